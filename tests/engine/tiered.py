"""Engines with tiers, whose bytes are sampled after every operation."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcellar import Engine
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.host import HostTier
from tests.tiers.test_cap import bytes_in

OPERATIONS = ("put", "get", "renew", "remove", "used", "entries")
PATIENCE = 240.0


def store_of(engine: Engine) -> Store:
    store = engine._loop.manager.store
    assert store is not None
    return store


def acknowledged(engine: Engine) -> None:
    """Wait until everything is stored that is to be."""
    until = time.monotonic() + PATIENCE
    while engine.stats().store.unwritten:
        assert time.monotonic() < until, "the store does not come to an end"
        time.sleep(0.002)


def settled(engine: Engine) -> None:
    """Wait until nothing is on its way, and then assert that all memory for it is free again."""
    acknowledged(engine)
    transfers = store_of(engine).transfers
    until = time.monotonic() + PATIENCE
    while transfers.staged():
        assert time.monotonic() < until, f"{transfers.staged()} staged bytes are never freed"
        time.sleep(0.002)
    engine.check()


class Watch:
    """Samples the bytes of an engine's tiers around every operation of theirs."""

    def __init__(self, engine: Engine, directory: Path | None = None) -> None:
        self.samples, self.wrong = 0, set[str]()
        self._engine, self._directory, self._lock = engine, directory, threading.Lock()
        self._store, self._cells = store_of(engine), engine._built.memory.storage.bytes
        for tier in self._store.transfers.tiers:
            for name in OPERATIONS:
                setattr(tier, name, self._around(getattr(tier, name)))
        transfers = self._store.transfers
        for name in ("reserve", "fetch", "release"):
            setattr(transfers, name, self._around(getattr(transfers, name)))

    def _around(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(*arguments: Any, **options: Any) -> Any:
            self.sample()
            try:
                return act(*arguments, **options)
            finally:
                self.sample()

        return sampled

    def sample(self) -> None:
        with self._lock:
            self.samples += 1
            transfers = self._store.transfers
            self._most("staging", transfers.staged(), transfers.staging)
            for tier in transfers.tiers:
                self._most(tier.name, tier.size(), tier.cap)
                if isinstance(tier, HostTier):
                    held = sum(len(chunk) for _, chunks in list(tier._content.values()) for chunk in chunks)
                    self._most("chunks in host memory", held, tier.cap)
                if tier.name == "disk" and self._directory is not None:
                    self._most("files", bytes_in(self._directory), tier.cap)
            self._most("device", self._engine._built.memory.storage.bytes, self._cells)

    def _most(self, what: str, found: int, cap: int) -> None:
        if found > cap:
            self.wrong.add(f"{what}: {found} bytes, over its cap of {cap}")
