"""What an operator clears or removes, and what expires, is gone from the memory of drafts and its store, too; and what
drafts are made of survives a restart."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.attention.choose import named
from kvcellar.engine.draft_memory import DraftMemory
from kvcellar.engine.open_store import open_draft_store
from kvcellar.engine.result import Collector
from kvcellar.models.build_guest import build_guest
from kvcellar.models.load import load
from kvcellar.prefix.node import key_of
from kvcellar.retention import NO_OPTIONS, RetentionOptions
from kvcellar.speculate.draft_model import ModelDrafter
from kvcellar.speculate.speculator import Speculator
from tests.engine.drafting import PATIENCE, always_restored
from tests.engine.mixes import tokens
from tests.zoo import ARCHS

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
ONE, TWO = (tokens(random.Random(seed), 150) for seed in (1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    ARCHS["llama"].build(max_position_embeddings=2048).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    always_restored(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def opened(path: Path, store: Path | None) -> Iterator[tuple[Engine, DraftMemory]]:
    """An engine whose target also drafts for itself."""
    settings = {"dtype": "float32", "cache_bytes": 8_000_000, "context": 600, "max_sequences": 4, "threads": 1}
    with Engine(path, store=str(store) if store is not None else None, **settings) as engine:
        guest = build_guest(load(path, dtype="float32", device="cpu").model, named(None))
        cache = DraftMemory(guest.memory({group.name: 800 for group in guest.shape.groups}))
        loop = engine._loop

        def install() -> None:
            cache.store = open_draft_store(cache, [path], engine._built.settings, loop.post, share=0.5)
            drafting = loop.manager.drafting
            drafting.memory = cache
            drafting.speculator = Speculator(ModelDrafter("self", guest.forward, cache, context=600), fixed=3)

        loop.call(install)
        yield engine, cache


def asked(engine: Engine, text: list[int], namespace: str = "", retention: RetentionOptions = NO_OPTIONS) -> None:
    """One request, to its end."""
    collector = Collector(1)
    params = engine.params(**GREEDY)
    engine.submit(text, params, deliver=collector.deliver, namespace=namespace, retention=retention)
    collector.result()


def written(engine: Engine, cache: DraftMemory) -> None:
    """Wait until everything is stored that is to be."""
    until = time.monotonic() + PATIENCE
    while (
        engine._loop.call(lambda: cache.store is not None and cache.store.unwritten) or engine.stats().store.unwritten
    ):
        assert time.monotonic() < until, "the store does not come to an end"
        time.sleep(0.005)
    engine.check()


def known(engine: Engine, cache: DraftMemory, text: list[int], namespace: str = "") -> tuple[int, int]:
    """How many tokens of a text the tree of the drafter has, and its store."""

    def look() -> tuple[int, int]:
        key, tree = key_of(text), cache.prefixes.tree
        found = cache.store.catalogue.match(namespace, key, len(text)).resume if cache.store is not None else 0
        return tree.match(tree.peek(namespace), key, len(text)).resume, found

    return engine._loop.call(look)


def test_drafts_go_on_after_a_restart_and_what_is_removed_is_gone(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as (engine, cache):
        first = engine.generate(ONE, **GREEDY)
        assert first.speculation is not None
        assert first.speculation.accepted >= 5, "the target drafts for itself"
        engine.generate(TWO, **GREEDY)
        written(engine, cache)
        assert all(n >= 150 for text in (ONE, TWO) for n in known(engine, cache, text))
        engine.clear_cache()
        assert known(engine, cache, ONE) == (0, 150), "the store is not the cache"
        engine.check()
    assert cache.memory.free() == dict.fromkeys(cache.memory.free(), 800)

    with opened(model, tmp_path / "store") as (engine, cache):
        again = engine.generate(ONE, **GREEDY)
        assert again.token_ids == first.token_ids
        assert cache.store is not None
        assert cache.store.restores.restored >= 128
        engine.generate(TWO, **GREEDY)
        written(engine, cache)
        engine.cache.remove(prefix=ONE[:3])
        assert known(engine, cache, ONE) == (0, 0)
        assert min(known(engine, cache, TWO)) >= 150
        (entry,) = [one["name"] for one in engine.cache.listed("device") if one["start"] == 0]
        engine.cache.remove(entry=entry)
        assert known(engine, cache, TWO) == (0, 0)
        asked(engine, ONE, "a")
        asked(engine, TWO, "b")
        written(engine, cache)
        stored = [one["name"] for one in engine.cache.listed("disk", "b")]
        engine.cache.remove(entry=stored[0])
        assert known(engine, cache, TWO, "b") == (0, 0)
        assert min(known(engine, cache, ONE, "a")) >= 150
        engine.cache.remove(namespace="a")
        assert known(engine, cache, ONE, "a") == (0, 0)
        engine.generate(ONE, **GREEDY)
        written(engine, cache)
        engine.cache.clear()
        assert known(engine, cache, ONE) == (0, 0)
        assert set(cache.memory.free().values()) == {800}
        engine.check()


def test_what_a_request_does_not_let_store_or_keep_is_not(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as (engine, cache):
        asked(engine, ONE, retention=RetentionOptions(stored=False))
        asked(engine, TWO, retention=RetentionOptions(ttl=0.001))
        written(engine, cache)
        assert known(engine, cache, ONE)[1] == 0
        asked(engine, [*ONE, 5], "c")
        assert known(engine, cache, TWO)[0] == 0
        engine.check()


def test_an_error_while_reading_drops_the_drafts_and_no_request(model: Path, tmp_path: Path, caplog) -> None:
    with opened(model, tmp_path / "store") as (engine, cache):
        expected = engine.generate(ONE, **GREEDY).token_ids
        pump = cache.pump
        cache.pump = lambda: 1 // 0  # type: ignore[method-assign]
        engine.clear_cache()
        assert engine.generate(ONE, **GREEDY).token_ids == expected
        cache.pump = pump  # type: ignore[method-assign]
        assert "the memory of drafts is dropped" in caplog.text
        engine.check()
        found = engine.generate(TWO, **GREEDY)
        assert found.speculation is not None
        assert found.speculation.accepted >= 5
        engine.check()
