"""served_engine: an engine under the name of one model, as a server uses it.

Models of the library share an engine if their weights and drafts are the same files. Each has its own sampling
defaults, chat template, system prompt and examples, and its own adapter, which is added to the engine while others run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcellar.engine.card import default_sampling
from kvcellar.engine.load.in_library import preamble_of, shown_name
from kvcellar.engine.messages import DescribeVariant
from kvcellar.frontend.control_clients import AdaptersClient
from kvcellar.frontend.conversations import Conversations
from kvcellar.frontend.reply_formats import Replies
from kvcellar.frontend.result import Ticket
from kvcellar.frontend.text_codec import TextCodec

if TYPE_CHECKING:
    from kvcellar.frontend.engine import Engine
    from kvcellar.library.library import LibraryModel

    Interface = Engine
else:
    Interface = object  # what is not here is that of the engine: see `__getattr__`


def _nothing() -> None:
    """What a model without an adapter has to free."""


class NamedEngine(Interface):
    """`adapter` is that of requests which name none; "": none. `close`, when no request of the model is left, blocks
    until its memory is free. Without more, it is the model that the engine was made for.

    `model`, `healthy`, `starting`, and `decode` and `token_bytes` of a few tokens are used on the event loop and return
    quickly. All other methods are called from several threads at once; they may take long, but must not hold the
    interpreter lock for long."""

    def __init__(self, engine: "Engine", adapter: str | None = None, close: Callable[[], None] = _nothing) -> None:
        self._engine, self.adapter, self._free = engine, adapter, close
        self.model, self.conversations = engine.model, engine.conversations
        self.codec: TextCodec | None = None  # None: that of the engine
        self.replies = engine.replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        self._free()

    def render(self, *given: Any, **options: Any) -> list[int]:
        return (self.codec or self._engine).render(*given, **options)

    def submit(self, *given: Any, **how: Any) -> Ticket:
        if how.get("adapter") is None:
            how["adapter"] = self.adapter
        return self._engine.submit(*given, **how)

    def share_conversations(self, kept: Conversations, key: str) -> None:
        """Continue conversations that are `kept` for several engines, this one's under the name of the model. `key`
        identifies the engine where its tokenizer has no digest."""
        own, name = self._engine.conversations, self.model.name
        if own is not kept:
            self.conversations = own.beside(kept, key, name)
        elif name != self._engine.model.name:
            self.conversations = own.beside(own, "", name)


def open_variant(engine: "Engine", model: "LibraryModel") -> NamedEngine:
    """A model of the library whose weights and drafts are those of the engine. From any thread but the engine's. Blocks
    while its adapter is read and tested. Raises `ModelRefused` and `AdapterRefused`; then nothing has changed."""
    client, codec = engine._client, engine._codec
    shown, manifest, card = shown_name(model), model.manifest, client.card
    found = client.ask(DescribeVariant(shown, dict(manifest.parameters), manifest.template))
    sampling = default_sampling(found.defaults, vocab_size=card.model.vocab_size, model=shown)
    text, template = card.text.assets, found.chat_template
    if text is not None:
        text = replace(text, chat_template=template, response_template=found.response_template)
    own = codec.variant(text, preamble_of(manifest))
    if model.adapters:
        name, adapters = f"{shown}@{model.id[:12]}", AdaptersClient(client)
        adapters.add(name, model.adapters)
        made = NamedEngine(engine, name, partial(adapters.remove, name, wait=True))
    else:
        made = NamedEngine(engine, adapter="")
    made.codec, made.replies = own, Replies(own)
    about = {"default_sampling": sampling, "chat_template": template, "has_chat": template is not None}
    made.model = replace(engine.model, **about)
    return made
