"""contracts: the protocols between the packages: stored planes, what a layer remembers, and attention backends.

Tensors are `Any` here: this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcellar.plan import GroupPlan
from kvcellar.shapes import Arrangement, AttentionSpec, Kind, Plane, Scoring, Storage


class Stored(Protocol):
    """One plane of one layer: the data as it is stored, and how to read it.

    Kernels read `codes` (or `rows`) and `scales` in place; all other code calls `read` or `at`.
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
    def rows(self) -> Any:
        """The same as [cells,heads,width], a view."""
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

    def at(self, cells: Any, heads: Any, dtype: Any) -> Any:
        """[*,size] of cells and heads, two indices that broadcast to [*]; rotated keys are not rotated back."""
        ...

    def meet(self, q: Any) -> Any:
        """Queries [...,size], rotated like keys that are read `rotated`: their products are the same."""
        ...


class StepTables(Protocol):
    """Tensors that stay where they are from step to step, so that a step can be recorded and replayed.

    Each has a name, and a bucket: a power of two of elements. What has the same name, type and bucket has the same
    address in every step. What it held before is overwritten.
    """

    device: Any
    dtype: Any  # the memory's own type
    heads: int  # KV heads of the group

    def fill(self, name: str, values: Sequence[int]) -> Any:
        """int64 [n] on the device, filled from the host at once; the rest of its bucket is zeros."""
        ...

    def empty(self, name: str, shape: Sequence[int], dtype: Any) -> Any:
        """Of this shape on the device, for the caller to fill."""
        ...


class GroupStep(Protocol):
    """What the layers of a group share in the open step."""

    @property
    def prepared(self) -> Any:
        """What the backend's `prepare` returned."""
        ...


class History(Protocol):
    """One layer in the open step: its planes and the tables of its group, bound once for all steps."""

    @property
    def planes(self) -> Mapping[str, Stored]:
        """By name: "k", "v"; all cells, as stored."""
        ...

    @property
    def step(self) -> GroupStep: ...

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

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Any:
        """Work that all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [1,T,H,D] -> [1,T,H,Dv]; row t sees `[layout.lowest(pos_t), segment.last(pos_t)]` of its own segment, no
        more. The rows of a segment without cells (a sequence that was given no input) are zeros.
        """
        ...

    def attend_dense(self, q: Any, k: Any, v: Any, visible: Any, scoring: Scoring) -> Any:
        """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]: for keys computed from what is stored (MLA).

        A row that sees nothing is zeros.
        """
        ...
