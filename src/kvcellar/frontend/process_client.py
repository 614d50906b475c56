"""process_client: an engine in a process of its own, as its front end sees it. No torch.

The process is started with its front end, and again when it dies: by a signal, for want of memory, or in a step that
takes longer than `STEP_SECONDS`. Requests go on (`remote_client.py`).

Always true:
  * there is one process at most, which has begun with all requests that are not done, or waits for its turn to;
  * events are delivered by one thread, the one that reads messages;
  * an engine that another process has killed, though memory did not lack, counts `OUTSIDE` of a death;
  * the process is gone when `close` has returned, and ends by itself if this one dies.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvcellar.engine.load.settings import Settings
from kvcellar.engine.messages import Control, RemoveAdapter, Start, Submission
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import BadRequest, EngineClosed, EngineFailed
from kvcellar.frontend.child_process import STARTING, ChildProcess
from kvcellar.frontend.fork_server import Starter, starter_for
from kvcellar.frontend.remote_client import RemoteClient
from kvcellar.images.shared import to_send
from kvcellar.progress import Listener, report
from kvcellar.wire import decode, ticks

log = logging.getLogger("kvcellar.engine")

OUTSIDE = 0.125  # of a death: a guard of memory that is not Linux itself kills, too, and a request may be the reason
FRUITLESS, SOON = 5, 60.0  # engines in a row that died so soon, in seconds, and had told nothing: then it is given up
STEP_SECONDS = 600.0  # that a step may take, and that may pass without a beat
CLOSE_SECONDS = 40.0  # until a process that does not end is killed
STARTS = 3  # in a row that fail before the engine is given up
TICK = 0.5  # seconds between two looks at the process
PAUSE = 1.0  # seconds before a start that follows one that has failed, and twice as many before each further one


def plain_settings(model: object, given: Iterable[str], settings: Settings) -> tuple[str | None, dict[str, Any]]:
    """A model and the settings of its engine that were given, as another process can have them. Raises `BadRequest` for
    objects of this one."""
    if not isinstance(model, str | Path | None):
        raise BadRequest("an engine in a process of its own loads a directory or a name, not a network", "model")
    if not isinstance(draft := settings.draft, str | Path | None):
        raise BadRequest("an engine in a process of its own makes its drafter by name, not by a function", "draft")
    plain = {name: getattr(settings, name) for name in given}
    if draft is not None:
        plain["draft"] = str(draft)
    return None if model is None else str(model), plain


class ProcessClient(RemoteClient[ChildProcess]):
    """An engine in a process of its own."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], starter: Starter | None = None) -> None:
        """Blocks until the model is loaded, and reports that. Raises what the load raises. `starter`: that of several
        engines; None: one of its own, which it closes."""
        super().__init__()
        self._start = Start(model, dict(settings), logging.getLogger("kvcellar").getEffectiveLevel())
        self._folder = os.getcwd()
        self._own: frozenset[str] | None = None  # the adapters that each engine has at first
        self._fruitless = 0  # engines in a row that have died before they told anything
        with ExitStack() as opened:
            if starter is None:
                starter = opened.enter_context(closing(starter_for(sys.platform)))
            self._starter = starter
            self._process = self._started(lambda progress: report(progress.stage, progress.done, progress.total))
            self._at_end = opened.pop_all()  # closed by the thread that reads
        self._watching = threading.Event()  # set at the end
        self._reader = threading.Thread(target=self._read, name="kvcellar-engine", daemon=True)
        self._readers.add(self._reader)
        self._joined(self._process)
        self._reader.start()
        threading.Thread(target=self._watch, name="kvcellar-watch", daemon=True).start()

    def _started(self, heard: Listener) -> ChildProcess:
        def waits() -> None:
            if self._closing:
                raise EngineClosed("the engine is closed; open a new one")
            heard(STARTING)

        process = ChildProcess(self._starter, self._start, self._folder, waits, self._unsent)
        try:
            with self._changed:
                if self._closing:
                    raise EngineClosed("the engine is closed; open a new one")
                self._process = process
            self.card = process.hello(heard, partial(self._take, process))
            there = self._agree(process, tuple(self._adapters.values()))
            self._own = frozenset(one.name for one in there) if self._own is None else self._own
            assert process.stats is not None, "it tells its statistics first"
            self._stats = process.stats
        except BaseException:
            process.end(0.0)
            raise
        return process

    @property
    def last_stats(self) -> EngineStats:
        """While an engine is started, those of the one that it replaces."""
        return decode(self._stats if self._process.stats is None else self._process.stats, EngineStats)

    def _to_send(self, submission: Submission) -> Submission:
        """With the places of images, which are kept by the request as long as the engine may open them."""
        return replace(submission, images=tuple(map(to_send, submission.images)))

    @property
    def pid(self) -> int:
        """Of the process of the engine."""
        return self._process.pid

    def close(self) -> bool:
        if self._owner != os.getpid():
            return False
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            process = self._process
        self._watching.set()
        process.end_sending()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_SECONDS)
            if self._reader.is_alive():
                process.kill(f"it has not ended within {CLOSE_SECONDS:.0f} seconds")
                self._reader.join()
        return True

    def _noted(self, control: Control) -> None:
        super()._noted(control)
        with self._changed:
            if isinstance(control, RemoveAdapter) and self._own is not None and control.name not in self._own:
                del self._adapters[control.name]  # another engine will not have it

    def _proved(self, number: int) -> bool:
        self._fruitless = 0
        return super()._proved(number)

    # -- on the thread that reads -------------------------------------------------------------------------------

    def _read(self) -> None:
        with self._at_end:
            while True:
                try:
                    while True:
                        self._take(self._process, self._process.link.receive())
                except EOFError:
                    pass
                except Exception:
                    log.exception("what the process of the engine has sent cannot be read; it is started again")
                try:
                    if not self._replaced():
                        return
                except BaseException as error:
                    log.exception("the engine has died, and starting it again has failed")
                    self._end(EngineFailed(f"the engine has died, and starting it again has failed: {error}"))
                    return

    def _replaced(self) -> bool:
        """The engine has died: start another one, which goes on with what ran. False at the end."""
        process = self._process
        with self._changed:
            self._engines.clear()
        how = process.end(CLOSE_SECONDS if self._closing else 2.0)
        if self._closing:
            return self._end(EngineClosed("the engine was closed before the answer was complete"))
        self._report_death(process, how)
        self._left(process, how, blame=lambda request: OUTSIDE if process.from_outside else 1.0)
        self._fruitless = self._fruitless + 1 if time.monotonic() - process.began < SOON else 1
        if self._fruitless > FRUITLESS:
            return self._end(EngineFailed(f"{self._fruitless} engines in a row have died at once: the last {how}"))
        return self._start_again()

    def _report_death(self, process: ChildProcess, how: str) -> None:
        stats = self.last_stats
        log.error(
            "the process %d of the engine %s, with %d requests; %.1f s before, it had made %d steps, %d completions "
            "ran and %d waited. It is started again, and they go on",
            *(process.pid, how, len(self._running), max(0.0, time.time() - stats.at)),
            *(stats.steps, stats.running, stats.waiting),
        )

    def _start_again(self) -> bool:
        card, why = self.card, ""
        for attempt in range(STARTS):
            if self._watching.wait(PAUSE * 2**attempt if attempt else PAUSE * (self._fruitless - 1)):
                break
            began = time.monotonic()
            try:
                process = self._started(lambda progress: None)
            except Exception as error:  # noqa: BLE001 - what a load raises
                if not self._closing:
                    log.error("the engine could not be started again: %s", error)
                why = str(error)
                continue
            if self.card.model != card.model:
                process.end(0.0)
                return self._end(EngineFailed("the files of the model have changed; start the server again"))
            log.warning("the engine was started again in %.1f s", time.monotonic() - began)
            self._pin_again()
            self._joined(process)
            return True
        if self._closing:
            return self._end(EngineClosed("the engine was closed before the answer was complete"))
        return self._end(EngineFailed(f"the engine has died, and could not be started again: {why}"))

    def _end(self, error: Exception) -> bool:
        self._over(error)
        self._watching.set()
        return False

    # -- on a thread of its own ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Kill a process that does not answer, or whose step does not end."""
        gone = None
        for stopped in ticks(self._watching, TICK):
            process, now = self._process, time.monotonic()
            if stopped:  # and all with it
                process.beaten = now
            self._look()
            if process.exited:
                if gone is process:  # and what it has sent was read meanwhile
                    process.link.close()  # a process that it has started may have its end
                gone = process
                continue
            silent = now - process.beaten
            if not process.killed and max(silent, process.beat.seconds) > STEP_SECONDS:
                process.kill(f"it was silent for {silent:.0f} s, or in one step for {process.beat.seconds:.0f} s")
