"""text_assets: reads the tokenizer and the chat template of a model directory."""

import json
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.tokenization_utils_base import get_fast_tokenizer_file

from kvcellar.errors import TokenizerFailed, panics_of
from kvcellar.text.assets import TextAssets
from kvcellar.text.trial import TokenizerTrial

MAX_FILE_BYTES = 256 << 20  # of one file of a tokenizer
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab")


@contextmanager
def trial_of(path: Path) -> Generator[TokenizerTrial]:
    """The trial of a model's tokenizer, which begins now, and ends with the block."""
    file = path / _tokenizer_file(path / "tokenizer_config.json") if _too_long(path) is None else None
    with closing(TokenizerTrial(file if file is not None and file.is_file() else None)) as trial:
        yield trial


def text_assets(path: Path, config: Any, trial: TokenizerTrial) -> TextAssets | str:
    """The tokenizer and its template, or why there is none. Raises `ModelRefused` for unsafe files."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return "the directory has no tokenizer"
    if (why := _too_long(path)) is not None:
        return why
    try:
        trial.check_file()
    except TokenizerFailed as error:
        return f"transformers cannot build its tokenizer: {error}"
    try:
        with panics_of("the reader of its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        return f"transformers cannot build its tokenizer: {type(error).__name__}: {error}"
    if not tokenizer.is_fast:
        return f"its tokenizer {type(tokenizer).__name__} has no fast form"
    trial.check(tokenizer.backend_tokenizer)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer, special, template, tokenizer.response_template)


def _too_long(path: Path) -> str | None:
    for file in (*path.iterdir(), *(path / "additional_chat_templates").glob("*")):
        if file.suffix in _SUFFIXES and file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
            return f"{file.name} has {file.stat().st_size} bytes; {MAX_FILE_BYTES} are allowed"
    return None


def _tokenizer_file(config: Path) -> str:
    """The name of the file that transformers reads, which the config of a tokenizer may choose by their version."""
    try:
        return get_fast_tokenizer_file(json.loads(config.read_bytes())["fast_tokenizer_files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "tokenizer.json"  # it chooses none, or transformers fails on it in the same way
