"""Requests, branches, cancellations, evictions from every tier, clearing and restarts in any order: each answer is that
of an engine which remembers nothing, and nothing leaks."""

import random
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.frontend.result import Collector
from tests.engine.mixes import bytes_for, tokens
from tests.engine.test_store import GREEDY, always, opened, saved  # noqa: F401
from tests.engine.tiered import acknowledged, settled, store_of
from tests.zoo import ARCHS

CONTEXT = 330
STEPS = 24


class Machine:
    """One engine after the other on the same store, and what has been said."""

    def __init__(self, name: str, path: Path, directory: Path, seed: int) -> None:
        self.draw, self.path, self.directory = random.Random(f"{name} {seed}"), path, directory
        model, host = ARCHS[name].build(max_position_embeddings=2048), 400_000
        self.limits = {"context": CONTEXT, "max_sequences": 2, "threads": 1}
        self.limits["cache_bytes"] = bytes_for(model, 2 * CONTEXT, **self.limits) + host
        self.limits |= {"host_bytes": host, "store_bytes": 900_000, "store_remote": f"file://{directory}/elsewhere"}
        self.limits |= {"store_remote_bytes": 900_000, "staging_bytes": 1_200_000}
        self.talks: list[list[int]] = [tokens(self.draw, 80)]
        self.cold = opened(path, None, context=CONTEXT)
        self.engine = self._opened()
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.cached = 0

    def _opened(self) -> Engine:
        return opened(self.path, self.directory / "store", **self.limits)

    def play(self) -> None:
        acts = [self.asks] * 5 + [self.asks_several, self.cancels, self.clears, self.restarts, self.loses, self.rests]
        for _ in range(STEPS):
            self.draw.choice(acts)()
            self.engine.check()
        settled(self.engine)

    def prompt(self) -> list[int]:
        """A new one, one that goes on, one that was there before, or a branch of one."""
        talk = self.draw.choice(self.talks)
        kind = self.draw.randrange(4)
        if kind == 0:
            return tokens(self.draw, self.draw.randrange(70, 130))
        if kind == 1:
            return talk
        cut = len(talk) if kind == 2 else self.draw.randrange(1, len(talk))
        found = [*talk[:cut], *tokens(self.draw, self.draw.randrange(10, 90))]
        return found if len(found) < CONTEXT - 10 else talk

    def _judge(self, prompt: list[int], found: Collector) -> None:
        result, key = found.result(), tuple(prompt)
        if key not in self.known:
            self.known[key] = self.cold.generate(prompt, **GREEDY).token_ids
        assert result.token_ids == self.known[key], f"warm differs from cold: {result.recall}"
        self.cached += result.usage.cached_tokens
        self.talks = [*self.talks[-5:], [*prompt, *result.token_ids]]

    def _submit(self, prompt: list[int], collector: Collector):
        return self.engine.submit(prompt, self.engine.params(**GREEDY), deliver=collector.deliver)

    def asks(self) -> None:
        prompt, collector = self.prompt(), Collector(1)
        self._submit(prompt, collector)
        self._judge(prompt, collector)

    def asks_several(self) -> None:
        several = [(self.prompt(), Collector(1)) for _ in range(4)]
        for one in several:
            self._submit(*one)
        for one in several:
            self._judge(*one)

    def cancels(self) -> None:
        collector = Collector(1)
        ticket = self._submit(self.prompt(), collector)
        if self.draw.random() < 0.5:
            self.engine.stats()
        ticket.cancel()
        collector.result()

    def clears(self) -> None:
        self.engine.clear_cache()

    def restarts(self) -> None:
        if self.draw.random() < 0.5:
            acknowledged(self.engine)
        self.close()
        self.engine = self._opened()

    def loses(self) -> None:
        """A tier loses some entries, or all."""
        tier = self.draw.choice(store_of(self.engine).transfers.tiers)
        keys = [entry.snapshot.key for entry in tier.entries()]
        tier.remove(self.draw.sample(keys, self.draw.randrange(len(keys) + 1)))

    def rests(self) -> None:
        settled(self.engine)

    def close(self) -> None:
        """Nothing may be left of an engine that was closed."""
        store = store_of(self.engine)
        self.engine.clear_cache()
        stats = self.engine.stats()
        assert (stats.cells_used, stats.cells_cached, stats.rows_used, stats.rows_cached) == (0, 0, 0, 0)
        self.engine.close()
        assert not store.transfers.staged()
        assert not any(thread.is_alive() for thread in store.transfers._threads)
        assert not store.restores._staged
        assert not store.transfers.tiers[0].entries(), "host memory is not freed"


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "lfm2"])
def test_warm_equals_cold_whatever_tiers_do(saved, tmp_path, name) -> None:  # noqa: F811
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    machine = Machine(name, saved[name], tmp_path, 1)
    try:
        machine.play()
        machine.close()
        assert machine.cached > 0
    finally:
        machine.engine.close()
        machine.cold.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "lfm2", "qwen3.5"])
def test_warm_equals_cold_whatever_tiers_do_for_long(saved, tmp_path, name, seed) -> None:  # noqa: F811
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    machine = Machine(name, saved[name], tmp_path, seed)
    try:
        machine.play()
        machine.close()
    finally:
        machine.engine.close()
        machine.cold.close()
