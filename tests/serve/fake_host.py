"""A host whose loads and closes run when the test says, over engines that only have a size."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.errors import ModelNotFound
from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.memory.tiers.archive import Archive
from kvcellar.serve.models.model_manager import Limits, ModelManager
from kvcellar.serve.models.model_spec import ModelSpec
from tests.serve.fake_engine import FakeModel, FakeReplies


class SizedEngine:
    """What the host needs of an engine. `leases` are counted by the test."""

    def __init__(self, name: str, size: int, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes
        self.model = FakeModel(name)
        self.replies = FakeReplies()
        self.own_size, self.healthy, self.closed, self.leases = size, True, False, 0
        self.starting = False
        self.adapters: dict[str, int] = {}  # bytes by name of a model
        self.used: dict[str, int] = {}  # leases by name of a model
        self.conversations = Conversations(Archive(), TokenSource(name, "", 256))

    @property
    def size(self) -> int:
        return self.own_size + sum(self.adapters.values())

    def render(self, *args: Any, **options: Any) -> list[int]:
        return []


@dataclass
class World:
    """All that was made, and the jobs that a thread would run."""

    limits: Limits
    sizes: dict[str, tuple[int, int]]  # by name of a model: weights, least cache
    adapters: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])  # name: base, bytes
    versions: dict[str, int] = field(default_factory=dict[str, int])  # of the files of a model, by name
    used: dict[str, int] = field(default_factory=dict[str, int])  # the most of a cache that an engine can use, by name
    most_cache: int = 40
    now: float = 0.0
    jobs: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    engines: list[SizedEngine] = field(default_factory=list[SizedEngine])
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])  # of loads, by name
    loads: int = 0
    free: Callable[[], object] = lambda: None
    longest: int = 0

    def __post_init__(self) -> None:
        engines: Any = self.close
        self.host = ModelManager(
            self, self.limits, unload=engines, free=lambda: self.free(), clock=lambda: self.now, spawn=self.jobs.append
        )

    def find(self, name: str) -> ModelSpec:
        base, own = self.adapters.get(name, (name, 0))
        if base not in self.sizes:
            raise ModelNotFound(f"there is no model {name!r}")
        weights, least = self.sizes[base]
        adapter = f"{name} {self.versions.get(name, 0)}"

        def load(cache: int, going_on: Callable[[], None]) -> Any:
            assert least <= cache <= self.most_cache
            self.loads += 1
            if name in self.errors:
                raise self.errors[name]
            used = min(cache, self.used.get(base, cache))
            engine = SizedEngine(base, weights + used, used)
            self.engines.append(engine)
            assert self.bytes <= self.limits.max_bytes, "the cap was exceeded"
            return engine

        def join(engine: Any) -> NamedEngine:
            if name in self.errors:
                raise self.errors[name]
            assert not engine.closed
            assert adapter not in engine.adapters, "an adapter was added twice"
            engine.adapters[adapter] = own
            assert self.bytes <= self.limits.max_bytes, "the cap was exceeded"

            def close() -> None:
                assert not engine.used.get(adapter), "an adapter was removed under a request"
                del engine.adapters[adapter]

            return NamedEngine(engine, adapter, close)

        about: dict[str, Any] = {"id": str(self.versions.get(name, 0)), "own": own, "join": join}
        return ModelSpec(name, f"key of {base}", weights, self.most_cache, least, load, **about)

    def known(self, name: str) -> bool:
        return True

    def all(self) -> Sequence[ModelSpec]:
        return [self.find(name) for name in sorted({*self.sizes, *self.adapters})]

    def close(self, engine: SizedEngine) -> None:
        assert not engine.leases, "an engine was closed under a request"
        assert not engine.closed
        assert not any(engine.used.values())
        engine.closed = True

    @property
    def bytes(self) -> int:
        return sum(engine.size for engine in self.engines if not engine.closed)

    def run_job(self, chance: random.Random) -> bool:
        if not self.jobs:
            return False
        self.jobs.pop(chance.randrange(len(self.jobs)))()
        return True

    def check(self) -> None:
        self.host.check()
        assert self.bytes <= self.limits.max_bytes
        assert self.bytes <= self.host.bytes


def engine_of(lease: Any) -> SizedEngine:
    return lease.engine._engine
