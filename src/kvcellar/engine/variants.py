"""variants: models of the library that share an engine: those whose weights and drafts are the same files.

Each has its own sampling defaults, chat template, system prompt and examples, and its own adapter, which is added to
the engine while others run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvcellar.engine.adapters_client import AdaptersClient
from kvcellar.engine.client import EngineClient
from kvcellar.engine.control_replies import VariantText
from kvcellar.engine.defaults import default_sampling
from kvcellar.engine.in_library import preamble_of, shown_name
from kvcellar.engine.replies import Replies
from kvcellar.engine.text_codec import TextCodec
from kvcellar.messages import DescribeVariant
from kvcellar.sample.params import SamplingParams

if TYPE_CHECKING:
    from kvcellar.library.library import LibraryModel


def _nothing() -> None:
    """What a model without an adapter has to free."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What one model has of its own on an engine. `render` and `replies` are as those of the engine; `close`, when no
    request of the model is left, blocks until its memory is free."""

    default_sampling: SamplingParams
    render: Callable[..., list[int]]
    replies: Replies
    adapter: str | None = None  # of its requests; "": none; None: that of requests which name none
    close: Callable[[], None] = _nothing
    template: str | None = None  # of chats


class Variants:
    """Of one engine. May be called from any thread but the engine's."""

    def __init__(self, client: EngineClient, codec: TextCodec) -> None:
        self._client, self._codec = client, codec

    def open(self, model: "LibraryModel") -> Variant:
        """A model whose weights and drafts are those of the engine. Blocks while its adapter is read and tested. Raises
        `ModelRefused` and `AdapterRefused`; then nothing has changed."""
        shown, manifest = shown_name(model), model.manifest
        found: VariantText = self._client.ask(DescribeVariant(shown, dict(manifest.parameters), manifest.template))
        sampling = default_sampling(found.defaults, vocab_size=self._client.card.model.vocab_size, model=shown)
        text, template = self._client.card.text, found.chat_template
        if text is not None:
            text = replace(text, chat_template=template, response_template=found.response_template)
        codec = self._codec.variant(text, preamble_of(manifest))
        render, replies = codec.render, Replies(codec)
        if not model.adapters:
            return Variant(sampling, render, replies, adapter="", template=template)
        name, adapters = f"{shown}@{model.id[:12]}", AdaptersClient(self._client)
        adapters.add(name, model.adapters)
        return Variant(sampling, render, replies, name, partial(adapters.remove, name, wait=True), template)
