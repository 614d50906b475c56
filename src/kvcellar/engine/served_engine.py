"""served_engine: the interface of an engine that a server and its pages use. `kvcellar.Engine` implements it, and so
does an engine under the name of one of its models, and a fake in tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Unpack

from kvcellar.engine.card import ModelCard
from kvcellar.engine.control_clients import CacheClient
from kvcellar.engine.conversations import Conversations
from kvcellar.engine.embeddings import Embeddings
from kvcellar.engine.replies import Replies
from kvcellar.engine.request import SubmitOptions
from kvcellar.engine.result import Ticket
from kvcellar.engine.stats import EngineStats
from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams
from kvcellar.text.template import RenderOptions


class ServedEngine(Protocol):
    """`model`, `healthy`, `starting`, and `decode` and `token_bytes` of a few tokens are used on the event loop and
    return quickly. All other methods are called from several threads at once; they may take long, but must not hold
    the interpreter lock for long."""

    @property
    def model(self) -> ModelCard: ...
    @property
    def healthy(self) -> bool:
        """False once it has failed for ever, or is closed."""
        ...

    @property
    def starting(self) -> bool:
        """Whether it has died and is started again: requests wait for it."""
        ...

    @property
    def cache_bytes(self) -> int:
        """The most bytes that it takes beside weights and adapters, of those that it was granted."""
        ...

    @property
    def cache(self) -> CacheClient: ...
    @property
    def conversations(self) -> Conversations: ...
    @property
    def embeddings(self) -> Embeddings: ...
    @property
    def replies(self) -> Replies: ...

    @property
    def last_stats(self) -> EngineStats:
        """As it has told them last. Waits for nothing."""
        ...

    def stats(self) -> EngineStats:
        """Waits for the running step."""
        ...

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        """Raises `PromptTooLong`, before tokenizing, for a text that cannot fit in `limit` tokens."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def written(self, token: int) -> str:
        """The entry of the vocabulary, which is not decoded."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: int | None = None,
        namespace: str = "",
        replay: bool = True,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Raises `PromptTooLong` for more than `limit` tokens."""
        ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        """`deliver` is called on the engine's thread. Raises `BadRequest`, `Overloaded` or `EngineClosed`."""
        ...
