"""inbox: the calls that other threads have for the thread of an engine, which runs them between two steps.

Always true: nothing is added once it is closed.

In a forked process that thread does not exist, and a lock that was held stays held. So `post` compares the process with
the inbox's own before it acquires the lock, and raises in a fork.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvcellar.engine.device import DeviceThread
from kvcellar.errors import EngineClosed, forked_from


class Inbox:
    """Of one engine on the thread of `device`. Made before the parts of the engine that post calls to it."""

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
