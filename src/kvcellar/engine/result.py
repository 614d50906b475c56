"""result: what a caller gets of a request: its events collected into a result, or streamed as they arrive.

Always true of a stream:
  * it is iterated once, with `for` or with `async for`;
  * where iteration stops before the end, by leaving the loop, an error or a cancelled task, the request is cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvcellar.errors import EngineClosed, WrongStage
from kvcellar.events import Delta, Done, Event, Failed, Finished, FinishReason, Timings, TokenLogprob, Usage
from kvcellar.process import Origin

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
    """All completions of a request. `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first."""

    choices: tuple[Answer, ...]
    usage: Usage
    timings: Timings

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
        self._pieces: list[list[Delta]] = [[] for _ in range(n)]
        self._finished: dict[int, Finished] = {}
        self._done: Done | None = None
        self._origin = Origin()
        self.deliver = self._events.put

    @property
    def over(self) -> bool:
        """Has the last event been read?"""
        return self._done is not None

    def pieces(self) -> Iterator[Delta]:
        """Pieces as they come, until the request is over. Raises the request's error."""
        while self._done is None:
            if not self._origin.here:
                raise EngineClosed(f"the request belongs to {self._origin}; it receives nothing more in this process")
            yield from self._take(self._events.get())

    def arrived(self) -> Iterator[Delta]:
        """Pieces that have come, without waiting for more. Raises the request's error."""
        while self._done is None:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            yield from self._take(event)

    def _take(self, event: Event) -> tuple[Delta, ...]:
        match event:
            case Delta():
                self._pieces[event.choice].append(event)
                return (event,)
            case Finished():
                self._finished[event.choice] = event
            case Failed(error=error):
                raise error
            case Done():
                self._done = event
        return ()

    def result(self) -> Result:
        """Wait for the end. Raises the request's error."""
        for _ in self.pieces():
            pass
        return self.collected()

    def collected(self) -> Result:
        """All of it, when it is over. Raises `WrongStage` before."""
        if self._done is None:
            raise WrongStage("the answer has not come to its end")
        choices = tuple(self._answer(index) for index in sorted(self._finished))
        return Result(choices, self._done.usage, self._done.timings)

    def _answer(self, index: int) -> Answer:
        pieces, end = self._pieces[index], self._finished[index]
        told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return Answer(
            index,
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.token_ids),
            end.reason,
            tuple(entry for logprobs in told for entry in logprobs) if told else None,
            end.stop_string,
        )


class Stream(Iterator[Delta]):
    """Made by `Engine.stream`. `for` waits in this thread; `async for` waits on the event loop and never holds it up.

    The request begins with the first step of the loop, and so do its errors. `result` is there after the last.
    """

    def __init__(self, submit: Submit, n: int) -> None:
        self._submit = submit
        self._collector = Collector(n)
        self._pieces: Generator[Delta] | AsyncGenerator[Delta] | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        if self._pieces is None:
            self._pieces = _waited(self._submit, self._collector)
        if not isinstance(self._pieces, Generator):
            raise WrongStage("this stream is gone through with `async for` already")
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what has begun with `for` and is not at its end. May be called again."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()

    def __aiter__(self) -> AsyncGenerator[Delta]:
        if self._pieces is not None:
            raise WrongStage("a stream is gone through once; ask for another one")
        self._pieces = pieces = _listened(self._submit, self._collector)
        return pieces

    @property
    def result(self) -> Result:
        """All of it. Raises `WrongStage` before the end."""
        return self._collector.collected()


# Neither of the two holds its stream: whoever lets go of a stream ends it at once, and not when cycles are looked for.


def _waited(submit: Submit, collector: Collector) -> Generator[Delta]:
    ticket = submit(collector.deliver)
    try:
        yield from collector.pieces()
    finally:
        ticket.cancel()


async def _listened(submit: Submit, collector: Collector) -> AsyncGenerator[Delta]:
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def deliver(event: Event) -> None:
        collector.deliver(event)
        loop.call_soon_threadsafe(news.set)  # raises once the loop is closed; the request is cancelled then

    # Reading and checking a long prompt takes its time, on a thread of its own, which nobody can stop.
    submitting = loop.run_in_executor(None, submit, deliver)
    try:
        ticket = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel)
        raise
    try:
        while not collector.over:
            await news.wait()
            news.clear()
            for piece in collector.arrived():
                yield piece
    finally:
        ticket.cancel()


def _cancel(submitting: "asyncio.Future[Ticket]") -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
