"""The dumb model that judges the memory: lists of tokens, and of each kind of layer the rule in one line.

Every token that is ever written has a number of its own. In every group it is one `Cell`, which lines share as it is:
the cells in use are the distinct ones that somebody holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import pi

from kvcellar.cache.layouts import Causal, Chunked, Sliding
from kvcellar.cache.memory import Group
from kvcellar.contracts import Layout, Plane, Rotation


@dataclass(frozen=True)
class Kind:
    """A kind of layer. `sees(q, k)`: may the query at q look at k? `stays(end, k)`: is k kept when `end` comes next?"""

    layout: Layout
    sees: Callable[[int, int], bool]
    stays: Callable[[int, int], bool]


def causal() -> Kind:
    return Kind(Causal(), lambda q, k: k <= q, lambda end, k: True)


def sliding(window: int, memory: int) -> Kind:
    return Kind(Sliding(window, memory), lambda q, k: q - window < k <= q, lambda end, k: end - k <= memory)


def chunked(size: int) -> Kind:
    return Kind(
        Chunked(size), lambda q, k: k <= q and k // size == q // size, lambda end, k: k // size >= (end - 1) // size
    )


@dataclass(frozen=True, eq=False)
class Cell:
    """What is stored of a token. Its key was turned by `turned` half circles, when what stood before it was removed."""

    token: int
    turned: int = 0

    @property
    def spells(self) -> tuple[int, int]:
        return self.token, self.turned % 2


@dataclass(frozen=True)
class Member:
    """A group of the memory under test, and the kind that it should behave like."""

    kind: Kind
    group: Group
    query_heads: int

    @property
    def turns(self) -> bool:
        return bool(self.group.rotations)


def member(name: str, kind: Kind, layers: Sequence[int], heads: tuple[int, int], k: int, v: int) -> Member:
    """`heads` are the query and the KV heads; `k` and `v` the sizes of their vectors."""
    planes = (Plane("k", heads[1], k), Plane("v", heads[1], v))
    return Member(kind, Group(name, kind.layout, planes, tuple(layers)), heads[0])


def shifting(m: Member, *, turns: bool) -> Member:
    """The same, where the middle may be removed. Keys that turn do so by half a circle a position: they change sign."""
    pairs = m.group.planes[0].size // 2
    rotations = {layer: {"k": Rotation((pi,) * pairs)} for layer in m.group.layers} if turns else {}
    return replace(m, group=replace(m.group, no_shift=None, rotations=rotations))


@dataclass
class Line:
    """One sequence: its tokens, and for each group the cells it still holds by position."""

    tokens: list[int]
    held: list[dict[int, Cell]]
    derived: int | None = None  # where the first removal from its middle was


@dataclass
class Dumb:
    """What the memory should know."""

    members: Sequence[Member]
    lines: dict[int, Line] = field(default_factory=dict)
    written: int = 0
    pending: dict[int, list[int]] | None = None  # new tokens of the open step, by sequence
    opened: list[int] = field(default_factory=list)

    @property
    def kinds(self) -> list[Kind]:
        return [m.kind for m in self.members]

    def length(self, seq: int) -> int:
        return len(self.lines[seq].tokens) if seq in self.lines else 0

    def used(self, group: int) -> int:
        held = {cell for line in self.lines.values() for cell in line.held[group].values()}
        return len(held) + sum(map(len, (self.pending or {}).values()))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, feeds: Mapping[int, int]) -> None:
        """`feeds[seq]` new tokens for each sequence."""
        self.opened = [seq for seq in feeds if seq not in self.lines]
        for seq in self.opened:
            self.lines[seq] = Line([], [{} for _ in self.kinds])
        self.pending = {}
        for seq, count in feeds.items():
            self.pending[seq] = list(range(self.written, self.written + count))
            self.written += count

    def now(self, group: int, seq: int) -> dict[int, Cell]:
        """What a sequence holds in the open step, its new tokens included, by position."""
        new = (self.pending or {}).get(seq, [])
        return self.lines[seq].held[group] | {pos: Cell(t) for pos, t in enumerate(new, self.length(seq))}

    def rows(self, group: int) -> list[set[tuple[int, int]]]:
        """What each row of the open step sees."""
        return [
            {now[k].spells for k in range(q + 1) if self.kinds[group].sees(q, k)}
            for seq, new in (self.pending or {}).items()
            for now in [self.now(group, seq)]
            for q in range(self.length(seq), self.length(seq) + len(new))
        ]

    def commit(self, accepted: Mapping[int, int]) -> None:
        for seq, new in (self.pending or {}).items():
            line = self.lines[seq]
            kept = new[: accepted.get(seq, len(new))]
            start = len(line.tokens)
            line.tokens += kept
            for kind, held in zip(self.kinds, line.held, strict=True):
                held.update((pos, Cell(token)) for pos, token in enumerate(kept, start))
                for pos in [pos for pos in held if not kind.stays(len(line.tokens), pos)]:
                    del held[pos]
        self.pending = None

    def abandon(self) -> None:
        for seq in self.opened:
            del self.lines[seq]
        self.pending = None

    # -- sequences ------------------------------------------------------------------------------------------------

    def can_cut(self, seq: int, pos: int) -> int:
        """By trying: what the token at `kept` would see before it must still be held."""
        if seq not in self.lines:
            return 0
        held = self.lines[seq].held
        return max(
            kept
            for kept in range(min(pos, self.length(seq)) + 1)
            if all(k in h for kind, h in zip(self.kinds, held, strict=True) for k in range(kept) if kind.sees(kept, k))
        )

    def cut(self, line: Line, kept: int) -> Line:
        derived = line.derived if line.derived is not None and line.derived < kept else None
        return Line(line.tokens[:kept], [{pos: c for pos, c in h.items() if pos < kept} for h in line.held], derived)

    def fork(self, src: int, dst: int, upto: int) -> int:
        kept = self.can_cut(src, upto)
        self.lines[dst] = self.cut(self.lines[src], kept)
        return kept

    def remove(self, seq: int, start: int) -> int:
        kept = self.can_cut(seq, start)
        if kept == min(start, self.length(seq)):
            self.lines[seq] = self.cut(self.lines[seq], kept)
        return kept

    def can_shift(self, seq: int, start: int, end: int) -> bool:
        """May [start, end) go? What the next token will see must be held, and chunks hold who was in them with whom."""
        line = self.lines[seq]
        after = len(line.tokens) - (end - start)
        for m, held in zip(self.members, line.held, strict=True):
            if isinstance(m.kind.layout, Chunked) and self.sees_others(m.kind, len(line.tokens), start, end):
                return False
            moved = {pos if pos < start else pos - (end - start) for pos in held if not start <= pos < end}
            if any(k not in moved for k in range(after) if m.kind.sees(after, k)):
                return False
        return True

    @staticmethod
    def sees_others(kind: Kind, length: int, start: int, end: int) -> bool:
        """By trying every pair: does one that moves down see somebody there that it did not see, or lose one?"""
        moved = {pos: pos if pos < start else pos - (end - start) for pos in range(length) if not start <= pos < end}
        return any(
            kind.sees(q, k) != kind.sees(moved[q], moved[k]) for q in range(end, length) for k in moved if k <= q
        )

    def spare(self, group: int, seq: int, end: int) -> int:
        """Cells that a shift needs beside those it will give back."""
        return self.members[group].turns * sum(pos >= end for pos in self.lines[seq].held[group])

    def shift(self, seq: int, start: int, end: int) -> None:
        line, by = self.lines[seq], end - start
        del line.tokens[start:end]
        line.derived = start if line.derived is None else min(start, line.derived)
        for index, m in enumerate(self.members):
            before = {pos: cell for pos, cell in line.held[index].items() if pos < start}
            behind = {pos - by: cell for pos, cell in line.held[index].items() if pos >= end}
            if m.turns:
                behind = {pos: Cell(cell.token, cell.turned + by) for pos, cell in behind.items()}
            line.held[index] = {p: c for p, c in (before | behind).items() if m.kind.stays(len(line.tokens), p)}
