"""protocols: the interface of an engine that the server uses. `kvcellar.Engine` implements it; so do fakes in tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from kvcellar.engine.cache_client import SurveyClient
from kvcellar.engine.control_replies import StoreDisk
from kvcellar.engine.conversations import Conversations
from kvcellar.engine.replies import ServedReplies
from kvcellar.engine.request import SubmitOptions
from kvcellar.engine.stats import EngineStats
from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams
from kvcellar.text.template import RenderOptions


class ServedModel(Protocol):
    """`path`: of its files, None where it was made from none; `has_text`: whether there is a tokenizer;
    `special_tokens` are those that chat templates name."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def has_text(self) -> bool: ...
    @property
    def default_sampling(self) -> SamplingParams: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...
    @property
    def chat_template(self) -> str | None: ...


class Ticket(Protocol):
    @property
    def begun(self) -> bool:
        """Whether the engine has taken the request out of its queue. May be read from any thread."""
        ...

    def cancel(self) -> None:
        """May be called from any thread, at any time and repeatedly. `Done` is still delivered."""
        ...


class ServedCache(Protocol):
    """What the prefix cache and the store have. May be called from any thread, and takes long; records are dataclasses,
    entries are JSON. Raises `KvcellarError`."""

    @property
    def disk(self) -> StoreDisk | None: ...
    @property
    def survey(self) -> SurveyClient: ...
    def namespaces(self) -> Sequence[Any]: ...
    def stored_totals(self) -> list[dict[str, object]]: ...
    def listed(self, tier: str, namespace: str | None = None) -> Iterator[dict[str, Any]]: ...
    def hot(self, tier: str, most: int) -> list[dict[str, Any]]: ...
    def remove(
        self, *, namespace: str | None = None, entry: str | None = None, prefix: Sequence[int] | None = None
    ) -> Any: ...
    def clear(self, *, all_models: bool = False) -> Any: ...
    def collect(self) -> int: ...
    def verify(self) -> Any: ...
    def export(self) -> Iterator[bytes]: ...
    def import_from(self, source: Any) -> Any: ...


class ServedEmbeddings(Protocol):
    """May be used from any thread. `refused`: why the model does not embed; None: it does."""

    @property
    def refused(self) -> str | None: ...
    def check(self, dimensions: int | None = None) -> None:
        """Raises `BadRequest` where the model does not embed, or not in so many dimensions."""
        ...

    def tokens(self, text: str | Sequence[int], *, truncate: bool = False) -> Sequence[int]:
        """With what the tokenizer puts around a text. Raises `PromptTooLong`, or truncates."""
        ...

    def submit(
        self,
        ids: Sequence[int],
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        """One `Embedded`, then `Finished` and `Done`. Raises what `ServedEngine.submit` raises."""
        ...

    def vector(
        self, pooled: Sequence[float], dimensions: int | None = None, *, normalised: bool | None = None
    ) -> tuple[float, ...]:
        """`normalised`: of length 1; None: as the model says."""
        ...


class ServedEngine(Protocol):
    """`model`, `healthy`, `starting`, and `decode` and `token_bytes` of a few tokens are used on the event loop and
    return quickly. All other methods are called from several threads at once; they may take long, but must not hold
    the interpreter lock for long."""

    @property
    def model(self) -> ServedModel: ...
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
    def cache(self) -> ServedCache: ...
    @property
    def conversations(self) -> Conversations: ...
    @property
    def embeddings(self) -> ServedEmbeddings: ...
    @property
    def replies(self) -> ServedReplies: ...

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
