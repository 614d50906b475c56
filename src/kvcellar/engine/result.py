"""result: what a request came to, collected from its events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvcellar.errors import EngineClosed, WrongStage
from kvcellar.events import Delta, Done, Event, Failed, Finished, FinishReason, Timings, TokenLogprob, Usage
from kvcellar.process import Origin


@dataclass(frozen=True, slots=True)
class Answer:
    """One of a request's `n` answers. `token_ids` leave out the token that ended it, if one did."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All answers of a request. `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first."""

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
        """Has the request been admitted, so that it holds memory or did? May be read from any thread."""
        return self._begun()


class Collector:
    """Receives a request's events on the engine's thread and hands them out on the caller's."""

    def __init__(self, n: int) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._pieces: list[list[Delta]] = [[] for _ in range(n)]
        self._finished: dict[int, Finished] = {}
        self._done: Done | None = None
        self._origin = Origin()
        self.deliver = self._events.put

    @property
    def over(self) -> bool:
        """Has the end been handed out?"""
        return self._done is not None

    def pieces(self) -> Iterator[Delta]:
        """Pieces as they come, until the request is over. Raises the request's error."""
        while self._done is None:
            if not self._origin.here:
                raise EngineClosed(f"the request belongs to {self._origin}; nothing more of it comes here")
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
