"""contracts: what rooms promise each other. Standard library only, so that every room can read it.

Tensors are `Any` here: the thinking half must import without torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from kvcellar.errors import BadRequest

if TYPE_CHECKING:
    from kvcellar.plan import GroupPlan
    from kvcellar.spans import Span

# A plane is stored [cells, heads, size], [heads, cells, size] or [heads, size, cells].
Arrangement = Literal["token", "head", "transposed"]
Kind = Literal["float64", "float32", "bfloat16", "float16", "fp8", "int8", "int4"]
GROUP = 128  # elements of a vector that share a scale; all of them where the vector is shorter
SCALE_BYTES = 2  # a scale is a float16
_BITS: Mapping[Kind, int] = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4,
}  # fmt: skip


class Layout(Protocol):
    """The rules of a layer kind, in integers. It says nothing about storage.

    For every layout `lowest` never falls as `pos` grows, `lowest(pos) <= pos`, and `keep(end) <= lowest(end)`.
    """

    def lowest(self, pos: int) -> int:
        """The lowest position that a query at `pos` sees. It sees all from there up to its own."""
        ...

    def keep(self, end: int) -> int:
        """The lowest position that must stay when the next token to come is at `end`."""
        ...

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        """May the next token be at `pos`, where exactly the positions `[first, end)` are held?"""
        ...

    def can_cut(self, first: int, end: int, pos: int) -> int:
        """The largest `kept <= pos` at which one could go on after forgetting `[kept, end)`. 0 is always possible."""
        ...

    def can_shift(self, first: int, end: int, gone: "Span") -> bool:
        """May what lies behind `gone` move down to its start, where exactly `[first, end)` is held?

        Afterwards every position that the next token sees must be held, and nobody may see what it did not see before.
        """
        ...

    def most_cells(self, context: int, step: int) -> int:
        """The most cells one sequence of up to `context` positions ever holds, in steps of up to `step` new tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Storage:
    """As what the elements of a plane are stored.

    fp8 (e4m3), int8 and int4 have symmetric float16 scales: one per cell, head and `GROUP` elements of the vector, the
    last of which may be fewer. `hadamard`: vectors are rotated before they are quantised: no element stands out then.
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
        """Scales of a vector of `size` elements."""
        return -(-size // GROUP) if self.quantised else 0

    def bytes(self, size: int) -> int:
        """Bytes of a vector of `size` elements, its scales included. Two int4 share a byte."""
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

        `auto`, and the one that is not named, is the model's own type.
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
    return Storage(kind, hadamard=bool(plus))  # pyright: ignore[reportArgumentType]  # it checks the kind


@dataclass(frozen=True, slots=True)
class Plane:
    """One named tensor that every cell of a group has in every layer: `heads` vectors of `size` elements."""

    name: str
    heads: int
    size: int
    storage: Storage | None = None  # None: as the memory's own type

    def bytes_per_cell(self, itemsize: int) -> int:
        """Bytes of one cell in one layer, scales included; `itemsize` is that of the memory's own type."""
        return self.heads * (self.storage.bytes(self.size) if self.storage is not None else itemsize * self.size)


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One named tensor that a recurrent layer remembers of every sequence: a convolution's last inputs, or sums."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.kind] // 8


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent layers of a model, and what each remembers. A sequence has one row of all of it together."""

    layers: Mapping[int, tuple[StatePlane, ...]]

    @property
    def bytes(self) -> int:
        """Of a row."""
        return sum(plane.bytes for planes in self.layers.values() for plane in planes)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the vectors of a plane turn with position (RoPE): pair i by `frequencies[i]` radians a position.

    The pairs are elements `start + 2i` and `start + 2i + 1` if interleaved, else `start + i` and `start + n + i` of n
    pairs. Other elements do not turn. A scale on the whole vector (YaRN) cancels and is not here.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    start: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a group of layers wants of an attention backend."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: str
    device: str
    softcap: bool = False
    sinks: bool = False
    stored: StoredAs = StoredAs()  # how its K and V are stored

    def __str__(self) -> str:
        extras = "".join(f", {name}" for name in ("softcap", "sinks") if getattr(self, name))
        extras += f", stored as {self.stored}" if self.stored != StoredAs() else ""
        return (
            f"{self.query_heads} query heads on {self.kv_heads} KV heads of {self.key_size}/{self.value_size}, "
            f"{self.dtype} on {self.device}{extras}"
        )


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights: `softmax(cap(scale * q.k))`, with one learned logit per head (`sinks`) beside them."""

    scale: float
    softcap: float | None = None
    sinks: Any = None  # Tensor [H]: takes part in the softmax and adds nothing to the output


class Stored(Protocol):
    """One plane of one layer: the data as it is stored, and how to read it.

    Kernels read `codes` and `scales` where they lie; everybody else calls `read`.
    """

    @property
    def plane(self) -> Plane: ...

    @property
    def storage(self) -> Storage: ...

    @property
    def arrangement(self) -> Arrangement: ...

    @property
    def codes(self) -> Any:
        """The elements of all cells, in the plane's arrangement. Two int4 share a byte: element i in the low half,
        element i + (size + 1) // 2 in the high half, 8 added to each."""
        ...

    @property
    def scales(self) -> Any:
        """Float16, arranged like `codes`, with one scale for `GROUP` elements; None if nothing is quantised."""
        ...

    def read(self, cells: Any, dtype: Any, *, rotated: bool = False) -> Any:
        """[heads,n,size] of `cells` (a slice or an index [n]) in `dtype`: a view where nothing needs to be computed.

        Keys that were rotated before quantising are answered as they were before, or, if `rotated`, as they are.
        """
        ...

    def meet(self, q: Any) -> Any:
        """Queries [T,H,size], rotated as the keys are that `read` answers if `rotated`: their products are the same."""
        ...


class History(Protocol):
    """What one layer remembers, as stored, and how to read it. Valid until its step ends."""

    @property
    def plan(self) -> "GroupPlan": ...

    @property
    def prepared(self) -> Any:
        """What the backend's `prepare` made of the plan at `begin`."""
        ...

    def stored(self, name: str) -> Stored:
        """A plane, all cells, as stored."""
        ...

    def dense(self) -> tuple[Any, Any, Any]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): every cell that some row may see, once."""
        ...


class Backend(Protocol):
    """Attention of new tokens over stored cells. Declares what it wants, so that nothing is rearranged per step.

    A group may be plain instead, [cells, heads, size] without padding: every backend reads that too, and
    `Stored.arrangement` says what it got.
    """

    name: str
    arrangement: Arrangement | Mapping[str, Arrangement]  # of all planes, or by the name of each
    padding: int  # the number of places of a plane is a multiple of this
    kinds: frozenset[Kind]  # what it can read

    def refuse(self, ask: Ask) -> str | None:
        """Why it cannot serve `ask`; None if it can. `unread` says so of kinds that it does not read."""
        ...

    def prepare(self, plan: "GroupPlan", device: Any) -> Any:
        """Work that all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [T,H,D] -> [T,H,Dv]; row t sees `[layout.lowest(pos_t), segment.last(pos_t)]` of its own segment, no more.

        The rows of a segment without cells (a sequence that was given no input) answer zeros.
        """
        ...

    def attend_dense(self, q: Any, k: Any, v: Any, visible: Any, scoring: Scoring) -> Any:
        """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]: for keys computed from what is stored (MLA).

        A row that sees nothing answers zeros.
        """
        ...


def unread(backend: Backend, ask: Ask) -> str | None:
    """Why `backend` cannot read what is stored as `ask` says; None if it can."""
    for name, storage in (("keys", ask.stored.k), ("values", ask.stored.v)):
        kind = storage.kind if storage is not None else ask.dtype
        if kind not in backend.kinds:
            return f"it cannot read {name} stored as {kind}, only {', '.join(sorted(backend.kinds))}"
    return None
