"""gguf_tokenizer: the tokenizer and the chat template of a GGUF file, as files of a model directory.

transformers builds the tokenizer from the vocabulary and the merges of the file. How text is split before that is only
named in it; a name that is not known here is refused, because another split gives other tokens.
"""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
)

from kvcellar.errors import ModelRefused, panics_of, shown
from kvcellar.models.gguf_file import Header

_AS_GPT2 = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_WHOLE_WORDS = frozenset(  # llama.cpp takes a word that is a token without merging it, and adds the first token
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
_NAMES = {  # in transformers, and in the file
    "tokenizer_type": "model", "pre_tokenizer_type": "pre", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id", "pad_token_id": "padding_token_id", "add_prefix_space": "add_space_prefix",
}  # fmt: skip
_IN_ORDER = ("gemma", "gemma2", "gemma3")  # architectures: merges follow from the order of tokens
_BYTES: dict[int, str] = bytes_to_unicode()
_ALPHABET = frozenset(_BYTES.values())
_MOST_TOKEN = 1 << 12  # characters
_MOST_SQUARES = 1 << 26  # of characters of all tokens, if merges are recovered: the time grows with their square
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(header: Header, into: Path) -> None:
    """Write what the file has of a tokenizer; nothing if it has none. Raises `ModelRefused`."""
    fields = {name: header.fields.get(f"tokenizer.ggml.{key}") for name, key in _NAMES.items()}
    for name in ("tokenizer_type", "pre_tokenizer_type"):
        if not isinstance(fields[name], str | None):
            raise _wrong(header, _NAMES[name], f"is {shown(fields[name])}; a text is needed")
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
    _check_merges(header, fields)
    try:
        given = {name: one for name, one in fields.items() if one is not None}
        with panics_of("the reader of its tokenizer"):
            backend, _ = convert_gguf_tokenizer(header.fields["general.architecture"], given)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelRefused(f"the tokenizer of {header.name} cannot be built: {error}") from error
    if split in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind == "gpt2" and split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    template = header.fields.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **_settings(header, tokens, kind))
    if isinstance(template, str):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(into)


def _settings(header: Header, tokens: list[str], kind: str) -> dict[str, Any]:
    """Special tokens by role, and which of them are added to a text."""
    ids = {role: header.fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    found: dict[str, Any] = {role: tokens[one] for role, one in ids.items() if one is not None}
    split = header.fields.get("tokenizer.ggml.pre")
    first = kind == "llama" or (kind == "gpt2" and split in _WHOLE_WORDS and "bos_token" in found)
    for name, default in (("add_bos_token", first), ("add_eos_token", False)):
        given = header.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(given, bool):
            raise _wrong(header, name, f"is {shown(given)}; true or false is needed")
        found[name] = given
    found["add_bos_token"] &= kind != "gemma4"
    return found


def _wrong(header: Header, key: str, why: str) -> ModelRefused:
    return ModelRefused(f"{header.name}: tokenizer.ggml.{key} {why}")


def _checked_tokens(header: Header, fields: dict[str, Any]) -> list[str]:
    """The tokens, if the lists that belong to them are as long and hold what they should. Raises `ModelRefused`."""
    tokens = fields["tokens"]
    for name, kind in (("tokens", str), ("merges", str), ("scores", float), ("token_type", int)):
        found = fields[name]
        if found is None and name != "tokens":
            continue
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            raise _wrong(header, name, f"is no list of {kind.__name__}")
        if kind is str and max(map(len, found), default=0) > _MOST_TOKEN:
            raise _wrong(header, name, f"has an element of more than {_MOST_TOKEN} characters")
        if name in ("scores", "token_type") and len(found) != len(tokens):
            raise _wrong(header, name, f"has {len(found)} elements for {len(tokens)} tokens")
    for name in _ROLES.values():
        one = header.fields.get(f"tokenizer.ggml.{name}_token_id")
        if one is not None and not (isinstance(one, int) and 0 <= one < len(tokens)):
            raise _wrong(header, f"{name}_token_id", f"is {shown(one)}; there are {len(tokens)} tokens")
    return tokens


def _check_merges(header: Header, fields: dict[str, Any]) -> None:
    """Each merge joins two tokens into a third one, and what merges could be derived from is there. Raises
    `ModelRefused`."""
    kind, merges = fields["tokenizer_type"], fields["merges"]
    in_order = kind == "llama" and header.fields.get("general.architecture") in _IN_ORDER
    if merges is None:
        needed = "merges" if kind == "gpt2" else "scores"
        if fields[needed] is None and not in_order:
            raise _wrong(header, needed, f"is missing; a tokenizer of type {kind} needs it")
        if sum(len(token) ** 2 for token in fields["tokens"]) > _MOST_SQUARES:
            raise _wrong(header, "merges", "is missing, and the tokens are too long to recover merges from them")
        return
    spelled = _in_bytes if kind == "gpt2" else _in_blanks if in_order else str
    known = set(map(spelled, fields["tokens"]))
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2 or not all(parts):
            raise _wrong(header, "merges", f"has {shown(merge)}, which is not two tokens with a space between them")
        if missing := [part for part in (*parts, "".join(parts)) if part not in known]:
            raise _wrong(header, "merges", f"has {shown(merge)}, and {shown(missing[0])} is no token of the file")


def _in_bytes(token: str) -> str:
    """As transformers spells a token of a byte-level vocabulary."""
    return token if _ALPHABET.issuperset(token) else "".join(_BYTES[byte] for byte in token.encode())


def _in_blanks(token: str) -> str:
    """As transformers spells a token of Gemma's vocabulary."""
    return token if token.strip() else "▁" * len(token) if " " in token else token
