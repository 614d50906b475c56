"""tensor_file: writes a safetensors file tensor by tensor, so that only one tensor is in memory at a time.

Always true: the header was written first, every tensor has its place in the file from the start, and a file is complete
only if each was written once. The same tensors give the same bytes in any order of writing.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Type, as in safetensors, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES.get(self.dtype, 1)


class TensorFile:
    """One file that is being written."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._places: dict[str, int] = {}
        self._left = set(entries)
        header: dict[str, object] = {"__metadata__": _METADATA}
        end = 0
        for name in sorted(entries, key=lambda one: (-_BYTES.get(entries[one].dtype, 1), one)):  # aligned to elements
            entry = entries[name]
            header[name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.bytes],
            }
            self._places[name] = end
            end += entry.bytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._write(len(raw).to_bytes(8, "little") + raw, 0)
        os.ftruncate(self._file, self._start + end)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the shape that was declared for it."""
        assert tuple(tensor.shape) == self._entries[name].shape, name
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert len(raw) == self._entries[name].bytes, name
        self._left.remove(name)
        buffer: Any = raw.numpy()  # its stub lacks the buffer protocol
        self._write(memoryview(buffer), self._start + self._places[name])

    def _write(self, raw: bytes | memoryview, at: int) -> None:
        rest = memoryview(raw)
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written

    def close(self) -> None:
        os.close(self._file)

    def check(self) -> None:
        assert not self._left, f"not written: {sorted(self._left)[:3]}"


@contextmanager
def tensor_file(path: Path, entries: Mapping[str, Entry]) -> Iterator[TensorFile]:
    """A new file at `path`, which is complete when the block ends."""
    file = TensorFile(path, entries)
    try:
        yield file
        file.check()
    finally:
        file.close()
