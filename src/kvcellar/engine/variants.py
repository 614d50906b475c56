"""variants: models of the library that share an engine: those whose weights and drafts are the same files.

Each has its own sampling defaults, chat template, system prompt and examples, and its own adapter, which is added to
the engine while others run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcellar.engine.defaults import default_sampling
from kvcellar.engine.replies import Replies, ServedReplies
from kvcellar.engine.text_codec import TextCodec
from kvcellar.sample.params import SamplingParams

if TYPE_CHECKING:  # imports torch
    from kvcellar.engine.build import Built
    from kvcellar.library.library import LibraryModel


def _nothing() -> None:
    """What a model without an adapter has to free."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What one model has of its own on an engine. `render` and `replies` are as those of the engine; `close`, when no
    request of the model is left, blocks until its memory is free."""

    default_sampling: SamplingParams
    render: Callable[..., list[int]]
    replies: ServedReplies
    adapter: str | None = None  # of its requests; "": none; None: that of requests which name none
    close: Callable[[], None] = _nothing
    template: str | None = None  # of chats


class Variants:
    """Of one engine. May be called from any thread but the engine's."""

    def __init__(self, built: "Built", codec: TextCodec) -> None:
        self._built, self._codec = built, codec

    def open(self, model: "LibraryModel") -> Variant:
        """A model whose weights and drafts are those of the engine. Blocks while its adapter is read and tested. Raises
        `ModelRefused` and `AdapterRefused`; then nothing has changed."""
        from kvcellar.engine.open_model import as_created, preamble_of, shown_name  # imports transformers

        built = self._built
        loaded = as_created(built.base, model)
        sampling = default_sampling(loaded.defaults, vocab_size=built.intake.vocab_size, model=loaded.name)
        template = loaded.text.chat_template if loaded.text is not None else None
        codec = self._codec.variant(loaded.text, preamble_of(model.manifest))
        render, replies = codec.render, Replies(codec)
        if not model.adapters:
            return Variant(sampling, render, replies, adapter="", template=template)
        name = f"{shown_name(model)}@{model.id[:12]}"
        built.adapters.add(name, model.adapters)
        return Variant(sampling, render, replies, name, partial(built.adapters.remove, name, wait=True), template)
