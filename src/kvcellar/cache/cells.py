"""cells: which cells of a group are held, and by how many.

Cells are numbered from 1; cell 0 is null and never given out. They are accounted for in *pieces*: stretches of cells
with the same number of holders. Work is proportional to the pieces touched, never to the cells in them or to the pool.

Always true:
  * pieces cover [1, capacity] without gap or overlap, linked in order;
  * a piece is free exactly when its `holders` is 0, and no two free pieces touch;
  * `free` is the sum of the lengths of the free pieces, each of which is in the bin of its size;
  * a run that somebody holds starts where a piece starts, and all its cells have at least one holder;
  * pieces that touch have different numbers of holders, unless a run begins where they meet.
"""

from collections.abc import Iterable, Iterator

from kvcellar.plan import Run


class Piece:
    """Cells [start, end) with the same number of holders."""

    __slots__ = ("begins", "end", "holders", "next", "prev", "start")

    def __init__(self, start: int, end: int, holders: int) -> None:
        self.start, self.end, self.holders = start, end, holders
        self.begins = 0  # how many held runs begin here; if none, the piece may be joined to the one before
        self.prev: Piece | None = None
        self.next: Piece | None = None

    def __len__(self) -> int:
        return self.end - self.start


class Cells:
    """The cells of one group. `take` gives them out, `hold` adds a holder, `drop` takes one away."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = 0
        self._at: dict[int, Piece] = {}  # by where it starts
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
    def highest(self) -> int:
        """The highest cell that is held; 0 if none is."""
        free = self.free_runs()
        return free[-1].cell - 1 if free and free[-1].end == self.capacity + 1 else self.capacity

    def held(self) -> tuple[int, int]:
        """How many cells all held runs have, shared ones once for each holder, and how many runs these are. Costs all
        pieces."""
        pieces = self._at.values()
        return sum(len(piece) * piece.holders for piece in pieces), sum(piece.begins for piece in pieces)

    def free_runs(self) -> list[Run]:
        """All that is free, in order. Costs the pieces that are free."""
        return sorted(Run(piece.start, len(piece)) for shelf in self._bins.values() for piece in shelf.values())

    def resize(self, capacity: int) -> None:
        """Have so many cells from now on. The caller has seen that none above is held."""
        assert capacity >= self.highest, f"cell {self.highest} is held; there cannot be only {capacity}"
        free = self.free_runs()
        last = self._at[free[-1].cell] if free and free[-1].end == self.capacity + 1 else None
        start = last.start if last is not None else self.capacity + 1
        if last is not None:
            self._unshelve(last)
        before = self._before(start)
        self._at.pop(start, None)
        grown = Piece(start, capacity + 1, 0) if capacity >= start else None
        if grown is not None:
            self._at[start] = grown
            grown.prev = before
            self._shelve(grown)
        if before is not None:
            before.next = grown
        else:
            self._head = grown
        self.free += capacity - self.capacity
        self.capacity = capacity

    def _before(self, start: int) -> Piece | None:
        """The piece that ends where `start` is, at the end of the chain."""
        piece, before = self._head, None
        while piece is not None and piece.start < start:
            piece, before = piece.next, piece
        return before

    # -- giving out ---------------------------------------------------------------------------------------------

    def take(self, n: int, after: int | None = None, before: int | None = None) -> list[Run]:
        """`n` free cells, yours until you `drop` them. The caller has seen that `n <= free`.

        They follow cell `after` if the ones behind it are free, so that a sequence that grows stays in one run. Else
        they end where cell `before` is, if a caller names one that it will give back soon: so a window that slides goes
        round in its own cells, in two runs. A new run is put in the middle of the widest free stretch, which leaves it
        and its neighbour room to grow.
        """
        assert n <= self.free, f"{n} cells were asked for, {self.free} are free"
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
            room = 0 if widest.prev is None else (len(widest) - got) // 2
            runs.append(self._take(widest, room, got))
            n -= got
        return runs

    def _free_before(self, cell: int) -> Piece | None:
        """The free piece that ends where a held run begins at `cell`."""
        piece = self._at[cell].prev
        return piece if piece is not None and piece.holders == 0 else None

    def take_exact(self, run: Run) -> None:
        """Take just these cells, all of them free; yours until you `drop` them."""
        piece = self._piece(run.cell)
        assert piece.holders == 0 and run.end <= piece.end, f"{run} is not free"
        self._take(piece, run.cell - piece.start, run.n)

    def _take(self, piece: Piece, skip: int, n: int) -> Run:
        """Take `n` cells of a free piece, `skip` from its start; what is left on either side stays free."""
        self._unshelve(piece)
        if skip:
            piece = self._split(piece, piece.start + skip)
            assert piece.prev is not None
            self._shelve(piece.prev)
        if len(piece) > n:
            self._shelve(self._split(piece, piece.start + n))
        piece.holders = piece.begins = 1
        self.free -= n
        return Run(piece.start, n)

    def weld(self, cell: int) -> None:
        """The run that began at `cell` is now the end of the run before it: its holder calls this when they have met.

        So a sequence written one token at a time stays one piece.
        """
        self._at[cell].begins -= 1
        self._mend(cell)

    # -- holders ------------------------------------------------------------------------------------------------

    def hold(self, runs: Iterable[Run]) -> None:
        """One more holder for cells that are held already."""
        for run in runs:
            for piece in self._pieces(run):
                piece.holders += 1
            self._at[run.cell].begins += 1

    def drop(self, runs: Iterable[Run]) -> None:
        """One holder less; what nobody holds any more is free."""
        for run in runs:
            self._at[run.cell].begins -= 1
            self._let_go(run)

    def hold_part(self, run: Run, skip: int, n: int) -> Run:
        """One more holder for `n` cells of a held run behind its first `skip`, which are returned as a run."""
        if skip:
            _, run = self._part(run, skip)
        if n < run.n:
            run, _ = self._part(run, n)
        self.hold([run])
        return run

    def exclusive(self, runs: Iterable[Run]) -> int:
        """How many cells no run but these held ones holds: as many as dropping all of them would free."""
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
        """A held run in order, in parts that its holder alone holds and parts that others hold, too (True)."""
        piece: Piece | None = self._at[run.cell]
        while piece is not None and piece.start < run.end:
            yield Run(piece.start, min(piece.end, run.end) - piece.start), piece.holders > 1
            piece = piece.next

    def divide(self, run: Run, n: int) -> tuple[Run, Run]:
        """The first `n` cells of a held run and the others, as two held runs; 0 < n < run.n."""
        left, right = self._part(run, n)
        self._at[right.cell].begins += 1
        return left, right

    def divide_all(self, runs: Iterable[Run], n: int) -> tuple[list[Run], list[Run]]:
        """The first `n` cells of held runs and the others, as held runs."""
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
        """Keep the first `n` cells of a held run and give back the others; 0 < n < run.n."""
        left, right = self._part(run, n)
        self._let_go(right)
        return left

    def _part(self, run: Run, n: int) -> tuple[Run, Run]:
        left, right = Run(run.cell, n), Run(run.cell + n, run.n - n)
        self._pieces(left)
        return left, right

    def _pieces(self, run: Run) -> list[Piece]:
        """The pieces that make up a held run; the last is split where the run ends."""
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
        """The piece that a cell is in. Costs all pieces where none begins there."""
        piece = self._at.get(cell)
        return piece or next(piece for piece in self._at.values() if piece.start < cell < piece.end)

    def borders(self, run: Run) -> list[int]:
        """Where pieces begin within `run`, its first cell apart: runs that hold some of its cells end only there."""
        piece, found = self._piece(run.cell).next, list[int]()
        while piece is not None and piece.start < run.end:
            found.append(piece.start)
            piece = piece.next
        return found

    def holders(self, cell: int) -> tuple[int, Iterator[int]]:
        """How many hold a cell, and where their runs can begin, the nearest first: where a piece begins, back to the
        next free one."""
        piece = self._piece(cell)
        return piece.holders, self._starts(piece)

    @staticmethod
    def _starts(piece: Piece | None) -> Iterator[int]:
        while piece is not None and piece.holders:
            yield piece.start
            piece = piece.prev

    def _split(self, piece: Piece, at: int) -> Piece:
        """Cut `piece` in two and return the right part. Neither part is shelved."""
        right = Piece(at, piece.end, piece.holders)
        right.prev, right.next = piece, piece.next
        if piece.next is not None:
            piece.next.prev = right
        piece.next, piece.end = right, at
        self._at[at] = right
        return right

    def _join(self, left: Piece, right: Piece) -> None:
        """`left` takes over the cells of `right`, which is no more."""
        left.end, left.next = right.end, right.next
        if right.next is not None:
            right.next.prev = left
        del self._at[right.start]

    def _let_go(self, run: Run) -> None:
        """One holder less for cells at whose start no run of that holder begins any more."""
        pieces = self._pieces(run)
        borders = [*(piece.start for piece in pieces), run.end]
        for piece in pieces:
            assert piece.holders > 0, f"cells {piece.start}..{piece.end - 1} were given back twice"
            piece.holders -= 1
            if piece.holders == 0:
                self._release(piece)
        for border in borders:
            self._mend(border)

    def _mend(self, cell: int) -> None:
        """Join the pieces that meet at `cell`, if their cells have as many holders and no run begins there."""
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
        """A free piece of the largest size class there is: at least half as long as the longest."""
        return next(iter(self._bins[max(self._bins)].values()))

    def check(self) -> None:
        """Assert everything that is always true of the pieces."""
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
                assert before is None or before.holders, f"two free pieces meet at {at}"
                free += len(piece)
            elif not piece.begins:
                assert before is not None, "nobody's run begins at the first cell, and it is held"
                assert before.holders not in (0, piece.holders), f"the pieces that meet at {at} could be one"
            at, before, piece, seen = piece.end, piece, piece.next, seen + 1
        assert at == self.capacity + 1, f"pieces end at {at}, the cells at {self.capacity + 1}"
        assert free == self.free, f"{free} cells are free, {self.free} were counted"
        assert seen == len(self._at), "there are pieces outside the chain"
        assert sum(map(len, self._bins.values())) == sum(p.holders == 0 for p in self._at.values())

    def check_holders(self, runs: Iterable[Run]) -> None:
        """Assert that `runs` are all that is held: every cell has as many holders as there are runs over it."""
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
