"""rows: which row has the state of which sequence, after how many tokens. No torch.

A row is what all recurrent layers of a model remember of one sequence at one position. It is written by the step that
took it, and never again: who forks shares it, and whoever goes on writes another. So a fork copies nothing, a step that
is given up leaves nothing behind, and where a state was captured one can go back to it.

Always true:
  * row 0 is null, the state of a sequence that has read nothing; nobody takes it or gives it back;
  * every other row is free, or somebody holds it: the open step that took it, tracks whose state it is, or tracks that
    have captured it;
  * the captures of a track are in order, all behind position 0 and none beyond its end.

Nothing here decides what is kept: rows are only counted, and `policy` ranks what could go.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, pairwise

from kvcellar.errors import BadRequest, CacheFull, shown
from kvcellar.plan import Batch, StateSegment
from kvcellar.policy import Candidate
from kvcellar.spans import Span

NAME = "recurrent"  # what messages and reports call the rows


class Track:
    """One sequence: `row` is its state after `end` tokens; `captured` has rows by position, `places` these in order."""

    __slots__ = ("captured", "end", "places", "row")

    def __init__(self) -> None:
        self.end = self.row = 0
        self.captured: dict[int, int] = {}
        self.places: list[int] = []

    def deepest(self, pos: int) -> int:
        """The largest position up to `pos` whose state is there."""
        if pos >= self.end:
            return self.end
        i = bisect_right(self.places, pos)
        return self.places[i - 1] if i else 0

    def at(self, pos: int) -> int:
        """The row of a position whose state is there."""
        return self.row if pos == self.end else self.captured[pos] if pos else 0


class Row:
    """A row that somebody holds. `number` says when it was taken; `saves` are the tokens that its captures save."""

    __slots__ = ("captors", "held", "number", "own", "saves", "stands", "taken", "used")

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = True  # by the open step
        self.own = 0  # tracks whose state it is
        self.held = 0  # checkpoints of claims
        self.captors: dict[Track, int] = {}  # tracks that have captured it, and at which position
        self.saves = 0
        self.stands = 1  # captures, itself and those behind it that were let go: who wants them comes here
        self.used = 0  # when it was captured or gone back to, as `Rows` counts that

    @property
    def kept(self) -> bool:
        """Only for going back to."""
        return bool(self.captors) and not self.own and not self.held


class Rows:
    """The rows of one memory: `capacity` of them, the null row apart."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity, 0, -1))
        self._rows: dict[int, Row] = {}
        self._kept: set[int] = set()  # rows that are kept for going back to, and for nothing else
        self._tracks: dict[int, Track] = {}
        self._step: list[StateSegment] = []
        self._between: dict[tuple[int, int], int] = {}  # of the open step, by sequence and position inside a feed
        self._numbers = count()
        self._uses = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def end(self, seq: int) -> int:
        track = self._tracks.get(seq)
        return track.end if track is not None else 0

    def points(self, seq: int) -> tuple[int, ...]:
        """The positions at which `seq` could go on, in order, 0 apart."""
        track = self._tracks.get(seq)
        if track is None:
            return ()
        return (*track.places, track.end) if track.end and track.end not in track.captured else tuple(track.places)

    def deepest(self, seq: int, pos: int) -> int:
        track = self._tracks.get(seq)
        return track.deepest(pos) if track is not None else 0

    # -- a step -------------------------------------------------------------------------------------------------

    def admit(self, batch: Batch) -> None:
        """Raise `BadRequest` if rows that only ask are not at the end, `CacheFull` if there are too few free rows."""
        for feed in batch.feeds:
            if not feed.stores and feed.pos.start != self.end(feed.seq):
                raise BadRequest(
                    f"rows of sequence {feed.seq} that only ask must follow its end at {self.end(feed.seq)}, not begin "
                    f"at {feed.pos.start}: recurrent layers know no other place"
                )
        need = sum(feed.stores + len(feed.between) for feed in batch.feeds)
        if need > self.free:
            raise CacheFull(NAME, need, self.free, unit="rows")

    def begin(self, batch: Batch) -> tuple[StateSegment, ...]:
        """Take a row for every feed that stores. The caller has seen that `admit` lets them, and opened what is new."""
        row = 0
        for feed in batch.feeds:
            read, write = self._tracks[feed.seq].row, self._take() if feed.stores else 0
            self._step.append(StateSegment(feed.seq, row, len(feed.pos), read, write))
            row += len(feed.pos)
            for pos in feed.between:
                self._between[feed.seq, pos] = self._take()
        return tuple(self._step)

    def new(self, seq: int) -> int:
        """The row of the open step that becomes the state of a sequence."""
        return next(segment.write for segment in self._step if segment.seq == seq)

    def between(self, seq: int, pos: int) -> int:
        """The row of the open step for a checkpoint inside a feed."""
        return self._between[seq, pos]

    def null(self, batch: Batch) -> tuple[StateSegment, ...]:
        """As `begin`, of a step that is only tried: every sequence begins, and no row is taken."""
        segments: list[StateSegment] = []
        row = 0
        for feed in batch.feeds:
            segments.append(StateSegment(feed.seq, row, len(feed.pos), 0, 0))
            row += len(feed.pos)
        return tuple(segments)

    def check_parts(self, batch: Batch, counts: Sequence[int]) -> None:
        """Raise `BadRequest` if a part of a feed is kept, and it was not said beforehand that this might be."""
        for feed, kept in zip(batch.feeds, counts, strict=True):
            if 0 < kept < len(feed.pos) and not feed.revertible:
                raise BadRequest(
                    f"{kept} of {len(feed.pos)} new tokens of sequence {feed.seq} cannot be kept: its feed was not "
                    f"begun as revertible"
                )

    def writes(self, batch: Batch, counts: Sequence[int]) -> dict[int, int]:
        """The rows of the open step that would be kept, with so many tokens of each feed, and whose they are."""
        feeds = zip(self._step, batch.feeds, counts, strict=True)
        return {segment.write: segment.seq for segment, feed, kept in feeds if feed.stores and kept}

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        """Each sequence goes on from the row that the step took for it, if it keeps any of its tokens."""
        segments = self._closed()
        for segment, feed, kept in zip(segments, batch.feeds, counts, strict=True):
            if not feed.stores:
                continue
            track = self._tracks[feed.seq]
            if kept:
                self._become(track, segment.write, feed.pos.start + kept)
            if feed.capture and kept == len(feed.pos):
                self._capture(track, track.end, track.row)
            self._let_go(segment.write)

    def abandon(self) -> None:
        """Give back what the step took."""
        for segment in self._closed():
            self._let_go(segment.write)

    def _closed(self) -> list[StateSegment]:
        """What the step took, which ends now; of rows inside its feeds only those stay that claims hold."""
        segments, between = self._step, self._between
        self._step, self._between = [], {}
        for row in between.values():
            self._let_go(row)
        return segments

    # -- sequences ----------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, kept: int) -> None:
        """`dst` shares what `src` has up to `kept`, and nothing else."""
        source, before = self._tracks[src], self._tracks.get(dst)
        track = self._tracks[dst] = Track()
        self._become(track, source.at(kept), kept)
        self._use(track.row)
        self._capture(source, kept, track.row)  # where two part, one may want to go back to
        for pos in source.places[: bisect_right(source.places, kept)]:
            self._capture(track, pos, source.captured[pos])
        if before is not None:  # not sooner: what it was may be all that holds what is shared
            self._forget(before)

    def open(self, seq: int) -> None:
        self._tracks.setdefault(seq, Track())

    def cut(self, seq: int, kept: int) -> None:
        track = self._tracks[seq]
        if kept < track.end:
            self._use(track.at(kept))
        self._become(track, track.at(kept), kept)
        self._release(track, track.places[bisect_right(track.places, kept) :])

    def capture(self, seq: int) -> None:
        """Keep the state that `seq` has now."""
        track = self._tracks[seq]
        self._capture(track, track.end, track.row)

    def close_over(self, seq: int, gone: Span) -> None:
        raise AssertionError("a state cannot forget what came in between")

    def drop(self, seq: int) -> None:
        track = self._tracks.pop(seq, None)
        if track is not None:
            self._forget(track)

    # -- claims -------------------------------------------------------------------------------------------------

    def row(self, seq: int, pos: int) -> int:
        """The row of a position whose state is there."""
        return self._tracks[seq].at(pos)

    def hold(self, row: int) -> None:
        """One more holder for a row that is held already; the null row 0 is not counted."""
        if row:
            self._change_holds(row, 1)

    def take_hold(self) -> int:
        """A free row with one holder. Raises `CacheFull` if there is none."""
        if not self._free:
            raise CacheFull(NAME, 1, 0, unit="rows")
        row = self._take()
        self._rows[row].taken, self._rows[row].held = False, 1
        return row

    def drop_hold(self, row: int) -> None:
        if row:
            self._change_holds(row, -1)
            self._give_back(row)

    def _change_holds(self, row: int, by: int) -> None:
        kept = self._rows[row].kept
        self._rows[row].held += by
        self._count(row, kept)

    def exclusive(self, rows: Iterable[int]) -> int:
        """How many rows would be free without these holds."""
        times = Counter(row for row in rows if row)
        found = {row: self._rows[row] for row in times}
        return sum(not (one.taken or one.own or one.captors) and one.held == times[row] for row, one in found.items())

    def resume(self, seq: int, pos: int, row: int) -> None:
        """A sequence that was opened just now goes on from `row`, of `pos` tokens."""
        track = self._tracks[seq]
        self._become(track, row, pos)
        self._use(row)

    def check_holds(self, holds: Mapping[int, int]) -> None:
        """Assert that claims hold just these rows, so often."""
        assert holds == {row: found.held for row, found in self._rows.items() if found.held}

    # -- inside -------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        row = self._free.pop()
        self._rows[row] = Row(next(self._numbers))
        return row

    def _let_go(self, row: int) -> None:
        """The step that took it, if one did, does not hold it any more."""
        if row:
            self._rows[row].taken = False
            self._give_back(row)

    def _become(self, track: Track, row: int, end: int) -> None:
        """From now on `row` is the track's own state, of `end` tokens."""
        before, track.row, track.end = track.row, row, end
        for of, by in ((row, 1), (before, -1)):
            if of:
                kept = self._rows[of].kept
                self._rows[of].own += by
                self._count(of, kept)
        if before:
            self._give_back(before)

    def _capture(self, track: Track, pos: int, row: int) -> None:
        """`pos` is behind all that the track has captured, or is captured already."""
        if not pos or pos in track.captured:
            return
        found = self._rows[row]
        kept = found.kept
        if not found.captors:
            self._use(row)
        found.captors[track] = pos
        found.saves += pos - (track.places[-1] if track.places else 0)
        track.captured[pos] = row
        track.places.append(pos)
        self._count(row, kept)

    def _use(self, row: int) -> None:
        """It is captured, or somebody goes on from it."""
        if row:
            self._uses += 1
            self._rows[row].used = self._uses

    def _release(self, track: Track, places: Iterable[int]) -> None:
        for pos in places:
            self._release_one(track, pos)

    def _release_one(self, track: Track, pos: int) -> None:
        """What it saved is saved by the next one from now on."""
        i = bisect_right(track.places, pos) - 1
        saved = pos - (track.places[i - 1] if i else 0)
        del track.places[i]
        row = track.captured.pop(pos)
        found = self._rows[row]
        kept = found.kept
        del found.captors[track]
        found.saves -= saved
        self._count(row, kept)
        self._give_back(row)
        if i < len(track.places):
            self._rows[track.captured[track.places[i]]].saves += saved

    def _forget(self, track: Track) -> None:
        self._release(track, track.places[::-1])
        self._become(track, 0, 0)

    def _give_back(self, row: int) -> None:
        """Unless somebody holds it."""
        found = self._rows[row]
        if not (found.taken or found.own or found.captors or found.held):
            del self._rows[row]
            self._free.append(row)

    def _count(self, row: int, was_kept: bool) -> None:
        """Who holds a row has changed."""
        kept = self._rows[row].kept
        if kept != was_kept:
            (self._kept.add if kept else self._kept.discard)(row)

    # -- what could go ------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many rows are kept for going back to, and for nothing else."""
        return len(self._kept)

    def candidates(self) -> list[Candidate]:
        """These, as the policy ranks them. Costs the rows that are kept."""
        found = ((row, self._rows[row]) for row in self._kept)
        return [Candidate(row, one.saves, one.stands, self._uses - one.used, one.number) for row, one in found]

    def evict(self, row: int) -> None:
        """Give up a row that is kept only for going back to: what wanted it resumes from the one before."""
        if row not in self._kept:
            raise BadRequest(f"row {shown(row)} is not kept just for going back to")
        found = self._rows[row]
        heirs: set[int] = set()
        for track, pos in list(found.captors.items()):
            before = bisect_right(track.places, pos) - 2
            if before >= 0:
                heirs.add(track.captured[track.places[before]])
            self._release_one(track, pos)
        for heir in heirs:  # once, in however many tracks it comes before: `saves` counts those
            self._rows[heir].stands += found.stands

    def check(self, lengths: Mapping[int, int]) -> None:
        """Assert what is always true, where `lengths` are those of all sequences."""
        assert self._tracks.keys() == lengths.keys(), "a sequence has no track, or a track no sequence"
        own: dict[int, int] = {}
        captors: dict[int, dict[Track, int]] = {}
        saves: dict[int, int] = {}
        for seq, track in self._tracks.items():
            assert track.end == lengths[seq], f"the state of sequence {seq} is of {track.end}, not of {lengths[seq]}"
            assert (track.row == 0) == (track.end == 0), f"sequence {seq} has row {track.row} at {track.end}"
            assert track.places == sorted(track.captured)
            assert all(0 < pos <= track.end for pos in track.places)
            assert track.captured.get(track.end, track.row) == track.row
            if track.row:
                own[track.row] = own.get(track.row, 0) + 1
            for before, pos in pairwise([0, *track.places]):
                row = track.captured[pos]
                captors.setdefault(row, {})[track] = pos
                saves[row] = saves.get(row, 0) + pos - before
        taken = {segment.write for segment in self._step} - {0} | set(self._between.values())
        holds = {row for row, found in self._rows.items() if found.held}
        assert self._rows.keys() == taken | own.keys() | captors.keys() | holds
        for row, found in self._rows.items():
            assert found.taken == (row in taken)
            assert found.own == own.get(row, 0), f"row {row} is the state of {own.get(row, 0)}, counted {found.own}"
            assert (found.captors, found.saves) == (captors.get(row, {}), saves.get(row, 0))
            assert len(set(found.captors.values())) <= 1, f"row {row} was captured at different positions"
            assert found.stands >= 1 and 0 <= found.used <= self._uses
        assert self._kept == {row for row, found in self._rows.items() if found.kept}
        assert sorted([*self._free, *self._rows]) == list(range(1, self.capacity + 1))


class NoRows:
    """The rows of a memory without recurrent layers: no sequence needs one. How many tokens each has is kept, because
    no table says so in a memory without groups."""

    free = capacity = None
    kept = 0

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def end(self, seq: int) -> int:
        return self._ends.get(seq, 0)

    def points(self, seq: int) -> None:
        return None

    def deepest(self, seq: int, pos: int) -> int:
        return pos

    def admit(self, batch: Batch) -> None:
        return

    def begin(self, batch: Batch) -> tuple[StateSegment, ...]:
        return ()

    def candidates(self) -> list[Candidate]:
        return []

    def evict(self, row: int) -> None:
        raise BadRequest("this memory has no rows: no layer is recurrent")

    def row(self, seq: int, pos: int) -> int:
        return 0

    def new(self, seq: int) -> int:
        return 0

    def between(self, seq: int, pos: int) -> int:
        return 0

    def hold(self, row: int) -> None:
        return

    def take_hold(self) -> int:
        return 0

    def drop_hold(self, row: int) -> None:
        return

    def exclusive(self, rows: Iterable[int]) -> int:
        return 0

    def resume(self, seq: int, pos: int, row: int) -> None:
        self._ends[seq] = pos

    def check_holds(self, holds: Mapping[int, int]) -> None:
        """Assert that there are none."""
        assert not holds

    def null(self, batch: Batch) -> tuple[StateSegment, ...]:
        return ()

    def check_parts(self, batch: Batch, counts: Sequence[int]) -> None:
        return

    def writes(self, batch: Batch, counts: Sequence[int]) -> dict[int, int]:
        return {}

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        for feed, kept in zip(batch.feeds, counts, strict=True):
            if feed.stores:
                self._ends[feed.seq] = feed.pos.start + kept

    def abandon(self) -> None:
        return

    def open(self, seq: int) -> None:
        self._ends.setdefault(seq, 0)

    def fork(self, src: int, dst: int, kept: int) -> None:
        self._ends[dst] = kept

    def cut(self, seq: int, kept: int) -> None:
        self._ends[seq] = kept

    def close_over(self, seq: int, gone: Span) -> None:
        self._ends[seq] -= len(gone)

    def capture(self, seq: int) -> None:
        return

    def drop(self, seq: int) -> None:
        self._ends.pop(seq, None)

    def check(self, lengths: Mapping[int, int]) -> None:
        """Assert that a sequence is here if it is in memory, and as long."""
        assert self._ends == lengths, f"sequences end at {self._ends}, not at {lengths}"
