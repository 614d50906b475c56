"""loop: the one thread that owns the device. Everything that changes a completion, a sequence or memory happens here.

Others talk to it by leaving callables in its inbox, which it runs between steps; it answers through each request's
`deliver`, and through futures.

An exception that nothing expects ends the request that it belongs to, with `EngineFailed`, and no other: whatever was
half done, memory and the scheduler are put in order again from what the other completions say, which read again what
they lost (`_heal`). The engine ends only where that does not succeed, or where an error that belongs to no request
comes again before the next step.

Always true between steps:
  * every request that has been taken in has completions that run or wait, or it is over;
  * a completion that is over has left the scheduler, and its cells are free or rest with its session;
  * `_under_way` are the requests that are not over, by their number.

A forked process has no such thread: there every call raises, before it takes a lock, and closing does nothing.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from kvcellar.engine.compaction import Compaction
from kvcellar.engine.manager import SequenceManager
from kvcellar.engine.request import Completion, Request, Stage
from kvcellar.engine.runner import Runner
from kvcellar.engine.scheduler import Scheduler
from kvcellar.errors import CacheFull, EngineClosed, EngineFailed, KvcellarError, WrongStage
from kvcellar.events import FinishReason
from kvcellar.process import Origin

T = TypeVar("T")
log = logging.getLogger("kvcellar.engine")


class Loop:
    """Owns the thread. `start` it once, `close` it once."""

    def __init__(self, manager: SequenceManager, scheduler: Scheduler, *, context: int, threads: int) -> None:
        self.manager, self.scheduler = manager, scheduler
        self.compaction = Compaction(manager.memory.storage)
        self._context, self._threads = context, threads
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._under_way: dict[int, Request] = {}
        self._hurt: list[tuple[Request | None, EngineFailed]] = []  # what errors have ended since the last `_heal`
        self._stalled_at = -1  # the number of steps when an error came that belongs to no request
        self._arrivals = count()
        self._open = True
        self._origin = Origin()
        self._gate = threading.Lock()  # nobody puts a call into the inbox of a loop that has ended
        self._thread = threading.Thread(target=self._run, name="kvcellar-engine", daemon=True)
        self.steps = 0

    def start(self, runner: Runner) -> None:
        self._runner = runner
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._open and self._origin.here and self._thread.is_alive()

    @property
    def backlog(self) -> int:
        """Requests that have not been admitted yet, about."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the engine's thread, between two steps. Raises `EngineClosed`."""
        if not self._origin.here:
            raise EngineClosed(f"the engine belongs to {self._origin}; make a new one after the fork")
        with self._gate:
            if not self._open:
                raise EngineClosed("the engine is closed; open a new one")
            self._inbox.put(call)

    def ask(self, question: Callable[[], T], *, changes: str = "") -> T:
        """Run `question` on the engine's thread, between two steps. Returns what it returns, raises what it raises.

        `changes` is what it changes, if it does: any other error than ours is raised as `EngineFailed` with these words
        then, and memory is put in order.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised where it was asked
                ours = isinstance(error, KvcellarError) or not changes
                future.set_exception(error if ours else self._contain(changes, None, error))

        self.check_caller()
        self.post(call)
        return future.result()

    def check_caller(self) -> None:
        """Raise `WrongStage` on the engine's own thread: there, waiting for the engine would never end."""
        if threading.current_thread() is self._thread:
            raise WrongStage("an event's receiver runs on the engine's thread and must not wait for the engine")

    def close(self) -> None:
        """End the thread. Requests under way get `EngineClosed`. May be called again; does nothing in a fork."""
        if not self._origin.here:
            return
        with suppress(EngineClosed):
            self.post(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def submit(self, request: Request, completion: Completion) -> None:
        def take_in() -> None:
            request.number = next(self._arrivals)
            request.completions.append(completion)
            self._under_way[request.number] = request
            self.scheduler.add(completion)

        self.post(lambda: self._guard("taking in the request", request, take_in))

    def cancel(self, request: Request) -> None:
        """End all its completions as they are. A request that is over does not notice."""
        with suppress(EngineClosed):
            self.post(lambda: self._cancel(request))

    def open_session(self, session: int) -> None:
        """From now on what its requests leave in memory stays with it."""
        self.post(lambda: self.manager.open_session(session))

    def end_session(self, session: int) -> None:
        """Cancel what is under way for a session, and forget what it holds."""

        def end() -> None:
            for completion in [*self.scheduler.running, *self.scheduler.waiting]:
                if completion.request.session == session:
                    self._cancel(completion.request)
            self._guard("closing a session", None, lambda: self.manager.close_session(session))

        with suppress(EngineClosed):
            self.post(end)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
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
        """Run what came in. If there is nothing else to do, compact memory until something comes, and wait for it."""
        idle = not self.scheduler.running and not self.scheduler.waiting
        while idle and self._inbox.empty() and self._compact():
            pass
        try:
            while True:
                call = self._inbox.get(block=idle)
                self._guard("a call", None, call)
                self._heal()
                idle = False
                if not self._open:
                    return
        except Empty:
            return

    def _compact(self) -> bool:
        """Move a piece; False if there is none. An error there belongs to no request, and is no reason to try again."""
        try:
            return bool(self.compaction.piece())
        except Exception as error:  # noqa: BLE001 - logged
            self._contain("compacting memory", None, error)
            self._heal()
            return False

    def _make_room(self, completion: Completion) -> None:
        """A completion that has filled the context forgets its oldest part behind what it keeps, to go on.

        Whether memory can move what lies behind depends on the completion alone: other completions and sessions give up
        the cells that are missing. Else the text would depend on what else runs.
        """
        span = completion.excess(self._context)
        while completion in self.scheduler.running:
            self.scheduler.at = completion
            try:
                if (reason := self.manager.shift(completion, span)) is not None:
                    self.manager.forget(completion, span, reason)
                return
            except CacheFull as full:
                self.scheduler.at = None  # what fails next is an idle session's affair
                if not self.manager.reclaim() and not self.scheduler.send_back_youngest(completion):
                    self.scheduler.at = completion
                    self.manager.forget(completion, span, f"too few free cells in group {full.group}")
                    return

    def _turn(self) -> None:
        self.scheduler.at = None
        try:
            for completion in list(self.scheduler.running):
                if completion.full(self._context):
                    self._make_room(completion)
            self.scheduler.at = None
            shares, stuck = self.scheduler.build()
            self.scheduler.at = None
            for completion in stuck:
                self.ended(completion, "length")
            if shares and not self._hurt:
                self._runner.step(shares)
                self.steps += 1
        except Exception as error:
            at = self.scheduler.at
            if at is None and self._stalled_at == self.steps:
                raise
            if at is None:
                self._stalled_at = self.steps
            self._contain("a step", at.request if at is not None else None, error)
        for request in [completion.request for completion in self.scheduler.running if completion.request.deaf]:
            self._cancel(request)
        self._heal()

    def ended(self, completion: Completion, over: FinishReason | Exception) -> None:
        """A completion is over. With an error its whole request is, for its answers belong together. Raises nothing."""

        def end() -> None:
            if isinstance(over, Exception):
                for other in completion.request.completions:
                    if other.stage is not Stage.DONE:
                        self._leave(other)
                        other.become(Stage.DONE)
                completion.request.fail(over)
            else:
                self._leave(completion)
                completion.finish(over)
            self._forget_if_over(completion.request)

        self._guard("ending the request", completion.request, end)

    # -- errors that nothing expects ----------------------------------------------------------------------------

    def _guard(self, what: str, request: Request | None, act: Callable[[], None]) -> None:
        """Do `act`, which belongs to `request`, if to any: what it raises ends that one."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - logged, and given to its request
            self._contain(what, request, error)

    def _contain(self, what: str, request: Request | None, error: Exception) -> EngineFailed:
        """`what` raised `error`, which ends `request`, if it belongs to one. The rest is for `_heal`: steps may be on
        their way yet that have read tokens and not drawn."""
        log.error("%s failed", what, exc_info=error)
        failure = EngineFailed(f"{what} failed with {type(error).__name__}: {error}")
        self._hurt.append((request, failure))
        for completion in request.completions if request is not None else ():
            completion.stage = Stage.DONE  # from whatever it was
        return failure

    def _heal(self) -> None:
        """After errors: completions and memory agree again, and the requests that the errors belong to have failed.

        Raises what `check` raises if memory is not as it must be even so. Costs the cells in use.
        """
        if not self._hurt:
            return
        hurt, self._hurt = self._hurt, []
        try:
            completions = [
                ln for request in self._under_way.values() for ln in request.completions if ln.stage is not Stage.DONE
            ]
            self.manager.settle(completions)
            self.scheduler.restore(completions)
            self.check()
        finally:
            for request, failure in hurt:
                if request is not None:
                    request.fail(failure)
                    self._forget_if_over(request)

    def check(self) -> None:
        """Assert every invariant of the scheduler and of memory."""
        self.scheduler.check()
        self.manager.check(self.scheduler.running)

    def _forget_if_over(self, request: Request) -> None:
        if request.over:
            self._under_way.pop(request.number, None)

    def _leave(self, completion: Completion) -> None:
        self.scheduler.leave(completion)
        session = completion.request.session
        if session is not None and completion.seq is not None:
            self.manager.rest(session, completion)
        else:
            self.manager.release(completion)

    def split(self, completion: Completion, twins: Sequence[Completion]) -> None:
        """`completion` has read its prompt: it and `twins`, which share its cells, decode from now on. If that fails
        their request is over."""

        def fork() -> None:
            completion.become(Stage.DECODE)
            for twin in twins:
                completion.request.completions.append(twin)  # first, so that it ends with the others if a fork fails
                self.manager.fork(completion, twin)
                twin.become(Stage.PREFILL)
                twin.become(Stage.DECODE)
                self.scheduler.join(twin)

        self._guard("sharing the prompt among its answers", completion.request, fork)

    def _cancel(self, request: Request) -> None:
        def end() -> None:
            for completion in list(request.completions):
                if completion.stage is not Stage.DONE:
                    self._leave(completion)
                    completion.finish("cancelled")
            self._forget_if_over(request)

        self._guard("cancelling the request", request, end)

    def _stop(self) -> None:
        self._open = False

    def _finish(self, reason: Exception) -> None:
        """However it came: every request gets its error, everything is given back, later calls are refused."""
        with self._gate:
            self._open = False
        try:
            self._run_what_is_left()
            for request in [*self._under_way.values(), *(request for request, _ in self._hurt if request is not None)]:
                request.fail(reason)
            self._under_way.clear()
            self.scheduler.running.clear()
            self.scheduler.waiting.clear()
            self.manager.clear()
        except Exception:
            log.exception("the engine has ended, and what its memory held could not be given back")

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
