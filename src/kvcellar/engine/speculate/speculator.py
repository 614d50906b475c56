"""speculator: one drafter with its depth control and its reports: all that the engine calls.

    chains = [Chain(...), ...]             # one for each completion in decode
    speculator.draft(chains)               # adds drafts, or none; not while it is `parked`: `rest` then
    verified = verify(chains, logits)      # in the step, with the logits of all rows of the chains
    speculator.learn(chains, verified)     # at the end of the step
    speculator.close(key)                  # the completion ended, was preempted, or its text was changed
    speculator.conclude(request)           # all completions of the request have ended

Always true:
  * `draft` never raises: a drafter that does proposes nothing in this round, and nothing more after `FAILURES` such
    rounds one after the other; `refused` is the reason then;
  * a step that fails between `draft` and `learn` leaves no trace: it is not counted, and the chains are dropped;
  * a drafter that is parked (`Parking`) is not called but to drop texts, and reads none.

A drafter that reads hidden states, or computes what it has missed, costs time beside its drafts: hidden states of each
step, the prompts, what it catches up with. So it is compared with plain decoding as a whole: what its rounds have won,
less all of that. Where this does not pay it is parked, and costs nothing, until a trial. Trials become rarer as long
as they fail.

Always true:
  * since the last time that it had won `KEPT` plain steps or more, or a trial began, it has lost at most `MOST` plain
    steps and one call of the drafter;
  * after a trial that has lost something, it is parked for at least `1 / SHARE` times as long.
"""

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from kvcellar.engine.speculate.chain import Chain, Key, Verified
from kvcellar.engine.speculate.depth import DepthController, Limit, Outcome
from kvcellar.engine.speculate.drafter import Committed, Drafter
from kvcellar.events import Speculation

KEPT = 8.0  # plain steps of what was won that later losses are set against
MOST = 8.0  # plain steps that it may lose
IDLE = 96  # rounds without drafts, but for probes, after which it is parked
SHORTEST, LONGEST = 128.0, 4096.0  # plain steps from one trial to the next, if little was lost
SHARE = 0.005  # of the time, that trials may lose


class Parking:
    """Of one drafter, for all its texts. It begins with a trial."""

    def __init__(self) -> None:
        self.parked = False
        self._won = 0.0  # seconds, negative: lost
        self._plain = math.inf  # seconds of a plain step, by the last round
        self._idle = 0
        self._wait = SHORTEST
        self._left = 0.0  # plain steps until the next trial

    def spend(self, seconds: float) -> None:
        """The drafter has taken so long beside a round."""
        if not self.parked:
            self._won -= seconds
            self._park_if_lost()

    def rest(self) -> bool:
        """A round of plain decoding is over, for which the drafter was parked. Returns whether a trial begins."""
        self._left -= 1
        self.parked = self._left > 0
        return not self.parked

    def observe(self, won: float, plain: float, *, drafting: bool) -> None:
        """A round is over, with so many seconds less than plain decoding of its tokens takes, of which a step takes
        `plain` seconds. `drafting`: drafts were the choice, not a probe."""
        self._plain = plain
        self._won = min(self._won + won, KEPT * plain)
        self._idle = 0 if drafting else self._idle + 1
        if self._won >= KEPT * plain:
            self._wait = SHORTEST
        if self._idle >= IDLE:
            self._park()
        else:
            self._park_if_lost()

    def _park_if_lost(self) -> None:
        if self._won < -MOST * self._plain:
            self._park()

    def _park(self) -> None:
        lost = max(0.0, -self._won) / self._plain
        self._left = max(self._wait, lost / SHARE)
        self._wait = min(2 * self._wait, LONGEST)
        self.parked, self._won, self._idle = True, 0.0, 0

    def check(self) -> None:
        """Assert what is always true."""
        assert not self.parked or self._left > 0
        assert SHORTEST <= self._wait <= LONGEST
        assert self._idle < IDLE


PARTS = 8  # of the rounds, for the depth over time


@dataclass(slots=True)
class Totals:
    """Of all requests since the start. A round is that of one completion."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    saved: float = 0.0

    def add(self, drafted: int, accepted: int, saved: float) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.saved += saved


class Tally:
    """Counts the rounds of a request, of all its completions."""

    def __init__(self) -> None:
        self._depths = array("H")  # drafts of each round
        self._tried: list[int] = []
        self._accepted: list[int] = []
        self._saved = 0.0

    def add(self, drafted: int, tried: int, accepted: int, saved: float) -> None:
        """A round with `drafted` drafts, of which the first `tried` were compared and the first `accepted` became
        tokens, and the seconds that it saved."""
        self._depths.append(drafted)
        self._saved += saved
        missing = [0] * (tried - len(self._tried))
        self._tried += missing
        self._accepted += missing
        for pos in range(tried):
            self._tried[pos] += 1
            self._accepted[pos] += pos < accepted

    def report(self) -> Speculation:
        rounds = len(self._depths)
        parts = min(PARTS, rounds)
        cuts = [rounds * part // parts for part in range(parts + 1)] if parts else [0]
        slices = [self._depths[a:b] for a, b in pairwise(cuts)]
        return Speculation(
            rounds=rounds,
            drafted=sum(self._depths),
            accepted=sum(self._accepted),
            tried_at=tuple(self._tried),
            accepted_at=tuple(self._accepted),
            depths=tuple((sum(part) / len(part), max(part)) for part in slices),
            seconds_saved=self._saved,
        )


log = logging.getLogger("kvcellar.engine.speculate")

FAILURES = 3


class Speculator:
    """Serves all completions of one engine, on its thread."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        deepest: int | None = None,
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`deepest`: the most drafts of a round, if fewer than the drafter's own limit. `fixed`: the depth of every
        round, where that many drafts are of use; None: the depth controller chooses. `clock` measures steps."""
        self.drafter, self._fixed = drafter, fixed
        self.deepest = drafter.deepest if deepest is None else min(deepest, drafter.deepest)
        self.depth = DepthController(catches_up=drafter.catches_up)
        self.totals = Totals()
        self.refused: str | None = None
        self._clock = clock
        self._failures = 0  # calls one after the other, without a round with drafts between them
        self._failed = False  # in this round
        self._started = self._proposed = 0.0  # when the round began, and seconds of `propose` in it
        self._parking = Parking() if drafter.reads_hidden or drafter.catches_up else None
        self._read: set[Key] = set()  # completions whose hidden states the drafter has read
        self._tallies: dict[int, Tally] = {}  # by number of the request

    @property
    def parked(self) -> bool:
        """Whether the drafter is not used for now, because that does not pay."""
        return self._parking is not None and self._parking.parked and self._fixed is None

    @property
    def reads_hidden(self) -> bool:
        """Whether `committed` is to be called."""
        return self.drafter.reads_hidden and self.refused is None and not self.parked

    def draft(self, chains: Sequence[Chain]) -> None:
        """Begin a round. The `room` of a chain is the most drafts that are of use; it becomes the chosen depth."""
        self._started, self._proposed, self._failed = self._clock(), 0.0, False
        limit = 0 if self.refused is not None else self.deepest
        limits = [Limit(chain.key, min(chain.room, limit)) for chain in chains]
        if self._fixed is not None:
            depths = [min(one.most, self._fixed) for one in limits]
        else:
            depths = self.depth.choose(limits)
        for chain, depth in zip(chains, depths, strict=True):
            chain.room = depth
        if asked := [chain for chain in chains if chain.left > 0]:
            began = self._clock()
            try:
                self.drafter.propose(asked)
            except Exception as error:  # noqa: BLE001 - drafts are not worth a failed request
                for chain in asked:
                    chain.cut(0)
                self._fail(error, [chain.key for chain in asked])
            self._proposed = self._clock() - began

    def committed(self, news: Sequence[Committed]) -> None:
        """Pass on what has entered the target's memory, to a drafter that reads hidden states."""
        if self.reads_hidden:
            self._read.update(new.key for new in news)
            with self._spending():
                try:
                    self.drafter.committed(news)
                except Exception as error:  # noqa: BLE001 - drafts are not worth a failed request
                    self._fail(error, [new.key for new in news])

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Around what the drafter does beside its rounds."""
        began = self._clock()
        yield
        if self._parking is not None:
            self._parking.spend(self._clock() - began)
            self._stop_reading_if_parked()

    def step_failed(self, error: Exception) -> None:
        """A step with drafts raised, and is run again without."""
        self._fail(error, ())

    def learn(self, chains: Sequence[Chain], verified: Sequence[Verified], *, alone: bool = True) -> None:
        """End a round. Unless the completions were `alone` in the step, its time is not measured."""
        if not self._failed and any(chain.drafts for chain in chains):
            self._failures = 0
        seconds = self._clock() - self._started if alone else None
        plain = self.depth.plain_seconds(len(chains))
        outcomes: list[Outcome] = []
        for chain, one in zip(chains, verified, strict=True):
            drafted = len(chain.drafts)
            outcomes.append(Outcome(chain.key, drafted, one.tried, one.accepted))
            saved = len(one.drawn) * plain - seconds if drafted and plain and seconds else 0.0
            tally = self._tallies.setdefault(chain.key[0], Tally())
            tally.add(drafted, one.tried, one.accepted, saved)
            self.totals.add(drafted, one.accepted, saved)
        won = self.depth.observe(outcomes, seconds, proposed=self._proposed)
        if self._parking is not None and plain and not self._parking.parked:
            self._parking.observe(won, plain, drafting=self.depth.drafting)
            self._stop_reading_if_parked()

    def rest(self, keys: Sequence[Key]) -> None:
        """A round of these completions is over for which the drafter was parked, in place of `draft` and `learn`."""
        for key in keys:
            self._tallies.setdefault(key[0], Tally()).add(0, 0, 0, 0.0)
            self.totals.add(0, 0, 0.0)
        if self._parking is not None and self._parking.rest():
            self.depth.begin_trial()

    def _stop_reading_if_parked(self) -> None:
        """Drop what the drafter has of texts that it would have to go on reading."""
        if self.parked:
            keys, self._read = self._read, set[Key]()
            for key in keys:
                self._drop(key, keep=False)

    def close(self, key: Key) -> None:
        """Drop what is kept of a completion, except for its part of the report."""
        self.depth.forget(key)
        self._read.discard(key)
        with self._spending():
            self._drop(key, keep=True)

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what is kept of texts that have ended (see `Drafter`). What the drafter raises is raised: it may still
        have what was to be removed."""
        self.drafter.forget(namespace, tokens)

    def fork(self, key: Key, other: Key) -> None:
        """The completion `other` begins with the text of `key`."""
        if key in self._read:
            self._read.add(other)
        with self._spending():
            try:
                self.drafter.fork(key, other)
            except Exception as error:  # noqa: BLE001 - drafts are not worth a failed request
                self._fail(error, [key, other])

    def report(self, request: int) -> Speculation | None:
        """What drafts have done for a request so far; None if it had no round."""
        tally = self._tallies.get(request)
        return tally.report() if tally is not None else None

    def conclude(self, request: int) -> None:
        """A request is done: drop its report."""
        self._tallies.pop(request, None)

    def _fail(self, error: Exception, keys: Sequence[Key]) -> None:
        """The drafter raised, or its drafts made a step raise. What it keeps of these completions may be wrong, and is
        dropped."""
        log.error("drafter %s failed", self.drafter.name, exc_info=error)
        self._failed = True
        for key in keys:
            self._drop(key, keep=False)
        self._failures += 1
        if self._failures >= FAILURES and self.refused is None:
            self.refused = f"{FAILURES} calls in a row failed, the last with {type(error).__name__}: {error}"
            log.error("drafter %s is not used any more: %s", self.drafter.name, self.refused)

    def _drop(self, key: Key, *, keep: bool) -> None:
        try:
            self.drafter.close(key, keep=keep)
        except Exception:
            log.exception("drafter %s could not drop a completion", self.drafter.name)
