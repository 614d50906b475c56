"""gguf_file: the header of a GGUF file: its metadata, and where its tensors are.

A GGUF file is not trusted. Each count, length, offset and product that it declares is compared with the size of the
file, and with a bound of its own, before anything of that size is read, allocated or computed with. Everything here
raises `ModelRefused` with the name of the file and the reason.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME

from kvcellar.errors import ModelRefused, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_TENSORS, _MOST_FIELDS = 1 << 16, 1 << 12
_MOST_HEADER = 256 << 20  # bytes before the tensors
_MOST_TEXT = 16 << 20  # bytes of a text
_MOST_NAME = 256  # bytes of a key or of the name of a tensor
_MOST_ELEMENTS = 1 << 22  # of all arrays
_MOST_TEXTS = 3 << 19  # of all arrays: each is read on its own
_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
_MOST_OTHER_TEXTS = 1 << 12  # of an array that is none of these
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32  # where the file declares none
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_TEXT_LENGTH = 8  # bytes of the length of a text

Q5_0, Q5_1, TQ1_0, TQ2_0, MXFP4 = 6, 7, 34, 35, 39  # types that transformers does not decode
TYPES: Mapping[int, tuple[str, int, int]] = {  # name, elements of a block, bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    Q5_0: ("Q5_0", 32, 22),
    Q5_1: ("Q5_1", 32, 24),
    TQ1_0: ("TQ1_0", 256, 54),
    TQ2_0: ("TQ2_0", 256, 66),
    MXFP4: ("MXFP4", 32, 17),
    **{number: (GGML_NAME[number], *block) for number, block in GGML_BLOCK.items()},
}
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file. `shape`: as in torch, the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: int  # a key of `TYPES`
    offset: int  # from the start of the file
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself."""

    name: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def read_header(file: Path) -> Header:
    """The header of a GGUF file, whose tensors are all inside the file and do not overlap."""
    try:
        with open(file, "rb") as opened:
            return _Reader(opened, file.name, os.fstat(opened.fileno()).st_size).header()
    except OSError as error:
        raise ModelRefused(f"{file.name} cannot be read: {error}") from error


class _Reader:
    """Reads a file from its start. `_left`: the bytes that may follow, of the file and of `_MOST_HEADER`."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self._file, self._name, self._size = file, name, size
        self._left = min(size, _MOST_HEADER)
        self._elements, self._texts = _MOST_ELEMENTS, _MOST_TEXTS  # that may follow

    def header(self) -> Header:
        tensors, count = self._counts()
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("a key", _MOST_NAME)
            if key in fields:
                raise self._wrong(f"it has the key {shown(key)} twice")
            fields[key] = self._value(key)
        listed = [self._listed() for _ in range(tensors)]
        return Header(self._name, fields, self._placed(listed, self._alignment(fields)))

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of fields."""
        if self._size < 24 or self._take(4, "its magic number") != _MAGIC:
            raise ModelRefused(f"{self._name} is not a GGUF file")
        version, tensors, fields = struct.unpack("<IQQ", self._take(20, "its counts"))
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = f"; it is version {swapped} in big-endian order" if swapped in (1, *_VERSIONS) else ""
            raise self._wrong(f"it has version {version}, and 2 and 3 are read{order}")
        bounds = ("tensors", tensors, _MOST_TENSORS, 32), ("fields", fields, _MOST_FIELDS, 13)
        for what, number, most, least in bounds:
            if number > most or number * least > self._left:
                raise self._wrong(f"it declares {number} {what}; it has {self._size} bytes, and {most} are allowed")
        return tensors, fields

    def _value(self, key: str) -> Any:
        kind = self._whole("<I", f"the type of {key}")
        if kind == _ARRAY:
            return self._array(key)
        return self._single(kind, key)

    def _single(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text(key, _MOST_TEXT)
        if kind not in _NUMBERS:
            raise self._wrong(f"the value of {shown(key)} has the unknown type {kind}")
        raw = self._take(struct.calcsize(_NUMBERS[kind]), key)
        if kind == _BOOL and raw not in (b"\0", b"\1"):
            raise self._wrong(f"the truth value of {shown(key)} is neither 0 nor 1")
        return struct.unpack(_NUMBERS[kind], raw)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = struct.unpack("<IQ", self._take(12, key))
        if kind != _TEXT and kind not in _NUMBERS:
            raise self._wrong(f"the elements of {shown(key)} have type {kind}; texts and numbers are read")
        least = _TEXT_LENGTH if kind == _TEXT else struct.calcsize(_NUMBERS[kind])
        most = self._elements
        if kind == _TEXT:
            most = min(most, self._texts if key in _VOCABULARY else min(self._texts, _MOST_OTHER_TEXTS))
        if count > most or count * least > self._left:
            raise self._wrong(
                f"{shown(key)} declares {count} elements; {self._left} bytes follow, and {most} are allowed"
            )
        self._elements -= count
        self._texts -= count if kind == _TEXT else 0
        if kind == _TEXT:
            return [self._text(key, _MOST_TEXT) for _ in range(count)]
        raw = self._take(count * least, key)
        if kind == _BOOL and raw.strip(b"\0\1"):
            raise self._wrong(f"the truth values of {shown(key)} are neither 0 nor 1")
        return list(struct.unpack(f"<{count}{_NUMBERS[kind][1]}", raw))

    def _listed(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and relative offset of the next tensor."""
        name = self._text("the name of a tensor", _MOST_NAME)
        count = self._whole("<I", name)
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise self._wrong(f"{shown(name)} has {count} dimensions; 1 to {_MOST_DIMENSIONS} are read")
        dimensions = struct.unpack(f"<{count}Q", self._take(8 * count, name))
        kind, offset = struct.unpack("<IQ", self._take(12, name))
        if kind not in TYPES:
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise self._wrong(
                f"{shown(name)} is stored as {_OTHER_TYPES.get(kind, f'type {kind}')}, which is not decoded. These "
                f"types are: {known}"
            )
        return name, tuple(reversed(dimensions)), kind, offset

    def _alignment(self, fields: Mapping[str, Any]) -> int:
        found = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(found, int) or not 8 <= found <= 1 << 20 or found & (found - 1):
            raise self._wrong(f"general.alignment is {shown(found)}; a power of 2 from 8 to {1 << 20} is needed")
        return found

    def _placed(self, listed: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, Stored]:
        """The tensors with their places in the file, each checked."""
        start = -(-self._file.tell() // alignment) * alignment
        room = self._size - start
        found: dict[str, Stored] = {}
        for name, shape, kind, offset in listed:
            label, elements, block = TYPES[kind]
            if shape[-1] % elements or not all(shape):
                raise self._wrong(f"{shown(name)} has the shape {shape}, which {label} cannot store")
            size = math.prod(shape) // elements * block
            if offset % alignment or offset > room or size > room - offset:
                raise self._wrong(
                    f"{shown(name)} declares {size} bytes at offset {offset} of {max(room, 0)}, aligned to {alignment}"
                )
            if name in found:
                raise self._wrong(f"it has the tensor {shown(name)} twice")
            found[name] = Stored(name, shape, kind, start + offset, size)
        self._check_apart(found)
        return found

    def _check_apart(self, tensors: Mapping[str, Stored]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._wrong(f"the tensors {shown(before)} and {shown(tensor.name)} overlap")
            end, before = tensor.offset + tensor.bytes, tensor.name

    def _text(self, what: str, most: int) -> str:
        length = self._whole("<Q", what)
        if length > most:
            raise self._wrong(f"a text ({shown(what)}) declares {length} bytes; {most} are allowed")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"a text ({shown(what)}) is not UTF-8: {error.reason} at byte {error.start}") from None

    def _whole(self, form: str, what: str) -> int:
        found: int = struct.unpack(form, self._take(struct.calcsize(form), what))[0]
        return found

    def _take(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise self._wrong(f"it ends within its header, at {shown(what)}: {self._left} of {count} bytes follow")
        self._left -= count
        raw = self._file.read(count)
        if len(raw) != count:
            raise self._wrong(f"it was shortened while it was read, at {shown(what)}")
        return raw

    def _wrong(self, reason: str) -> ModelRefused:
        return ModelRefused(f"{self._name} is no GGUF file that can be read: {reason}")
