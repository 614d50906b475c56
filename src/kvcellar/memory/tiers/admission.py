"""admission: whether restoring takes less time than computing again. Measured rates in, a number out."""

from collections.abc import Sequence
from typing import NamedTuple

DECAY = 0.95  # weight of a measurement after the next one


class Rate:
    """How long a transfer of so many bytes takes: a latency, and a time for each byte, fitted to what was measured
    lately."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0  # decayed sums: 1, bytes, seconds, products

    def record(self, n: int, seconds: float) -> None:
        self._weight = self._weight * DECAY + 1
        self._n = self._n * DECAY + n
        self._t = self._t * DECAY + seconds
        self._nn = self._nn * DECAY + n * n
        self._nt = self._nt * DECAY + n * seconds

    def seconds(self, n: int) -> float:
        """Of `n` bytes. Before the first measurement 0: what was never measured is tried."""
        if not self._weight:
            return 0.0
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        spread = self._nn / self._weight - mean_n**2
        slope = (self._nt / self._weight - mean_n * mean_t) / spread if spread > 1e-6 * mean_n**2 else -1.0
        if not 0 <= slope * mean_n <= mean_t:  # all of one size, or noise: by the mean alone
            return mean_t * n / mean_n if mean_n else mean_t
        return mean_t + slope * (n - mean_n)


class Piece(NamedTuple):
    """One snapshot of a chain: the tokens that it saves, and the seconds that restoring it takes."""

    tokens: int
    seconds: float


def restored(pieces: Sequence[Piece], tokens_per_second: float) -> int:
    """How many pieces of a chain, from its beginning on, to restore, so that restoring them and computing the tokens of
    the others takes the least time; of equal times the most. `tokens_per_second` is the measured rate of prefill."""
    best = lead = 0.0
    count = 0
    for number, piece in enumerate(pieces, 1):
        lead += piece.tokens / tokens_per_second - piece.seconds
        if lead >= best:
            best, count = lead, number
    return count
