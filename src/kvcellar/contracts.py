"""contracts: the protocols between the packages: stored planes, what a layer remembers, and attention backends.

Tensors are `Any` here: the thinking half must import without torch.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from kvcellar.plan import GroupPlan
from kvcellar.shapes import Arrangement, AttentionSpec, Kind, Plane, Scoring, Storage


class Stored(Protocol):
    """One plane of one layer: the data as it is stored, and how to read it.

    Kernels read `codes` and `scales` in place; all other code calls `read`.
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
        """Float16, arranged like `codes`, with one scale for `BLOCK` elements; None if nothing is quantised."""
        ...

    def read(self, cells: Any, dtype: Any, *, rotated: bool = False) -> Any:
        """[heads,n,size] of `cells` (a slice or an index [n]) in `dtype`: a view where nothing needs to be computed.

        Keys that were rotated before quantising are rotated back, unless `rotated`.
        """
        ...

    def meet(self, q: Any) -> Any:
        """Queries [T,H,size], rotated like keys that are read `rotated`: their products are the same."""
        ...


class History(Protocol):
    """What one layer remembers, as stored, and how to read it. Valid until its step ends."""

    @property
    def plan(self) -> GroupPlan: ...

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
    `Stored.arrangement` is the one used.
    """

    name: str
    arrangement: Arrangement | Mapping[str, Arrangement]  # of all planes, or by the name of each
    padding: int  # the number of places of a plane is a multiple of this
    kinds: frozenset[Kind]  # what it can read

    def refuse(self, spec: AttentionSpec) -> str | None:
        """Why it cannot serve `spec`; None if it can. `AttentionSpec.unreadable` checks the kinds."""
        ...

    def prepare(self, plan: GroupPlan, device: Any) -> Any:
        """Work that all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [T,H,D] -> [T,H,Dv]; row t sees `[layout.lowest(pos_t), segment.last(pos_t)]` of its own segment, no more.

        The rows of a segment without cells (a sequence that was given no input) are zeros.
        """
        ...

    def attend_dense(self, q: Any, k: Any, v: Any, visible: Any, scoring: Scoring) -> Any:
        """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]: for keys computed from what is stored (MLA).

        A row that sees nothing is zeros.
        """
        ...
