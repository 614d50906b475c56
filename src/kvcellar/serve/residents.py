"""residents: which engines are in memory, what they take, and which one has to leave for another.

Decides only: the host loads and closes engines, and reports here when that is done.

Always true:
  * the bytes of all residents, counted from before their load until after they are closed, are at most the limit, and
    there are at most as many residents as the limits allow;
  * an engine is closed only if it has no lease, and no lease is given on an engine that is being loaded or closed;
  * loads wait in order of arrival. While the first one waits for memory, the residents that have to leave for it get no
    new leases, so it waits for the requests that run now and for no later ones;
  * at most one load and one resident exist for a key.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvcellar.errors import BadRequest, Overloaded
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.servable import Servable

FOREVER = float("inf")


class Stage(Enum):
    LOADING = "its bytes are reserved, and its engine is being made"
    READY = "requests can have leases on it"
    CLOSING = "its engine is being closed; then its bytes are free"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all models together. `max_bytes` caps weights, caches, drafts and adapters."""

    max_bytes: int
    max_models: int = 3
    max_waiting: int = 512  # requests that wait for a model
    wait_seconds: float = 300.0  # until a request that waits for the memory of others is refused
    keep_alive: float = 300.0  # seconds without requests until a model is unloaded
    device: str = "cpu"  # kind of the device whose bytes these are


@dataclass(eq=False, slots=True)
class Resident:
    """An engine and its memory."""

    servable: Servable
    size: int  # reserved bytes
    keep_alive: float
    fixed: bool = False
    stage: Stage = Stage.LOADING
    engine: ServedEngine | None = None
    leases: int = 0
    leaving: bool = False  # gets no new leases, because the first load waits for its memory
    used: float = 0.0  # when the last lease was given or returned

    @property
    def key(self) -> str:
        return self.servable.key

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY

    @property
    def idle(self) -> bool:
        return self.ready and not self.leases and not self.fixed

    @property
    def expires(self) -> float:
        """When it is unloaded if no request comes."""
        return self.used + self.keep_alive if self.idle else FOREVER

    @property
    def failed(self) -> bool:
        """Whether another engine has to replace it. One that stays is not replaced: the server is unhealthy."""
        return self.ready and not self.fixed and self.engine is not None and not self.engine.healthy

    def due(self, now: float) -> bool:
        """Whether it has to be closed: it was not used for long enough, or its engine has failed."""
        return self.idle and (self.expires <= now or self.failed)


@dataclass(eq=False, slots=True)
class Load:
    """A model that `waiting` requests wait for."""

    servable: Servable
    keep_alive: float | None = None
    waiting: int = 1
    resident: Resident | None = None  # None: it has not begun
    granted: bool = False  # each request that waits has a lease

    @property
    def key(self) -> str:
        return self.servable.key


@dataclass(frozen=True, slots=True)
class Work:
    """What the host has to do now."""

    begin: tuple[Load, ...] = ()  # load
    close: tuple[Resident, ...] = ()
    ready: tuple[Load, ...] = ()  # its engine is there: each request that waits for it has a lease


class Residents:
    """Thread-safe. `now` is the time of a monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._residents: dict[str, Resident] = {}  # by key
        self._loads: dict[str, Load] = {}  # by key; those that have not begun in order of arrival
        self._lock = threading.RLock()
        self._closed = False

    # -- leases -------------------------------------------------------------------------------------------------

    def take(self, servable: Servable, now: float, keep_alive: float | None = None) -> Resident | None:
        """A lease on the engine of `servable`; None if it, or its adapter, has to be loaded first."""
        with self._lock:
            found = self._residents.get(servable.key)
            if found is None or not found.ready or found.leaving or self._waits(servable.key):
                return None
            if found.failed:
                return None
            return self._lease(found, now, keep_alive)

    def give_back(self, resident: Resident, now: float) -> None:
        with self._lock:
            assert resident.leases > 0, "a lease was returned twice"
            resident.leases -= 1
            resident.used = now

    def _lease(self, resident: Resident, now: float, keep_alive: float | None, leases: int = 1) -> Resident:
        resident.leases += leases
        resident.used = now
        if keep_alive is not None:
            resident.keep_alive = keep_alive
        return resident

    def _waits(self, key: str) -> bool:
        """Requests that arrive later are queued behind those that wait."""
        load = self._loads.get(key)
        return load is not None and load.resident is None

    # -- loads --------------------------------------------------------------------------------------------------

    def enter(self, servable: Servable, keep_alive: float | None) -> Load:
        """Wait for a model: its load, which others may be waiting for. Raises `Overloaded`, and `BadRequest` for a
        model that can never be loaded here."""
        with self._lock:
            if sum(load.waiting for load in self._loads.values()) >= self.limits.max_waiting:
                raise Overloaded(f"{self.limits.max_waiting} requests are waiting for models; try again later")
            if (load := self._loads.get(servable.key)) is not None:
                load.waiting += 1
                load.keep_alive = keep_alive if keep_alive is not None else load.keep_alive
                return load
            self._check_fits(servable)
            load = self._loads[servable.key] = Load(servable, keep_alive)
            return load

    def _check_fits(self, servable: Servable) -> None:
        fixed = [one for one in self._residents.values() if one.fixed and one.key != servable.key]
        free = self.limits.max_bytes - sum(one.size for one in fixed)
        if servable.key in self._residents:
            return
        if servable.least > free or len(fixed) >= self.limits.max_models:
            taken = f"; models that stay loaded take {self.limits.max_bytes - free} of them" if fixed else ""
            raise BadRequest(
                f"the model {servable.name} needs {servable.least} bytes, and this server has "
                f"{self.limits.max_bytes} bytes for at most {self.limits.max_models} models{taken}",
                "model",
            )

    def leave(self, load: Load, now: float) -> None:
        """One that waited for it does not wait any more: its lease, if it has one, is returned. A load that nothing
        waits for and that has not begun is dropped."""
        with self._lock:
            load.waiting -= 1
            if load.granted and load.resident is not None:
                self.give_back(load.resident, now)
            if load.waiting == 0 and load.resident is None and self._loads.get(load.key) is load:
                del self._loads[load.key]

    def loaded(self, load: Load, engine: ServedEngine, now: float) -> None:
        """The engine of a load that has begun. Each request that waits for it has a lease now."""
        with self._lock:
            assert load.resident is not None and load.resident.stage is Stage.LOADING
            load.resident.stage, load.resident.engine = Stage.READY, engine
            self._grant(load, now)

    def _grant(self, load: Load, now: float) -> None:
        assert load.resident is not None
        del self._loads[load.key]
        load.granted = True
        self._lease(load.resident, now, load.keep_alive, load.waiting)

    def failed(self, load: Load) -> None:
        with self._lock:
            assert load.resident is not None and load.resident.stage is Stage.LOADING
            del self._loads[load.key], self._residents[load.key]

    def closed(self, resident: Resident) -> None:
        with self._lock:
            assert resident.stage is Stage.CLOSING
            resident.engine = None
            del self._residents[resident.key]

    def reserved(self, servable: Servable) -> Resident:
        """Bytes for an engine that stays, and is being loaded. Raises `BadRequest` if it does not fit."""
        with self._lock:
            self._check_fits(servable)
            made = self._begin(servable, FOREVER)
            made.fixed = True
            return made

    def add(self, resident: Resident, engine: ServedEngine | None) -> None:
        """The engine that `reserved` has bytes for; None: it could not be loaded."""
        with self._lock:
            resident.stage, resident.engine = Stage.READY, engine
            if engine is None:
                del self._residents[resident.key]

    # -- decisions ----------------------------------------------------------------------------------------------

    def work(self, now: float) -> Work:
        """What has to be done now. Call it after every change, and when `next_due` is over."""
        with self._lock:
            for one in self._residents.values():
                one.leaving = False
            closing = [one for one in self._residents.values() if one.due(now) or (self._closed and one.ready)]
            for one in closing:
                one.stage = Stage.CLOSING
            begin: list[Load] = []
            ready: list[Load] = []
            for load in [load for load in self._loads.values() if load.resident is None]:
                found = self._residents.get(load.key)
                if found is not None and found.ready and not found.failed:
                    load.resident = found
                    self._grant(load, now)
                    ready.append(load)
                    continue
                if found is None:
                    closing += self._evict(load.servable.least)
                if found is not None or not self._fits(load.servable.least):
                    break
                keep_alive = self.limits.keep_alive if load.keep_alive is None else load.keep_alive
                load.resident = self._begin(load.servable, keep_alive)
                begin.append(load)
            return Work(tuple(begin), tuple(closing), tuple(ready))

    def _begin(self, servable: Servable, keep_alive: float) -> Resident:
        size = min(servable.most, self.limits.max_bytes - self.bytes)
        made = self._residents[servable.key] = Resident(servable, size, keep_alive)
        return made

    def _fits(self, size: int, without: Sequence[Resident] = ()) -> bool:
        """Whether one more engine does, once those `without` are closed."""
        size += self.bytes - sum(one.size for one in without)
        return size <= self.limits.max_bytes and len(self._residents) - len(without) < self.limits.max_models

    def _evict(self, size: int) -> list[Resident]:
        """Close the least recently used idle ones until so much fits when all are closed; if that is not enough, mark
        those that have to become idle."""
        gone = [one for one in self._residents.values() if one.stage is Stage.CLOSING]
        closing: list[Resident] = []
        others = sorted(self._residents.values(), key=lambda one: (one.leases > 0, one.used))
        for one in others:
            if self._fits(size, gone):
                break
            if one.fixed or not one.ready:
                continue
            if one.idle:
                one.stage = Stage.CLOSING
                closing.append(one)
            else:
                one.leaving = True
            gone.append(one)
        return closing

    def unload(self, key: str) -> bool:
        """Unload an engine when its requests have ended, those too that wait for its load; requests that arrive
        meanwhile use it. Whether there is one that can be unloaded, or will be."""
        with self._lock:
            found, load = self._residents.get(key), self._loads.get(key)
            if found is not None and found.fixed:
                return False
            if load is not None:
                load.keep_alive = 0.0
            if found is None or found.stage is Stage.CLOSING:
                return load is not None
            found.keep_alive = 0.0
            return True

    def close(self) -> None:
        """From now on nothing is loaded, and all engines are closed, whether they have leases or not."""
        with self._lock:
            self._closed = True
            self._loads = {key: load for key, load in self._loads.items() if load.resident is not None}

    # -- views --------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(one.size for one in self._residents.values())

    @property
    def next_due(self) -> float:
        with self._lock:
            return min((one.expires for one in self._residents.values()), default=FOREVER)

    def all(self) -> list[Resident]:
        with self._lock:
            return list(self._residents.values())

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert self.bytes <= self.limits.max_bytes, f"{self.bytes} bytes of {self.limits.max_bytes}"
            assert len(self._residents) <= self.limits.max_models
            for key, one in self._residents.items():
                assert one.key == key and one.leases >= 0
                assert (one.engine is not None) == one.ready or one.stage is Stage.CLOSING
                assert not one.leases or one.ready or self._closed
                assert one.size >= one.servable.least
                loading = key in self._loads and self._loads[key].resident is one
                assert (one.stage is Stage.LOADING) == (loading or (one.fixed and not one.ready))
            for key, load in self._loads.items():
                assert load.key == key
                assert load.waiting > 0 or load.resident is not None
