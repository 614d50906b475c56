"""cost: seconds of a step by its rows, learnt from the steps that were run.

Always true of a `Curve`:
  * a number of rows counts once it was measured twice, and the lower one is its first value: the first step of a size
    also pays for preparing kernels of that size;
  * `seconds` never falls with the rows: where measurements do, neighbours are averaged;
  * between measured numbers of rows it is linear.
"""

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable

RATE = 0.05  # weight of a new measurement, or as much as that of each of so few
CLAMP = 0.25  # a measurement counts as at most this share away from the value: one long pause changes little,
CHANGED = 3  # but so many that are all further off, to one side, replace it
OFTEN = 8  # measurements from which on a value is compared with
EXACT = 32  # numbers of rows up to this are measured one by one, larger ones in groups of similar size
STEPS = 16  # groups in a doubling of the rows


def step_clock(device: str) -> Callable[[], float]:
    """The clock that steps on a kind of device are measured with: on a CPU, the CPU time of the thread, which takes
    part in every parallel region, so that what else the machine does is not measured."""
    return time.thread_time if device == "cpu" and os.name == "posix" else time.perf_counter


def rounded(rows: int) -> int:
    """The number of rows that stands for `rows`: itself if it is small."""
    width = max(1, (1 << (rows.bit_length() - 1)) // STEPS)
    return rows if rows <= EXACT else rows // width * width


class Track:
    """Follows a positive number that is measured with noise: a mean of logarithms, with deviations cut at `CLAMP`."""

    __slots__ = ("outside", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.outside: list[float] = []  # the last measurements, if all are far off, to one side

    def add(self, found: float, rate: float) -> bool:
        """Enter a measurement with this weight. True: the number has changed, and is that of the last ones."""
        off = math.log(found / self.value)
        if abs(off) <= CLAMP:
            self.outside.clear()
        elif self.outside and (self.outside[-1] > self.value) != (off > 0):
            self.outside = [found]
        else:
            self.outside.append(found)
        if len(self.outside) == CHANGED:
            self.value = min(self.outside, key=lambda each: abs(each - self.value))
            self.outside.clear()
            return True
        self.value *= math.exp(rate * min(max(off, -CLAMP), CLAMP))
        return False


class _Point:
    __slots__ = ("count", "track")

    def __init__(self, seconds: float) -> None:
        self.track, self.count = Track(seconds), 1

    @property
    def value(self) -> float:
        return self.track.value

    @property
    def settled(self) -> bool:
        return self.count > 1 and not self.track.outside

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count == 2:
            self.track.value = min(self.track.value, seconds)
        elif self.track.add(seconds, max(RATE, 1 / self.count)):
            self.count = 2


class Curve:
    """Seconds by rows, for steps of a similar number of sequences."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._rows: list[int] = []  # measured, ascending
        self._seconds: list[float] = []  # of these, never falling

    @property
    def most(self) -> int:
        """The most rows that count; 0: none do."""
        return self._rows[-1] if self._rows else 0

    def add(self, rows: int, seconds: float) -> bool:
        """Enter a measurement. True: one more would tell whether it is a change."""
        rows = rounded(rows)
        if (point := self._points.get(rows)) is None:
            point = self._points[rows] = _Point(seconds)
        else:
            point.add(seconds)
        self._fit()
        return not point.settled

    def _fit(self) -> None:
        """Average neighbours that fall (pool adjacent violators)."""
        blocks: list[tuple[float, int, int]] = []  # mean, weight, number of points
        twice = [rows for rows, point in self._points.items() if point.count > 1]
        self._rows = sorted(twice or self._points)
        for rows in self._rows:
            point = self._points[rows]
            mean, weight, size = point.value, point.count, 1
            while blocks and blocks[-1][0] > mean:
                before, its, n = blocks.pop()
                mean, weight, size = (before * its + mean * weight) / (its + weight), its + weight, size + n
            blocks.append((mean, min(weight, 20), size))
        self._seconds = [mean for mean, _, size in blocks for _ in range(size)]

    def measured(self, rows: int) -> float | None:
        """The value of this number of rows, if it was measured often."""
        point = self._points.get(rounded(rows))
        return point.value if point is not None and point.settled and point.count >= OFTEN else None

    def seconds(self, rows: int) -> float:
        """Expected seconds. Below what was measured as the fewest rows; above it, as if every row cost as much more as
        it does on average, but at least as half the cost of a row of the largest."""
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            last, value = self._rows[-1], self._seconds[-1]
            return value + (rows - last) * max(self._slope(), 0.5 * value / last)
        if at == 0 or self._rows[at] == rows:
            return self._seconds[at]
        low, high = self._rows[at - 1], self._rows[at]
        part = (rows - low) / (high - low)
        return self._seconds[at - 1] * (1 - part) + self._seconds[at] * part

    def _slope(self) -> float:
        if len(self._rows) < 2:
            return 0.0
        return (self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0])

    def check(self) -> None:
        """Assert what is always true of it."""
        assert self._rows == sorted(self._rows)
        assert len(self._seconds) == len(self._rows)
        assert self._seconds == sorted(self._seconds)
        assert all(point.value > 0 for point in self._points.values())
