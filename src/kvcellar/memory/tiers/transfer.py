"""transfer: one snapshot on its way to or from the tiers (see `transfers`)."""

import mmap
import threading
from enum import Enum

from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.lanes import Lane
from kvcellar.memory.tiers.tier import Loaded


class Outcome(Enum):
    STORED = "in at least one tier"
    FETCHED = "its chunks are in memory until they are released"
    MISSED = "not in any tier that can be read now"
    REFUSED = "no tier has stored it"
    CANCELLED = "by the caller, or when the time for closing was over"
    FAILED = "an error that no tier should raise"


class Transfer:
    """One snapshot on its way. The results are valid when `outcome` is set.

    `tiers` are the names of those that it was stored in, or of the one that it came from; `seconds` were spent there.
    """

    def __init__(self, snapshot: Snapshot, need: int, *, stores: bool) -> None:
        self.snapshot, self.need, self.stores = snapshot, need, stores  # `need`: bytes of memory on its way
        self.outcome: Outcome | None = None
        self.loaded: Loaded | None = None
        self.tiers: tuple[str, ...] = ()
        self.seconds = 0.0
        self.ended = threading.Event()
        self.cancelled = self.running = self.overdue = False
        self.lane: Lane | None = None  # where its present job runs, or waits for a thread
        self.since = 0.0  # when that began
        self.promotions = 0  # into the tiers above the one that it came from
        self.buffer: mmap.mmap | None = None  # what was fetched, with `extra` bytes more than `need`
        self.extra = 0
        self.holders = 1  # of its bytes: the transfer, then the owner of what was fetched; and each promotion
