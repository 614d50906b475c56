"""loop: the one thread that owns the device. Everything that changes a line, a sequence or memory happens here.

Others talk to it by leaving callables in its inbox, which it runs between steps; it answers through each request's
`deliver`, and through futures.

Always true between steps:
  * every request that has been taken in has lines that run or wait, or it is over;
  * a line that is over has left the scheduler, and its cells are free or rest with its session.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from kvcellar.engine.cellar import Cellar
from kvcellar.engine.request import Line, Request, Stage
from kvcellar.engine.runner import Runner
from kvcellar.engine.scheduler import Scheduler
from kvcellar.errors import CacheFull, EngineClosed, EngineFailed, WrongStage
from kvcellar.events import FinishReason

T = TypeVar("T")
log = logging.getLogger("kvcellar.engine")

Twin = Callable[[Line, int], Line]  # (a line that has read its prompt, choice) -> the line that writes that answer


class Loop:
    """Owns the thread. `start` it once, `close` it once."""

    def __init__(
        self,
        cellar: Cellar,
        scheduler: Scheduler,
        *,
        context: int,
        threads: int | None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """`over` is called on the engine's thread when everything else has ended."""
        self.cellar, self.scheduler, self._over = cellar, scheduler, over
        self._context, self._threads = context, threads
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._arrivals = count()
        self._open = True
        self._gate = threading.Lock()  # nobody puts a call into the inbox of a loop that has ended
        self._thread = threading.Thread(target=self._run, name="kvcellar-engine", daemon=True)
        self.steps = 0

    def start(self, runner: Runner) -> None:
        self._runner = runner
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._open and self._thread.is_alive()

    @property
    def backlog(self) -> int:
        """Requests that have not been admitted yet, about."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine's thread, between two steps. Raises `EngineClosed`."""
        with self._gate:
            if not self._open:
                raise EngineClosed("the engine is closed; open a new one")
            if not self._thread.is_alive():
                raise EngineClosed("the engine's thread did not come along into this forked process; open a new one")
            self._inbox.put(call)

    def ask(self, question: Callable[[], T]) -> T:
        """Run `question` on the engine's thread and wait for its answer."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                future.set_exception(error)

        self.check_caller()
        self.post(call)
        return future.result()

    def check_caller(self) -> None:
        """Raise `WrongStage` on the engine's own thread: there, waiting for the engine would never end."""
        if threading.current_thread() is self._thread:
            raise WrongStage("an event's receiver runs on the engine's thread and must not wait for the engine")

    def close(self) -> None:
        """End the thread. Requests that are under way are told `EngineClosed`. May be called again."""
        with suppress(EngineClosed):
            self.post(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def submit(self, request: Request, line: Line) -> None:
        def take_in() -> None:
            request.number = next(self._arrivals)
            request.lines.append(line)
            self.scheduler.add(line)

        self.post(take_in)

    def cancel(self, request: Request) -> None:
        """End all its lines as they are. A request that is over does not notice."""
        with suppress(EngineClosed):
            self.post(lambda: self._cancel(request))

    def open_session(self, session: int) -> None:
        """From now on what its requests leave in memory stays with it."""
        self.post(lambda: self.cellar.open_session(session))

    def end_session(self, session: int) -> None:
        """Cancel what is under way for a session, and forget what it holds."""

        def end() -> None:
            for line in [*self.scheduler.running, *self.scheduler.waiting]:
                if line.request.session == session:
                    self._cancel(line.request)
            self.cellar.close_session(session)

        with suppress(EngineClosed):
            self.post(end)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        reason: Exception = EngineClosed("the engine was closed before the answer was complete")
        try:
            while self._open:
                self._receive()
                self._turn()
        except Exception as error:
            log.exception("the engine's thread met an error it did not expect; the engine is closed")
            reason = EngineFailed(f"the engine stopped on {type(error).__name__}: {error}")
        finally:
            self._finish(reason)

    def _receive(self) -> None:
        """Run what came in. Waits for something if there is nothing else to do."""
        idle = not self.scheduler.running and not self.scheduler.waiting
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
                if not self._open:
                    return
        except Empty:
            return

    def _make_room(self, line: Line) -> None:
        """A line that has filled the context forgets its oldest part behind what it keeps, to go on.

        Whether memory can move what lies behind is the line's own affair: others make room for the keys that move. Else
        the text would depend on who else is there.
        """
        span = line.excess(self._context)
        assert span is not None, "a line without anything to forget should have ended"
        while line in self.scheduler.running:
            try:
                if not self.cellar.shift(line, span):
                    self.cellar.forget(line, span)
                return
            except CacheFull:
                if not self.cellar.reclaim() and not self.scheduler.send_back_youngest(line):
                    self.cellar.forget(line, span)
                    return

    def _turn(self) -> None:
        for line in list(self.scheduler.running):
            if line.full(self._context):
                self._make_room(line)
        shares, stuck = self.scheduler.build()
        for line in stuck:
            self.ended(line, "length")
        if not shares:
            return
        self._runner.step(shares)
        self.steps += 1
        for share in shares:
            if share.line.request.deaf:
                self._cancel(share.line.request)

    def ended(self, line: Line, over: FinishReason | Exception) -> None:
        """A line is over. With an error its whole request is, for its answers belong together."""
        if isinstance(over, Exception):
            for other in line.request.lines:
                if other.stage is not Stage.DONE:
                    self._leave(other)
                    other.become(Stage.DONE)
            line.request.fail(over)
        else:
            self._leave(line)
            line.finish(over)

    def _leave(self, line: Line) -> None:
        self.scheduler.leave(line)
        session = line.request.session
        if session is not None and line.seq is not None:
            self.cellar.rest(session, line)
        else:
            self.cellar.release(line)

    def split(self, line: Line, twin: Twin) -> list[Line]:
        """The lines that write the answers of a prompt that has just been read; they share its cells."""
        request = line.request
        for choice in range(len(request.lines), request.params.n):
            other = twin(line, choice)
            self.cellar.fork(line, other)
            other.become(Stage.READING)
            other.become(Stage.WRITING)
            request.lines.append(other)
            self.scheduler.join(other)
        return [line] if len(request.lines) == 1 or line.choice.produced else list(request.lines)

    def _cancel(self, request: Request) -> None:
        for line in list(request.lines):
            if line.stage is not Stage.DONE:
                self._leave(line)
                line.finish("cancelled")

    def _stop(self) -> None:
        self._open = False

    def _finish(self, reason: Exception) -> None:
        """Whatever happened: everybody is told, everything is given back, and later callers are refused."""
        with self._gate:
            self._open = False
        self._run_what_is_left()
        for line in [*self.scheduler.running, *self.scheduler.waiting]:
            if not line.request.over:
                line.request.fail(reason)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self.cellar.clear()
        self._over()

    def _run_what_is_left(self) -> None:
        """Calls that came in before the gate was shut: somebody may wait for each of them."""
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                return
            try:
                call()
            except Exception:
                log.exception("a call that had come in could not be run while the engine ended")
