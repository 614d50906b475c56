"""stored_features: what tiers have of the features of images, as bytes.

    if not stored.renew(image, options):                    # a request has used them
        stored.keep(image, options, record, sizes, chunks)  # write them to all tiers
    reading = stored.begin(image)                           # a prompt needs them
    stored.advance(reading)                                 # True while it is to be waited for
    reading.loaded; stored.end(reading)

Features are an entry without one before it, in a namespace of their own, whose tokens are the ids of the rows of the
image. So their key is made of all that decides them, requests of a namespace read what such requests have
stored, and what removes a namespace removes them.

An entry is as large as the features, so these are stored where a fourth of the staging memory has room for them.

Always true:
  * a reading that has not ended has a transfer, or looks, or waits for staging memory;
  * one that makes no progress for as long as snapshots are waited for is over: the tower makes the features;
  * what is on its way is in no tier yet, and has memory reserved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcellar.memory.prefix.node import TOKEN
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.restore_plan import AGAIN, Look, News, patience
from kvcellar.memory.retention import Retention, RetentionOptions
from kvcellar.memory.snapshot import Snapshot, StoredImage, key_after
from kvcellar.memory.spans import Span
from kvcellar.memory.tiers.tier import Loaded
from kvcellar.memory.tiers.transfers import Transfer, Transfers


@dataclass(eq=False, slots=True)
class Reading:
    """Of the features of one image."""

    image: StoredImage
    began: float
    looks: list[Look]  # for what others have stored, until they are waited for
    transfer: Transfer | None = None
    longest: float = 0.0  # seconds without progress for which it is waited for

    @property
    def loaded(self) -> Loaded | None:
        """What was read, until the end; None: nothing."""
        return self.transfer.loaded if self.transfer is not None else None


class StoredFeatures:
    """Of the images of one model. All of it runs on the engine's thread; tiers are used by the threads of the
    transfers."""

    def __init__(
        self,
        transfers: Transfers,
        catalogue: Catalogue,
        news: News,
        *,
        identity: bytes,
        secret: bytes,
        renew: Callable[[Sequence[bytes], Retention], None],
        not_written: Callable[[str], None],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`identity` and `secret` as in `Store`; `renew` keeps entries longer; `not_written` is told why something is
        not stored; `wall` is the clock of retention."""
        self._transfers, self._catalogue, self._news = transfers, catalogue, news
        self._identity, self._secret, self._renew = identity, secret, renew
        self._not_written, self._clock, self._wall = not_written, clock, wall
        self._slow = 0  # how often reading seemed to take longer than the tower
        self.readings: set[Reading] = set()
        self.on_way: set[bytes] = set()  # keys of what is being written

    # -- writing ------------------------------------------------------------------------------------------------

    def renew(self, image: StoredImage, options: RetentionOptions) -> bool:
        """Keep features at least as long as `options` say. False if they are not stored."""
        if there := (key := self._key(image)) in self._catalogue:
            self._renew([key], self._retention(options))
        return there

    def keep(
        self,
        image: StoredImage,
        options: RetentionOptions,
        record: bytes,
        sizes: Sequence[int],
        chunks: Callable[[], list[bytes]],
    ) -> bool:
        """Write features to all tiers, unless they are stored. `chunks` returns bytes of these `sizes`. False if there
        is too little staging memory now. Raises what `chunks` raises."""
        key, span = self._key(image), Span(0, len(image.tokens) // TOKEN)
        snapshot = Snapshot(key, None, image.space, span, image.tokens, record, tuple(sizes))
        if key in self._catalogue or key in self.on_way:
            return True
        if snapshot.size > self._transfers.largest:
            self._not_written(f"the features of an image have {snapshot.size} bytes")
            return True
        if (transfer := self._transfers.reserve(snapshot)) is None:
            return False
        self.on_way.add(key)
        try:
            made = chunks()
        except BaseException:
            self._transfers.cancel(transfer)
            raise
        self._transfers.put(transfer, made, self._retention(options))
        return True

    def written(self, transfer: Transfer) -> None:
        """It has ended, or was cancelled."""
        self.on_way.remove(transfer.snapshot.key)

    def _retention(self, options: RetentionOptions) -> Retention:
        """Pins are those of requests."""
        return replace(options.at(self._wall()), pinned=False)

    def _key(self, image: StoredImage) -> bytes:
        named = {"identity": self._identity, "namespace": image.space, "secret": self._secret}
        return key_after(None, tokens=image.tokens, **named)

    # -- reading ------------------------------------------------------------------------------------------------

    def begin(self, image: StoredImage) -> Reading:
        """A prompt needs features."""
        looks = self._news.ask(image.space, lambda: image.tokens, lambda: self._key(image) not in self._catalogue)
        reading = Reading(image, self._clock(), looks)
        self.readings.add(reading)
        return reading

    def advance(self, reading: Reading, computing: float) -> bool:
        """Go on with a reading; False when it is over. `computing`: seconds that the tower is going to take, without
        which there would be no features; 0: not known."""
        if reading.looks:
            if self._news.left(reading.looks):
                return True
            reading.looks = []
        if reading.transfer is None and not self._fetch(reading, computing):
            return False
        if (transfer := reading.transfer) is None:
            return self._clock() - reading.began < reading.longest
        if transfer.outcome is None and self._transfers.waited(transfer) >= reading.longest:
            if self._transfers.overdue(transfer) is not None:
                self._transfers.cancel(transfer)
                return False
        return transfer.outcome is None

    def _fetch(self, reading: Reading, computing: float) -> bool:
        """Begin to read, where there is staging memory. False if no tier has it, or the tower is faster: but of
        `AGAIN` readings that seem too slow, one is made."""
        key = self._key(reading.image)
        found, source = self._catalogue.get(key), self._transfers.source(key)
        if found is None or source is None or found.size > self._transfers.largest:
            return False
        seconds = self._transfers.reads[source].seconds(found.size)
        reading.longest = patience(seconds, computing)
        if 0 < computing < seconds:
            self._slow += 1
            if self._slow % AGAIN:
                return False
        reading.transfer = self._transfers.fetch(found)
        return True

    def refuse(self, reading: Reading) -> None:
        """What was read is of no use: remove it from all tiers."""
        key = self._key(reading.image)
        self._catalogue.forget(key)
        self._transfers.remove([key])

    def end(self, reading: Reading) -> None:
        """Free what was read. May be called again."""
        self.readings.discard(reading)
        if reading.transfer is not None:
            self._transfers.cancel(reading.transfer)

    def check(self) -> None:
        """Assert what is always true."""
        assert all(one.transfer is None or not one.looks for one in self.readings)
