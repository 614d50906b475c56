"""What an operator clears or removes, and what expires, is gone from the memory of drafts and its store, too; and what
drafts are made of survives a restart."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.frontend.result import Collector
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from tests.engine.drafting import PATIENCE, always_restored, chain
from tests.engine.mixes import tokens
from tests.own_cache import own_cache
from tests.zoo import ARCHS

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
ONE, TWO = (tokens(random.Random(seed), 150) for seed in (1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a target, and in it that of a draft model."""
    path = tmp_path_factory.mktemp("model")
    for layers, directory in ((8, path), (1, path / "draft")):
        ARCHS["llama"].build(max_position_embeddings=2048, num_hidden_layers=layers).save_pretrained(directory)
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    always_restored(monkeypatch)
    own_cache(monkeypatch, tmp_path / "cache")


@contextmanager
def opened(path: Path, store: Path | None) -> Iterator[tuple[Engine, DraftMemory]]:
    """An engine with a draft model, which drafts three tokens in each round."""
    settings = {"dtype": "float32", "cache_bytes": 16_000_000, "context": 600, "max_sequences": 4, "threads": 1}
    with Engine(path, draft=str(path / "draft"), store=str(store) if store is not None else None, **settings) as engine:
        drafting, cache = engine._loop.manager.drafting, engine._loop.manager.drafting.memory
        assert drafting.speculator is not None
        assert cache is not None
        drafting.speculator = Speculator(drafting.speculator.drafter, fixed=3)
        empty = cache.memory.free()
        yield engine, cache
    assert cache.memory.free() == empty


def restored(engine: Engine, cache: DraftMemory, text: list[int]) -> int:
    """How many tokens a completion that begins with this text need not compute, once they are read."""
    one, until = chain(9999, text, 0, vocab=1000), time.monotonic() + PATIENCE
    while (seqs := engine._loop.call(lambda: cache.open([one]))) == [None]:
        assert time.monotonic() < until, "it is never read"
        time.sleep(0.005)

    def length() -> int:
        found = cache.memory.length(seqs[0] or 0)
        cache.close(one.key, keep=False)
        return found

    return engine._loop.call(length)


def drafted(engine: Engine, text: list[int]) -> list[int]:
    """The tokens of a request for which the drafter has drafted: it may wait for what is stored for longer than one
    takes."""
    end = time.monotonic() + PATIENCE
    while True:
        made = engine.generate(text, **GREEDY)
        assert made.speculation is not None
        if made.speculation.drafted:
            return list(made.token_ids)
        assert time.monotonic() < end, "nothing is ever drafted"


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
        key, tree = key_of(text), cache.cache.prefixes.tree
        found = cache.store.catalogue.match(namespace, key, len(text)).resume if cache.store is not None else 0
        return tree.match(tree.peek(namespace), key, len(text)).resume, found

    return engine._loop.call(look)


def test_drafts_go_on_after_a_restart_and_what_is_removed_is_gone(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as (engine, cache):
        first = drafted(engine, ONE)
        drafted(engine, TWO)
        written(engine, cache)
        assert all(n >= 150 for text in (ONE, TWO) for n in known(engine, cache, text))
        engine.clear_cache()
        assert known(engine, cache, ONE) == (0, 150), "the store is not the cache"
        engine.check()

    with opened(model, tmp_path / "store") as (engine, cache):
        assert restored(engine, cache, ONE) == restored(engine, cache, TWO) == 149
        assert drafted(engine, ONE) == first
        drafted(engine, TWO)
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
        own = engine._loop.manager.store.identity.hex()[:16]
        stored = {one["identity"]: one["name"] for one in engine.cache.listed("disk", "b") if not one["parent"]}
        engine.cache.remove(entry=stored[own])
        assert known(engine, cache, TWO, "b") == (0, 0)
        assert min(known(engine, cache, ONE, "a")) >= 150
        engine.cache.remove(namespace="a")
        assert known(engine, cache, ONE, "a") == (0, 0)
        engine.generate(ONE, **GREEDY)
        written(engine, cache)
        engine.cache.clear()
        assert known(engine, cache, ONE) == (0, 0)
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


def test_the_entry_of_a_draft_model_is_removed_alone(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as (engine, cache):
        drafted(engine, ONE)
        written(engine, cache)
        assert cache.store is not None
        identity = cache.store.identity.hex()[:16]
        (name,) = [one["name"] for one in engine.cache.listed("disk") if one["identity"] == identity]
        assert engine.cache.remove(entry=name).stored == 1
        assert known(engine, cache, ONE) == (0, 0)
        assert engine.generate(ONE, **GREEDY).usage.cached_tokens == 149


def test_an_error_while_reading_drops_the_drafts_and_no_request(model: Path, monkeypatch, caplog) -> None:
    with opened(model, None) as (engine, _cache):
        expected = engine.generate(ONE, **GREEDY).token_ids
        engine.clear_cache()
        with monkeypatch.context() as patched:
            patched.setattr(DraftMemory, "pump", lambda memory: 1 // 0)
            assert engine.generate(ONE, **GREEDY).token_ids == expected
            engine.check()
        assert "the memory of drafts is dropped" in caplog.text
        engine.check()
        found = engine.generate(TWO, **GREEDY)
        assert found.speculation is not None
        assert found.speculation.drafted > 0
        engine.check()
