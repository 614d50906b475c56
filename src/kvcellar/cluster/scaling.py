"""scaling: how many replicas of an engine there should be, by what they have measured. No Ray.

    meter.note(stats)                  # in a replica, several times a second
    meter.read()                       # a `Report`, as a mapping: means since the last one
    wanted(reports, target)            # where Serve decides: `target` are there, or are being started

  * work: the part of the time in which prompts wait or are computed. Of all replicas together it is how many of them
    prompts keep busy;
  * backlog: seconds that the prompts that wait take. A replica that is started now works off what is left when it is
    ready, after `start` seconds: so many more are of use as work it off in that time;
  * room: cells of running sequences and of prompts that wait, over those that there are, or sequences, over the most
    that run at once. Of all replicas together it is how many of them hold all that.

So `n` replicas are enough if `max(work + backlog / start, room) <= n`. One less is enough if that uses at most `SPARE`
of it. What waits for fewer ones is more: by the law of Pollaczek and Khinchine `backlog` is to `1 / (1 - work / n)`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from kvcellar.engine.stats import EngineStats

SPARE = 0.8  # of what fewer replicas can do: so those that were ended are not started again at once


class Report(NamedTuple):
    """Of one replica."""

    work: float
    backlog: float
    room: float
    start: float


def wanted(reports: Sequence[Report], target: int) -> int:
    """So many replicas, with those of the reports among them. 0: they do nothing."""
    if not reports:
        return target
    work, backlog, room, _ = map(sum, zip(*reports, strict=True))
    if not (work or backlog or room):
        return 0
    there, start = len(reports), max(one.start for one in reports)

    def used(replicas: int) -> float:
        """The part of so many, fewer ones than there are."""
        if work >= replicas:
            return inf
        longer = max(1.0, (1 - work / there) / (1 - work / replicas))
        return max(work + backlog * longer / start, room) / replicas

    found = max(target, floor(work) + 1, ceil(work + backlog / start), ceil(room))
    while found == target > 1 and used(target - 1) <= SPARE:
        found = target = target - 1
    return found


def policy(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """As Serve calls it, in its controller. Ray pickles it by value. Calls through handles are those of gateways that
    ask for a replica (`gateway.py`)."""
    metrics = context.aggregated_metrics or {}
    measured = [metrics.get(name, {}) for name in Report._fields]
    replicas = [one for one in context.running_replicas if all(one in values for values in measured)]
    reports = [Report(*(values[one] for values in measured)) for one in replicas]
    found = wanted(reports, context.target_num_replicas)
    return found or int(context.total_num_requests > 0), {}


class Meter:
    """Measures what a replica reports. From any thread."""

    def __init__(self, start: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`start`: seconds that it took until the replica could be used."""
        self._start, self._clock, self._lock = start, clock, threading.Lock()
        self._now = Report(0.0, 0.0, 0.0, start)  # since `_at`
        self._sums, self._began = Report(0.0, 0.0, 0.0, 0.0), clock()
        self._at = self._began

    def note(self, stats: "EngineStats") -> None:
        cells = max((one.cells for one in stats.groups), default=1)
        used = max((one.used / one.cells for one in stats.groups if one.cells), default=0.0)
        sequences = (stats.running + stats.waiting) / stats.max_sequences
        with self._lock:
            self._pass()
            self._now = Report(
                work=float(stats.waiting_tokens > 0),
                backlog=stats.waiting_tokens * stats.token_seconds,
                room=max(used + stats.waiting_tokens / cells, sequences),
                start=self._start,
            )

    def read(self) -> dict[str, float]:
        """Means since it was called last."""
        with self._lock:
            now = self._pass()
            seconds = now - self._began
            found = Report(*(one / seconds for one in self._sums)) if seconds > 0 else self._now
            self._sums, self._began = Report(0.0, 0.0, 0.0, 0.0), now
            return found._asdict()

    def _pass(self) -> float:
        now = self._clock()
        self._sums = Report(*(old + one * (now - self._at) for old, one in zip(self._sums, self._now, strict=True)))
        self._at = now
        return now
