"""buckets: a histogram that costs one search in a short list for each value."""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    1000.0,
)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Buckets:
    """Values by the first bound that is not less. Used by one thread at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: "Buckets") -> None:
        assert self.bounds == other.bounds
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def __copy__(self) -> "Buckets":
        made = Buckets(self.bounds)
        made.merge(self)
        return made

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound as text, and how many values are not greater."""
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == inf else repr(bound), float(so_far)))
        return found
