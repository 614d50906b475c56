"""protocols: what the server needs of an engine, and nothing more. `kvcellar.Engine` fits; tests bring their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams


class ServedModel(Protocol):
    """What is served. `has_text`: there is a tokenizer; `has_chat`: there is a chat template."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def has_text(self) -> bool: ...
    @property
    def default_sampling(self) -> SamplingParams: ...


class Ticket(Protocol):
    @property
    def begun(self) -> bool:
        """Has the engine taken the request out of its queue? May be read from any thread."""
        ...

    def cancel(self) -> None:
        """From any thread, at any moment, any number of times. A `Done` still follows."""
        ...


class ServedEngine(Protocol):
    """On the event loop `model` and `healthy` are read, and `decode` is called for a token or two: they must not hold
    it up. All else is called on several threads at once. It may take long, but not keep the interpreter for long."""

    @property
    def model(self) -> ServedModel: ...
    @property
    def healthy(self) -> bool: ...

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        """Raises `PromptTooLong` for more than `limit` tokens, where the length tells without tokenizing."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
        add_generation_prompt: bool = True,
        limit: int | None = None,
    ) -> list[int]:
        """Raises `PromptTooLong` for more than `limit` tokens."""
        ...

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, deliver: Callable[[Event], None]) -> Ticket:
        """Events come on the engine's own thread. Raises `BadRequest`, `Overloaded` or `EngineClosed` at once."""
        ...
