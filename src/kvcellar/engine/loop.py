"""loop: the one thread that owns the device. Everything that changes a line, a sequence or memory happens here.

Others talk to it by leaving callables in its inbox, which it runs between steps; it answers through each request's
`deliver`, and through futures.

Always true between steps:
  * every request that has been taken in has lines that run or wait, or it is over;
  * a line that is over has left the scheduler, and its cells are free or rest with its session.
"""

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from kvcellar.engine.cellar import Cellar
from kvcellar.engine.request import Line, Request, Stage
from kvcellar.engine.runner import Runner
from kvcellar.engine.scheduler import Scheduler, Share
from kvcellar.errors import EngineClosed, EngineFailed
from kvcellar.events import FinishReason

T = TypeVar("T")
log = logging.getLogger("kvcellar.engine")

Twin = Callable[[Line, int], Line]  # (a line that has read its prompt, choice) -> the line that writes that answer


class Loop:
    """Owns the thread. `start` it once, `close` it once."""

    def __init__(self, cellar: Cellar, scheduler: Scheduler, *, context: int, threads: int | None) -> None:
        self.cellar, self.scheduler = cellar, scheduler
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
            self._inbox.put(call)

    def ask(self, question: Callable[[], T]) -> T:
        """Run `question` on the engine's thread and wait for its answer."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                future.set_exception(error)

        self.post(call)
        return future.result()

    def close(self) -> None:
        """End the thread. Requests that are under way are told `EngineClosed`. May be called again."""
        try:
            self.post(self._stop)
        except EngineClosed:
            pass
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
        try:
            self.post(lambda: self._cancel(request))
        except EngineClosed:
            pass

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

    def _make_room(self) -> None:
        """Lines whose next token would stand behind the end of the context forget their oldest part."""
        for line in list(self.scheduler.running):
            if line.stage is Stage.WRITING and line.past(self._context):
                if not self.cellar.make_room(line, self._context):
                    self.scheduler.send_back(line)

    def _turn(self) -> None:
        self._make_room()
        shares, stuck = self.scheduler.build()
        for line in stuck:
            self.ended(line, "length")
        if not shares:
            return
        try:
            self._runner.step(shares)
            self.steps += 1
        except Exception as error:
            # One bad step must not end the engine: memory is as before it, and the requests in it are told.
            log.exception("a step of %d requests failed", len(shares))
            self._fail_all(shares, EngineFailed(f"the step failed with {type(error).__name__}: {error}"))
        for share in shares:
            if share.line.request.deaf:
                self._cancel(share.line.request)

    def _fail_all(self, shares: list[Share], error: EngineFailed) -> None:
        for share in shares:
            if not share.line.request.over:
                self.ended(share.line, error)

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
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass
        for line in [*self.scheduler.running, *self.scheduler.waiting]:
            if not line.request.over:
                line.request.fail(reason)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self.cellar.clear()


def fresh_seed() -> int:
    """A seed for a request that named none."""
    return random.SystemRandom().getrandbits(63)
