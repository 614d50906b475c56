"""loaded_model: an engine in memory, and the models that use it under names of their own.

Models of one key share an engine. Each has an adapter or none, and stays for as long as it is used; the engine stays
for as long as it has models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvcellar.frontend.engine import Engine
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.serve.models.model_spec import ModelKey, ModelSpec

FOREVER = float("inf")


class Stage(Enum):
    LOADING = "its bytes are reserved, and it is being made"
    READY = "requests can have leases on it"
    CLOSING = "it is being closed; then its bytes are free"


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model under its name, on an engine that others may share."""

    spec: ModelSpec
    on: "LoadedEngine"
    keep_alive: float
    fixed: bool = False
    stage: Stage = Stage.LOADING
    engine: NamedEngine | None = None
    leases: int = 0
    leaving: bool = False  # gets no new leases, because the first model that waits needs its memory
    used: float = 0.0  # when the last lease was given or returned

    @property
    def key(self) -> ModelKey:
        return self.spec.model_key

    @property
    def size(self) -> int:
        """Reserved bytes of its adapter."""
        return self.spec.own

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY and self.on.ready

    @property
    def closing(self) -> bool:
        return Stage.CLOSING in (self.stage, self.on.stage)

    @property
    def idle(self) -> bool:
        return self.ready and not self.leases and not self.fixed

    @property
    def expires(self) -> float:
        """When it is unloaded if no request comes."""
        return self.used + self.keep_alive if self.idle else FOREVER


@dataclass(eq=False, slots=True, weakref_slot=True)
class LoadedEngine:
    """An engine and its memory. `size`: bytes without adapters of models: those reserved for its load, then those that
    it can use. `models` is replaced and never changed, as threads without the lock of the manager iterate over it."""

    spec: ModelSpec
    size: int
    stage: Stage = Stage.LOADING
    engine: Engine | None = None
    models: Mapping[ModelKey, LoadedModel] = field(default_factory=dict[ModelKey, LoadedModel])

    def remove(self, model: LoadedModel) -> None:
        self.models = {key: one for key, one in self.models.items() if one is not model}

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def bytes(self) -> int:
        return self.size + sum(one.size for one in self.models.values())

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY

    @property
    def fixed(self) -> bool:
        return any(one.fixed for one in self.models.values())

    @property
    def kept(self) -> int:
        """Bytes that are never freed while the server runs."""
        return self.size + sum(one.size for one in self.models.values() if one.fixed) if self.fixed else 0

    @property
    def leases(self) -> int:
        return sum(one.leases for one in self.models.values())

    @property
    def used(self) -> float:
        return max((one.used for one in self.models.values()), default=0.0)

    @property
    def idle(self) -> bool:
        return self.ready and all(one.idle for one in self.models.values())

    @property
    def failed(self) -> bool:
        """Whether another engine has to replace it. One that stays is not replaced: the server is unhealthy."""
        return self.ready and not self.fixed and self.engine is not None and not self.engine.healthy

    def due(self, now: float) -> bool:
        """Whether it has to be closed: no model of it was used for long enough, or the engine has failed."""
        return self.idle and (self.failed or all(one.expires <= now for one in self.models.values()))
