"""recorded_groups: which operators of a recorded step run together, row by row, and when a storage is in use."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvcellar.kernels.program import Op
from kvcellar.kernels.recorded_memory import Life, View
from kvcellar.kernels.recorded_small import Lone, Small

Layout = tuple[int, int, torch.dtype] | None  # of a storage in rows: elements of a row, rows, type; None: of no rows


@dataclass(slots=True)
class Group:
    """Operators that run together: small ones, row by row if there are several `rows`; else one of any kind.

    Always true: if there are several rows, then each storage that is written here is written and read in one layout,
    so that a row neither reads nor overwrites what belongs to another.
    """

    small: list[Small] = field(default_factory=list)
    rows: int = 1
    of: str | None = None  # the expression of the number of rows
    layouts: dict[int, Layout] = field(default_factory=dict)  # by storage
    written: set[int] = field(default_factory=set)
    lone: Lone | None = None
    op: Op | None = None  # called

    def join(self, one: Small) -> bool:
        """Add an operator, if it can run row by row together with those before it."""
        rows = one.rows
        if rows == 1 or (self.small and (rows, one.out.rows) != (self.rows, self.of)):
            return False
        more: dict[int, Layout] = {}
        for view in one.views():
            stride = view.row_stride()
            layout = (stride, rows, view.dtype) if stride else None
            same = more.get(view.storage, self.layouts.get(view.storage, layout)) == layout
            more[view.storage] = layout if same else None
        written, out = self.written, one.out.storage
        if any(layout is None and (storage in written or storage == out) for storage, layout in more.items()):
            return False
        self.small.append(one)
        self.rows, self.of = rows, one.out.rows
        self.written.add(out)
        self.layouts |= more
        return True

    def views(self, views: Sequence[View | None]) -> Iterator[View]:
        """What it reads and writes in fixed memory. `views` are those of values; None: somewhere else."""
        if self.op is not None:
            for value in (*self.op.reads, *self.op.outputs):
                if value is not None and (view := views[value]) is not None:
                    yield view
        elif self.lone is not None:
            yield from self.lone.views()
        for one in self.small:
            yield from one.views()

    def of_one_row(self, lives: dict[int, Life], at: int) -> set[int]:
        """Storages that need memory for one row only: those that this group alone uses, whose index is `at`."""
        if len(self.small) < 2:
            return set()
        alone = {storage for storage in self.written if lives[storage].first == lives[storage].last == at}
        return {storage for storage in alone if self.layouts[storage] is not None}


def grouped(items: Iterable[Small | Lone | Op]) -> list[Group]:
    """Operators in groups, in the same order."""
    groups: list[Group] = []
    for item in items:
        if isinstance(item, Small):
            if groups and groups[-1].small and groups[-1].join(item):
                continue
            group = Group()
            if not group.join(item):
                group.small.append(item)
            groups.append(group)
        elif isinstance(item, Lone):
            groups.append(Group(lone=item))
        else:
            groups.append(Group(op=item))
    return groups


def lives(
    groups: Sequence[Group], views: Sequence[View | None], given: Iterable[View], wanted: Iterable[View]
) -> dict[int, Life]:
    """The life of each storage that groups use, `given` before the first and `wanted` after the last of them."""
    sizes, first, last = dict[int, int](), dict[int, int](), dict[int, int]()

    def used(view: View, at: int) -> None:
        storage, size = view.storage, view.bytes
        if size >= sizes.get(storage, 0):
            sizes[storage] = size
        first.setdefault(storage, at)
        last[storage] = at

    for view in given:
        used(view, -1)
    for at, group in enumerate(groups):
        for view in group.views(views):
            used(view, at)
    for view in wanted:
        used(view, len(groups))
    return {storage: Life(size, first[storage], last[storage]) for storage, size in sizes.items()}
