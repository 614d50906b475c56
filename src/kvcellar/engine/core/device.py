"""device: the thread that computes on a device, and the calls that other threads have for it. It steps all engines on
it in turn, so that their kernels do not compete for the same processors, and none waits for more than one step of each
other engine.

Always true:
  * an engine is stepped by one thread, from `add` to its last turn;
  * the thread exists while there is an engine on it. It ends with the last one, and `add` starts another;
  * `_engines` and `_thread` change only while `_changed` is held;
  * nothing is added to an inbox once it is closed.

In a forked process the thread does not exist, and a lock that was held stays held. So `Inbox.post` compares the process
with its own before it acquires the lock, and raises in a fork.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from kvcellar.errors import EngineClosed, forked_from

DONE = float("inf")  # there is no engine left


class Stepped(Protocol):
    """What the thread steps."""

    @property
    def threads(self) -> int:
        """How many threads torch computes its steps with."""
        ...

    @property
    def ended(self) -> bool:
        """Whether its last turn was taken."""
        ...

    def turn(self) -> float | None:
        """A bounded part of its work. Returns the seconds until there is more: 0 for none, None for not before `wake`.
        Raises nothing."""
        ...


class DeviceThread:
    """Steps engines in turn. All methods may be called from any thread. An engine adds itself, and ends by itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engines: list[Stepped] = []
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._threads = 0  # of torch, on this thread

    def add(self, engine: Stepped) -> None:
        with self._changed:
            try:
                self._engines.append(engine)
                if self._thread is None:
                    thread = threading.Thread(target=self._begin, name="kvcellar-engine", daemon=True)
                    thread.start()
                    self._thread = thread
            except BaseException:
                self._engines = [other for other in self._engines if other is not engine]
                raise
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        self._awake.set()

    @property
    def current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def runs(self, engine: Stepped) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive() and engine in self._engines

    def wait_for(self, engine: Stepped) -> None:
        """Wait for the last turn of `engine`; and for the end of the thread, if no other engine is on it."""
        with self._changed:
            thread = self._thread
            self._changed.wait_for(lambda: engine not in self._engines)
            if thread is None or thread is self._thread:
                return
        thread.join()

    def check(self) -> None:
        """Assert that the thread exists exactly while there are engines."""
        with self._changed:
            assert (self._thread is not None) == bool(self._engines)
            assert len(set(map(id, self._engines))) == len(self._engines)

    def _begin(self) -> None:
        with self._changed:  # `add` has returned, or failed
            added = self.current
        if added:
            self._run()

    def _run(self) -> None:
        import torch  # not at the top: commands that compute nothing import this module, too

        self._threads = 0
        while (pause := self._round(torch.set_num_threads)) is not DONE:
            if pause != 0:
                self._awake.wait(pause)

    def _round(self, set_threads: Callable[[int], None]) -> float | None:
        """A turn of each engine. Nothing of an engine that has ended is referred to between two rounds."""
        self._awake.clear()
        pauses: list[float] = []
        for engine in list(self._engines):
            if engine.threads != self._threads:
                set_threads(engine.threads)
                self._threads = engine.threads
            if (pause := engine.turn()) is not None:
                pauses.append(pause)
            if engine.ended and self._remove(engine):
                return DONE
        return min(pauses, default=None)

    def _remove(self, engine: Stepped) -> bool:
        """Whether it was the last one, with which the thread ends."""
        with self._changed:
            self._engines.remove(engine)
            if not self._engines:
                self._thread = None
            self._changed.notify_all()
            return not self._engines


class Inbox:
    """The calls for one engine on the thread of `device`, which runs them between steps. Made before the parts of the
    engine that post calls to it."""

    def __init__(self, device: DeviceThread) -> None:
        self.device, self.open = device, True
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._process = os.getpid()
        self._gate = threading.Lock()  # held while a call is added, so that none is after `close`

    def __len__(self) -> int:
        return self._calls.qsize()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the engine's."""
        return self._process != os.getpid()

    def post(self, call: Callable[[], None]) -> None:
        """Let the engine's thread run `call`. May be called from any thread. Raises `EngineClosed`."""
        if self.forked:
            raise EngineClosed(f"the engine belongs to {forked_from(self._process)}; make a new one after the fork")
        with self._gate:
            if not self.open:
                raise EngineClosed("the engine is closed; open a new one")
            self._calls.put(call)
        self.device.wake()

    def take(self) -> Callable[[], None] | None:
        """The next call, on the engine's thread; None: there is none."""
        try:
            return self._calls.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        """On the engine's thread. What was added before can still be taken."""
        with self._gate:
            self.open = False
