"""shapes: descriptions of planes, recurrent state and attention: heads, sizes, storage, rotation, scoring.

Tensors are `Any` here: this module does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvcellar.errors import BadRequest

Arrangement = Literal["token", "head"]  # a plane is stored [cells, heads, size] or [heads, cells, size]
Kind = Literal["float64", "float32", "bfloat16", "float16", "fp8", "int8", "int4"]
BLOCK = 128  # elements of a vector that share a scale; all of them if the vector is shorter
SCALE_BYTES = 2  # a scale is a float16
_BITS: Mapping[Kind, int] = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """How the elements of a plane are stored.

    fp8 (e4m3), int8 and int4 have symmetric float16 scales: one per cell, head and `BLOCK` elements of the vector, the
    last of which may be fewer. `hadamard`: vectors are rotated before they are quantised, which removes outliers.
    """

    kind: Kind
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise BadRequest(f"K/V cannot be stored as {self.kind!r}; there are {kinds}", "kv_dtype")
        if self.hadamard and not self.quantised:
            raise BadRequest(f"rotating helps only what is quantised, and {self.kind} is not", "kv_dtype")

    @property
    def quantised(self) -> bool:
        return self.kind in ("fp8", "int8", "int4")

    def scales(self, size: int) -> int:
        """Number of scales of a vector of `size` elements."""
        return -(-size // BLOCK) if self.quantised else 0

    def bytes(self, size: int) -> int:
        """Bytes of a vector of `size` elements, scales included. A byte stores two int4."""
        return -(-size * _BITS[self.kind] // 8) + SCALE_BYTES * self.scales(size)

    def __str__(self) -> str:
        return f"{self.kind}+hadamard" if self.hadamard else self.kind


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How keys and values are stored; None is the model's own type."""

    k: Storage | None = None
    v: Storage | None = None

    @classmethod
    def parse(cls, text: str) -> "StoredAs":
        """From `int8`, `int8+hadamard` (which rotates the keys), or `k=int8+hadamard,v=int4`. Raises `BadRequest`.

        `auto` is the model's own type, which is also the default for a plane that is not named.
        """
        planes = [part.strip().partition("=") for part in text.split(",")]
        if len(planes) == 1 and not planes[0][1]:
            key = _storage(planes[0][0])
            return cls(key, key if key is None or not key.hadamard else Storage(key.kind))
        named = {name.strip(): _storage(kind) for name, equals, kind in planes if equals}
        if len(named) < len(planes) or named.keys() - {"k", "v"}:
            raise BadRequest(f"kv_dtype is {text!r}; write it like int8, or k=int8+hadamard,v=int4", "kv_dtype")
        value = named.get("v")
        if value is not None and value.hadamard:
            raise BadRequest(f"only keys can be rotated before quantising, not values: {text!r}", "kv_dtype")
        return cls(named.get("k"), value)

    def of(self, plane: str) -> Storage | None:
        return {"k": self.k, "v": self.v}.get(plane)

    def __str__(self) -> str:
        return f"k={self.k or 'auto'},v={self.v or 'auto'}"


def _storage(text: str) -> Storage | None:
    kind, plus, extra = text.strip().partition("+")
    if plus and extra != "hadamard":
        raise BadRequest(f"after + only hadamard can follow, not {extra!r}", "kv_dtype")
    if kind == "auto" and not plus:
        return None
    return Storage(kind, hadamard=bool(plus))  # pyright: ignore[reportArgumentType]  # `Storage` checks the kind


@dataclass(frozen=True, slots=True)
class Plane:
    """One named tensor that every cell of a group has a part of in every layer: `heads` vectors of `size` elements."""

    name: str
    heads: int
    size: int
    storage: Storage | None = None  # None: the memory's own type

    def bytes_per_cell(self, itemsize: int) -> int:
        """Bytes of one cell in one layer, scales included; `itemsize` is that of the memory's own type."""
        return self.heads * (self.storage.bytes(self.size) if self.storage is not None else itemsize * self.size)


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One named tensor of a recurrent layer's state per sequence: e.g. a convolution's last inputs, or an SSM state."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.kind] // 8


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent layers of a model and the planes of each. A state row holds all of them for one sequence."""

    layers: Mapping[int, tuple[StatePlane, ...]]

    @property
    def bytes(self) -> int:
        """Bytes of one state row."""
        return sum(plane.bytes for planes in self.layers.values() for plane in planes)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the vectors of a plane rotate with position (RoPE): pair i by `frequencies[i]` radians per position.

    The pairs are elements `start + 2i` and `start + 2i + 1` if interleaved, else `start + i` and `start + n + i` of n
    pairs. Other elements are not rotated. A scale of the whole vector (YaRN) is not needed: stored keys include it.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    start: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a group of layers: what a backend must support to serve it."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: str
    device: str
    softcap: bool = False
    sinks: bool = False
    stored: StoredAs = StoredAs()  # how K and V are stored

    def __str__(self) -> str:
        extras = "".join(f", {name}" for name in ("softcap", "sinks") if getattr(self, name))
        extras += f", stored as {self.stored}" if self.stored != StoredAs() else ""
        return (
            f"{self.query_heads} query heads on {self.kv_heads} KV heads of {self.key_size}/{self.value_size}, "
            f"{self.dtype} on {self.device}{extras}"
        )

    def unreadable(self, kinds: frozenset[Kind]) -> str | None:
        """The reason why a backend that reads `kinds` cannot read K and V; None if it can."""
        for name, storage in (("keys", self.stored.k), ("values", self.stored.v)):
            kind = storage.kind if storage is not None else self.dtype
            if kind not in kinds:
                return f"it cannot read {name} stored as {kind}, only {', '.join(sorted(kinds))}"
        return None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights: `softmax(cap(scale * q.k))`, with one additional learned logit per head (`sinks`)."""

    scale: float
    softcap: float | None = None
    sinks: Any = None  # Tensor [H]: takes part in the softmax and adds nothing to the output
