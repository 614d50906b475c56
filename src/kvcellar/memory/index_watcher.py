"""index_watcher: what other processes have stored in a directory that this one shares with them.

    look = news.ask(misses)     # a request has arrived
    news.waits(look)            # whether it should wait: what is found is known when this is False

Looking costs one small read of the index where no other process has changed it, by a thread of the disk's lane, and is
done at most once in `AGAIN` seconds.

Always true:
  * at most one look is under way; a disk that hangs delays requests by `PATIENCE` seconds in all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.transfers import Transfers

AGAIN = 0.25  # seconds after a look until the next one
PATIENCE = 0.5  # seconds for which a request waits for a look


@dataclass(eq=False, slots=True)
class Look:
    """One look into the index."""

    began: float
    ended: bool = False


class News:
    """All of it runs on the engine's thread, but for the look itself."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """`post` runs a call on the engine's thread."""
        self._transfers, self._post, self._clock = transfers, post, clock
        tiers = enumerate(transfers.tiers)
        self._number, self._disk = next(((at, tier) for at, tier in tiers if isinstance(tier, DiskTier)), (0, None))
        self._look: Look | None = None

    def ask(self, misses: Callable[[], bool]) -> Look | None:
        """A look that has not ended, if a request misses tokens. None where the disk is not shared, cannot be used, or
        was looked at just now."""
        disk, last = self._disk, self._look
        if disk is None or not disk.shared or self._transfers.down(self._number) or not misses():
            return None
        if last is not None and (not last.ended or self._clock() < last.began + AGAIN):
            return None if last.ended else last
        look = self._look = Look(self._clock())
        self._transfers.run(self._number, lambda: self._found(look, disk))
        return look

    def waits(self, look: Look) -> bool:
        """Whether a request should wait for it."""
        return not look.ended and self._clock() < look.began + PATIENCE

    def left(self) -> float:
        """Seconds for which requests wait for a look at most; infinite: none does now."""
        if self._look is None or not self.waits(self._look):
            return inf
        return self._look.began + PATIENCE - self._clock()

    def _found(self, look: Look, disk: DiskTier) -> None:
        """On a thread of the lane."""
        disk.news()
        self._post(lambda: setattr(look, "ended", True))
