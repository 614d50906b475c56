"""resident: an engine in memory, the models that use it under names of their own, and the loads that wait for one.

Models of one key share an engine. Each is a member of it, with an adapter or none, and stays for as long as it is used;
the engine stays for as long as it has members.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.variants import Variant
from kvcellar.serve.servable import MemberKey, Servable

FOREVER = float("inf")


class Stage(Enum):
    LOADING = "its bytes are reserved, and it is being made"
    READY = "requests can have leases on it"
    CLOSING = "it is being closed; then its bytes are free"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all models together. `max_bytes` caps weights, caches, drafts and adapters."""

    max_bytes: int
    max_models: int = 3  # engines: models that share one count once
    max_waiting: int = 512  # requests that wait for a model
    wait_seconds: float = 300.0  # until a request that waits for the memory of others is refused
    keep_alive: float = 300.0  # seconds without requests until a model is unloaded
    device: str = "cpu"  # kind of the device whose bytes these are


@dataclass(eq=False, slots=True)
class Member:
    """A model under its name, on an engine that others may share."""

    servable: Servable
    resident: "Resident"
    keep_alive: float
    fixed: bool = False
    stage: Stage = Stage.LOADING
    variant: Variant | None = None
    leases: int = 0
    leaving: bool = False  # gets no new leases, because the first load waits for its memory
    used: float = 0.0  # when the last lease was given or returned

    @property
    def key(self) -> MemberKey:
        return self.servable.member

    @property
    def size(self) -> int:
        """Reserved bytes of its adapter."""
        return self.servable.own

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY and self.resident.stage is Stage.READY

    @property
    def idle(self) -> bool:
        return self.ready and not self.leases and not self.fixed

    @property
    def expires(self) -> float:
        """When it is unloaded if no request comes."""
        return self.used + self.keep_alive if self.idle else FOREVER


@dataclass(eq=False, slots=True, weakref_slot=True)
class Resident:
    """An engine and its memory. `size`: bytes without adapters of members: those reserved for its load, then those that
    it can use. `members` is replaced and never changed, as threads without the lock of `Residents` iterate over it."""

    servable: Servable
    size: int
    stage: Stage = Stage.LOADING
    engine: ServedEngine | None = None
    members: Mapping[MemberKey, Member] = field(default_factory=dict[MemberKey, Member])

    def remove(self, member: Member) -> None:
        self.members = {key: one for key, one in self.members.items() if one is not member}

    @property
    def key(self) -> str:
        return self.servable.key

    @property
    def bytes(self) -> int:
        return self.size + sum(one.size for one in self.members.values())

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY

    @property
    def fixed(self) -> bool:
        return any(one.fixed for one in self.members.values())

    @property
    def kept(self) -> int:
        """Bytes that are never freed while the server runs."""
        return self.size + sum(one.size for one in self.members.values() if one.fixed) if self.fixed else 0

    @property
    def leases(self) -> int:
        return sum(one.leases for one in self.members.values())

    @property
    def used(self) -> float:
        return max((one.used for one in self.members.values()), default=0.0)

    @property
    def idle(self) -> bool:
        return self.ready and all(one.idle for one in self.members.values())

    @property
    def failed(self) -> bool:
        """Whether another engine has to replace it. One that stays is not replaced: the server is unhealthy."""
        return self.ready and not self.fixed and self.engine is not None and not self.engine.healthy

    def due(self, now: float) -> bool:
        """Whether it has to be closed: no member was used for long enough, or the engine has failed."""
        return self.idle and (self.failed or all(one.expires <= now for one in self.members.values()))

    def parting(self, now: float) -> list[Member]:
        """Members that have to leave an engine which stays."""
        return [one for one in self.members.values() if one.expires <= now]


@dataclass(eq=False, slots=True)
class Load:
    """A model that `waiting` requests wait for."""

    servable: Servable
    keep_alive: float | None = None
    waiting: int = 1
    member: Member | None = None  # None: it has not begun
    granted: bool = False  # each request that waits has a lease


@dataclass(frozen=True, slots=True)
class Work:
    """What the host has to do now."""

    begin: tuple[Load, ...] = ()  # load
    close: tuple[Resident, ...] = ()
    part: tuple[Member, ...] = ()  # remove from their engines
    ready: tuple[Load, ...] = ()  # the model is there: each request that waits for it has a lease
