"""observed: what a gateway knows of its replicas, as statistics."""

import time
from collections import deque

from kvcellar.engine.control_replies import RECENT_SECONDS
from kvcellar.engine.stats import EngineStats, ReplicaState, ReplicaStats


class Told:
    """What a replica has told of itself: the last statistics, and its counts of the last `RECENT_SECONDS`, with one
    more from before that."""

    def __init__(self) -> None:
        self.last: EngineStats | None = None
        self._counts = deque[tuple[float, int, int]]()  # when, prompt tokens, tokens in decode

    def take(self, stats: EngineStats) -> None:
        self.last = stats
        self._counts.append((time.monotonic(), stats.prefill_tokens, stats.decode_tokens))
        self._drop()

    def _drop(self) -> None:
        since = time.monotonic() - RECENT_SECONDS
        while len(self._counts) > 1 and self._counts[1][0] <= since:
            self._counts.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt tokens, and tokens in decode, per second."""
        self._drop()
        if not self._counts:
            return 0.0, 0.0
        (first, *before), (_, *now) = self._counts[0], self._counts[-1]
        seconds = min(RECENT_SECONDS, max(1.0, time.monotonic() - first))
        prefill, decode = ((count - old) / seconds for count, old in zip(now, before, strict=True))
        return prefill, decode

    def shown(self, name: str, address: str, state: ReplicaState, why: str, blocks: int) -> ReplicaStats:
        if (stats := self.last) is None:
            return ReplicaStats(name, address, state, why)
        groups = [(one.cells, one.used, one.cached) for one in stats.groups]
        cells, used, cached = max(
            groups, key=lambda one: (one[1] / max(1, one[0]), one[2] / max(1, one[0])), default=(0, 0, 0)
        )
        return ReplicaStats(
            *(name, address, state, why, stats.running, stats.waiting, stats.waiting_tokens),
            *(cells, used, cached, *self.rates(), blocks),
        )
