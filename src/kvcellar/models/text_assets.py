"""text_assets: reads the tokenizer and the chat template of a model directory."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvcellar.errors import panics_of
from kvcellar.text.assets import TextAssets
from kvcellar.text.trial import check_tokenizer_file

MAX_FILE_BYTES = 256 << 20  # of one file of a tokenizer
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab")


def text_assets(path: Path, config: Any) -> TextAssets | str:
    """The tokenizer and its template, or why there is none. Raises `ModelRefused` for unsafe files."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return "the directory has no tokenizer"
    for file in (*path.iterdir(), *(path / "additional_chat_templates").glob("*")):
        if file.suffix in _SUFFIXES and file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
            return f"{file.name} has {file.stat().st_size} bytes; {MAX_FILE_BYTES} are allowed"
    if (file := path / "tokenizer.json").is_file():
        check_tokenizer_file(file)
    try:
        with panics_of("the reader of its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        return f"transformers cannot build its tokenizer: {type(error).__name__}: {error}"
    if not tokenizer.is_fast:
        return f"its tokenizer {type(tokenizer).__name__} has no fast form"
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer, special, template, tokenizer.response_template)
