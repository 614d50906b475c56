"""loop: the work of one engine on the device's thread. Completions, sequences and memory change on that thread only.

Other threads put callables into its inbox, which it runs between steps; it returns results through each request's
`deliver`, and through futures.

An unexpected exception ends only the request that it belongs to, with `EngineFailed`. Memory and the scheduler are made
consistent with the other completions, whose missing tokens are recomputed (`failures.py`). The engine ends only if that
fails, or if an error that belongs to no request occurs again before the next step.

Always true between steps:
  * every request that was taken in has completions that run or wait, or is done;
  * a completion that is done is not in the scheduler, and what it computed belongs to the prefix tree or is free;
  * `_requests` are the requests that are not done, by number;
  * while the engine sleeps and completions wait, something is being read back for one of them.

In a forked process calls raise (`device.py`), and `close` does nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TypeVar, cast

from kvcellar.engine.core.compaction import Compaction
from kvcellar.engine.core.device import Inbox
from kvcellar.engine.core.ending import Ending
from kvcellar.engine.core.failures import Failures
from kvcellar.engine.core.last_requests import LastRequests
from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.engine.core.runner import Runner
from kvcellar.engine.core.scheduler import Scheduler
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.errors import (
    BadRequest,
    CacheFull,
    EngineClosed,
    EngineFailed,
    KvcellarError,
    ModelRefused,
    WrongStage,
)
from kvcellar.events import FinishReason

T = TypeVar("T")
MEASURED = 32  # tokens of prompts in a step, at least, from which on it measures how fast they are computed
READS = 0.05  # seconds, at most, until running completions that wait for features of images are looked at again
LOOK = 1.0  # seconds, at most, until completions that wait while none runs are looked at again
DESCRIBED = 8  # of them are described in the log where they wait for nothing
log = logging.getLogger("kvcellar.engine")


def _lately(mean: float, measured: float) -> float:
    """About the last ten are in the mean; 0.0: there was none."""
    return mean + 0.1 * (measured - mean) if mean else measured


def nothing() -> None:
    """What is told of a turn where no one listens."""


class Loop:
    """Takes its turns on the thread of a device. Call `start` once, and `close`."""

    def __init__(
        self,
        manager: SequenceManager,
        scheduler: Scheduler,
        *,
        siblings: Callable[[Completion, int], Sequence[Completion]],
        context: int,
        threads: int,
        inbox: Inbox,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`siblings` makes the next outputs of a request, up to so many, whose prompt a completion has prefilled."""
        self.manager, self.scheduler, self.threads = manager, scheduler, threads
        self._siblings, self._clock = siblings, clock
        self.compaction = Compaction(manager.memory.storage)
        self._context, self._inbox, self._device, self.post = context, inbox, inbox.device, inbox.post
        self._requests: dict[int, Request] = {}
        self._failures = Failures(manager, scheduler)
        self.last = LastRequests()
        self._arrivals = count()  # numbers of requests
        self._stalled = False  # all waiting completions wait for what is read back
        self._paused = False  # the last turn returned after how many seconds to look at them again
        self._looked = False  # the last step was made because nothing was awaited any more
        self.silences = 0  # how often they waited for nothing
        self.ending, self.ended = Ending(manager), False
        self.steps, self.started = 0, time.time()
        self.token_seconds = 0.0  # of a token of a prompt, lately
        self.turn_began: float | None = None  # seconds of the clock; None: it rests

    def start(
        self,
        runner: Runner,
        *,
        turned: Callable[[], None] = nothing,
        observed: Callable[[], float | None] = nothing,
        failed: Callable[[], None] = nothing,
    ) -> None:
        """`turned` is called at the end of each turn, when all events of a step are delivered; then `observed`, which
        looks at the engine, or returns after how many seconds it wants to; and `failed` when the engine has met an
        error that ends it, before its requests are told. None may raise, or block."""
        self._runner, self._turned, self._observed, self._failed = runner, turned, observed, failed
        self._device.add(self)

    # -- from any thread ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._inbox.open and not self._inbox.forked and self._device.runs(self)

    @property
    def backlog(self) -> int:
        """Approximate number of requests that were not admitted yet."""
        return len(self.scheduler.waiting) + len(self._inbox)

    def call(self, function: Callable[[], T], changes: str = "") -> T:
        """Run `function` on the engine's thread, between two steps. Returns its result, or raises its exception.

        `changes` describes its change of state, "" for none. If it is not empty, an error other than `KvcellarError` is
        raised as `EngineFailed` with this description, and the loop recovers.
        """
        answers: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()
        self.check_caller()
        self.post(partial(self._answer, answers, function, changes))
        result, error = answers.get()  # a `Future` would keep the error, whose frames refer to it
        if error is None:
            return cast(T, result)
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def _answer(
        self,
        answers: "SimpleQueue[tuple[T, None] | tuple[None, Exception]]",
        function: Callable[[], T],
        changes: str,
    ) -> None:
        """What `call` does on the engine's thread."""
        try:
            answers.put((function(), None))
        except Exception as error:  # noqa: BLE001 - raised by `call`
            ours = isinstance(error, KvcellarError) or not changes
            answers.put((None, error if ours else self._failures.record(changes, None, error)))

    def check_caller(self) -> None:
        """Raise `WrongStage` on the engine's own thread, where waiting for the engine would be a deadlock."""
        if self._device.current:
            raise WrongStage("an event's receiver runs on the engine's thread and must not wait for the engine")

    def close(self) -> bool:
        """End the engine. Requests that are not done get `EngineClosed`. Idempotent; does nothing in a fork, where it
        returns False."""
        if self._inbox.forked:
            return False
        if not self._device.current:
            self.ending.wait()
        with suppress(EngineClosed):
            self.post(self._inbox.close)
        if not self._device.current:
            self._device.wait_for(self)
            self.ending.close()
        return True

    def number(self) -> int:
        """Of the next request to be submitted: its place in the order of arrival."""
        return next(self._arrivals)

    def submit(self, request: Request, completions: Sequence[Completion]) -> None:
        """Take in a request with its first completions, which wait, or are done where it goes on."""

        def take_in() -> None:
            if not request.claim():
                return
            request.completions += completions
            self._requests[request.number] = request
            for completion in [one for one in completions if one.status is Status.WAITING]:
                if completion.spent(self._context):
                    completion.finish("length")
                    continue
                self.scheduler.enqueue(completion)
                self.manager.arrived(completion)
            if all(one.status is Status.DONE for one in completions) and not request.done:
                request.conclude()
            self._remove_if_done(request)

        self.post(lambda: self._guard("taking in the request", request, take_in))

    def cancel(self, number: int) -> None:
        """End all completions of a request. No effect on one that is done."""

        def end() -> None:
            if (request := self._requests.get(number)) is not None:
                self._cancel(request)

        with suppress(EngineClosed):
            self.post(end)

    def stop(self, number: int, choice: int, tokens: int) -> None:
        """End one completion of a request, whose text has ended with so many of its tokens. No effect on one that is
        done, but for what is counted."""

        def end() -> None:
            request = self._requests.get(number)
            for completion in request.completions if request is not None else ():
                if completion.sampler.index == choice:
                    completion.told = tokens
                    if completion.status is not Status.DONE:
                        self.end(completion, "stop")

        with suppress(EngineClosed):
            self.post(end)

    def fail(self, number: int, error: Exception) -> None:
        """End a request with an error. No effect on one that is done."""

        def end() -> None:
            request = self._requests.get(number)
            for completion in request.completions if request is not None else ():
                if completion.status is not Status.DONE:
                    self.end(completion, error)  # and with it the others
                    break

        with suppress(EngineClosed):
            self.post(end)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Run the calls in the inbox; then a step or, without requests that can go on, a part of what waits to be
        written or compacted. Returns the seconds until there is more to do: 0 for none, None for not before a call.
        Raises nothing: an error of the engine itself is its end.
        """
        self.turn_began = self._clock()
        pause = self._turn()
        self.turn_began = None
        self._turned()
        if self.ended or (wanted := self._observed()) is None:
            return pause
        return wanted if pause is None else min(pause, wanted)

    def _turn(self) -> float | None:
        if not self._inbox.open:
            return self._end()
        reason: BaseException | None = None
        try:
            idle = not self._receive() and not self.scheduler.running and (not self.scheduler.waiting or self._stalled)
            if self._inbox.open:
                if idle:
                    return self._rest()
                self._step()
                seeing = self.manager.seeing
                waits = self._stalled and seeing is not None and seeing.reads
                return READS if waits and not self._pump() else 0.0
        except BaseException as error:  # other engines are on this thread
            log.exception("the engine's thread met an error it did not expect; the engine is closed")
            reason = error
            self._failed()
        self._shut_down(reason)
        return 0.0

    def _end(self) -> float | None:
        pause = self.ending.turn()
        self.ended = pause is None
        return pause

    def _receive(self) -> bool:
        """Run the calls in the inbox. Whether there was one. Calls that are added meanwhile are for the next turn, so
        that a thread which makes one after another runs one in each turn."""
        received = len(self._inbox)
        for _ in range(received):
            if not self._inbox.open or (call := self._inbox.take()) is None:
                break
            self._guard("a call", None, call)
            self._recover()
        return received > 0

    def _rest(self) -> float | None:
        """A part of the idle work. Completions that wait while none runs wait for what is read back: a step looks again
        when a read has taken too long, and after `LOOK` seconds, whatever has happened."""
        if self.manager.seeing is not None:
            self.manager.seeing.rest()
        if self._pump() or self._compact():
            return 0.0
        if not self.scheduler.waiting:
            return None
        if self._paused:
            self._step()
            return 0.0
        store = self.manager.store
        awaited = store is not None and store.restores.awaited
        if not (awaited or self._looked):
            self._step()  # what was read has arrived since the last step
            self._looked = True
            return 0.0
        self._paused = True
        if not awaited:
            self._report_silence()
        pause = store.restores.look_again() if store is not None else None
        return LOOK if pause is None else min(pause, LOOK)

    def _report_silence(self) -> None:
        """Completions wait, and there is nothing that could wake the engine for them."""
        self.silences += 1
        waiting = self.scheduler.waiting
        state = "; ".join(f"request {one.key}: {self.manager.describe(one)}" for one in waiting[:DESCRIBED])
        log.error("%d completions wait for nothing; the engine looks again in %g s. %s", len(waiting), LOOK, state)

    def _pump(self) -> bool:
        """Read a bounded part of memory for the store. False if there is nothing to read, or after an error."""
        more = self.manager.drafting.pump()
        try:
            return (self.manager.store is not None and self.manager.store.pump()) or more
        except Exception as error:  # noqa: BLE001 - logged
            self._failures.record("reading memory for the store", None, error)
            self._recover()
            return False

    def _compact(self) -> bool:
        """Compact a bounded part of memory. False if there is nothing to compact, or after an error."""
        try:
            return bool(self.compaction.compact_some())
        except Exception as error:  # noqa: BLE001 - logged
            self._failures.record("compacting memory", None, error)
            self._recover()
            return False

    def _step(self) -> None:
        self.scheduler.current, self._stalled, self._paused, self._looked = None, False, False, False
        try:
            for completion in list(self.scheduler.running):
                if completion.full(self._context):
                    if self.manager.movable(completion, completion.overflow(self._context)):
                        self._shift(completion)
                    else:
                        self.end(completion, "length")
            self._encode()
            self.scheduler.current = None
            scheduled, stuck = self.scheduler.schedule()
            self.scheduler.current = None
            for completion in stuck:
                self.end(completion, "length")
            self._stalled = not (scheduled or stuck or self._failures.pending)
            if scheduled and not self._failures.pending:
                self._forward(scheduled)
        except Exception as error:  # noqa: BLE001 - recorded, or raised again
            self._failures.record_step(error, self.steps)
        for request in [completion.request for completion in self.scheduler.running if completion.request.unreachable]:
            self._cancel(request)
        self._recover()

    def _encode(self) -> None:
        """Encode a part of an image that a running prompt needs next, for as long as streams may wait. An error ends
        its request."""
        seeing, running = self.manager.seeing, self.scheduler.running
        if seeing is None:
            return
        began = self._clock()
        seeing.evict(running)  # running prompts have passed images since the last time
        seeing.read(running)
        if (found := seeing.missing(running)) is None:
            seeing.abandon()
            self.scheduler.waited(self._clock() - began)
            return
        try:
            seeing.encode(*found, running, self.scheduler.between())
        except ModelRefused as error:  # of this image, before anything of it was computed in memory
            self.end(found[0], BadRequest(str(error), "messages"))
        except Exception as error:  # noqa: BLE001 - logged, and given to its request
            self._failures.record("encoding an image", found[0].request, error)
            self._recover()
        self.scheduler.waited(self._clock() - began)

    def _shift(self, completion: Completion) -> None:
        """Remove the oldest tokens of a completion that has filled its context.

        Whether K/V are moved or recomputed changes the text, so it must not depend on other requests. So if cells are
        missing, what no sequence uses is evicted, and other completions are preempted.
        """
        manager, scheduler, span = self.manager, self.scheduler, completion.overflow(self._context)
        while completion in scheduler.running:
            scheduler.current = completion
            try:
                if (reason := manager.shift(completion, span)) is not None:
                    manager.drop(completion, span, reason)
                return
            except CacheFull as full:
                scheduler.current = None  # an error during eviction belongs to no completion
                short = full.need - full.free
                if manager.evict(full.group, short) or manager.clear_cache():
                    continue
                if not (scheduler.preempt_last(completion) or manager.unpin()):
                    scheduler.current = completion
                    manager.drop(completion, span, f"too few free cells in group {full.group}")
                    return

    def _forward(self, scheduled: Sequence[Scheduled]) -> None:
        began = self._clock()
        prompts = sum(one.tokens - one.ends for one in scheduled if one.completion.status is Status.PREFILL)
        try:
            self._runner.step(scheduled)
        except CacheFull as full:
            self._make_room(scheduled, full)
            return
        seconds = self._clock() - began
        self.steps += 1
        if prompts >= MEASURED:
            self.token_seconds = _lately(self.token_seconds, seconds / prompts)
        self.scheduler.stepped(scheduled, prompts, seconds)
        if self.manager.store is not None:
            self.manager.store.stepped(sum(one.tokens for one in scheduled), seconds)
        self._pump()

    def _make_room(self, scheduled: Sequence[Scheduled], full: CacheFull) -> None:
        """A step did not begin for want of memory, which should not happen, since it was reserved: no request ends for
        that, and the tree stays. What no sequence uses is evicted, or the completion that ranks last is preempted, and
        the next step is scheduled anew. Raises `full` where neither is possible."""
        log.error("a step of %d sequences found too little memory and is scheduled again: %s", len(scheduled), full)
        group = None if full.unit == "rows" else full.group
        if self.manager.evict(group, max(1, full.need - full.free)):
            return
        if self.scheduler.running and not self.scheduler.preempt_last(self.scheduler.running[0]):
            self.scheduler.current = self.scheduler.running[0]
            raise full

    def end(self, completion: Completion, reason: FinishReason | Exception) -> None:
        """End a completion: with a reason, or with an error, which ends its whole request. Raises nothing."""

        def act() -> None:
            if isinstance(reason, Exception):
                for other in completion.request.completions:
                    if other.status is not Status.DONE:
                        self._free(other)
                        other.become(Status.DONE)
                completion.request.fail(reason)
            else:
                self._free(completion)
                completion.finish(reason)
            self._remove_if_done(completion.request)

        self._guard("ending the request", completion.request, act)

    # -- unexpected errors --------------------------------------------------------------------------------------

    def _guard(self, what: str, request: Request | None, act: Callable[[], None]) -> None:
        """Call `act`, which belongs to `request` if that is not None: an error ends the request."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - logged, and given to its request
            self._failures.record(what, request, error)

    def _recover(self) -> None:
        if self._failures.pending:
            self._failures.recover(self._requests, self._remove_if_done)

    def check(self) -> None:
        """Assert every invariant of the scheduler and of memory."""
        self.scheduler.check()
        self.manager.check(self.scheduler.running)
        self.manager.drafting.check()
        self.last.check()
        if self.manager.seeing is not None:
            self.manager.seeing.check(self.scheduler.running)
        self._failures.check()

    def _remove_if_done(self, request: Request) -> None:
        if request.done:
            if self._requests.pop(request.number, None) is not None:
                self.last.add(request)
            self.manager.drafting.conclude(request.number)
            if self.manager.seeing is not None:
                self.manager.seeing.forget(request, self.scheduler.running)
            request.completions = []  # they refer to it: what both hold is freed now, not by a collection of cycles

    def _free(self, completion: Completion) -> None:
        self.scheduler.remove(completion)
        completion.request.speculation = self.manager.drafting.report(completion)
        self.manager.release(completion)
        self.manager.forget(completion)

    def fork(self, completion: Completion, siblings: Sequence[Completion]) -> None:
        """At the end of prefill: start decode of `completion`, and of its `siblings`, which share its cells. Of the
        outputs that there are no sequences for yet, the next one waits. An error ends their request."""
        request = completion.request

        def act() -> None:
            completion.become(Status.DECODE)
            for sibling in siblings:
                request.completions.append(sibling)  # first: it must end with the others if a fork fails
                self.manager.fork(completion, sibling)
                sibling.become(Status.PREFILL)
                sibling.become(Status.DECODE)
                self.scheduler.add_running(sibling)
            for following in self._siblings(completion, 1):
                request.completions.append(following)
                self.scheduler.enqueue(following)
                self.manager.arrived(following)

        self._guard("sharing the prompt among its completions", request, act)

    def siblings(self, completion: Completion, others: int) -> Sequence[Completion]:
        """The next outputs of a request whose prompt is computed, as many as there are sequences for beside so many
        `others` that the same step starts."""
        made = self._siblings(completion, self.scheduler.spare(others))
        self.scheduler.started(len(made))
        return made

    def _cancel(self, request: Request) -> None:
        def end() -> None:
            for completion in list(request.completions):
                if completion.status is not Status.DONE:
                    self._free(completion)
                    completion.finish("cancelled")
            self._remove_if_done(request)

        self._guard("cancelling the request", request, end)

    def _shut_down(self, error: BaseException | None) -> None:
        """Fail all requests, and refuse later calls. `error` ended the engine, if any."""
        self._inbox.close()
        reason: Exception = EngineClosed("the engine was closed before the answer was complete")
        if error is not None:
            reason = EngineFailed(f"the engine stopped on {type(error).__name__}: {error}")
        try:
            if self.manager.seeing is not None:
                self.manager.seeing.rest()
            self._run_remaining()
            for request in [
                *self._requests.values(),
                *(request for request, _ in self._failures.pending if request is not None),
            ]:
                request.fail(reason)
            self._requests.clear()
            self.scheduler.running.clear()
            self.scheduler.waiting.clear()
        except Exception:
            log.exception("the requests of an engine that has ended could not be ended")

    def _run_remaining(self) -> None:
        """Run the calls that were in the inbox at the end: threads may be waiting for their results."""
        while (call := self._inbox.take()) is not None:
            try:
                call()
            except Exception:
                log.exception("a call failed while the engine ended")
