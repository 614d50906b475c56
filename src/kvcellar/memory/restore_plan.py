"""restore_plan: which stored snapshots are read back for a prompt, how long a request waits for them, and for a look at
what other processes have stored.

    plan = planner.plan(namespace, key)      # the snapshots in order, and why others are computed again
    planner.patience(plan.parts)             # seconds without progress after which they are computed again, too

Planning costs the snapshots of one chain. It reads and changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from kvcellar.memory.prefix.node import TOKEN
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.admission import Piece, Rate, restored
from kvcellar.memory.tiers.tier import NEXT_LOOK
from kvcellar.memory.tiers.transfers import Transfers

LEAST = 64  # tokens: fewer are computed again as fast as they are read
MEASURED = 32  # new tokens of a step, at least, from which on it measures how fast prompts are computed
AGAIN = 16  # of so many restores that seem too slow, one is made: else what was measured once would be for ever
SHORTEST, LONGEST = 5.0, 60.0  # seconds without progress for which a request waits, at least and at most
PATIENCE = 0.5  # seconds for which a request waits for a look
SLACK = 4  # times as long as predicted: a read that takes longer is not expected to end


class Part(NamedTuple):
    """What a request needs of a snapshot: its tokens up to `end`, to be resumed at `resume`. `piece`: the tokens that
    it saves, and the seconds that it is predicted to take."""

    snapshot: Snapshot
    end: int
    resume: int
    piece: Piece


class Plan(NamedTuple):
    """What is read back. `skipped` and `unavailable` say why tokens that a tier has are not; "" where all are."""

    parts: tuple[Part, ...] = ()
    skipped: str = ""
    unavailable: str = ""


class Planner:
    """Plans the restores of one memory by measured rates."""

    def __init__(self, transfers: Transfers, catalogue: Catalogue, prefixes: Prefixes) -> None:
        self._transfers, self._catalogue, self._prefixes = transfers, catalogue, prefixes
        self._slow = 0  # how often restoring seemed to take longer
        self.entering, self.prefill = Rate(), Rate()  # of bytes into memory; of tokens through the model

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        if tokens >= MEASURED:
            self.prefill.record(tokens, seconds)

    def plan(self, namespace: str, key: bytes) -> Plan:
        """The snapshots that memory does not have, if restoring takes less time than computing their tokens again."""
        found = self._catalogue.match(namespace, key, len(key) // TOKEN - 1)
        if found.resume < LEAST:
            return Plan()
        have = at = self.own(namespace, key)
        parts: list[Part] = []
        unavailable = ""
        for snapshot in found.chain:
            if snapshot.span.end <= have:
                continue
            if not self._transfers.has(snapshot.key):
                break
            source = self._transfers.source(snapshot.key)
            if source is None and found.resume >= at + LEAST:
                unavailable = f"{found.resume - at} stored tokens are in tiers that have failed or were too slow"
            if source is None or snapshot.size > self._transfers.largest:
                break
            end = max(at, self._catalogue.resume(snapshot, found.resume))
            seconds = self._transfers.reads[source].seconds(snapshot.size) + self.entering.seconds(snapshot.size)
            parts.append(Part(snapshot, min(snapshot.span.end, found.resume), end, Piece(end - at, seconds)))
            at = end
        if at < self._prefixes.restorable(namespace, key) + LEAST:
            return Plan(unavailable=unavailable)
        count, skipped = self._admitted([part.piece for part in parts])
        return Plan(tuple(parts[:count]), skipped, "" if skipped else unavailable)

    def misses(self, namespace: str, key: bytes) -> bool:
        """Whether so many tokens are neither in memory nor known to be stored that others may have stored them."""
        last = len(key) // TOKEN - 1
        least = self._prefixes.restorable(namespace, key) + LEAST
        return last >= least and last >= self._catalogue.match(namespace, key, last).resume + LEAST

    def own(self, namespace: str, key: bytes) -> int:
        """Where a key can be resumed from what its namespace has in memory: the tree drops a claim behind that, even
        where the namespace of all has the tokens before it."""
        tree = self._prefixes.tree
        return tree.match(tree.peek(namespace), key, len(key) // TOKEN - 1).resume

    def _admitted(self, pieces: Sequence[Piece]) -> tuple[int, str]:
        """How many of the pieces to restore, and why not more."""
        speed = self.speed()
        if speed is None or (count := restored(pieces, speed)) == len(pieces):
            return len(pieces), ""
        self._slow += 1
        if self._slow % AGAIN == 0:
            return len(pieces), ""
        left = Piece(*map(sum, zip(*pieces[count:], strict=True)))
        return count, (
            f"{left.tokens} tokens are stored: reading them takes about {1000 * left.seconds:.0f} ms, "
            f"computing them {1000 * left.tokens / speed:.0f} ms"
        )

    def speed(self) -> float | None:
        """Tokens per second of prompts; None before the first one."""
        seconds = self.prefill.seconds(512)
        return 512 / seconds if seconds else None

    def patience(self, parts: Sequence[Part]) -> float:
        """Seconds without progress for which to wait for the first of these: as long as computing all of them takes, so
        that waiting in vain at most doubles the time, or much longer than reading it is predicted to take."""
        speed = self.speed()
        computing = sum(part.piece.tokens for part in parts) / speed if speed else 0.0
        return patience(parts[0].piece.seconds, computing)

    def reset(self, prefixes: Prefixes) -> None:
        """The tree was made anew."""
        self._prefixes = prefixes


def patience(reading: float, computing: float) -> float:
    """Seconds without progress for which to wait for what is predicted to take so many, to be read or computed."""
    return min(max(SHORTEST, computing, SLACK * reading), LONGEST)


@dataclass(eq=False, slots=True)
class Look:
    """One look into a tier."""

    began: float
    ended: bool = False


class News:
    """What other processes have stored in tiers that this one shares with them.

        looks = news.ask(namespace, key, misses)    # a request has arrived
        news.left(looks)                            # seconds for which it should wait: what is found is known when 0

    A tier is looked into by a thread of its lane, at the same place (see `Tier.place`) at most once in `NEXT_LOOK`
    seconds, and as long as a request waits for it: a tier that hangs delays requests by `PATIENCE` seconds in all. All
    but the look itself runs on the engine's thread.
    """

    def __init__(
        self,
        transfers: Transfers,
        catalogue: Catalogue,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """`post` runs a call on the engine's thread."""
        self._transfers, self._catalogue, self._post, self._clock = transfers, catalogue, post, clock
        self._looks: list[dict[int, Look]] = [{} for _ in transfers.tiers]  # by tier and place, the oldest first

    def ask(self, namespace: str, key: Callable[[], bytes], misses: Callable[[], bool]) -> list[Look]:
        """Looks that have not ended, if a request misses tokens: into each tier that is shared, can be used, and was
        not looked into just now."""
        usable = [number for number, tier in enumerate(self._transfers.tiers) if tier.shared and self._usable(number)]
        if not usable or not misses():
            return []
        return [look for number in usable if not (look := self._look(number, namespace, key())).ended]

    def _usable(self, number: int) -> bool:
        """Whether a tier can be used, and no look into it has taken too long."""
        looks, now = self._looks[number], self._clock()
        while looks and (oldest := next(iter(looks.values()))).ended and now >= oldest.began + NEXT_LOOK:
            del looks[next(iter(looks))]
        return not self._transfers.down(number) and all(
            look.ended or now < look.began + PATIENCE for look in looks.values()
        )

    def _look(self, number: int, namespace: str, key: bytes) -> Look:
        looks, now = self._looks[number], self._clock()
        place = self._transfers.tiers[number].place(namespace, key)
        look = looks.get(place)
        if look is None or (look.ended and now >= look.began + NEXT_LOOK):
            looks.pop(place, None)
            look = looks[place] = Look(now)
            self._transfers.run(number, partial(self._find, look, number, namespace, key))
        return look

    def left(self, looks: Iterable[Look]) -> float:
        """Seconds for which a request waits for these at most."""
        until = max((look.began for look in looks if not look.ended), default=-inf) + PATIENCE
        return max(0.0, until - self._clock())

    def _find(self, look: Look, number: int, namespace: str, key: bytes) -> None:
        """On a thread of the lane, as long as a request waits for it."""
        known, until = self._catalogue.whole(namespace, key), look.began + PATIENCE
        try:
            self._transfers.tiers[number].look(namespace, key, known, wanted=lambda: self._clock() < until)
        finally:
            self._post(lambda: setattr(look, "ended", True))
