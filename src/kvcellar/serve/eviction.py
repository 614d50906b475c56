"""eviction: which models have to leave so that another one fits: engines, and adapters of engines that stay."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcellar.serve.resident import Member, Resident, Stage


@dataclass(slots=True)
class Eviction:
    """What is closed now, because no request uses it. All else that has to leave is marked."""

    close: list[Resident] = field(default_factory=list[Resident])
    part: list[Member] = field(default_factory=list[Member])


@dataclass(frozen=True, slots=True)
class Freed:
    """What is free once some members are gone."""

    bytes: int
    engines: int


def freed(residents: Iterable[Resident], gone: set[Member], keep: Resident | None) -> Freed:
    """With what is being closed already. An engine is free when all its members are gone, except `keep`."""
    size = engines = 0
    for one in residents:
        left = [member for member in one.members.values() if not (member in gone or member.stage is Stage.CLOSING)]
        whole = one.stage is Stage.CLOSING or (one.ready and not left and one is not keep)
        size += one.bytes if whole else one.bytes - one.size - sum(member.size for member in left)
        engines += whole
    return Freed(size, engines)


def evicted(residents: Sequence[Resident], fits: Callable[[Freed], bool], keep: Resident | None) -> Eviction:
    """Close the least recently used idle models until `fits` is true when all are closed; if that is not enough, mark
    those that have to become idle. The engine of `keep` stays."""
    order = sorted((one for one in residents if one.ready), key=lambda one: (one.leases > 0, one.used))
    members = [one for engine in order for one in sorted(engine.members.values(), key=lambda one: one.used)]
    gone: set[Member] = set()
    for busy in (False, True):
        for one in members:
            if fits(freed(residents, gone, keep)):
                break
            if one.ready and not one.fixed and (one.leases > 0) is busy:
                gone.add(one)
    found = Eviction()
    for engine in order:
        _leave(engine, gone, found, stays=engine is keep)
    return found


def _leave(engine: Resident, gone: set[Member], found: Eviction, *, stays: bool) -> None:
    mine = [one for one in engine.members.values() if one in gone]
    whole = not stays and all(one in gone or one.stage is Stage.CLOSING for one in engine.members.values())
    if whole and engine.idle:
        engine.stage = Stage.CLOSING
        found.close.append(engine)
        return
    for one in mine:
        if one.size and one.idle:
            one.stage = Stage.CLOSING
            found.part.append(one)
        elif whole or one.size:
            one.leaving = True
