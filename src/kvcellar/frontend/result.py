"""result: what a caller gets of a request: its events collected into a result, or streamed as they arrive; and what an
engine remembers of the last ones.

Always true of a stream:
  * it is iterated once, with `for` or with `async for`;
  * where iteration stops before the end, by leaving the loop, an error or a cancelled task, the request is cancelled.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvcellar.errors import EngineClosed, WrongStage, forked_from
from kvcellar.events import (
    Delta,
    Done,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptScored,
    Recall,
    Speculation,
    Timings,
    TokenLogprob,
    Usage,
)

Submit = Callable[[Callable[[Event], None]], "Ticket"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the `n` completions of a request. `token_ids` do not contain the token that ended it, if one did."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All completions of a request, but those that had not begun when it was cancelled. `text`, `token_ids`,
    `finish_reason` and `logprobs` are those of the first."""

    choices: tuple[Answer, ...]
    usage: Usage
    timings: Timings
    recall: Recall | None = None  # what of the prompt came from memory, and why it was not more
    speculation: Speculation | None = None  # what drafts did; None: without drafts, or it ended before a round
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of its tokens, the first None; on request
    embedded: Embedded | None = None  # on request
    pinned: bool = False  # its prompt was, when it ended

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs


class Ticket:
    """A request that has been submitted."""

    def __init__(self, cancel: Callable[[], None], begun: Callable[[], bool]) -> None:
        self.cancel = cancel  # from any thread, at any moment, any number of times
        self._begun = begun

    @property
    def begun(self) -> bool:
        """Has the request been admitted, so that it uses memory or did? May be called from any thread."""
        return self._begun()


class Collector:
    """A queue of a request's events: filled on the engine's thread, read on the caller's."""

    def __init__(self, n: int) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._deltas: list[list[Delta]] = [[] for _ in range(n)]
        self._finished: dict[int, Finished] = {}
        self._done: Done | None = None
        self._scored: PromptScored | None = None
        self._embedded: Embedded | None = None
        self._process = os.getpid()
        self.deliver = self._events.put

    @property
    def over(self) -> bool:
        """Has the last event been read?"""
        return self._done is not None

    def deltas(self) -> Iterator[Delta]:
        """Deltas as they arrive, until the request is done. Raises the request's error."""
        while self._done is None:
            if self._process != os.getpid():
                owner = forked_from(self._process)
                raise EngineClosed(f"the request belongs to {owner}; it receives nothing more in this process")
            yield from self._take(self._events.get())

    def arrived(self) -> Iterator[Delta]:
        """Deltas that have arrived, without waiting for more. Raises the request's error."""
        while self._done is None:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            yield from self._take(event)

    def _take(self, event: Event) -> tuple[Delta, ...]:
        match event:
            case Delta():
                self._deltas[event.choice].append(event)
                return (event,)
            case PromptScored():
                self._scored = event
            case Embedded():
                self._embedded = event
            case Finished():
                self._finished[event.choice] = event
            case Failed(error=error):
                raise error
            case Done():
                self._done = event
        return ()

    def result(self) -> Result:
        """Wait for the end. Raises the request's error."""
        for _ in self.deltas():
            pass
        return self.collected()

    def collected(self) -> Result:
        """The result, when the request is done. Raises `WrongStage` before."""
        if self._done is None:
            raise WrongStage("the request is not done")
        choices = tuple(self._answer(index) for index in sorted(self._finished))
        done, scored = self._done, self._scored.logprobs if self._scored is not None else None
        read = scored, self._embedded
        return Result(choices, done.usage, done.timings, done.recall, done.speculation, *read, pinned=done.pinned)

    def _answer(self, index: int) -> Answer:
        deltas, end = self._deltas[index], self._finished[index]
        return Answer(
            index,
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            end.reason,
            tuple(entry for delta in deltas for entry in delta.logprobs or ()) if end.scored else None,
            end.stop_string,
        )


class Stream(Iterator[Delta]):
    """Made by `Engine.stream`. `for` blocks this thread; `async for` waits on the event loop without blocking it.

    The request is submitted, and may raise, with the first step of the iteration. `result` is available after the last.
    """

    def __init__(self, submit: Submit, n: int) -> None:
        self._submit = submit
        self._collector = Collector(n)
        self._iteration: Generator[Delta] | AsyncGenerator[Delta] | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        if self._iteration is None:
            self._iteration = _blocking(self._submit, self._collector)
        if not isinstance(self._iteration, Generator):
            raise WrongStage("this stream is iterated with `async for` already")
        return next(self._iteration)

    def close(self) -> None:
        """Cancel an iteration with `for` that is not at its end. Idempotent."""
        if isinstance(self._iteration, Generator):
            self._iteration.close()

    def __aiter__(self) -> AsyncGenerator[Delta]:
        if self._iteration is not None:
            raise WrongStage("a stream can be iterated once; call `stream` again")
        self._iteration = pieces = _waiting(self._submit, self._collector)
        return pieces

    @property
    def result(self) -> Result:
        """The result. Raises `WrongStage` before the end."""
        return self._collector.collected()


# Neither refers to its stream, so that an unreferenced stream is closed at once, not by the cycle collector.


def _blocking(submit: Submit, collector: Collector) -> Generator[Delta]:
    ticket = submit(collector.deliver)
    try:
        yield from collector.deltas()
    finally:
        ticket.cancel()


async def _waiting(submit: Submit, collector: Collector) -> AsyncGenerator[Delta]:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def deliver(event: Event) -> None:
        collector.deliver(event)
        loop.call_soon_threadsafe(arrived.set)  # raises once the loop is closed; the request is cancelled then

    # Tokenizing and checking a long prompt takes time: on another thread, which cannot be interrupted.
    submitting = loop.run_in_executor(None, submit, deliver)
    try:
        ticket = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel)
        raise
    try:
        while not collector.over:
            await arrived.wait()
            arrived.clear()
            for delta in collector.arrived():
                yield delta
    finally:
        ticket.cancel()


def _cancel(submitting: "asyncio.Future[Ticket]") -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
