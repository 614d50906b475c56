"""client: an engine as its front end sees it: tokens go in, and events of tokens come out.

The engine may be on a thread of this process (`thread_client.py`) or in a process of its own.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from kvcellar.engine.card import EngineCard
from kvcellar.engine.messages import ControlInParts, ControlWithReply, EngineEvent, Submission
from kvcellar.engine.stats import EngineStats
from kvcellar.memory.tiers.upkeep import Readable

R = TypeVar("R")


class EngineClient(Protocol):
    """One engine. All methods may be called from any thread, but those that wait for the engine not from one that
    delivers events: see `check_caller`."""

    @property
    def card(self) -> EngineCard: ...
    @property
    def alive(self) -> bool:
        """False once it has failed for ever, or is closed."""
        ...

    @property
    def starting(self) -> bool:
        """Whether it has died and is started again: requests wait for it."""
        ...

    @property
    def last_stats(self) -> EngineStats:
        """The statistics that the engine has told last: some tenths of a second after something has changed, once its
        step has ended. Waits for nothing."""
        ...

    def number(self) -> int:
        """Of the next request to be submitted: its place in the order of arrival."""
        ...

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        """`deliver` is called with every event of the request, in order, by one thread at a time; it must not block.
        Raises `BadRequest`, `Overloaded` and `EngineClosed`; then no event is delivered. Waits for an engine in a
        process of its own."""
        ...

    def cancel(self, number: int) -> None:
        """End all completions of a request. No effect on one that is done."""
        ...

    def stop(self, number: int, choice: int, tokens: int) -> None:
        """End one completion of a request, whose text has ended with so many of its tokens. No effect on one that is
        done, but for what is counted."""
        ...

    def fail(self, number: int, error: Exception) -> None:
        """End a request with an error. No effect on one that is done."""
        ...

    def ask(self, control: ControlWithReply[R], source: Readable | None = None) -> R:
        """The reply. Blocks. `source` is what an import reads. Raises what the
        operation raises, and `EngineClosed`."""
        ...

    def parts(self, control: ControlInParts[R]) -> Iterator[R]:
        """The replies. Closing the iterator ends the operation."""
        ...

    def check_caller(self) -> None:
        """Raise `WrongStage` on a thread that delivers events, where waiting for the engine would be a deadlock."""
        ...

    def close(self) -> bool:
        """End the engine. Requests that are not done get `EngineClosed`. Idempotent; does nothing in a fork, where it
        returns False."""
        ...
