"""gguf_import: a GGUF file as a model directory: safetensors, config, tokenizer and chat template.

The file is not trusted (`gguf_file.py`). Tensors are decoded to bfloat16 one at a time, and of each only a part in
float32; weights of some types keep their codes (`gguf_codes.py`).

Values of tensors are read and decoded in parts of bounded size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.integrations.gguf.dequant import dequantize

from kvcellar.errors import ModelRefused
from kvcellar.models.gguf_codes import bits_of, coded, modules_of
from kvcellar.models.gguf_codes import entries as entries_of
from kvcellar.models.gguf_file import MXFP4, Q5_0, Q5_1, TQ1_0, TQ2_0, TYPES, Header, Stored, read_header
from kvcellar.models.gguf_models import imported, with_factors
from kvcellar.models.gguf_tokenizer import write_tokenizer
from kvcellar.models.hf_logging import silence_transformers
from kvcellar.models.quantize.described import with_codes
from kvcellar.models.quantize.formats.floats import E2M1, as_floats
from kvcellar.models.quantize.tensor_file import Entry, tensor_file
from kvcellar.progress import report

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART = 4 << 20  # values that are decoded at once


class Tensors:
    """The open file. A context manager."""

    def __init__(self, file: Path) -> None:
        self._file = open(file, "rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def read_whole(self, stored: Stored) -> torch.Tensor:
        """A small tensor in float32."""
        return decode(self.read_blocks(stored), stored.type).reshape(stored.shape)

    def read_blocks(self, stored: Stored) -> torch.Tensor:
        """The bytes of a tensor, U8."""
        raw = torch.empty(stored.bytes, dtype=torch.uint8)
        self._fill(raw, stored.offset, stored.name)
        return raw

    def read(self, stored: Stored, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """A tensor as bfloat16. `change` is applied to float32 rows [R,C] of it, any number at a time."""
        width = stored.shape[-1]
        rows = stored.elements // width
        _, elements, block = TYPES[stored.type]
        row_bytes = width // elements * block
        found = torch.empty(rows, width, dtype=torch.bfloat16)  # [R,C]
        step = max(1, _PART // width)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            raw = torch.empty(count * row_bytes, dtype=torch.uint8)
            self._fill(raw, stored.offset + row * row_bytes, stored.name)
            values = decode(raw, stored.type).reshape(count, width)
            found[row : row + count] = values if change is None else change(values)
        return found.reshape(stored.shape)

    def _fill(self, raw: torch.Tensor, offset: int, name: str) -> None:
        self._file.seek(offset)
        buffer: Any = raw.numpy()  # its stub lacks the buffer protocol
        if self._file.readinto(buffer) != len(raw):
            raise ModelRefused(f"the file was shortened while {name} was read")


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
    modules = modules_of(found.parts) if codes else {}
    kept = {part.name: bits for part in found.parts if codes and (bits := bits_of(part)) is not None}
    entries: dict[str, Entry] = {}
    for part in found.parts:
        own = {part.name: Entry("BF16", part.shape)}
        entries |= entries_of(part, kept[part.name]) if part.name in kept else own
    with Tensors(file) as tensors, tensor_file(into / "model.safetensors", entries) as written:
        config = found.config
        if found.factors is not None:
            config = with_factors(config, tensors.read_whole(found.factors).reshape(-1).tolist(), header.name)
        _write_json(into / "config.json", with_codes(config, modules))
        _write_json(into / "generation_config.json", _generation(header, config))
        for done, part in enumerate(found.parts):
            report("converting weights", done, len(found.parts))
            if part.name in kept:
                for name, tensor in coded(part, kept[part.name], tensors.read_blocks(part.stored)):
                    written.put(name, tensor)
                continue
            values = tensors.read(part.stored, part.change)
            written.put(part.name, (values if part.order is None else part.order(values)).reshape(part.shape))


def _generation(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """Which tokens end a text, and sampling parameters if the file has any."""
    found = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    sampling = {name: header.fields.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    chosen = {name: value for name, value in sampling.items() if value is not None}
    return {**found, **({"do_sample": True, **chosen} if chosen else {})}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
