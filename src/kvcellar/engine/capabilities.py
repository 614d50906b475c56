"""capabilities: what clients may ask of a model beside completions, by its engine, or by its files while it is not
loaded."""

from pathlib import Path

from kvcellar.engine.replies import Replies, ServedReplies
from kvcellar.engine.text_codec import TextCodec
from kvcellar.errors import ModelRefused
from kvcellar.text.tokens import MOST_BYTES, bytes_for

NOTHING = ("completion",)  # of every model
CONTEXT = 2**20  # tokens; no conversation is rendered


def capabilities(replies: ServedReplies, *, embeds: bool) -> tuple[str, ...]:
    """By the names that Ollama has for them."""
    known = {"tools": replies.refusal is None, "thinking": replies.reasons, "embedding": embeds}
    return (*NOTHING, *(name for name, has in known.items() if has))


def capabilities_of(directory: Path, template: str | None = None) -> tuple[str, ...]:
    """Those that an engine of the model in a directory would have, whose chat template is `template`, if that is given.
    Reads the tokenizer, which takes up to seconds, and no weights."""
    from kvcellar.engine.open_model import with_template  # import transformers
    from kvcellar.models.load import text_of
    from kvcellar.models.pooling import pooling_of

    try:
        text = text_of(directory)
    except ModelRefused:
        return NOTHING  # a request for the model gets the reason
    assets, why_not = (None, text) if isinstance(text, str) else (text, "")
    if assets is not None and template is not None:
        assets = with_template(assets, template)
    text_bytes = bytes_for(MOST_BYTES)
    codec = TextCodec(assets, why_not, frozenset(), context=CONTEXT, text_bytes=text_bytes, replay_bytes=0)
    return capabilities(Replies(codec), embeds=not isinstance(pooling_of(directory), str))
