"""gguf_fields: the metadata of an architecture in a GGUF file, each field checked as it is read, and none left out."""

import math
from typing import Any

import numpy

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.gguf_file import Header

_MOST = 1 << 24  # of a whole number
_LESS = {"block_count": 10_000, "expert_count": 1 << 12}  # of others: so many records are made for a file
_WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})


class Fields:
    """The fields `ARCHITECTURE.*`. Those that were not read when all are refused by name."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._read: set[str] = set(_WITHOUT_EFFECT)
        found = header.fields.get("general.architecture")
        if not isinstance(found, str):
            raise ModelRefused(f"{header.name} has no general.architecture")
        self.architecture = found

    def raw(self, key: str) -> Any:
        """None where the file does not have it."""
        self._read.add(key)
        return self._header.fields.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; that of all layers where the file has one for each."""
        found = self.raw(key)
        if isinstance(found, list) and found and found.count(found[0]) == len(found):
            found = found[0]
        if found is None and default is not None:
            return default
        most = _LESS.get(key, _MOST)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
            raise self.wrong(key, found, f"a whole number from 1 to {most} is needed")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.raw(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise self.wrong(key, found, "a number is needed")
        return float(str(numpy.float32(found)))  # the decimal that was meant: 1e-06, not 9.99999997e-07

    def must_be(self, key: str, expected: Any) -> None:
        """Refuse a field with another value."""
        found = self.raw(key)
        if found is not None and found != expected:
            raise self.wrong(key, found, f"only {expected} is supported")

    def check_all_read(self) -> None:
        prefix = f"{self.architecture}."
        keys = (key for key in self._header.fields if key.startswith(prefix))
        if unread := sorted(key for key in keys if key.removeprefix(prefix) not in self._read):
            raise ModelRefused(
                f"{self._header.name} has fields that are not followed here, and that could change what it generates: "
                f"{', '.join(unread[:8])}"
            )

    def wrong(self, key: str, found: Any, why: str) -> ModelRefused:
        return ModelRefused(f"{self._header.name}: {self.architecture}.{key} is {shown(found)}; {why}")
