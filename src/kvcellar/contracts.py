"""contracts: what rooms promise each other. Standard library only, so that every room can read it.

Tensors are `Any` here: the thinking half must import without torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from kvcellar.plan import GroupPlan
    from kvcellar.spans import Span

Arrangement = Literal["token", "head"]  # a plane is stored [cells, heads, size] or [heads, cells, size]


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
class Plane:
    """One named tensor that every cell of a group has in every layer: `heads` vectors of `size` elements."""

    name: str
    heads: int
    size: int


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

    def __str__(self) -> str:
        extras = "".join(f", {name}" for name in ("softcap", "sinks") if getattr(self, name))
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


class History(Protocol):
    """What one layer remembers, as stored, and how to read it. Valid until its step ends."""

    @property
    def plan(self) -> "GroupPlan": ...

    @property
    def prepared(self) -> Any:
        """What the backend's `prepare` made of the plan at `begin`."""
        ...

    @property
    def arrangement(self) -> Arrangement: ...

    def plane(self, name: str) -> Any:
        """The whole stored plane, all cells: [C,heads,size], or [heads,C,size] if arranged by head."""
        ...

    def dense(self) -> tuple[Any, Any, Any]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): every cell that some row may see, once."""
        ...


class Backend(Protocol):
    """Attention of new tokens over stored cells. Declares what it wants, so that nothing is rearranged per step."""

    name: str
    arrangement: Arrangement

    def refuse(self, ask: Ask) -> str | None:
        """Why it cannot serve `ask`; None if it can."""
        ...

    def prepare(self, plan: "GroupPlan", device: Any) -> Any:
        """Work that all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [T,H,D] -> [T,H,Dv]; row t sees `[layout.lowest(pos_t), pos_t]` of its own sequence, and nothing else."""
        ...

    def attend_dense(self, q: Any, k: Any, v: Any, visible: Any, scoring: Scoring) -> Any:
        """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]: for keys computed from what is stored (MLA)."""
        ...
