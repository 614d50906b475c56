"""scaling: how many replicas of an engine there should be, by what they have measured. No Ray.

    meter.note(stats)                  # in a replica, several times a second
    meter.read()                       # a `Report`, as a mapping
    wanted(reports, target)            # where Serve decides: `target` are there, or are being started

  * work: seconds of prompts that come in a second, lately. Of all replicas together it is how many of them prompts
    keep busy;
  * backlog: seconds that the prompts that wait take. So many more replicas are of use as work it off in the time that
    one takes to start, and `MEAN_SECONDS` at least: what is done by then needs none;
  * room: cells of running sequences and of prompts that wait, over those that there are, or sequences, over the most
    that run at once. Of all replicas together it is how many of them hold all that.

So `n` replicas are enough if `max(work + backlog / start, room) <= n`. One less is enough if that uses at most `SPARE`
of it. What waits for fewer ones is more: by the law of Pollaczek and Khinchine `backlog` is to `1 / (1 - work / n)`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from math import ceil, exp, floor, inf
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from kvcellar.engine.stats import EngineStats

MEAN_SECONDS = 15.0  # in which the weight of work that has come falls to 1 / e
SPARE = 0.8  # of what fewer replicas can do: so those that were ended are not started again at once


class Report(NamedTuple):
    """Of one replica. `start`: seconds that it took until it could be used."""

    work: float
    backlog: float
    room: float
    start: float


def wanted(reports: Sequence[Report], target: int) -> int:
    """So many replicas, with those of the reports among them. 0: nothing runs or waits."""
    if not reports:
        return target
    work, backlog, room, start = map(sum, zip(*reports, strict=True))
    if not (backlog or room):
        return 0
    there = len(reports)
    soon = max(start / there, MEAN_SECONDS)  # earlier it is not known what comes

    def used(replicas: int) -> float:
        """The part of so many."""
        if work >= replicas:
            return inf
        longer = max(1.0, (1 - work / there) / (1 - work / replicas))
        return max(work + backlog * longer / soon, room) / replicas

    found = max(target, floor(work) + 1, ceil(work + backlog / soon), ceil(room))
    while found == target > 1 and used(target - 1) <= SPARE:
        found = target = target - 1
    return found


def calmed(found: int, target: int, peak: int) -> tuple[int, int]:
    """Where fewer are wanted, the most of those that were since then, `peak`, which comes with it: Serve ends replicas
    when fewer have been wanted for a time."""
    if found >= target:
        return found, 0
    peak = max(found, peak if peak < target else 0)
    return peak, peak


def policy(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """As Serve calls it, in its controller; Ray pickles it by value. Calls through handles, by which gateways meet
    replicas (`gateway.py`), do not count: where there is none, Serve itself starts one for a call."""
    raw, room = context.raw_metrics or {}, (context.aggregated_metrics or {}).get("room", {})
    reports = [
        Report(raw["work"][one][-1].value, raw["backlog"][one][-1].value, room[one], raw["start"][one][-1].value)
        for one in context.running_replicas
        if one in room
    ]
    target = context.target_num_replicas
    found, peak = calmed(wanted(reports, target), target, context.policy_state.get("peak", 0))
    return found, {"peak": peak}


class Meter:
    """Measures what a replica reports. From any thread."""

    def __init__(self, start: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._start, self._clock, self._lock = start, clock, threading.Lock()
        self._tokens = 0  # of prompts that have come: computed, and waiting
        self._work = self._backlog = self._room = 0.0
        self._sum = 0.0  # of the room, over seconds, since it was read
        self._at = self._began = clock()

    def note(self, stats: "EngineStats") -> None:
        cells = max((one.cells for one in stats.groups), default=inf)
        used = max((one.used / one.cells for one in stats.groups if one.cells), default=0.0)
        sequences = (stats.running + stats.waiting) / stats.max_sequences
        tokens = stats.waiting_tokens + stats.prefixes.asked - stats.prefixes.restored
        with self._lock:
            self._pass()
            self._work += (tokens - self._tokens) * stats.token_seconds / MEAN_SECONDS
            self._tokens, self._backlog = tokens, stats.waiting_tokens * stats.token_seconds
            self._room = max(used + stats.waiting_tokens / cells, sequences)

    def read(self) -> dict[str, float]:
        """`room`: its mean since this was called last."""
        with self._lock:
            now = self._pass()
            room = self._sum / (now - self._began) if now > self._began else self._room
            self._sum, self._began = 0.0, now
            return Report(max(0.0, self._work), self._backlog, room, self._start)._asdict()

    def _pass(self) -> float:
        now = self._clock()
        self._work *= exp((self._at - now) / MEAN_SECONDS)
        self._sum += self._room * (now - self._at)
        self._at = now
        return now
