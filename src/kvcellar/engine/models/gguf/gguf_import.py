"""gguf_import: a GGUF file as a model directory: safetensors, config, tokenizer and chat template.

The file is not trusted (`gguf_file.py`). Tensors are decoded to bfloat16 one at a time, and of each only a part in
float32. Q4_0 and Q8_0 keep their codes: a block has 32 values that share a float16 scale, so a matrix is one of
compressed-tensors with groups of 32: `X.weight_packed` of 4 bits or `X.weight` of 8, and `X.weight_scale`.

transformers builds the tokenizer from the vocabulary and the merges of the file. How text is split before that is only
named in it; a name that is not known here is refused, because another split gives other tokens.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
)

from kvcellar.engine.models.gguf.gguf_file import MXFP4, Q5_0, Q5_1, TQ1_0, TQ2_0, TYPES, Header, Stored, read_header
from kvcellar.engine.models.gguf.gguf_models import Part, imported, with_factors
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.quantize.formats.part import E2M1, as_floats
from kvcellar.engine.models.quantize.rounding import pack
from kvcellar.engine.models.quantize.writing import Entry, tensor_file, with_codes
from kvcellar.errors import ModelRefused, panics_of, shown
from kvcellar.progress import report

GROUP = 32
BITS = {2: 4, 8: 8}  # by type: Q4_0 and Q8_0
_EMBEDDING = "model.embed_tokens.weight"  # rows of it are looked up, as numbers


def bits_of(part: Part) -> int | None:
    """Of the codes of a tensor; None: it is decoded."""
    plain = len(part.shape) != 2 or part.change is not None or not part.name.endswith(".weight")
    return None if plain or part.name == _EMBEDDING else BITS.get(part.stored.type)


def coded_entries(part: Part, bits: int) -> dict[str, Entry]:
    """What is written of it."""
    outputs, inputs = part.shape
    codes = Entry("I32", (outputs, inputs // 8)) if bits == 4 else Entry("I8", part.shape)
    return {_name(part, bits): codes, f"{part.name}_scale": Entry("F16", (outputs, inputs // GROUP))}


def coded(part: Part, bits: int, raw: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and content of what is written. `raw` are the bytes of all blocks."""
    outputs, inputs = part.shape
    blocks = raw.view(outputs, inputs // GROUP, -1)
    scales, rest = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
    if bits == 4:
        rest = torch.cat((rest & 15, rest >> 4), -1) - 8  # modulo 256, as I8 is
    codes = rest.contiguous().view(torch.int8).flatten(1)  # [o,i]
    if part.order is not None:
        codes, scales = part.order(codes), part.order(scales)
    yield _name(part, bits), pack(codes, bits) if bits == 4 else codes
    yield f"{part.name}_scale", scales


def _name(part: Part, bits: int) -> str:
    return f"{part.name}_packed" if bits == 4 else part.name


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


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART = 4 << 20  # values that are decoded at once


def read_tensor(
    file: BinaryIO, stored: Stored, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """A tensor as bfloat16. `change` is applied to float32 rows [R,C] of it, any number at a time."""
    width = stored.shape[-1]
    rows = stored.elements // width
    found = torch.empty(rows, width, dtype=torch.bfloat16)  # [R,C]
    step = max(1, _PART // width)
    for row in range(0, rows, step):
        part = found[row : row + step]
        raw = read_blocks(file, stored, stored.bytes // rows * row, stored.bytes // rows * len(part))
        values = decode(raw, stored.type).reshape(part.shape)
        part.copy_(values if change is None else change(values))
    return found.reshape(stored.shape)


def read_blocks(file: BinaryIO, stored: Stored, start: int = 0, size: int | None = None) -> torch.Tensor:
    """Bytes of a tensor, U8: all, or so many from `start` on."""
    size = stored.bytes if size is None else size
    file.seek(stored.offset + start)
    found = numpy.fromfile(file, numpy.uint8, size)
    if len(found) != size:
        raise ModelRefused(f"the file was shortened while {stored.name} was read")
    return torch.from_numpy(found)


def decode(raw: torch.Tensor, kind: int) -> torch.Tensor:
    """float32 values of whole blocks, given as bytes."""
    name, _, block = TYPES[kind]
    if name in _PLAIN:
        return raw.view(_PLAIN[name]).float()
    if kind in (Q5_0, Q5_1):
        return _five_bits(raw.reshape(-1, block), minimum=kind == Q5_1)
    if kind == MXFP4:
        return _small_floats(raw.reshape(-1, block))
    if kind in (TQ1_0, TQ2_0):
        return _ternary(raw.reshape(-1, block), powers=kind == TQ1_0)
    return dequantize(raw, kind)


def _five_bits(blocks: torch.Tensor, *, minimum: bool) -> torch.Tensor:
    """Q5_0 and Q5_1 [B,22 or 24]: half scale (and half minimum), 32 fifth bits, 16 bytes of two values each."""
    scale = blocks[:, :2].view(torch.float16).float()
    at = 4 if minimum else 2
    fifth = (blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [B,4,8]
    low = blocks[:, at + 4 :]
    codes = torch.cat((low & 15, low >> 4), 1) | (fifth.reshape(-1, 32) << 4)  # [B,32]
    if minimum:
        return (scale * codes.float() + blocks[:, 2:4].view(torch.float16).float()).reshape(-1)
    return (scale * (codes.float() - 16)).reshape(-1)


def _small_floats(blocks: torch.Tensor) -> torch.Tensor:
    """MXFP4 [B,17]: an exponent of 2, 16 bytes of two values each."""
    codes = torch.cat((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), 1)  # [B,32]
    return (torch.tensor(E2M1)[codes.int()] * as_floats(blocks[:, :1])).reshape(-1)


def _ternary(blocks: torch.Tensor, *, powers: bool) -> torch.Tensor:
    """TQ1_0 [B,54] and TQ2_0 [B,66]: -1, 0 and 1 times a half at the end. TQ2_0 has 2 bits for each value; a byte of
    TQ1_0 is a fraction of 256 in base 3, of five digits in the first 48 bytes, and four in the last four."""
    if powers:
        parts = [_digits(blocks[:, a:b], count) for a, b, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    else:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
        parts = [(blocks[:, a : a + 32, None].mT >> shifts & 3).flatten(1) for a in (0, 32)]
    values = torch.cat(parts, 1).float() - 1  # [B,256]
    return (values * blocks[:, -2:].view(torch.float16).float()).reshape(-1)


def _digits(raw: torch.Tensor, count: int) -> torch.Tensor:
    """The first digits in base 3 of bytes [B,n] -> [B, count * n], those of the same place together."""
    places = torch.tensor([3**n for n in range(count)], dtype=torch.int32)[:, None]
    return ((raw[:, None].int() * places & 255) * 3 >> 8).flatten(1)


_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # of `general.sampling`


def import_gguf(file: Path, into: Path, *, codes: bool = True) -> None:
    """Write the model of a GGUF file into a directory, which is made. Without `codes` all weights are decoded.

    Raises `ModelRefused`, before any tensor is read where the architecture, a type, a field or a tensor is not
    supported, and `OSError`. What is in the directory then is of no use.
    """
    header = read_header(file)
    found = imported(header)
    into.mkdir(exist_ok=True)
    with silence_transformers():
        write_tokenizer(header, into)
    kept = {part.name: bits for part in found.parts if codes and (bits := bits_of(part)) is not None}
    modules: dict[int, list[str]] = {}
    for name, bits in kept.items():
        modules.setdefault(bits, []).append(name.removesuffix(".weight"))
    entries: dict[str, Entry] = {}
    for part in found.parts:
        own = {part.name: Entry("BF16", part.shape)}
        entries |= coded_entries(part, kept[part.name]) if part.name in kept else own
    with open(file, "rb") as opened, tensor_file(into / "model.safetensors", entries) as written:
        config = found.config
        if found.factors is not None:
            config = with_factors(
                config, decode(read_blocks(opened, found.factors), found.factors.type).tolist(), header.name
            )
        _write_json(into / "config.json", with_codes(config, modules))
        _write_json(into / "generation_config.json", _generation(header, config))
        for done, part in enumerate(found.parts):
            report("converting weights", done, len(found.parts))
            if part.name in kept:
                for name, tensor in coded(part, kept[part.name], read_blocks(opened, part.stored)):
                    written.put(name, tensor)
                continue
            values = read_tensor(opened, part.stored, part.change)
            written.put(part.name, (values if part.order is None else part.order(values)).reshape(part.shape))


def _generation(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """Which tokens end a text, and sampling parameters if the file has any."""
    found = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    sampling = {name: header.fields.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    chosen = {name: value for name, value in sampling.items() if value is not None}
    return {**found, **({"do_sample": True, **chosen} if chosen else {})}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
