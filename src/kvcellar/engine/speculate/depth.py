"""depth: how many drafts each completion gets in the next round: as many as give the most tokens per second, or none.

A step of S completions with d drafts together has S + d rows, and takes the seconds of the curve for about S
completions (`cost.py`). It gives S tokens, and each draft k of a completion with the probability that drafts 1 to k are
all accepted (`Rates`). That falls with k, so the best d drafts of a step are those with the highest probabilities,
whatever their completions; the controller takes the d with the most tokens per second. Only what was measured is
compared, and drafting has to be better than plain decoding by a margin.

What is not chosen is measured in probes: no drafts, fewer, more. What probes cost, in seconds beyond what the choice
would have taken for as many tokens, is limited to a share of the time so far. All steps may become slower or faster
between two probes, by other load or longer texts. So rounds of the choice tell how fast the machine is now (`drift`),
and a probe is compared with the rounds around it: seconds are divided by the drift before they enter a curve.

Always true:
  * between probes, the depths have more tokens per second than plain decoding, by what was measured, or are 0;
  * the seconds lost to probes are at most `LOSS` of all seconds, twice `FIRST` plain steps, `TRIAL` for each trial, and
    one probe of each kind.

`Rates` has the probability that draft k of a round is accepted if those before it were, learnt from the rounds so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcellar.engine.speculate.chain import Key
from kvcellar.engine.speculate.cost import Curve, Track, rounded

FORGET = 0.97  # weight of what was known when a draft is tried: about the last 30 count
PRIOR = 6.0  # a completion begins as if it had tried so many drafts, with the rate of all completions
TRUSTED = 6  # tries from which on a rate is used to choose a depth


class Rates:
    """Of all completions, or with `common` of one. Positions count from 0."""

    def __init__(self, common: "Rates | None" = None) -> None:
        self._common = common
        self._tries: list[int] = []
        self._weight: list[float] = []
        self._accepted: list[float] = []

    @property
    def trusted(self) -> int:
        """The number of first positions that were tried often."""
        return next((pos for pos, tries in enumerate(self._tries) if tries < TRUSTED), len(self._tries))

    @property
    def tried(self) -> int:
        """The number of first positions that were tried at all."""
        return len(self._tries)

    def rate(self, pos: int) -> float:
        """A position that was never tried has the rate of the one before it, and the first one 1."""
        if self._common is not None:
            prior = self._common.rate(pos)
            if pos >= len(self._tries):
                return prior
            return (self._accepted[pos] + PRIOR * prior) / (self._weight[pos] + PRIOR)
        if pos < len(self._tries):
            return self._accepted[pos] / self._weight[pos]
        return self._accepted[-1] / self._weight[-1] if self._tries else 1.0

    def add(self, tried: int, accepted: int) -> None:
        """A round in which the first `tried` drafts were compared, and the first `accepted` accepted."""
        for pos in range(tried):
            if pos == len(self._tries):
                self._tries.append(0)
                self._weight.append(0.0)
                self._accepted.append(0.0)
            self._tries[pos] += 1
            self._weight[pos] = self._weight[pos] * FORGET + 1
            self._accepted[pos] = self._accepted[pos] * FORGET + (pos < accepted)


LOSS = 0.01  # share of all seconds that probes may lose
FIRST = 1.5  # plain steps that those of plain decoding and the others may each lose before that
TRIAL = 6.0  # plain steps that probes may lose where a drafter is tried that has first to read texts
SAVED = 8.0  # plain steps of unused allowance that are kept
MARGIN = 1.02  # that drafting has to gain
WORST = 1.25  # a row of a wider step costs at most so many times a row of a plain one
DRIFT = 0.2  # weight of a round of the choice in how fast the machine is
EVERY = 2  # rounds from one probe to the next, at least
NEVER = 1000  # rounds since the last measurement of what was never measured
PLAIN = 3  # measurements of plain decoding before anything is drafted


class Limit(NamedTuple):
    """The most drafts that a completion can have in the next round: what it may still generate, and what the drafter
    can propose."""

    key: Key
    most: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A completion in a round: how many drafts it had, how many were compared, and how many were accepted."""

    key: Key
    drafted: int
    tried: int
    accepted: int


class _Place(NamedTuple):
    """A draft that a completion could have: the probability that it becomes a token, and where it is."""

    gain: float
    row: int  # of the completions
    pos: int


@dataclass(slots=True)
class _Choice:
    """What the last `choose` returned: drafts, whether they are a probe, and whether drafts are the best choice. `pace`
    is the seconds per token without a probe."""

    drafts: int
    probe: bool
    pace: float
    drafting: bool = False


@dataclass(slots=True)
class _Purse:
    """Seconds that probes of plain decoding may lose now, and other probes. Apart, so that none of them uses up what
    the others need."""

    plain: float
    other: float

    def fill(self, seconds: float, most: float) -> None:
        self.plain = min(self.plain + seconds, most)
        self.other = min(self.other + seconds, most)


class DepthController:
    """Learns as long as an engine runs, across its requests. With `catches_up` the drafter computes what it has missed
    when it drafts again, so the first of several drafted rounds is not representative."""

    def __init__(self, *, catches_up: bool) -> None:
        self._catches_up = catches_up
        self._curves: dict[int, Curve] = {}
        self._rates = Rates()
        self._own: dict[Key, Rates] = {}
        self._plain: dict[int, int] = {}  # rounds without drafts so far, by size of the step
        self._seen: dict[tuple[int, int], int] = {}  # the round that last had so many drafts, by size of the step
        self._round = 0
        self._probed = 0  # the round of the last probe
        self._purse: _Purse | None = None  # None: nothing is measured
        self._again: int | None = None  # drafts of a probe that is repeated: one was not enough
        self._drafted: set[Key] = set()  # completions that had drafts since the last round without any
        self._funds = catches_up  # whether probes may lose `TRIAL` plain steps from now on
        self._drift = Track(1.0)  # how many times as long steps take as the curves have it
        self._choice = _Choice(0, False, 0.0)

    # -- before a round -----------------------------------------------------------------------------------------

    def choose(self, limits: Sequence[Limit]) -> list[int]:
        """The depth of each completion in the next round."""
        size, curve = _size(len(limits)), self._curve(len(limits))
        if self._plain.get(size, 0) < PLAIN or not any(limit.most for limit in limits):
            self._choice = _Choice(0, False, 0.0)
            return [0] * len(limits)
        places = self._places(limits, self._rates.trusted)
        drafts, pace = self._best(len(limits), places, curve)
        self._choice = _Choice(drafts, False, pace, drafts > 0)
        if (probe := self._probe(limits, drafts, pace, curve)) is not None:
            places = self._places(limits, self._reach)
            self._choice = _Choice(probe, True, pace, drafts > 0)
            drafts = probe
        depths = [0] * len(limits)
        for place in places[:drafts]:
            depths[place.row] += 1
        return depths

    def _places(self, limits: Sequence[Limit], reach: int) -> list[_Place]:
        """All drafts that could be had, the most probable first. Those of a completion are in order."""
        found: list[_Place] = []
        for row, limit in enumerate(limits):
            rates, gain = self._own.get(limit.key, self._rates), 1.0
            for pos in range(min(limit.most, reach)):
                gain *= rates.rate(pos)
                found.append(_Place(gain, row, pos))
        return sorted(found, key=lambda place: (-place.gain, place.pos))

    def _best(self, sequences: int, places: Sequence[_Place], curve: Curve) -> tuple[int, float]:
        """The number of drafts with the most tokens per second, and its seconds per token."""
        best, pace = 0, curve.seconds(sequences) / sequences
        limit = pace / MARGIN
        tokens = float(sequences)
        for count, place in enumerate(places, start=1):
            rows = sequences + count
            if rows > curve.most:
                break
            tokens += place.gain
            if rounded(rows) == rows and (found := curve.seconds(rows) / tokens) < limit:
                best, pace, limit = count, found, found
        return best, pace

    @property
    def _reach(self) -> int:
        """How deep a probe may be."""
        return 2 * self._rates.trusted + 1

    def _probe(self, limits: Sequence[Limit], drafts: int, pace: float, curve: Curve) -> int | None:
        """How many drafts to measure in the next round instead of the best number; None: none."""
        most = sum(min(limit.most, self._reach) for limit in limits)
        if self._again is not None:
            again, self._again = min(self._again, most), None
            return again if again != drafts else None
        if self._round - self._probed < EVERY:
            return None
        n, purse = len(limits), self._purse
        if purse is None:
            return None
        if drafts and self._loss(n, (), pace, curve) <= purse.plain:
            return 0
        places = self._places(limits, self._reach)
        few = max(1, n // 2)  # a step takes about as long with less
        counts = {few, n, 2 * n, drafts // 2, drafts - few, drafts + few, min(2 * drafts + n, most)} - {0, drafts}
        found = [
            (self._due(_size(n), count, loss, curve.seconds(n)), count, loss)
            for count in counts
            if 0 < count <= most
            and (loss := self._loss(n, places[:count], pace, curve)) < SAVED * curve.seconds(n)
            and (count <= drafts + n or self._hopeful(n, places[:count], pace, curve))
        ]
        _, count, loss = max(found, default=(0.0, None, 0.0))
        return count if loss <= purse.other else None

    def _due(self, size: int, count: int, loss: float, plain: float) -> float:
        """How long so many drafts were not measured, by what it loses: each may lose about as much as another. What is
        due is waited for until it can be paid."""
        return (self._round - self._seen.get((size, count), -NEVER)) / max(loss, 0.02 * plain)

    def _loss(self, n: int, places: Sequence[_Place], pace: float, curve: Curve) -> float:
        """Seconds that a step of `n` completions with these drafts loses, if those not tried often are rejected."""
        rows = n + len(places)
        tokens = n + sum(place.gain for place in places if place.pos < self._rates.trusted)
        return min(curve.seconds(rows), WORST * curve.seconds(n) * rows / n) - tokens * pace

    def _hopeful(self, n: int, places: Sequence[_Place], pace: float, curve: Curve) -> bool:
        """Could these drafts be better than the choice, if rows beyond those measured cost nothing?"""
        hoped = n + sum(place.gain for place in places)
        return curve.seconds(min(n + len(places), curve.most)) < hoped * pace

    # -- after a round ------------------------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[Outcome], seconds: float | None, *, proposed: float = 0.0) -> float:
        """What became of a round, and how long it took with its drafts, of which `proposed` seconds in the drafter.
        Without `seconds` (the step had other rows, too) only acceptance is learnt. Returns the seconds that plain
        decoding of the same tokens would have taken longer, by what was measured: negative if drafts were a loss."""
        for outcome in outcomes:
            if outcome.tried:
                self._own.setdefault(outcome.key, Rates(self._rates)).add(outcome.tried, outcome.accepted)
                self._rates.add(outcome.tried, outcome.accepted)
        if not outcomes or (seconds is not None and seconds <= 0):
            return 0.0
        self._round += 1
        curve, rows = self._curve(len(outcomes)), sum(1 + outcome.drafted for outcome in outcomes)
        late = self._is_late(outcomes)
        if seconds is not None:
            self._measure(outcomes, seconds, late)
        elif curve.most and self._choice.probe and self._purse is not None:  # as much as where it is alone
            self._pay(outcomes, curve.seconds(rows))
        if not curve.most:
            return 0.0
        tokens = sum(1 + outcome.accepted for outcome in outcomes)
        won = tokens / len(outcomes) * curve.seconds(len(outcomes)) - curve.seconds(rows)
        return self._drift.value * won - (proposed if late else 0.0)

    def _is_late(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the drafter was catching up: a completion has its first drafts, or none that were chosen."""
        drafted = {outcome.key for outcome in outcomes if outcome.drafted}
        first, self._drafted = not drafted <= self._drafted, self._drafted | drafted if drafted else drafted
        return self._catches_up and (first or self._missed(outcomes))

    def _missed(self, outcomes: Sequence[Outcome]) -> bool:
        return sum(outcome.drafted for outcome in outcomes) < self._choice.drafts

    def _measure(self, outcomes: Sequence[Outcome], seconds: float, late: bool) -> None:
        sequences, drafts = len(outcomes), sum(outcome.drafted for outcome in outcomes)
        size, curve = _size(sequences), self._curve(sequences)
        known, unsure = curve.measured(sequences + drafts), late
        # Rounds in which the drafter was still catching up say nothing of a step without drafts, nor of one with fewer.
        if not late and known is not None and not self._choice.probe:
            self._drift.add(seconds / known, DRIFT)
        seconds /= self._drift.value
        if not late:
            if known is None or self._choice.probe or drafts != self._choice.drafts:
                unsure = curve.add(sequences + drafts, seconds)
            self._seen[size, drafts] = self._round
            self._plain[size] = self._plain.get(size, 0) + (not drafts)
        if not curve.most:
            return
        self._fill_purse(seconds, curve.seconds(sequences))
        if late and not drafts:
            if self._choice.probe and self._rates.trusted:  # what was never tried is first caught up with, at any cost
                self._pay(outcomes, seconds)
        elif self._choice.probe and (drafts or not self._choice.drafts):
            self._pay(outcomes, seconds if late else curve.seconds(sequences + drafts))
            if unsure:
                self._again = drafts

    def _fill_purse(self, seconds: float, plain: float) -> None:
        """Allow probes to lose a share of a round's seconds; `plain` are those of a plain step."""
        if self._purse is None:
            self._purse = _Purse(FIRST * plain, FIRST * plain)
        if self._funds:
            self._purse.other, self._funds = max(self._purse.other, TRIAL * plain), False
        self._purse.fill(LOSS / 2 * min(seconds, 4 * plain), SAVED * plain)

    def _pay(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Take what a probe has lost from the allowance."""
        self._probed = self._round
        tokens = float(len(outcomes))
        for outcome in outcomes:
            rates, gain = self._own.get(outcome.key, self._rates), 1.0
            for pos in range(min(outcome.drafted, self._rates.tried)):
                gain *= rates.rate(pos)
                tokens += gain
        loss = max(0.0, seconds - tokens * self._choice.pace)
        assert self._purse is not None
        if self._choice.drafts:
            self._purse.other -= loss
        else:
            self._purse.plain -= loss

    def begin_trial(self) -> None:
        """The drafter is used again after a while: find out soon whether that pays."""
        self._funds = True

    # -- beside -------------------------------------------------------------------------------------------------

    def plain_seconds(self, sequences: int) -> float | None:
        """Expected seconds of a step of so many completions without drafts; None: not measured yet."""
        curve = self._curves.get(_size(sequences))
        return self._drift.value * curve.seconds(sequences) if curve is not None and curve.most else None

    @property
    def drafting(self) -> bool:
        """Whether drafts were the last choice, probes apart."""
        return self._choice.drafting

    def acceptance(self) -> tuple[float, ...]:
        """The rate at which each draft is accepted if those before it were, where that is known."""
        return tuple(self._rates.rate(pos) for pos in range(self._rates.trusted))

    def forget(self, key: Key) -> None:
        """A completion has ended."""
        self._own.pop(key, None)
        self._drafted.discard(key)

    def _curve(self, sequences: int) -> Curve:
        return self._curves.setdefault(_size(sequences), Curve())

    def check(self) -> None:
        """Assert what is always true."""
        for curve in self._curves.values():
            curve.check()


def _size(sequences: int) -> int:
    """Steps of 1, 2, 3 to 4, 5 to 8 ... completions have a curve each."""
    return (sequences - 1).bit_length()
