"""contracts: the protocols between packages: stored planes, step tables, layer histories and attention backends.

Tensors are `Any` here: this module does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcellar.memory.plan import GroupPlan
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Plane, Scoring, Storage


class Stored(Protocol):
    """One plane of one layer: the stored data and methods to read it.

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
        """The elements of all cells, in the plane's arrangement. A byte stores two int4: element i in the low bits,
        element i + (size + 1) // 2 in the high bits, each plus 8."""
        ...

    @property
    def rows(self) -> Any:
        """View of `codes` as [cells,heads,width]."""
        ...

    @property
    def scales(self) -> Any:
        """Float16, arranged like `codes`, one scale per `BLOCK` elements; None if the plane is not quantised."""
        ...

    def read(self, cells: Any, dtype: Any, *, rotated: bool = False) -> Any:
        """[heads,n,size] of `cells` (a slice or an index [n]) in `dtype`: a view where nothing needs to be computed.

        Hadamard-rotated keys are rotated back, unless `rotated`.
        """
        ...

    def at(self, cells: Any, heads: Any, dtype: Any) -> Any:
        """[*,size] of cells and heads, two indices that broadcast to [*]; Hadamard-rotated keys stay rotated."""
        ...

    def meet(self, q: Any) -> Any:
        """Apply the keys' Hadamard rotation to queries [...,size], for dot products with keys read `rotated`."""
        ...


class StepTables(Protocol):
    """Tensors with the same address in every step, so that a step can be recorded and replayed.

    Each has a name and a bucket: its number of elements, rounded up to a power of two. Tensors with equal name, type
    and bucket have the same address in every step. Each step overwrites their content.
    """

    device: Any
    dtype: Any  # the memory's own type
    heads: int  # KV heads of the group

    def fill(self, name: str, values: Sequence[int]) -> Any:
        """int64 [n] on the device, copied from the host; the rest of its bucket is zero."""
        ...

    def empty(self, name: str, shape: Sequence[int], dtype: Any) -> Any:
        """An uninitialised tensor on the device, for the caller to fill."""
        ...


class Columns(Protocol):
    """The cells that a group's rows may see. Shared cells are there once."""

    @property
    def cells(self) -> Any:
        """[N], ascending."""
        ...

    @property
    def visible(self) -> Any:
        """[T,N], True where the row may see the cell."""
        ...


class GroupStep(Protocol):
    """Data of the open step that the layers of a group share."""

    @property
    def prepared(self) -> Any:
        """The return value of the backend's `prepare`."""
        ...

    @property
    def columns(self) -> "Columns":
        """The cells that the step's rows may see, for attention over keys computed from them."""
        ...


class History(Protocol):
    """One layer in the open step: its planes and its group's step tables. The object is the same in all steps."""

    @property
    def planes(self) -> Mapping[str, Stored]:
        """Planes by name ("k", "v"), with all cells as stored."""
        ...

    @property
    def step(self) -> GroupStep: ...

    def dense(self) -> tuple[Any, Any, Any]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): each cell that any row may see, once."""
        ...


class Backend(Protocol):
    """Attention of new tokens over stored cells. It declares its arrangement, so nothing is rearranged per step.

    Every backend must also read plain groups: [cells, heads, size] without padding. `Stored.arrangement` is the
    arrangement in use.
    """

    name: str
    arrangement: Arrangement | Mapping[str, Arrangement]  # of all planes, or by plane name
    padding: int  # the number of cells in a plane is a multiple of this
    kinds: frozenset[Kind]  # storage kinds it can read

    def refuse(self, spec: AttentionSpec) -> str | None:
        """The reason why it does not support `spec`; None if it does. `AttentionSpec.unreadable` checks `kinds`."""
        ...

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Any:
        """Compute what all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [1,T,H,D] -> [1,T,H,Dv]; row t sees exactly `[layout.lowest(pos_t), segment.last(pos_t)]` of its segment.

        The result is zero for rows of a segment without cells (a sequence without input).
        """
        ...

    def attend_latent(self, q: Any, history: History, scoring: Scoring) -> Any:
        """q [1,T,H,D+Dv] -> [1,T,H,D]: a key is the vector of the plane "k" [D] and behind it that of "v" [Dv], its
        value that of "k" (MLA without expanding). The result is zero where that of `attend` is.
        """
        ...

    def attend_dense(self, q: Any, k: Any, v: Any, step: GroupStep, scoring: Scoring) -> Any:
        """q [T,H,D], k [N,G,D], v [N,G,Dv] -> [T,H,Dv]: for keys computed from what the cells of `step.columns` store
        (MLA).

        The result is zero for a row that sees nothing.
        """
        ...
