"""rates: the probability that draft k of a round is accepted if those before it were, learnt from the rounds so far."""

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
