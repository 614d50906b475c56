"""parking: whether a drafter follows texts at all.

A drafter that reads hidden states, or computes what it has missed, costs time beside its drafts: hidden states of each
step, the prompts, what it catches up with. So it is compared with plain decoding as a whole: what its rounds have won,
less all of that. Where this does not pay it is parked, and costs nothing, until a trial. Trials become rarer as long
as they fail.

Always true:
  * since the last time that it had won `KEPT` plain steps or more, or a trial began, it has lost at most `MOST` plain
    steps and one call of the drafter;
  * after a trial that has lost something, it is parked for at least `1 / SHARE` times as long.
"""

import math

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
