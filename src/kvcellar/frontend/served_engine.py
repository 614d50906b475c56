"""served_engine: the interface of an engine that a server and its pages use, and an engine under the name of one model.

`kvcellar.Engine` implements the interface, and so do `NamedEngine` and a fake in tests. Models of the library share an
engine if their weights and drafts are the same files. Each has its own sampling defaults, chat template, system prompt
and examples, and its own adapter, which is added to the engine while others run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvcellar.engine.card import ModelCard, default_sampling
from kvcellar.engine.control_replies import VariantText
from kvcellar.engine.load.in_library import preamble_of, shown_name
from kvcellar.engine.messages import DescribeVariant
from kvcellar.engine.request_options import SubmitOptions
from kvcellar.engine.stats import EngineStats
from kvcellar.events import Event
from kvcellar.frontend.client import EngineClient
from kvcellar.frontend.control_clients import AdaptersClient, CacheClient
from kvcellar.frontend.conversations import Conversations
from kvcellar.frontend.embeddings import Embeddings
from kvcellar.frontend.reply_formats import Replies
from kvcellar.frontend.result import Ticket
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.template import RenderOptions

if TYPE_CHECKING:
    from kvcellar.library.library import LibraryModel


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


def _nothing() -> None:
    """What a model without an adapter has to free."""


class NamedEngine:
    """A `ServedEngine`. `adapter` is that of requests which name none; "": none. `close`, when no request of the model
    is left, blocks until its memory is free. Without more, it is the model that the engine was made for."""

    def __init__(self, engine: ServedEngine, adapter: str | None = None, close: Callable[[], None] = _nothing) -> None:
        self._engine, self.adapter, self.close = engine, adapter, close
        self.model, self.conversations = engine.model, engine.conversations
        self.render: Callable[..., list[int]] = lambda *given, **options: engine.render(*given, **options)
        self.replies = engine.replies

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def starting(self) -> bool:
        return self._engine.starting

    @property
    def cache_bytes(self) -> int:
        return self._engine.cache_bytes

    @property
    def cache(self) -> CacheClient:
        return self._engine.cache

    @property
    def embeddings(self) -> Embeddings:
        """Those of all models of the engine."""
        return self._engine.embeddings

    @property
    def last_stats(self) -> EngineStats:
        return self._engine.last_stats

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        return self._engine.encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._engine.decode(ids, special=special)

    def token_bytes(self, token: int) -> bytes:
        return self._engine.token_bytes(token)

    def written(self, token: int) -> str:
        return self._engine.written(token)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        if how.get("adapter") is None:
            how["adapter"] = self.adapter
        return self._engine.submit(prompt_ids, params, deliver=deliver, **how)

    def share_conversations(self, kept: Conversations, key: str) -> None:
        """Continue conversations that are `kept` for several engines, this one's under the name of the model. `key`
        identifies the engine where its tokenizer has no digest."""
        own, name = self._engine.conversations, self.model.name
        if own is not kept:
            self.conversations = own.beside(kept, key, name)
        elif name != self._engine.model.name:
            self.conversations = own.beside(own, "", name)


def open_variant(engine: ServedEngine, client: EngineClient, codec: TextCodec, model: "LibraryModel") -> NamedEngine:
    """A model whose weights and drafts are those of the engine, which `client` and `codec` belong to. From any thread
    but the engine's. Blocks while its adapter is read and tested. Raises `ModelRefused` and `AdapterRefused`; then
    nothing has changed."""
    shown, manifest, card = shown_name(model), model.manifest, client.card
    found: VariantText = client.ask(DescribeVariant(shown, dict(manifest.parameters), manifest.template))
    sampling = default_sampling(found.defaults, vocab_size=card.model.vocab_size, model=shown)
    text, template = card.text, found.chat_template
    if text is not None:
        text = replace(text, chat_template=template, response_template=found.response_template)
    own = codec.variant(text, preamble_of(manifest))
    if model.adapters:
        name, adapters = f"{shown}@{model.id[:12]}", AdaptersClient(client)
        adapters.add(name, model.adapters)
        made = NamedEngine(engine, name, partial(adapters.remove, name, wait=True))
    else:
        made = NamedEngine(engine, adapter="")
    made.render, made.replies = own.render, Replies(own)
    about = {"default_sampling": sampling, "chat_template": template, "has_chat": template is not None}
    made.model = replace(engine.model, **about)
    return made
