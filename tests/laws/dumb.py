"""The dumb model that judges the memory: lists of tokens, and of each kind of layer the rule in one line.

Every token that is ever written has a number of its own. In every group it is one `Cell`, which lines share as it is:
the cells in use are the distinct ones that are held. So it is with the positions of an input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcellar.memory.cells.layouts import Causal, Chunked, Input, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Group
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, StoredAs
from kvcellar.memory.spans import Span
from tests.laws import identity
from tests.laws.identity import Spelt


@dataclass(frozen=True)
class Kind:
    """A kind of layer. `near(q, k)`: is k not too far back for a query at q? `stays(end, k)`: is k kept at `end`?"""

    layout: Layout
    near: Callable[[int, int], bool]
    stays: Callable[[int, int], bool]
    looks_ahead: bool = True

    def sees(self, q: int, k: int, ahead: Sequence[Span] = ()) -> bool:
        """May the query at q look at k? Behind itself only within a span that looks ahead."""
        spans = ahead if self.looks_ahead else ()
        return self.near(q, k) and (k <= q or any(span.start <= q < span.end and k < span.end for span in spans))

    @property
    def of_input(self) -> bool:
        return isinstance(self.layout, Input)


def causal() -> Kind:
    return Kind(Causal(), lambda q, k: True, lambda end, k: True)


def sliding(window: int, memory: int) -> Kind:
    return Kind(Sliding(window, memory), lambda q, k: q - window < k, lambda end, k: end - k <= memory)


def chunked(size: int) -> Kind:
    return Kind(Chunked(size), lambda q, k: k // size >= q // size, lambda end, k: k // size >= (end - 1) // size)


def encoder(most: int) -> Kind:
    return Kind(Input(most), lambda q, k: True, lambda end, k: True)


@dataclass(frozen=True, eq=False)
class Cell:
    """What is stored of a token. Its key was turned by so many positions when what stood before it was removed."""

    token: int
    turned: int = 0
    times: int = 0

    @property
    def key(self) -> Spelt:
        return Spelt(self.token, self.turned % 4, self.times)

    @property
    def value(self) -> Spelt:
        return Spelt(self.token)


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


def straight(m: Member) -> Member:
    """The same, where no row sees behind itself."""
    return replace(m, kind=replace(m.kind, looks_ahead=False), group=replace(m.group, looks_ahead=False))


def shifting(m: Member, *, turns: bool) -> Member:
    """The same, where the middle may be removed."""
    rotations = {layer: {"k": identity.rotation(m.group.planes[0].size)} for layer in m.group.layers} if turns else {}
    return replace(m, group=replace(m.group, no_shift=None, rotations=rotations))


def kept_as(m: Member, stored: StoredAs) -> Member:
    """The same, with its K/V stored so."""
    planes = tuple(replace(plane, storage=stored.of(plane.name)) for plane in m.group.planes)
    return replace(m, group=replace(m.group, planes=planes))


@dataclass
class Line:
    """One sequence: its tokens, and for each group the cells it still holds by position; of its input, by place."""

    tokens: list[int]
    held: list[dict[int, Cell]]
    derived: int | None = None  # where the first removal from its middle was
    ahead: list[Span] = field(default_factory=list)
    digest: str | None = None


@dataclass
class Claimed:
    """A claim: for each group without a window the cells of its span, for each with one those of the last positions of
    its span, without a gap; for each checkpoint those of the windows."""

    span: Span
    held: dict[int, dict[int, Cell]]  # by group, position
    checkpoints: dict[int, dict[int, dict[int, Cell]]]  # by position, group, position
    ahead: list[Span]
    derived: int | None
    digest: str | None

    def cells(self, group: int) -> list[Cell]:
        """With those of every checkpoint."""
        found = list(self.held.get(group, {}).values())
        return found + [cell for windows in self.checkpoints.values() for cell in windows.get(group, {}).values()]

    def parts(self, pos: int) -> bool:
        return any(span.start < pos < span.end for span in self.ahead)


@dataclass
class Dumb:
    """What the memory should know."""

    members: Sequence[Member]
    lines: dict[int, Line] = field(default_factory=dict)
    claims: dict[int, Claimed] = field(default_factory=dict)
    written: int = 0
    batch: Batch | None = None  # of the open step
    pending: dict[int, list[int]] = field(default_factory=dict)  # its new tokens, by sequence
    opened: list[int] = field(default_factory=list)

    @property
    def kinds(self) -> list[Kind]:
        return [m.kind for m in self.members]

    def length(self, seq: int) -> int:
        return len(self.lines[seq].tokens) if seq in self.lines else 0

    def input_of(self, seq: int) -> list[Cell]:
        """The same in all groups of inputs."""
        index = next((index for index, kind in enumerate(self.kinds) if kind.of_input), None)
        return list(self.lines[seq].held[index].values()) if index is not None and seq in self.lines else []

    def used(self, group: int) -> int:
        held = {cell for line in self.lines.values() for cell in line.held[group].values()}
        held |= {cell for claim in self.claims.values() for cell in claim.cells(group)}
        return len(held) + (0 if self.kinds[group].of_input else sum(map(len, self.pending.values())))

    def new_tokens(self, n: int) -> list[int]:
        self.written += n
        return list(range(self.written - n, self.written))

    # -- a step ---------------------------------------------------------------------------------------------------

    def refuses(self, feed: Feed) -> bool:
        """Whether query-only rows should see something that is not held, or the last of them sees nothing."""
        length, held = self.length(feed.seq), self.lines[feed.seq].held
        for kind, of in zip(self.kinds, held, strict=True):
            if kind.of_input:
                continue
            wanted = [k for k in range(length) if kind.sees(feed.pos.start, k)]
            if any(k not in of for k in wanted) or not any(kind.sees(feed.pos.end - 1, k) for k in range(length)):
                return True
        return False

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.opened = [feed.seq for feed in batch.feeds if feed.seq not in self.lines]
        for seq in self.opened:
            self.lines[seq] = Line([], [{} for _ in self.kinds])
        self.pending = {feed.seq: self.new_tokens(len(feed.pos)) for feed in batch.feeds if feed.stores}

    def now(self, group: int, seq: int) -> dict[int, Cell]:
        """What a sequence holds in the open step, its new tokens included, by position."""
        new = [] if self.kinds[group].of_input else self.pending.get(seq, [])
        return self.lines[seq].held[group] | {pos: Cell(t) for pos, t in enumerate(new, self.length(seq))}

    def seen(self, group: int, feed: Feed) -> list[list[Cell]]:
        """What each row of a feed sees, in order."""
        kind, now = self.kinds[group], self.now(group, feed.seq)
        if kind.of_input:
            return [list(now.values()) for _ in range(len(feed.pos))]
        ahead = self.batch.ahead(feed.seq) if self.batch else ()
        end = self.length(feed.seq) + len(self.pending.get(feed.seq, []))
        rows = range(feed.pos.start, feed.pos.end)
        return [[now[k] for k in range(end) if kind.sees(q, k, ahead)] for q in rows]

    def commit(self, accepted: Mapping[int, int]) -> dict[int, Claimed]:
        """Returns the claims that feeds ask for, by sequence: made before anything slides out of windows."""
        made: dict[int, Claimed] = {}
        asking = {feed.seq: feed for feed in (self.batch.feeds if self.batch else ()) if feed.claims}
        for seq, new in self.pending.items():
            line = self.lines[seq]
            kept = new[: accepted.get(seq, len(new))]
            start = len(line.tokens)
            line.tokens += kept
            line.ahead += [
                span for span in (self.batch.ahead(seq) if self.batch else ()) if span.end <= self.length(seq)
            ]
            for kind, held in zip(self.kinds, line.held, strict=True):
                if not kind.of_input:
                    held.update((pos, Cell(token)) for pos, token in enumerate(kept, start))
            if seq in asking and kept:
                span = Span(start, len(line.tokens))
                claim = self.claim(seq, span, [pos for pos in asking[seq].checkpoints if pos <= span.end])
                assert claim is not None
                made[seq] = claim
            for kind, held in zip(self.kinds, line.held, strict=True):
                for pos in [pos for pos in held if not kind.stays(len(line.tokens), pos)]:
                    del held[pos]
        self.batch, self.pending = None, {}
        return made

    def abandon(self) -> None:
        for seq in self.opened:
            del self.lines[seq]
        self.batch, self.pending = None, {}

    # -- sequences ------------------------------------------------------------------------------------------------

    def can_cut(self, seq: int, pos: int) -> int:
        """By trying: what the token at `kept` would see before it must still be held, and no span is parted."""
        if seq not in self.lines:
            return 0
        line = self.lines[seq]
        of_text = [(kind, h) for kind, h in zip(self.kinds, line.held, strict=True) if not kind.of_input]
        return max(
            kept
            for kept in range(min(pos, self.length(seq)) + 1)
            if all(k in h for kind, h in of_text for k in range(kept) if kind.sees(kept, k))
            and not any(span.start < kept < span.end for span in line.ahead)
        )

    def cut(self, line: Line, kept: int) -> Line:
        derived = line.derived if line.derived is not None and line.derived < kept else None
        held = [
            dict(h) if kind.of_input else {pos: c for pos, c in h.items() if pos < kept}
            for kind, h in zip(self.kinds, line.held, strict=True)
        ]
        return Line(line.tokens[:kept], held, derived, [s for s in line.ahead if s.end <= kept], line.digest)

    def fork(self, src: int, dst: int, upto: int) -> int:
        kept = self.can_cut(src, upto)
        self.lines[dst] = self.cut(self.lines[src], kept)
        return kept

    def remove(self, seq: int, start: int) -> int:
        kept = self.can_cut(seq, start)
        if kept == min(start, self.length(seq)):
            self.lines[seq] = self.cut(self.lines[seq], kept)
        return kept

    def parts(self, seq: int, gone: Span) -> bool:
        """Would a part of a span that looked ahead stay, if this goes?"""
        return any(span.start < pos < span.end for span in self.lines[seq].ahead for pos in (gone.start, gone.end))

    def can_shift(self, seq: int, start: int, end: int) -> bool:
        """Whether [start, end) can be removed: the next token sees what is held, and tokens stay in their chunks."""
        line = self.lines[seq]
        after = len(line.tokens) - (end - start)
        for m, held in zip(self.members, line.held, strict=True):
            if m.kind.of_input:
                continue
            if isinstance(m.kind.layout, Chunked) and self.sees_others(m.kind, len(line.tokens), start, end):
                return False
            moved = {pos if pos < start else pos - (end - start) for pos in held if not start <= pos < end}
            if any(k not in moved for k in range(after) if m.kind.sees(after, k)):
                return False
        return True

    @staticmethod
    def sees_others(kind: Kind, length: int, start: int, end: int) -> bool:
        """By every pair of positions: whether one that moves down sees one that it did not see, or loses one."""
        moved = {pos: pos if pos < start else pos - (end - start) for pos in range(length) if not start <= pos < end}
        return any(
            kind.sees(q, k) != kind.sees(moved[q], moved[k]) for q in range(end, length) for k in moved if k <= q
        )

    def must_turn(self, group: int, seq: int, end: int) -> tuple[int, int]:
        """How many of the cells behind `end` have keys to rotate: those that are shared, and its own."""
        moved = {cell for pos, cell in self.lines[seq].held[group].items() if pos >= end}
        others = {cell for other, line in self.lines.items() if other != seq for cell in line.held[group].values()}
        others |= {cell for claim in self.claims.values() for cell in claim.cells(group)}
        turning = moved if self.members[group].turns else set()
        return len(turning & others), len(turning - others)

    def shift(self, seq: int, start: int, end: int) -> None:
        line, by = self.lines[seq], end - start
        del line.tokens[start:end]
        line.derived = start if line.derived is None else min(start, line.derived)
        line.ahead = [s for s in line.ahead if s.end <= start] + [
            Span(s.start - by, s.end - by) for s in line.ahead if s.start >= end
        ]
        for index, m in enumerate(self.members):
            if m.kind.of_input:
                continue
            before = {pos: cell for pos, cell in line.held[index].items() if pos < start}
            behind = {pos - by: cell for pos, cell in line.held[index].items() if pos >= end}
            if m.turns:
                behind = {p: Cell(cell.token, cell.turned - by, cell.times + 1) for p, cell in behind.items()}
            line.held[index] = {p: c for p, c in (before | behind).items() if m.kind.stays(len(line.tokens), p)}

    # -- claims ---------------------------------------------------------------------------------------------------

    def bounded(self, group: int) -> bool:
        """Does some token of a long text see less than all before it?"""
        return not self.kinds[group].of_input and not self.kinds[group].sees(1000, 0)

    def window(self, seq: int, pos: int) -> dict[int, dict[int, Cell]] | None:
        """By group with a window what a token at `pos` sees before it; None if some of it is not held."""
        found: dict[int, dict[int, Cell]] = {}
        for index, (kind, held) in enumerate(zip(self.kinds, self.lines[seq].held, strict=True)):
            if self.bounded(index):
                seen = [k for k in range(pos) if kind.sees(pos, k)]
                if any(k not in held for k in seen):
                    return None
                found[index] = {k: held[k] for k in seen}
        return found

    def claim(self, seq: int, span: Span, checkpoints: Sequence[int]) -> Claimed | None:
        """None if it is refused."""
        line = self.lines[seq]
        windows = {pos: self.window(seq, pos) for pos in checkpoints}
        made = Claimed(span, {}, {}, list(line.ahead), None, line.digest)
        if not len(span) or span.end > self.length(seq) or None in windows.values():
            return None
        if any(made.parts(pos) for pos in (span.start, span.end, *checkpoints)):
            return None
        if any(not span.start < pos <= span.end for pos in checkpoints):
            return None
        for index, held in enumerate(line.held):
            if self.kinds[index].of_input:
                made.held[index] = dict(held)
            elif not self.bounded(index):
                made.held[index] = {pos: held[pos] for pos in range(span.start, span.end)}
        self.give_tails(made, line)
        made.checkpoints = {pos: found for pos, found in windows.items() if found is not None}
        made.ahead = [one for one in line.ahead if span.start <= one.start < span.end]
        if line.derived is not None and line.derived < span.end:
            made.derived = max(span.start, line.derived)
        return made

    def give_tails(self, made: Claimed, line: Line) -> None:
        """What all groups with a window hold of the last positions of a claim."""
        windows = [index for index in range(len(self.kinds)) if self.bounded(index)]
        start = made.span.end
        while start > made.span.start and all(start - 1 in line.held[index] for index in windows):
            start -= 1
        for index in windows:
            made.held[index] = {pos: line.held[index][pos] for pos in range(start, made.span.end)}

    def assembled(self, path: Sequence[int], pos: int) -> Line | None:
        """None if it is refused."""
        claims = [self.claims[number] for number in path]
        ends = [0, *(claim.span.end for claim in claims)]
        if not claims or any(claim.span.start != end for claim, end in zip(claims, ends, strict=False)):
            return None
        last = claims[-1]
        if not last.span.start < pos <= last.span.end or last.parts(pos):
            return None
        if (windows := self.windows_at(claims, pos)) is None:
            return None
        line = Line([], [{} for _ in self.kinds], digest=claims[0].digest)
        for index, kind in enumerate(self.kinds):
            if kind.of_input:
                if any(claim.held[index] != claims[0].held[index] for claim in claims):
                    return None
                line.held[index] = dict(claims[0].held[index])
            elif self.bounded(index):
                line.held[index] = windows[index]
            else:
                for claim in claims:
                    line.held[index] |= {k: cell for k, cell in claim.held[index].items() if k < pos}
        line.tokens = [-1] * pos
        line.ahead = [span for claim in claims for span in claim.ahead if span.end <= pos]
        line.derived = min((c.derived for c in claims if c.derived is not None and c.derived < pos), default=None)
        return line

    def windows_at(self, claims: Sequence[Claimed], pos: int) -> dict[int, dict[int, Cell]] | None:
        """Those of the checkpoint at `pos`, or else of what the tails have; None if they have not all of it."""
        windows: dict[int, dict[int, Cell]] = {}
        for index in filter(self.bounded, range(len(self.kinds))):
            held = {k: cell for claim in claims for k, cell in claim.held[index].items()}
            seen = [k for k in range(pos) if self.kinds[index].sees(pos, k)]
            if pos in claims[-1].checkpoints:
                windows[index] = dict(claims[-1].checkpoints[pos][index])
            elif all(k in held for k in seen):
                windows[index] = {k: held[k] for k in seen}
            else:
                return None
        return windows

    def split(self, number: int, pos: int) -> Claimed | None:
        """The right part, taken from the claim; None if it is refused."""
        left = self.claims[number]
        if not left.span.start < pos < left.span.end or left.parts(pos):
            return None
        right = Claimed(Span(pos, left.span.end), {}, {}, [s for s in left.ahead if s.start >= pos], None, left.digest)
        for index, held in left.held.items():
            of_input = self.kinds[index].of_input
            right.held[index] = {k: cell for k, cell in held.items() if of_input or k >= pos}
            left.held[index] = {k: cell for k, cell in held.items() if of_input or k < pos}
        right.checkpoints = {at: found for at, found in left.checkpoints.items() if at > pos}
        left.checkpoints = {at: found for at, found in left.checkpoints.items() if at <= pos}
        right.derived = None if left.derived is None else max(pos, left.derived)
        left.derived = left.derived if left.derived is not None and left.derived < pos else None
        left.ahead = [span for span in left.ahead if span.start < pos]
        left.span = Span(left.span.start, pos)
        return right

    def join(self, number: int, following: int) -> bool:
        left, right = self.claims[number], self.claims[following]
        inputs = [index for index, kind in enumerate(self.kinds) if kind.of_input]
        if left.span.end != right.span.start or any(left.held[i] != right.held[i] for i in inputs):
            return False
        for index in left.held:
            gap = self.bounded(index) and right.span.start not in right.held[index]
            left.held[index] = right.held[index] if gap else left.held[index] | right.held[index]
        left.checkpoints |= right.checkpoints
        left.ahead += right.ahead
        left.derived = right.derived if left.derived is None else left.derived
        left.span = Span(left.span.start, right.span.end)
        del self.claims[following]
        return True

    def copied(self, number: int) -> Claimed:
        """The same in new cells. A cell that several of its windows share is still one, an input has no digest."""
        claim = self.claims[number]
        new: dict[tuple[int, Cell], Cell] = {}

        def copy(index: int, held: Mapping[int, Cell]) -> dict[int, Cell]:
            return {pos: new.setdefault((index, cell), replace(cell)) for pos, cell in held.items()}

        held = {index: {} if self.bounded(index) else copy(index, of) for index, of in claim.held.items()}
        checkpoints = {
            pos: {index: copy(index, of) for index, of in windows.items()} for pos, windows in claim.checkpoints.items()
        }
        return Claimed(claim.span, held, checkpoints, list(claim.ahead), claim.derived, None)

    def forget(self, number: int, tokens: int) -> None:
        """The first tokens of its tail."""
        claim = self.claims[number]
        for index in filter(self.bounded, range(len(self.kinds))):
            claim.held[index] = dict(sorted(claim.held[index].items())[tokens:])

    def exclusive(self, number: int, group: int, checkpoint: int | None) -> int:
        """Cells that no line and no other claim holds, or, of a checkpoint, nothing else."""
        claim = self.claims[number]
        others = {cell for line in self.lines.values() for cell in line.held[group].values()}
        others |= {cell for other, one in self.claims.items() if other != number for cell in one.cells(group)}
        mine = set(claim.cells(group))
        if checkpoint is not None:
            mine = set(claim.checkpoints[checkpoint].get(group, {}).values())
            others |= set(claim.held.get(group, {}).values())
            for at, windows in claim.checkpoints.items():
                others |= set(windows.get(group, {}).values()) if at != checkpoint else set()
        return len(mine - others)

    # -- inputs ---------------------------------------------------------------------------------------------------

    def input(self, digest: str | None) -> dict[int, dict[int, Cell]] | None:
        """By group, the input of this digest, if a line or a claim has it."""
        for one in (*self.lines.values(), *self.claims.values()):
            if digest is not None and one.digest == digest:
                return {index: one.held[index] for index, kind in enumerate(self.kinds) if kind.of_input}
        return None

    def give_input(self, seq: int, digest: str | None, n: int) -> list[int]:
        """The tokens that an input is written as: new ones, unless its digest is known."""
        source = self.input(digest)
        shared = [cell.token for cell in next(iter(source.values())).values()] if source is not None else []
        tokens = shared or self.new_tokens(n)
        line = self.lines.setdefault(seq, Line([], [{} for _ in self.kinds]))
        line.digest = digest
        for index, kind in enumerate(self.kinds):
            if kind.of_input:
                held = source[index] if source is not None else dict(enumerate(map(Cell, tokens)))
                line.held[index] = dict(held)
        return tokens
