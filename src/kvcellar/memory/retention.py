"""retention: how long what a request computes is kept, as a request states it and as each entry of a tier records it.

Absolute times are seconds of the wall clock (`time.time`): they are valid in the prefix tree, in every tier, and after
a restart.
"""

from dataclasses import dataclass

from kvcellar.errors import BadRequest, shown

PRIORITIES = range(-8, 9)
MOST_TTL = 10 * 365 * 86400.0  # seconds
MOST_OWNER = 255  # bytes
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How an entry is kept. All of it survives a restart.

    priority   of `PRIORITIES`: each level doubles the entry's worth
    pinned     not evicted; it still expires
    expires    when it is deleted, in seconds of the wall clock; None: never
    owner      what its bytes are counted for, where a tier has a quota for each owner: an opaque name, stored as it is
    """

    priority: int = 0
    pinned: bool = False
    expires: float | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}, not {self.priority}")
        if len(self.owner.encode()) > MOST_OWNER:
            raise ValueError(f"an owner has more than {MOST_OWNER} bytes")

    def expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


DEFAULT = Retention()


def stronger(one: Retention, other: Retention) -> Retention:
    """What keeps an entry at least as long as both; the owner is that of `one`."""
    lasting = None if one.expires is None or other.expires is None else max(one.expires, other.expires)
    return Retention(max(one.priority, other.priority), one.pinned or other.pinned, lasting, one.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How a request wants what it uses and computes to be kept. Raises `BadRequest` for values out of bounds.

    priority   from -8 to 8: each level doubles what its entries are worth to eviction
    ttl        seconds after the last use until they are deleted; None: no limit
    pinned     they are not evicted until they expire, as far as the engine has space for pinned entries
    stored     they may be written to the store, if there is one
    recurring  more requests with the same beginning will follow: what the request computes is worth as much to eviction
               as what was used again
    owner      the tenant that quotas count them for, and that shares sequences with others; "": none
    weight     how many sequences the owner has in proportion to others, where not all can run at once
    """

    priority: int = 0
    ttl: float | None = None
    pinned: bool = False
    stored: bool = True
    recurring: bool = False
    owner: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            allowed = f"from {PRIORITIES[0]} to {PRIORITIES[-1]}"
            raise BadRequest(f"priority must be a whole number {allowed}, not {shown(self.priority)}", "priority")
        if self.ttl is not None and not (type(self.ttl) in (int, float) and 0 < self.ttl <= MOST_TTL):
            raise BadRequest(f"ttl must be seconds, above 0 and up to {MOST_TTL:.0f}, not {shown(self.ttl)}", "ttl")
        for name in ("pinned", "stored", "recurring"):
            if not isinstance(value := getattr(self, name), bool):
                raise BadRequest(f"{name} must be True or False, not {shown(value)}", name)
        if type(self.weight) not in (int, float) or not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            allowed = f"from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
            raise BadRequest(f"weight must be a number {allowed}, not {shown(self.weight)}", "weight")
        owner = self.owner
        if type(owner) is not str or not owner.isprintable() or len(owner.encode()) > MOST_OWNER:
            raise BadRequest(f"owner must be printable text of up to {MOST_OWNER} bytes, not {shown(owner)}", "owner")

    def at(self, now: float) -> Retention:
        """The retention of entries that were last used at `now`, in seconds of the wall clock."""
        expires = None if self.ttl is None else now + self.ttl
        return Retention(priority=self.priority, pinned=self.pinned, expires=expires, owner=self.owner)


NO_OPTIONS = RetentionOptions()
