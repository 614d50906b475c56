"""residents: which models are in memory, what they take, and which one has to leave for another.

Decides only: the host loads and closes engines, and reports here when that is done.

Always true:
  * the bytes of all residents, counted from before their load until after they are closed, are at most the limit, and
    there are at most as many residents as the limits allow. An engine that is there counts with what it can use of its
    cache. The bytes of an adapter are counted from before it is read until it is freed;
  * an engine is closed, and a member removed from it, only without a lease; no lease is given on a model that is being
    loaded or closed;
  * loads wait in order of arrival. While the first one waits for memory, the models that have to leave for it get no
    new leases, so it waits for the requests that run now and for no later ones;
  * at most one resident exists for a key, and at most one load and one member for a name and its files.

What leaves so that a model fits are engines, and adapters of engines that stay.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.variants import Variant
from kvcellar.errors import BadRequest, Overloaded
from kvcellar.serve.resident import FOREVER, Limits, Load, Member, Resident, Stage, Work
from kvcellar.serve.servable import MemberKey, Servable


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


NOTHING = Freed(0, 0)


class Residents:
    """Thread-safe. `now` is the time of a monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._residents: dict[str, Resident] = {}  # by key
        self._loads: dict[MemberKey, Load] = {}  # those that have not begun in order of arrival
        self._lock = threading.RLock()
        self._closed = False

    # -- leases -------------------------------------------------------------------------------------------------

    def take(self, servable: Servable, now: float, keep_alive: float | None = None) -> Member | None:
        """A lease on a model; None if its engine, or its adapter, has to be loaded first."""
        with self._lock:
            found = self._member(servable)
            if found is None or not found.ready or found.leaving or self._waits(servable.member):
                return None
            if found.resident.failed:
                return None
            return self._lease(found, now, keep_alive)

    def give_back(self, member: Member, now: float) -> None:
        with self._lock:
            assert member.leases > 0, "a lease was returned twice"
            member.leases -= 1
            member.used = now

    def _member(self, servable: Servable) -> Member | None:
        resident = self._residents.get(servable.key)
        return None if resident is None else resident.members.get(servable.member)

    def _lease(self, member: Member, now: float, keep_alive: float | None, leases: int = 1) -> Member:
        member.leases += leases
        member.used = now
        if keep_alive is not None:
            member.keep_alive = keep_alive
        return member

    def _waits(self, key: MemberKey) -> bool:
        """Requests that arrive later are queued behind those that wait."""
        load = self._loads.get(key)
        return load is not None and load.member is None

    # -- loads --------------------------------------------------------------------------------------------------

    def enter(self, servable: Servable, keep_alive: float | None) -> Load:
        """Wait for a model: its load, which others may be waiting for. Raises `Overloaded`, and `BadRequest` for a
        model that can never be loaded here."""
        with self._lock:
            if sum(load.waiting for load in self._loads.values()) >= self.limits.max_waiting:
                raise Overloaded(f"{self.limits.max_waiting} requests are waiting for models; try again later")
            if (load := self._loads.get(servable.member)) is not None:
                load.waiting += 1
                load.keep_alive = keep_alive if keep_alive is not None else load.keep_alive
                return load
            if self._member(servable) is None:
                self._check_fits(servable)
            load = self._loads[servable.member] = Load(servable, keep_alive)
            return load

    def _check_fits(self, servable: Servable) -> None:
        fixed = [one for one in self._residents.values() if one.fixed]
        shares = any(one.key == servable.key for one in fixed)
        free = self.limits.max_bytes - sum(one.kept for one in fixed)
        need = servable.own if shares else servable.least + servable.own
        if need > free or (len(fixed) >= self.limits.max_models and not shares):
            taken = f"; models that stay loaded take {self.limits.max_bytes - free} of them" if fixed else ""
            raise BadRequest(
                f"the model {servable.name} needs {need} bytes, and this server has "
                f"{self.limits.max_bytes} bytes for at most {self.limits.max_models} models{taken}",
                "model",
            )

    def leave(self, load: Load, now: float) -> None:
        """One that waited for it does not wait any more: its lease, if it has one, is returned. A load that nothing
        waits for and that has not begun is dropped."""
        with self._lock:
            load.waiting -= 1
            if load.granted and load.member is not None:
                self.give_back(load.member, now)
            if load.waiting == 0 and load.member is None and self._loads.get(load.servable.member) is load:
                del self._loads[load.servable.member]

    def opened(self, resident: Resident, engine: ServedEngine) -> None:
        """The engine of a resident is there; no model can be used yet. What it cannot use of its cache is free."""
        with self._lock:
            assert resident.stage is Stage.LOADING
            resident.stage, resident.engine = Stage.READY, engine
            resident.size = min(resident.size, resident.servable.weights + engine.cache_bytes)

    def loaded(self, load: Load, variant: Variant, now: float) -> None:
        """The model of a load that has begun. Each request that waits for it has a lease now."""
        with self._lock:
            assert load.member is not None
            self.add(load.member, variant)
            self._grant(load, now)

    def add(self, member: Member, variant: Variant) -> None:
        """The model of a member whose bytes are reserved."""
        with self._lock:
            assert member.stage is Stage.LOADING and member.resident.ready
            member.stage, member.variant = Stage.READY, variant

    def _grant(self, load: Load, now: float) -> None:
        assert load.member is not None
        del self._loads[load.servable.member]
        load.granted = True
        self._lease(load.member, now, load.keep_alive, load.waiting)

    def failed(self, load: Load) -> None:
        with self._lock:
            assert load.member is not None
            del self._loads[load.servable.member]
            self.drop(load.member)

    def drop(self, member: Member) -> None:
        """It could not be loaded. An engine that is there and has no members is closed by the next work."""
        with self._lock:
            assert member.stage is Stage.LOADING
            member.resident.remove(member)
            if member.resident.stage is Stage.LOADING:
                del self._residents[member.resident.key]

    def closed(self, resident: Resident) -> None:
        with self._lock:
            assert resident.stage is Stage.CLOSING
            resident.engine = None
            del self._residents[resident.key]

    def parted(self, member: Member) -> None:
        """It was removed from its engine, and its adapter is freed."""
        with self._lock:
            assert member.stage is Stage.CLOSING
            member.resident.remove(member)

    def reserved(self, servable: Servable) -> Member:
        """Bytes for a model that stays, and is being loaded. Raises `BadRequest` if it does not fit."""
        with self._lock:
            self._check_fits(servable)
            found = self._begin(servable, FOREVER)
            found.fixed = True
            return found

    # -- decisions ----------------------------------------------------------------------------------------------

    def work(self, now: float) -> Work:
        """What has to be done now. Call it after every change, and when `next_due` is over."""
        with self._lock:
            done = Eviction()
            for one in self._residents.values():
                if one.due(now) or (self._closed and one.ready):
                    one.stage = Stage.CLOSING
                    done.close.append(one)
                for member in one.parting(now):
                    member.stage = Stage.CLOSING
                    done.part.append(member)
                for member in one.members.values():
                    member.leaving = False
            begin: list[Load] = []
            ready: list[Load] = []
            for load in [load for load in self._loads.values() if load.member is None]:
                found = self._residents.get(load.servable.key)
                if found is not None and found.stage is Stage.LOADING:
                    continue  # it can join when the engine is there
                if (member := self._member(load.servable)) is not None and member.ready and not member.resident.failed:
                    load.member = member
                    self._grant(load, now)
                    ready.append(load)
                elif self._has_free(load.servable, done):
                    keep_alive = self.limits.keep_alive if load.keep_alive is None else load.keep_alive
                    load.member = self._begin(load.servable, keep_alive)
                    begin.append(load)
                else:
                    break
            return Work(tuple(begin), tuple(done.close), tuple(done.part), tuple(ready))

    def _has_free(self, servable: Servable, done: Eviction) -> bool:
        """Whether the model can be loaded now. If not, others leave for it, where that helps."""
        found = self._residents.get(servable.key)
        if (found is not None and (not found.ready or found.failed)) or self._member(servable) is not None:
            return False  # until that is closed
        if found is not None and not found.fixed and servable.own > self._most_beside(found):
            found = None  # all that is left is in its cache: it has to be loaded again
            more = evicted(self.all(), lambda free: self._fits(servable, None, free), None)
        else:
            keep = found
            more = evicted(self.all(), lambda free: self._fits(servable, keep, free), keep)
        done.close += more.close
        done.part += more.part
        return self._fits(servable, found, NOTHING) and self._residents.get(servable.key) is found

    def _most_beside(self, resident: Resident) -> int:
        """Bytes that can be free while this engine stays."""
        others = sum(one.kept for one in self._residents.values() if one is not resident)
        return self.limits.max_bytes - others - resident.size

    def _fits(self, servable: Servable, shared: Resident | None, free: Freed) -> bool:
        """Whether a model does, on the engine `shared` or on one of its own, once so much is free."""
        size = self.bytes - free.bytes + servable.own
        if shared is not None:
            return size <= self.limits.max_bytes
        engines = len(self._residents) - free.engines
        return size + servable.least <= self.limits.max_bytes and engines < self.limits.max_models

    def _begin(self, servable: Servable, keep_alive: float) -> Member:
        resident = self._residents.get(servable.key)
        if resident is None:
            size = min(servable.most, self.limits.max_bytes - self.bytes - servable.own)
            resident = self._residents[servable.key] = Resident(servable, size)
        for one in self._all_members():
            if one.servable.name == servable.name and not one.fixed:  # what the name was before
                one.keep_alive = 0.0
        made = Member(servable, resident, keep_alive)
        resident.members = {**resident.members, servable.member: made}
        return made

    def unload(self, name: str) -> bool:
        """Unload the models of a name when their requests have ended, those too that wait for a load; requests that
        arrive meanwhile use it. Whether there is one that can be unloaded, or will be."""
        with self._lock:
            loads = [one for one in self._loads.values() if one.servable.name == name]
            members = [one for one in self._all_members() if one.servable.name == name and not one.fixed]
            for load in loads:
                load.keep_alive = 0.0
            for one in members:
                one.keep_alive = 0.0
            return bool(loads) or any(Stage.CLOSING not in (one.stage, one.resident.stage) for one in members)

    def close(self) -> None:
        """From now on nothing is loaded, and all engines are closed, whether they have leases or not."""
        with self._lock:
            self._closed = True
            self._loads = {key: load for key, load in self._loads.items() if load.member is not None}

    # -- views --------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(one.bytes for one in self._residents.values())

    @property
    def next_due(self) -> float:
        with self._lock:
            return min((one.expires for one in self._all_members()), default=FOREVER)

    def all(self) -> list[Resident]:
        with self._lock:
            return list(self._residents.values())

    def members(self) -> list[Member]:
        """The models that can be used."""
        with self._lock:
            return [one for one in self._all_members() if one.ready]

    def _all_members(self) -> list[Member]:
        return [member for one in self._residents.values() for member in one.members.values()]

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert self.bytes <= self.limits.max_bytes, f"{self.bytes} bytes of {self.limits.max_bytes}"
            assert len(self._residents) <= self.limits.max_models
            for key, one in self._residents.items():
                assert one.key == key
                assert one.stage is not Stage.LOADING or one.size >= one.servable.least
                assert (one.engine is not None) == one.ready or one.stage is Stage.CLOSING
                for name, member in one.members.items():
                    self._check_member(name, member, one)
            for key, load in self._loads.items():
                assert load.servable.member == key
                assert load.waiting > 0 or load.member is not None

    def _check_member(self, key: MemberKey, one: Member, resident: Resident) -> None:
        assert one.key == key and one.resident is resident and one.servable.key == resident.key
        assert one.leases >= 0
        assert not one.leases or one.ready or self._closed
        loading = key in self._loads and self._loads[key].member is one
        assert (one.stage is Stage.LOADING) == (loading or (one.fixed and one.variant is None))
        assert (one.variant is not None) or not one.ready
