"""gguf_tokenizer: the tokenizer and the chat template of a GGUF file, as files of a model directory.

transformers builds the tokenizer from the vocabulary and the merges of the file. How text is split before that is only
named in it; a name that is not known here is refused, because another split gives other tokens.
"""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
)

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.gguf_file import Header

_AS_GPT2 = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_NAMES = {  # in transformers, and in the file
    "tokenizer_type": "model", "pre_tokenizer_type": "pre", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id", "pad_token_id": "padding_token_id", "add_prefix_space": "add_space_prefix",
}  # fmt: skip
_MOST_TOKEN = 1 << 12  # characters: merges are recovered in a time that grows with their square
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(header: Header, into: Path) -> None:
    """Write what the file has of a tokenizer; nothing if it has none. Raises `ModelRefused`."""
    fields = {name: header.fields.get(f"tokenizer.ggml.{key}") for name, key in _NAMES.items()}
    kind = fields["tokenizer_type"]
    if kind in (None, "none", "no_vocab"):
        return
    if kind not in GGUF_TOKENIZER_TYPES:
        raise ModelRefused(
            f"{header.name} has a tokenizer of type {shown(kind)}; these types are imported: "
            f"{', '.join(GGUF_TOKENIZER_TYPES)}"
        )
    split = fields["pre_tokenizer_type"]
    if kind == "gpt2" and split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _AS_GPT2 | _SINGLE_DIGITS:
        known = sorted({*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_SINGLE_DIGITS})
        raise ModelRefused(
            f"{header.name} splits text as {shown(split)} does (tokenizer.ggml.pre), which is not known here; these "
            f"are: {', '.join(known)}"
        )
    tokens = _checked_tokens(header, fields)
    try:
        given = {name: one for name, one in fields.items() if one is not None}
        backend, _ = convert_gguf_tokenizer(header.fields["general.architecture"], given)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelRefused(f"the tokenizer of {header.name} cannot be built: {error}") from error
    if split in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    template = header.fields.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **_settings(header, tokens, kind))
    if isinstance(template, str):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(into)


def _settings(header: Header, tokens: list[str], kind: str) -> dict[str, Any]:
    """Special tokens by role, and which of them are added to a text."""
    ids = {role: header.fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    found: dict[str, Any] = {role: tokens[one] for role, one in ids.items() if one is not None}
    found["add_bos_token"] = header.fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and kind != "gemma4"
    found["add_eos_token"] = header.fields.get("tokenizer.ggml.add_eos_token", False)
    return found


def _checked_tokens(header: Header, fields: dict[str, Any]) -> list[str]:
    """The tokens, if the lists that belong to them are as long and hold what they should. Raises `ModelRefused`."""

    def wrong(key: str, why: str) -> ModelRefused:
        return ModelRefused(f"{header.name}: tokenizer.ggml.{key} {why}")

    tokens = fields["tokens"]
    for name, kind in (("tokens", str), ("merges", str), ("scores", float), ("token_type", int)):
        found = fields[name]
        if found is None and name != "tokens":
            continue
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            raise wrong(name, f"is no list of {kind.__name__}")
        if kind is str and max(map(len, found), default=0) > _MOST_TOKEN:
            raise wrong(name, f"has an element of more than {_MOST_TOKEN} characters")
        if name in ("scores", "token_type") and len(found) != len(tokens):
            raise wrong(name, f"has {len(found)} elements for {len(tokens)} tokens")
    for name in _ROLES.values():
        one = header.fields.get(f"tokenizer.ggml.{name}_token_id")
        if one is not None and not (isinstance(one, int) and 0 <= one < len(tokens)):
            raise wrong(f"{name}_token_id", f"is {shown(one)}; there are {len(tokens)} tokens")
    return tokens
