"""report: what drafts have done, for a request and for all."""

from array import array
from dataclasses import dataclass
from itertools import pairwise

from kvcellar.events import Speculation

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
