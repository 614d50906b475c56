"""capabilities: what clients may ask of a model beside completions, by its engine, or by its files while it is not
loaded."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Literal

from kvcellar.engine.card import TextCard
from kvcellar.errors import ModelRefused
from kvcellar.frontend.reply_formats import Replies
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.text.tokens import MOST_BYTES, bytes_for
from kvcellar.worker import own_python

Capability = Literal["completion", "vision", "tools", "thinking", "embedding"]
NOTHING: tuple[Capability, ...] = ("completion",)  # of every model
CONTEXT = 2**20  # tokens; no conversation is rendered
READ_SECONDS = 120.0  # until a tokenizer is given up
log = logging.getLogger("kvcellar.serve")


def capabilities(replies: Replies, *, sees: bool, embeds: bool) -> tuple[Capability, ...]:
    """By the names that Ollama has for them."""
    known: dict[Capability, bool] = {
        "vision": sees,
        "tools": replies.refusal is None,
        "thinking": replies.reasons,
        "embedding": embeds,
    }
    return (*NOTHING, *(name for name, has in known.items() if has))


def capabilities_of(directory: Path, template: str | None = None) -> tuple[Capability, ...]:
    """Those that an engine of the model in a directory would have, whose chat template is `template`, if that is given.
    Another process reads the tokenizer, for seconds, and no weights: this one needs no transformers for that."""
    asked, environment = own_python("-m", __name__, str(directory))
    try:
        found = subprocess.run(
            asked,
            env=environment,
            input=json.dumps(template),
            capture_output=True,
            text=True,
            check=True,
            timeout=READ_SECONDS,
        )
    except subprocess.SubprocessError as error:
        log.error("what the model in %s can do cannot be read: %s", directory, error)
        return NOTHING  # a request for the model gets the reason
    return tuple(json.loads(found.stdout))


def read(directory: Path, template: str | None) -> tuple[Capability, ...]:
    """As `capabilities_of`, in this process."""
    from kvcellar.engine.load.open_model import with_template  # import transformers
    from kvcellar.engine.models.load import text_of
    from kvcellar.engine.models.weights.config_file import pooling_of

    try:
        text = text_of(directory)
    except ModelRefused:
        return NOTHING  # a request for the model gets the reason
    assets, why_not = (None, text) if isinstance(text, str) else (text, "")
    if assets is not None and template is not None:
        assets = with_template(assets, template)
    codec = TextCodec(TextCard(assets=assets, why_not=why_not, context=CONTEXT, text_bytes=bytes_for(MOST_BYTES)))
    sees = codec.has_chat and _sees(directory)
    return capabilities(Replies(codec), sees=sees, embeds=not isinstance(pooling_of(directory), str))


def _sees(directory: Path) -> bool:
    """Whether the files of a model have all that it needs to take images; its network is tested when it is loaded."""
    from kvcellar.engine.models.weights.config_file import has_vision

    try:
        if not has_vision(directory):
            return False
        from kvcellar.images.processing import Processor  # which takes seconds

        Processor(directory, "", placeholder=-1, most_rows=0)
    except ModelRefused:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read(Path(sys.argv[1]), json.load(sys.stdin))))
