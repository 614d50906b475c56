"""cells: the allocator of a group's cells, with a reference count (`holders`) per cell.

Cells are numbered from 1; cell 0 is null and never allocated. They are tracked in *pieces*: contiguous cells with the
same number of holders. Work is proportional to the pieces touched, not to the cells in them or to the capacity.

Always true:
  * pieces cover [1, capacity] without gap or overlap, linked in order;
  * a piece is free exactly when its `holders` is 0, and no two free pieces are adjacent;
  * `free` is the sum of the lengths of the free pieces, each of which is in the bin of its size;
  * `runs` are the held runs, and `held` the sum of their lengths: a shared cell counts once per holder;
  * `reserved` of the free cells, at most all, are for the steps to come (see `Memory.reserve`): `spare` are the others;
  * a held run starts where a piece starts, and all its cells have at least one holder;
  * adjacent pieces have different numbers of holders, unless a held run begins at their border.
"""

from collections.abc import Iterable, Iterator

from kvcellar.memory.plan import Run


class Piece:
    """Cells [start, end) with the same number of holders."""

    __slots__ = ("begins", "end", "holders", "next", "prev", "start")

    def __init__(self, start: int, end: int, holders: int) -> None:
        self.start, self.end, self.holders = start, end, holders
        self.begins = 0  # number of held runs that begin here; if 0, the piece may be merged with the previous one
        self.prev: Piece | None = None
        self.next: Piece | None = None

    def __len__(self) -> int:
        return self.end - self.start


class Cells:
    """The cells of one group. `take` allocates, `hold` adds a holder, `drop` removes one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.near = 0  # new runs are placed below this cell as long as there is a wide free piece
        self.free = self.reserved = 0
        self.held = self.runs = 0
        self._at: dict[int, Piece] = {}  # by first cell
        self._bins: dict[int, dict[int, Piece]] = {}  # free pieces by size class, then by start
        self._head: Piece | None = None
        if capacity:
            self._head = self._at[1] = Piece(1, capacity + 1, 0)
            self._shelve(self._head)
            self.free = capacity

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def spare(self) -> int:
        """Free cells that are not reserved for a step."""
        return self.free - self.reserved

    def free_runs(self) -> list[Run]:
        """All free runs, in order. Linear in the number of free pieces."""
        return sorted(Run(piece.start, len(piece)) for shelf in self._bins.values() for piece in shelf.values())

    # -- allocation ---------------------------------------------------------------------------------------------

    def take(self, n: int, after: int | None = None, before: int | None = None) -> list[Run]:
        """Allocate `n` cells, held until `drop`. The caller has checked that `n <= free`.

        They follow cell `after` if the next cells are free, so a growing sequence stays in one run. Otherwise they end
        just before cell `before`, which the caller will free soon: so a sliding window reuses its own cells as a ring,
        in two runs. Any other new run is placed in the middle of one of the widest free pieces, which leaves room to
        grow for it and for the run before it; of a piece that begins below `near`, in the part below, if it fits.
        """
        assert n <= self.free, f"{n} cells are needed, {self.free} are free"
        runs: list[Run] = []
        behind = self._at.get(after + 1) if after is not None else None
        if n and behind is not None and behind.holders == 0:
            runs.append(self._take(behind, 0, min(n, len(behind))))
            n -= runs[0].n
        elif n and before is not None and (piece := self._free_before(before)) is not None:
            got = min(n, len(piece))
            runs.append(self._take(piece, len(piece) - got, got))
            n -= got
        while n:
            widest = self._widest()
            got = min(n, len(widest))
            end = self.near if widest.start + got <= self.near < widest.end else widest.end
            room = 0 if widest.prev is None else (end - widest.start - got) // 2
            runs.append(self._take(widest, room, got))
            n -= got
        return runs

    def _free_before(self, cell: int) -> Piece | None:
        """The free piece that ends just before `cell`, where a held run begins; None if there is none."""
        piece = self._at[cell].prev
        return piece if piece is not None and piece.holders == 0 else None

    def take_exact(self, run: Run) -> None:
        """Allocate exactly these cells, all of them free; held until `drop`."""
        piece = self._piece(run.cell)
        assert piece.holders == 0 and run.end <= piece.end, f"{run} is not free"
        self._take(piece, run.cell - piece.start, run.n)

    def _take(self, piece: Piece, skip: int, n: int) -> Run:
        """Allocate `n` cells of a free piece, from offset `skip`; the rest on both sides stays free."""
        self._unshelve(piece)
        if skip:
            piece = self._split(piece, piece.start + skip)
            assert piece.prev is not None
            self._shelve(piece.prev)
        if len(piece) > n:
            self._shelve(self._split(piece, piece.start + n))
        piece.holders = piece.begins = 1
        self.free -= n
        self.held += n
        self.runs += 1
        return Run(piece.start, n)

    def weld(self, cell: int) -> None:
        """Merge the run that begins at `cell` into the run before it; both belong to the calling table.

        So a sequence that grows one token at a time stays one piece.
        """
        self._at[cell].begins -= 1
        self.runs -= 1
        self._mend(cell)

    # -- holders ------------------------------------------------------------------------------------------------

    def hold(self, runs: Iterable[Run]) -> None:
        """Add a holder to cells that are already held."""
        for run in runs:
            for piece in self._pieces(run):
                piece.holders += 1
            self._at[run.cell].begins += 1
            self.held += run.n
            self.runs += 1

    def drop(self, runs: Iterable[Run]) -> None:
        """Remove a holder; cells without holders are freed."""
        for run in runs:
            self._at[run.cell].begins -= 1
            self.runs -= 1
            self._remove_holder(run)

    def hold_part(self, run: Run, skip: int, n: int) -> Run:
        """Add a holder to `n` cells of a held run, from offset `skip`; returns them as a run."""
        if skip:
            _, run = self._part(run, skip)
        if n < run.n:
            run, _ = self._part(run, n)
        self.hold([run])
        return run

    def exclusive(self, runs: Iterable[Run]) -> int:
        """Number of cells held only by these runs: dropping all of them would free so many."""
        times: dict[int, int] = {}
        found: dict[int, Piece] = {}
        for run in runs:
            piece: Piece | None = self._at[run.cell]
            while piece is not None and piece.start < run.end:  # a held run ends where a piece ends
                times[piece.start] = times.get(piece.start, 0) + 1
                found[piece.start] = piece
                piece = piece.next
        return sum(len(piece) for start, piece in found.items() if piece.holders == times[start])

    def parts(self, run: Run) -> Iterator[tuple[Run, bool]]:
        """The parts of a held run in order, each with whether it is shared (has more than one holder)."""
        piece: Piece | None = self._at[run.cell]
        while piece is not None and piece.start < run.end:
            yield Run(piece.start, min(piece.end, run.end) - piece.start), piece.holders > 1
            piece = piece.next

    def divide(self, run: Run, n: int) -> tuple[Run, Run]:
        """Split a held run into its first `n` cells and the rest, as two held runs; 0 < n < run.n."""
        left, right = self._part(run, n)
        self._at[right.cell].begins += 1
        self.runs += 1
        return left, right

    def divide_all(self, runs: Iterable[Run], n: int) -> tuple[list[Run], list[Run]]:
        """Split held runs into their first `n` cells in total and the rest, as held runs."""
        kept: list[Run] = []
        rest: list[Run] = []
        for run in runs:
            here, n = min(run.n, n), max(0, n - run.n)
            if 0 < here < run.n:
                run, tail = self.divide(run, here)
                rest.append(tail)
            (kept if here else rest).append(run)
        return kept, rest

    def shorten(self, run: Run, n: int) -> Run:
        """Keep the first `n` cells of a held run and drop the rest; 0 < n < run.n."""
        left, right = self._part(run, n)
        self._remove_holder(right)
        return left

    def _part(self, run: Run, n: int) -> tuple[Run, Run]:
        left, right = Run(run.cell, n), Run(run.cell + n, run.n - n)
        self._pieces(left)
        return left, right

    def _pieces(self, run: Run) -> list[Piece]:
        """The pieces that a held run consists of; the last is split at the run's end if necessary."""
        found: list[Piece] = []
        piece: Piece | None = self._at[run.cell]
        while piece is not None and piece.start < run.end:
            if piece.end > run.end:
                self._split(piece, run.end)
            found.append(piece)
            piece = piece.next
        return found

    # -- pieces -------------------------------------------------------------------------------------------------

    def _piece(self, cell: int) -> Piece:
        """The piece that contains a cell. O(1) for the first cell of a piece, otherwise O(pieces)."""
        piece = self._at.get(cell)
        return piece or next(piece for piece in self._at.values() if piece.start < cell < piece.end)

    def borders(self, run: Run) -> list[int]:
        """First cells of the pieces that begin inside `run`, except its own first cell. Held runs begin and end only at
        such borders."""
        piece, found = self._piece(run.cell).next, list[int]()
        while piece is not None and piece.start < run.end:
            found.append(piece.start)
            piece = piece.next
        return found

    def holders(self, cell: int) -> tuple[int, Iterator[int]]:
        """The number of holders of a cell, and the first cells of the pieces where their runs may begin: from its own
        piece back to the last free piece before it."""
        piece = self._piece(cell)
        return piece.holders, self._starts(piece)

    @staticmethod
    def _starts(piece: Piece | None) -> Iterator[int]:
        while piece is not None and piece.holders:
            yield piece.start
            piece = piece.prev

    def _split(self, piece: Piece, at: int) -> Piece:
        """Split `piece` in two and return the right part. Neither part is added to the bins."""
        right = Piece(at, piece.end, piece.holders)
        right.prev, right.next = piece, piece.next
        if piece.next is not None:
            piece.next.prev = right
        piece.next, piece.end = right, at
        self._at[at] = right
        return right

    def _join(self, left: Piece, right: Piece) -> None:
        """Extend `left` over the cells of `right`, and remove `right`."""
        left.end, left.next = right.end, right.next
        if right.next is not None:
            right.next.prev = left
        del self._at[right.start]

    def _remove_holder(self, run: Run) -> None:
        """Remove a holder from the cells of `run`, whose start is not (or no longer) counted in `begins`."""
        self.held -= run.n
        pieces = self._pieces(run)
        borders = [*(piece.start for piece in pieces), run.end]
        for piece in pieces:
            assert piece.holders > 0, f"cells {piece.start}..{piece.end - 1} are freed twice"
            piece.holders -= 1
            if piece.holders == 0:
                self._release(piece)
        for border in borders:
            self._mend(border)

    def _mend(self, cell: int) -> None:
        """Merge the two pieces with a border at `cell` if they have the same holders and no held run begins there."""
        piece = self._at.get(cell)
        if piece is None or piece.begins or piece.holders == 0:
            return
        if piece.prev is not None and piece.prev.holders == piece.holders:
            self._join(piece.prev, piece)

    def _release(self, piece: Piece) -> None:
        self.free += len(piece)
        left, right = piece.prev, piece.next
        if right is not None and right.holders == 0:
            self._unshelve(right)
            self._join(piece, right)
        if left is not None and left.holders == 0:
            self._unshelve(left)
            self._join(left, piece)
            piece = left
        self._shelve(piece)

    def _shelve(self, piece: Piece) -> None:
        self._bins.setdefault(len(piece).bit_length(), {})[piece.start] = piece

    def _unshelve(self, piece: Piece) -> None:
        size = len(piece).bit_length()
        shelf = self._bins[size]
        del shelf[piece.start]
        if not shelf:
            del self._bins[size]

    def _widest(self) -> Piece:
        """A free piece of the largest non-empty size class: more than half as long as the longest free piece."""
        return next(iter(self._bins[max(self._bins)].values()))

    def check(self) -> None:
        """Assert the invariants of the pieces."""
        at, free, before = 1, 0, None
        piece = self._head
        seen = 0
        while piece is not None:
            assert piece.start == at, f"piece [{piece.start},{piece.end}) should start at {at}"
            assert piece.end > at, f"piece [{piece.start},{piece.end}) is empty"
            assert piece.prev is before, f"piece [{piece.start},{piece.end}) is linked wrongly"
            assert self._at[piece.start] is piece, f"piece [{piece.start},{piece.end}) is not where it starts"
            shelf = self._bins.get(len(piece).bit_length(), {})
            assert (shelf.get(piece.start) is piece) == (piece.holders == 0), "only free pieces are in the bins"
            if piece.holders == 0:
                assert before is None or before.holders, f"two adjacent pieces are free at {at}"
                free += len(piece)
            elif not piece.begins:
                assert before is not None, "the first cell is held, and no run begins there"
                assert before.holders not in (0, piece.holders), f"the pieces at {at} could be one"
            at, before, piece, seen = piece.end, piece, piece.next, seen + 1
        assert at == self.capacity + 1, f"pieces end at {at}, the cells at {self.capacity + 1}"
        assert free == self.free, f"{free} cells are free, {self.free} were counted"
        assert self.held == sum(len(piece) * piece.holders for piece in self._at.values()), f"{self.held} are not held"
        assert self.runs == sum(piece.begins for piece in self._at.values()), f"{self.runs} runs are not held"
        assert 0 <= self.reserved <= self.free, f"{self.reserved} of {self.free} free cells are reserved"
        assert seen == len(self._at), "there are pieces outside the chain"
        assert sum(map(len, self._bins.values())) == sum(p.holders == 0 for p in self._at.values())

    def check_holders(self, runs: Iterable[Run]) -> None:
        """Assert that `runs` are all held runs: every cell has as many holders as runs that contain it."""
        expected: dict[int, int] = {}
        begins: dict[int, int] = {}
        for run in runs:
            assert run.cell in self._at, f"{run} begins within a piece"
            begins[run.cell] = begins.get(run.cell, 0) + 1
            for cell in range(run.cell, run.end):
                expected[cell] = expected.get(cell, 0) + 1
        piece = self._head
        while piece is not None:
            assert piece.begins == begins.get(piece.start, 0), f"{piece.begins} runs should begin at {piece.start}"
            for cell in range(piece.start, piece.end) if piece.holders else ():
                assert expected.get(cell, 0) == piece.holders, (
                    f"cell {cell} has {piece.holders} holders, {expected.get(cell, 0)} are known"
                )
            piece = piece.next
        assert len(expected) == self.used, f"{self.used} cells are in use, {len(expected)} are known"
