"""assets: what makes text of a model's tokens: its tokenizer and its templates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Those of one model. `tokenizer` has passed its trial (`trial`). `chat_template` is None where it has none."""

    tokenizer: Tokenizer
    special: Mapping[str, str]  # "bos_token" -> its text, and so on
    chat_template: str | None
    response_template: Any = None  # how the checkpoint says that answers are read, in transformers' format
