"""capacity: how many cells and state rows fit into the bytes that were granted, and what that takes."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcellar.errors import CapacityTooSmall
from kvcellar.memory.layout import Layout
from kvcellar.progress import rounded

MOST_CHECKPOINTS = 1 << 15  # half of the state rows that are for checkpoints, at most
SHARE = 4  # what prompts resume from, in windows or in state rows, gets one such part of the cache's bytes


def sized(count: int) -> str:
    """A number of bytes, exact and rounded: 800000000 bytes (800 MB)."""
    return f"{count} bytes" + (f" ({rounded(count)})" if count >= 1000 else "")


@dataclass(frozen=True, slots=True)
class Demand:
    """What one group takes: `bytes` of its planes and `staging` of an edit, as functions of its number of cells.

    `undo` are the bytes of a cell's keys, kept while a context shift with too few free cells rotates them in place.
    """

    name: str
    layout: Layout
    bytes: Callable[[int], int]
    staging: Callable[[int], int]
    undo: int = 0

    def bounded(self, context: int) -> bool:
        """Whether a sequence that fills the context holds a window of it only."""
        return self.layout.keep(context) > 0

    def shifting(self, cells: int, context: int) -> int:
        """The most bytes that a context shift keeps to undo it, of the only sequence in so many cells, which fills the
        context: half of it moves, or all that a window holds."""
        held = self.layout.most_cells(context, 0)
        return self.undo * max(0, min(held, context - context // 2) - (cells - held))


@dataclass(frozen=True, slots=True)
class RowShare:
    """Rows of recurrent state. Each of `sequences` running at once has one and takes another in a step; `checkpoints`
    are for the prefix cache, which also has what the others leave free."""

    sequences: int
    checkpoints: int = 0
    bytes_per_row: int = 0

    @property
    def rows(self) -> int:
        return 2 * self.sequences + self.checkpoints if self.bytes_per_row else 0

    @property
    def bytes(self) -> int:
        """The null row included."""
        return (self.rows + 1) * self.bytes_per_row


def share_windows(demands: Sequence[Demand], *, budget: int, context: int) -> int:
    """The number of checkpoints whose windows the bounded groups have cells for, beside those of running sequences:
    as many as a quarter of `budget` holds; 0 without bounded groups. Of these cells, tails have what checkpoints do not
    need."""
    bounded = [demand for demand in demands if demand.bounded(context)]
    window = sum(demand.bytes(demand.layout.most_cells(context, 0)) - demand.bytes(0) for demand in bounded)
    return budget // SHARE // window if window > 0 else 0


def share_rows(bytes_per_row: int, *, budget: int, because: str, max_sequences: int) -> RowShare:
    """Rows for as many sequences as fit into half of `budget`, up to `max_sequences`; checkpoints take a quarter of
    it, but at least two for each sequence and at most twice `MOST_CHECKPOINTS`.

    Raises `CapacityTooSmall` if not even one sequence fits.
    """
    if not bytes_per_row:
        return RowShare(max_sequences)
    sequences = min(max_sequences, (budget // 2 // bytes_per_row - 1) // 4)
    if sequences < 1:
        raise CapacityTooSmall(
            f"{budget} bytes ({because}) are too few: a row of recurrent state has {bytes_per_row}, five are the least "
            f"that can work, and they may take half. Raise cache_bytes."
        )
    checkpoints = 2 * max(sequences, min(MOST_CHECKPOINTS, budget // SHARE // 2 // bytes_per_row))
    return RowShare(sequences, checkpoints, bytes_per_row)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Cells of each group, what they take, and what limits them: `bytes + scratch + staging <= budget`."""

    cells: Mapping[str, int]
    by_group: Mapping[str, int]  # bytes of its planes, null cells included
    states: RowShare
    windows: int  # checkpoints that bounded groups have cells for, beside running sequences
    scratch: int  # bytes of a step, or of what a context shift keeps to undo it, whichever are more
    staging: int  # bytes of an edit
    budget: int
    tokens: int  # of all sequences together that fit; without groups, the most that can be used
    because: str

    @property
    def bytes(self) -> int:
        """Of all planes, and all states."""
        return sum(self.by_group.values()) + self.states.bytes

    @property
    def total(self) -> int:
        """The most bytes allocated at once."""
        return self.bytes + self.scratch + self.staging

    @property
    def holds(self) -> str:
        """What fits, in words. Recurrent state does not grow with the text."""
        return f"{self.tokens} tokens" if self.cells else f"{self.states.sequences} sequences of any length"

    def __str__(self) -> str:
        """A line with the sum, and one for each part of it."""
        lines = [
            f"{self.holds} in {rounded(self.bytes)}; with {rounded(self.scratch)} for a step and "
            f"{rounded(self.staging)} for edits {rounded(self.total)} of {rounded(self.budget)}",
            f"  limit: {self.because}",
        ]
        lines += [f"  {name}: {self.cells[name]} cells in {rounded(size)}" for name, size in self.by_group.items()]
        if self.states.bytes:
            lines.append(f"  recurrent: {self.states.rows} rows in {rounded(self.states.bytes)}")
        if self.windows:
            lines.append(f"  windows of {self.windows} checkpoints are among them")
        return "\n".join(lines)


def resolve_capacity(
    demands: Sequence[Demand],
    *,
    budget: int,
    because: str,
    scratch: Callable[[int, int, int], int],
    context: int,
    max_sequences: int,
    step_tokens: int,
    bytes_per_row: int = 0,
) -> Capacity:
    """Divide `budget` bytes among groups so that all of them are full at the same number of tokens in use.

    With `x` tokens in use, a group needs `min(x, (max_sequences + windows) * resting + step_tokens)` cells, where
    `resting` is the most that one sequence holds between steps, and `windows` are those of checkpoints in bounded
    groups (`share_windows`; 0 in others). The largest such `x` is taken, and no more than full contexts need.
    `scratch` returns the bytes of a step, given the longest sequence, how many tokens fit, and how many sequences
    decode; and the staging of one group is left for edits. Recurrent state, of `bytes_per_row` a sequence, is allocated
    first (`share_rows`). Without groups, tokens take no bytes, only the largest step has to fit, and rows for
    checkpoints get the rest.

    A sequence that can fill the context, alone in memory, can also be shifted there: what that takes beside cells is
    part of the bytes of a step, as both never happen at once. If it does not fit, no sequence can fill the context.

    Raises `CapacityTooSmall`.
    """
    states = share_rows(bytes_per_row, budget=budget, because=because, max_sequences=max_sequences)
    max_sequences, windows = states.sequences, share_windows(demands, budget=budget, context=context)

    def most_cells(demand: Demand) -> int:
        holding = max_sequences + (windows if demand.bounded(context) else 0)
        return holding * demand.layout.most_cells(context, 0) + step_tokens

    def capacity(tokens: int, why: str) -> Capacity:
        cells = {demand.name: min(tokens, most_cells(demand)) for demand in demands}
        longest = _longest(demands, cells, context)
        shift = sum(d.shifting(cells[d.name], context) for d in demands) if longest == context else 0
        return Capacity(
            cells=cells,
            states=states,
            windows=windows,
            by_group={demand.name: demand.bytes(cells[demand.name]) for demand in demands},
            scratch=max(scratch(longest, tokens, max_sequences), shift),
            staging=max((demand.staging(cells[demand.name]) for demand in demands), default=0),
            budget=budget,
            tokens=tokens,
            because=why,
        )

    most = max_sequences * context + step_tokens
    if not demands:
        states = replace(states, checkpoints=min(states.checkpoints, 2 * max_sequences))
        found = capacity(most, because)
        if found.total > budget:
            raise CapacityTooSmall(
                f"{budget} bytes ({because}) are too few: {states.rows} rows of recurrent state take {states.bytes}, "
                f"and a step {found.scratch} more. Raise cache_bytes; or lower step_tokens or max_sequences."
            )
        rest = (budget - found.total) // bytes_per_row if bytes_per_row else 0
        more = min(rest, max(0, 2 * (MOST_CHECKPOINTS - max_sequences)))
        return replace(found, states=replace(states, checkpoints=states.checkpoints + more))
    full = bisect_left(range(most), True, key=lambda n: all(d.layout.most_cells(context, 1) <= n for d in demands))
    low = _largest(most, full, lambda tokens: capacity(tokens, because).total <= budget)
    if low < 2:
        least = capacity(2, because)
        raise CapacityTooSmall(
            f"{budget} bytes ({because}) hold {low} tokens of this model; two are the least that can work, which is "
            f"{least.total} bytes, {least.scratch} of them for a step. Raise cache_bytes."
        )
    why = because if low < most else f"all that {max_sequences} sequences of {context} tokens can use"
    return capacity(low, why)


def _largest(most: int, full: int, fits: Callable[[int], bool]) -> int:
    """The largest number of tokens up to `most` that fits. From `full` on, a sequence can fill the context, and only
    then a shift takes bytes: so more tokens may fit where fewer do not. Below and above, fewer fit where more do."""
    low, high = (full, most) if fits(full) else (0, max(0, full - 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _longest(demands: Sequence[Demand], cells: Mapping[str, int], context: int) -> int:
    """The most tokens of one sequence, alone in so many cells."""

    def too_long(tokens: int) -> bool:
        return any(demand.layout.most_cells(tokens, 1) > cells[demand.name] for demand in demands)

    return max(1, bisect_left(range(1, context + 1), True, key=too_long))
