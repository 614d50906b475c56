"""A memory and the dumb model beside it: every operation is done to both, and their results are compared.

In a step every row sees exactly the tokens that its layout's rule names, in every layer, whichever way one reads. What
raises changes nothing, be it that something was refused, or that there was no room in the middle of it (`fault`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, NotSupported, WrongStage
from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, GroupPlan, Plan
from kvcellar.memory.shapes import Scoring
from kvcellar.memory.spans import Span
from tests.laws import identity
from tests.laws.breaking import Fault, try_with
from tests.laws.dumb import Cell, Dumb, Member
from tests.laws.watch import Wishes, everything, nothing_changes, stored

End = str | Mapping[int, int]  # "commit", "abandon", or how many tokens of some sequences are accepted


class Player:
    """`limits` is how many tokens a sequence may have, where it has a limit; `spare` how much `max_bytes` leaves free.

    `done` counts what was done.
    """

    def __init__(
        self,
        members: Sequence[Member],
        cells: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        wishes: Wishes | None = None,
        limits: Mapping[int, int] | None = None,
        spare: int | None = None,
    ) -> None:
        groups, wishes = [m.group for m in members], wishes or Wishes()
        sizes = {group.name: n for group, n in zip(groups, cells, strict=False)}
        need = sum(group.bytes(sizes[group.name], dtype.itemsize) for group in groups)
        need += max(group.staging(sizes[group.name], dtype.itemsize) for group in groups)
        self.limits = limits or {}
        self.memory = Memory(
            groups,
            cells=sizes,
            dtype=dtype,
            device="cpu",
            backend=wishes,
            limits=self.limits,
            max_bytes=need + spare if spare is not None else None,
        )
        self.members = sorted(members, key=lambda m: m.kind.of_input)  # as the memory has them
        self.dumb = Dumb(self.members)
        self.fault: Fault | None = None
        self.done: Counter[str] = Counter()

    def _do(self, what: str, act: Callable[[], Any]) -> Any:
        """The result of `act`: of the first call, or of the second one after a fault in the first."""
        through, answer = False, None
        if self.fault is not None and not self.fault.fired:
            before = everything(self.memory)
            through, answer = try_with(self.fault, act)
            if not through:
                self.memory.check()
                assert everything(self.memory) == before, "an operation that raised has changed something"
                self.done["broken"] += 1
        self.done[what] += 1
        return answer if through else act()

    def _refused(self, error: type[Exception], says: str, act: Callable[[], Any]) -> Any:
        with nothing_changes(self.memory), pytest.raises(error, match=says) as refused:
            act()
        self.done[error.__name__] += 1
        return refused.value

    # -- steps ----------------------------------------------------------------------------------------------------

    def batch(
        self,
        feeds: Mapping[int, int],
        borders: Mapping[int, set[int]] | None = None,
        asks: Sequence[Feed] = (),
        claimed: Collection[int] = (),
    ) -> Batch:
        """So many new tokens for each sequence; between every two borders of these a span looks ahead. The step makes
        claims of those of the sequences `claimed`."""
        starts = {seq: self.dumb.length(seq) for seq in feeds}
        new = [Feed(seq, Span(starts[seq], starts[seq] + n), claimed=seq in claimed) for seq, n in feeds.items()]
        ahead: list[tuple[int, Span]] = []
        for seq, found in (borders or {}).items():
            within = sorted(border for border in found if border <= feeds.get(seq, -1))
            ahead += [
                (seq, Span(starts[seq] + a, starts[seq] + b)) for a, b in zip(within[::2], within[1::2], strict=False)
            ]
        asking = [feed for feed in asks if feed.seq in self.dumb.lines and feed.seq not in feeds]
        return Batch((*asking[::2], *new, *asking[1::2]), tuple(ahead))

    def step(self, batch: Batch, end: End = "commit") -> None:
        if self.begin(batch):
            self.end(end)

    def begin(self, batch: Batch) -> bool:
        """Whether it was not refused."""
        memory, dumb, free = self.memory, self.dumb, self.memory.free()
        short = [m for m in self.members if not m.kind.of_input and free[m.group.name] < batch.stored]
        if any(self._cannot(feed) for feed in batch.feeds):
            self._refused(BadRequest, "a query at|may have", lambda: memory.begin(batch))
            return False
        if short:
            full = self._refused(CacheFull, "cells in group", lambda: memory.begin(batch))
            name = short[0].group.name
            assert (full.group, full.need, full.free) == (name, batch.stored, free[name])
            return False
        plan = self._do("look ahead" if batch.look_ahead else "begin", lambda: memory.begin(batch))
        dumb.begin(batch)
        for m in self.members:
            for layer in m.group.layers if not m.kind.of_input else ():
                self._do("put", partial(memory.put, layer, *self.new(layer)))
        self._look(batch, plan)
        return True

    def _cannot(self, feed: Feed) -> bool:
        if not feed.stores:
            return self.dumb.refuses(feed)
        return feed.pos.end > self.limits.get(feed.seq, feed.pos.end)

    def end(self, end: End) -> None:
        memory, dumb = self.memory, self.dumb
        if end == "abandon":
            self._do("abandon", memory.abandon)
            dumb.abandon()
            return
        named = {} if isinstance(end, str) else end
        accepted = {seq: min(n, len(dumb.pending[seq])) for seq, n in named.items() if seq in dumb.pending}
        for seq, n in accepted.items():
            at = dumb.length(seq) + n
            for span in dumb.batch.ahead(seq) if dumb.batch else ():
                if span.start < at < span.end:
                    self._refused(BadRequest, "looks ahead", partial(memory.commit, accepted))
                    accepted = accepted | {seq: span.start - dumb.length(seq)}
        made = self._do("accept" if accepted else "commit", partial(memory.commit, accepted))
        claims = dumb.commit(accepted)
        assert made.keys() == claims.keys()
        dumb.claims |= {number: claims[seq] for seq, number in made.items()}

    def new(self, layer: int) -> list[Tensor]:
        """k [T,G,D] and v [T,G,Dv] of the open step's tokens."""
        return self.words(layer, [token for new in self.dumb.pending.values() for token in new])

    def words(self, layer: int, tokens: Sequence[int]) -> list[Tensor]:
        (group,) = (m.group for m in self.members if layer in m.group.layers)
        return [
            identity.vectors(tokens, layer, number, plane.heads, plane.size, dtype=self.memory.dtype)
            for number, plane in enumerate(group.planes)
        ]

    def reserve(self, batch: Batch) -> None:
        """The worst case: it is written and read like any other step, and leaves nothing."""
        memory = self.memory
        needs = {
            m.group.name: max(
                m.kind.layout.most_cells(1, 1) if m.kind.of_input else f.pos.end - m.kind.layout.lowest(f.pos.start)
                for f in batch.feeds
            )
            for m in self.members
        }
        if any(need > memory.storage.capacity()[name] for name, need in needs.items()):
            self._refused(CapacityTooSmall, "cache_bytes", lambda: memory.begin(batch, reserve=True))
            return
        with nothing_changes(memory):
            plan = self._do("reserve", lambda: memory.begin(batch, reserve=True))
            for m in self.members:
                for layer in m.group.layers:
                    if not m.kind.of_input:
                        self._do("put", partial(memory.put, layer, *self.words(layer, range(plan.stored))))
                    q = torch.ones(plan.tokens, m.query_heads, m.group.planes[0].size)
                    out = memory.attend(layer, q, Scoring(1.0))
                    assert out.shape == (plan.tokens, m.query_heads, m.group.planes[1].size)
            with pytest.raises(WrongStage, match="reserved"):
                memory.commit()
            memory.check()
            memory.abandon()

    # -- what the rows see ----------------------------------------------------------------------------------------

    def _look(self, batch: Batch, plan: Plan) -> None:
        assert (plan.feeds, plan.look_ahead) == (batch.feeds, batch.look_ahead)
        assert (plan.tokens, plan.stored) == (batch.tokens, sum(map(len, self.dumb.pending.values())))
        for index, m in enumerate(self.members):
            rows = [row for feed in batch.feeds for row in self.dumb.seen(index, feed)]
            self._look_at_segments(index, batch, plan.groups[index])
            for layer in m.group.layers:
                self._look_at_dense(m, layer, rows)

    def _look_at_segments(self, index: int, batch: Batch, plan: GroupPlan) -> None:
        """The way a kernel reads: planes and runs."""
        m, row = self.members[index], 0
        cells: list[Cell] = []
        for feed, segment in zip(batch.feeds, plan.segments, strict=True):
            seen = {pos: cell for pos, cell in self.dumb.now(index, feed.seq).items() if pos >= segment.first}
            start = segment.end if m.kind.of_input else feed.pos.start
            assert (segment.seq, segment.row, segment.pos) == (feed.seq, row, Span(start, start + len(feed.pos)))
            assert all(a.end != b.cell for a, b in pairwise(segment.runs)), "two runs could be one"
            assert segment.first == min((k for k in seen if m.kind.sees(start, k)), default=segment.first)
            assert segment.end == min(max(seen, default=-1) + 1, segment.pos.end)
            cells += [seen[pos] for pos in range(segment.first, segment.end)]
            row += len(feed.pos)
        self._check_runs(m, [run for segment in plan.segments for run in segment.runs], cells)
        if not m.kind.of_input:
            new = [Cell(token) for tokens in self.dumb.pending.values() for token in tokens]
            self._check_runs(m, [run for segment in plan.segments for run in segment.new], new)
        if len(plan.segments) == 1:
            for layer in m.group.layers:
                self._check(m, layer, cells, self.memory.get(layer).in_order())

    def _check_runs(self, m: Member, runs: Sequence[Any], cells: Sequence[Cell]) -> None:
        for layer in m.group.layers:
            self._check(m, layer, cells, [stored(self.memory, layer, plane.name, runs) for plane in m.group.planes])

    def _check(self, m: Member, layer: int, cells: Sequence[Cell], planes: Sequence[Tensor]) -> None:
        """`planes` k [n,G,D] and v [n,G,Dv] are what `cells` should be, in order."""
        for number, (plane, read) in enumerate(zip(m.group.planes, planes, strict=True)):
            identity.check(read, [cell.value if number else cell.key for cell in cells], layer, number, plane)

    def _look_at_dense(self, m: Member, layer: int, rows: list[list[Cell]]) -> None:
        k, v, visible = self.memory.get(layer).dense()
        there = {cell for row in rows for cell in row}
        keys = identity.recognised(k, [cell.key for cell in there], layer, 0, m.group.planes[0])
        values = identity.recognised(v, [cell.value for cell in there], layer, 1, m.group.planes[1])
        assert [token for token, _ in keys] == [token for token, _ in values]
        assert len(keys) == len(there), "a cell is there twice, or one that no row sees"
        found = [sorted(keys[i] for i in row.nonzero().flatten().tolist()) for row in visible]
        assert found == [sorted(cell.key[:2] for cell in row) for row in rows]
        dtype = torch.float32
        q = torch.arange(len(visible) * m.query_heads * k.shape[2], dtype=dtype).sin()
        q = q.reshape(len(visible), m.query_heads, k.shape[2])
        expected = attend_dense(q, k.to(dtype), v.to(dtype), visible, Scoring(scale=k.shape[2] ** -0.5))
        got = self._do("attend", lambda: self.memory.attend(layer, q, Scoring(scale=k.shape[2] ** -0.5)))
        assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)

    # -- sequences ------------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, upto: int) -> None:
        kept, limit = self.dumb.can_cut(src, upto), self.limits.get(dst)
        if src == dst:
            self._refused(BadRequest, "onto itself", lambda: self.memory.fork(src, dst, upto))
        elif limit is not None and kept > limit:
            self._refused(BadRequest, f"may have {limit}", lambda: self.memory.fork(src, dst, upto))
        else:
            assert self._do("fork", lambda: self.memory.fork(src, dst, upto)) == kept
            assert self.dumb.fork(src, dst, upto) == kept

    def remove(self, seq: int, span: Span) -> None:
        """Exactly the given span is removed, or nothing."""
        memory, dumb, length = self.memory, self.dumb, self.dumb.length(seq)
        gone = Span(min(span.start, length), min(span.end, length))
        if not len(gone):
            with nothing_changes(memory):
                assert memory.remove(seq, span) == length
        elif (why := self._cannot_remove(seq, gone)) is not None:
            refused = self._refused(NotSupported, why, lambda: memory.remove(seq, span))
            assert refused.kept == dumb.can_cut(seq, gone.start)
            self.done["parted"] += why == "looked ahead"
        elif gone.end == length:
            assert self._do("remove", lambda: memory.remove(seq, span)) == gone.start
            dumb.remove(seq, gone.start)
        elif not self._has_room_to_turn(seq, gone.end):
            self._refused(CacheFull, "cells in group", lambda: memory.remove(seq, span))
        else:
            assert self._do("shift", lambda: memory.remove(seq, span)) == length - len(gone)
            dumb.shift(seq, gone.start, gone.end)

    def _cannot_remove(self, seq: int, gone: Span) -> str | None:
        """The expected reason of a refusal; None if there is none."""
        if self.dumb.parts(seq, gone):
            return "looked ahead"
        if gone.end == self.dumb.length(seq):
            return None if self.dumb.can_cut(seq, gone.start) == gone.start else "no longer hold"
        if any(m.group.no_shift for m in self.members):
            return "cannot be shifted|no longer hold"
        return None if self.dumb.can_shift(seq, gone.start, gone.end) else "no longer hold"

    def _has_room_to_turn(self, seq: int, end: int) -> bool:
        """Is each key written to a free cell, or turned where it is, with room for what was there?"""
        memory, in_place = self.memory, 0
        for index, m in enumerate(self.members):
            shared, own = self.dumb.must_turn(index, seq, end)
            missing = max(0, shared + own - memory.free()[m.group.name])
            if missing > own:
                return False
            keys = sum(
                plane.bytes_per_cell(memory.dtype.itemsize)
                for turns in m.group.rotations.values()
                for plane in m.group.planes
                if plane.name in turns
            )
            in_place += missing * (keys + 8)  # and which cell it was
        self.done["in place"] += in_place > 0
        return memory.storage.spare is None or in_place <= memory.storage.spare

    def drop(self, seq: int) -> None:
        self._do("drop", lambda: self.memory.drop(seq))
        del self.dumb.lines[seq]

    def clear(self) -> None:
        self._do("clear", self.memory.clear)
        self.dumb = Dumb(self.members, written=self.dumb.written)

    def ask(self, seq: int, positions: Sequence[int]) -> None:
        with nothing_changes(self.memory):
            for pos in positions:
                kept = self.dumb.can_cut(seq, pos)
                assert self.memory.can_cut(seq, pos) == kept
                assert (self.memory.can_cut(seq, pos) == pos) == (kept == pos)

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim(self, seq: int, span: Span, checkpoints: Sequence[int]) -> None:
        made = self.dumb.claim(seq, span, checkpoints)
        act = partial(self.memory.claims.make, seq, span, checkpoints)
        if made is None:
            self._refused(BadRequest, "claim|inside|needs", act)
        else:
            self.dumb.claims[self._do("claim", act)] = made

    def assemble(self, seq: int, path: Sequence[int], pos: int) -> None:
        line = self.dumb.assembled(path, pos) if path else None
        act = partial(self.memory.claims.assemble, seq, path, pos)
        if seq in self.dumb.lines or line is None:
            self._refused(BadRequest, "exists|consecutive|end in|inside|inputs|no checkpoint|may have", act)
        elif pos > self.limits.get(seq, pos):
            self._refused(BadRequest, "may have", act)
        else:
            self._do("assemble", act)
            self.dumb.lines[seq] = line

    def split(self, claim: int, pos: int) -> None:
        act = partial(self.memory.claims.split, claim, pos)
        right = self.dumb.split(claim, pos)
        if right is None:
            self._refused(BadRequest, "cannot be split|inside", act)
        else:
            self.dumb.claims[self._do("split", act)] = right

    def join(self, claim: int, following: int) -> None:
        act = partial(self.memory.claims.join, claim, following)
        if self.dumb.join(claim, following):
            self._do("join", act)
        else:
            self._refused(BadRequest, "does not follow|inputs", act)

    def copy_claim(self, claim: int) -> None:
        """Read it out, and write it back as another claim: it reads out as the same bytes, if it is in as few runs."""
        claims, free = self.memory.claims, self.memory.free()
        with claims.reading(claim) as reading:
            record, chunks = reading.record, list(reading)
        copy = self.dumb.copied(claim)
        need = {m.group.name: len(set(copy.cells(index))) for index, m in enumerate(self.members)}
        act = partial(claims.write_back, record, chunks)
        if any(n > free[name] for name, n in need.items()):
            self._refused(CacheFull, "cells in group", act)
            return
        number = self._do("copy", act)
        self.dumb.claims[number] = copy
        with claims.reading(number) as again:
            if len(again.record.stretches) > len(record.stretches):  # there was no run of free cells for a window
                assert sum(again.sizes()) == sum(map(len, chunks))
                return
            assert again.record == replace(record, digest=None)
            assert [chunk.numpy().tobytes() for chunk in again] == [chunk.numpy().tobytes() for chunk in chunks]

    def damaged_copy(self, claim: int, draw: Random) -> None:
        """Bytes that are not those of the record leave everything as it was."""
        claims = self.memory.claims
        with claims.reading(claim) as reading:
            record, chunks = reading.record, list(reading)
        ways = [chunks[:-1], [*chunks, torch.zeros(3, dtype=torch.uint8)]]
        if chunks:
            at = draw.randrange(len(chunks))
            ways.append([*chunks[:at], chunks[at][:-1], *chunks[at + 1 :]])
        for wrong in ways if chunks else ways[1:]:
            with nothing_changes(self.memory), pytest.raises((BadRequest, CacheFull)):
                claims.write_back(record, wrong)
        with nothing_changes(self.memory), pytest.raises(BadRequest, match="another shape"):
            claims.write_back(replace(record, shape="0" * 64), chunks)

    def drop_claim(self, claim: int) -> None:
        self._do("drop_claim", partial(self.memory.claims.drop, claim))
        del self.dumb.claims[claim]

    def forget(self, claim: int, tokens: int) -> None:
        self._do("forget", partial(self.memory.claims.forget, claim, tokens))
        self.dumb.forget(claim, tokens)

    def drop_checkpoint(self, claim: int, pos: int) -> None:
        act = partial(self.memory.claims.drop_checkpoint, claim, pos)
        if pos in self.dumb.claims[claim].checkpoints:
            self._do("drop_checkpoint", act)
            del self.dumb.claims[claim].checkpoints[pos]
        else:
            self._refused(BadRequest, "no checkpoint", act)

    def ask_claim(self, claim: int) -> None:
        """How many cells it alone holds, and each of its checkpoints."""
        names = [m.group.name for m in self.members]
        with nothing_changes(self.memory):
            for pos in (None, *self.dumb.claims[claim].checkpoints):
                cells, rows = self.memory.claims.exclusive(claim, pos)
                assert cells == {name: self.dumb.exclusive(claim, index, pos) for index, name in enumerate(names)}
                assert rows == 0

    # -- inputs ---------------------------------------------------------------------------------------------------

    def write_input(self, seq: int, n: int, digest: str | None) -> None:
        memory, dumb = self.memory, self.dumb
        inputs = [m for m in self.members if m.kind.of_input]
        source = dumb.input(digest)
        tokens = range(dumb.written, dumb.written + n)
        planes = {layer: tuple(self.words(layer, tokens)) for m in inputs for layer in m.group.layers}

        def act() -> bool:
            return memory.inputs.write(seq, n, planes, digest=digest)

        short = [m for m in inputs if memory.free()[m.group.name] < n]
        if dumb.input_of(seq):
            self._refused(BadRequest, "has an input", act)
        elif source is not None and any(len(held) != n for held in source.values()):
            self._refused(BadRequest, "positions, not", act)
        elif source is None and short:
            assert self._refused(CacheFull, "cells in group", act).group == short[0].group.name
        else:
            assert self._do("write_input", act) == (source is None)
            dumb.give_input(seq, digest, n)

    def share_input(self, seq: int, digest: str) -> None:
        if self.dumb.input_of(seq):
            self._refused(BadRequest, "has an input", lambda: self.memory.inputs.share(seq, digest))
        elif self.dumb.input(digest) is None:
            with nothing_changes(self.memory):
                assert not self.memory.inputs.share(seq, digest)
        else:
            assert self._do("share_input", lambda: self.memory.inputs.share(seq, digest))
            self.dumb.give_input(seq, digest, 0)

    def read_inputs(self, seqs: Sequence[int]) -> None:
        """Of sequences that have inputs as long as each other's."""
        for m in self.members:
            for layer in m.group.layers if m.kind.of_input else ():
                for number, plane in enumerate(m.group.planes):
                    read = self._do("read_input", partial(self.memory.inputs.read, layer, plane.name, seqs))
                    for seq, one in zip(seqs, read, strict=True):
                        cells = self.dumb.input_of(seq)
                        identity.check(one, [cell.value for cell in cells], layer, number, plane)

    # -- storage --------------------------------------------------------------------------------------------------

    def compact(self, budget: int) -> int:
        free = self.memory.free()
        moved = self._do("compact", lambda: self.memory.storage.compact(budget))
        assert 0 <= moved <= budget
        assert self.memory.free() == free
        self.done["moved"] += bool(moved)
        return moved

    def leave_room(self, scratch: int) -> None:
        storage = self.memory.storage
        if storage.spare is not None and scratch > storage.spare:
            self._refused(CapacityTooSmall, "are allowed", lambda: storage.leave_room(scratch))
        else:
            self._do("leave_room", lambda: storage.leave_room(scratch))
            assert storage.scratch == scratch

    # -- always ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, and that the memory reports and holds the same as the dumb model."""
        memory, dumb = self.memory, self.dumb
        memory.check()
        assert set(memory.sequences) == set(dumb.lines)
        assert memory.storage.spare is None or memory.storage.scratch <= memory.storage.spare
        for seq, line in dumb.lines.items():
            assert memory.has(seq)
            assert (memory.length(seq), memory.derived(seq)) == (len(line.tokens), line.derived)
            assert memory.inputs.length(seq) == len(dumb.input_of(seq))
            assert memory._sequences.record(seq).ahead == tuple(line.ahead)
            assert memory._sequences.record(seq).digest == line.digest
        for index, m in enumerate(self.members):
            name, runs, cells = m.group.name, [], []
            assert memory.free()[name] == memory.storage.capacity()[name] - dumb.used(index)
            for seq, line in dumb.lines.items():
                span = memory.held(seq)[name]
                assert list(range(span.start, span.end)) == sorted(line.held[index])
                runs += memory._sequences.known(seq)[index].runs
                cells += [line.held[index][pos] for pos in sorted(line.held[index])]
            self._check_runs(m, runs, cells)
            self._check_claims(index, m)
        for number, claim in dumb.claims.items():
            known = memory.claims.of(number)
            assert (known.span, list(known.ahead), known.derived) == (claim.span, claim.ahead, claim.derived)
            assert (known.digest, known.checkpoints.keys()) == (claim.digest, claim.checkpoints.keys())
        assert set(memory.claims) == set(dumb.claims)

    def _check_claims(self, index: int, m: Member) -> None:
        runs: list[Any] = []
        cells: list[Cell] = []
        for number, claim in self.dumb.claims.items():
            known = self.memory.claims.of(number)
            tables = [(known.tables.get(index), claim.held.get(index))]
            tables += [
                (known.checkpoints[pos].windows.get(index), of.get(index)) for pos, of in claim.checkpoints.items()
            ]
            for table, held in tables:
                assert (table is None) == (held is None)
                if table is not None and held is not None:
                    assert list(range(table.first, table.end)) == sorted(held)
                    runs += table.runs
                    cells += [held[pos] for pos in sorted(held)]
        self._check_runs(m, runs, cells)
