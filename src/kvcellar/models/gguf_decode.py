"""gguf_decode: values of the tensors of a GGUF file, read and decoded in parts of bounded size."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.integrations.gguf.dequant import dequantize

from kvcellar.errors import ModelRefused
from kvcellar.models.gguf_file import MXFP4, Q5_0, Q5_1, TQ1_0, TQ2_0, TYPES, Stored
from kvcellar.models.quantize.formats.floats import E2M1, as_floats

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
