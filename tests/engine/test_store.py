"""What an engine has computed is found by the next one on the same store: warm equals cold, and nothing is lost that
the store has acknowledged."""

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.memory import store as store_file
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.store import LATE, MOST_BEHIND, SLICE, Store
from tests.engine.drafting import always_restored
from tests.engine.mixes import bytes_for, tokens
from tests.engine.tiered import store_of
from tests.own_cache import own_cache
from tests.zoo import ARCHS

KINDS = ["llama", "gemma3", "llama4", "lfm2", "qwen3.5"]
GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Model directories, made when they are first asked for."""

    class Saved(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp(name.replace(".", "-"))
            ARCHS[name].build(max_position_embeddings=2048).save_pretrained(self[name])
            return self[name]

    return Saved()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def kept(monkeypatch, cache) -> None:
    own_cache(monkeypatch, cache)


@pytest.fixture(autouse=True)
def always(monkeypatch) -> None:
    always_restored(monkeypatch)


def opened(path: Path, store: Path | None, **settings) -> Engine:
    given = {
        "dtype": "float32",
        "cache_bytes": 24_000_000,
        "context": 1500,
        "max_sequences": 8,
        "threads": 1,
    } | settings
    return Engine(path, store=None if store is None else str(store), **given)


def acknowledged(engine: Engine) -> None:
    until = time.monotonic() + 240
    while engine.stats().store.unwritten:
        assert time.monotonic() < until, "the store does not come to an end"
        time.sleep(0.005)


def conversation(seed: object, turns: int = 3, n: int = 130) -> Iterator[list[int]]:
    draw, text = random.Random(str(seed)), []
    for _ in range(turns):
        text = [*text, *tokens(draw, n)]
        yield text


def test_a_snapshot_that_is_given_up_while_it_is_read_out_is_no_error(saved, tmp_path, caplog) -> None:
    with opened(saved["llama"], tmp_path / "store") as engine:
        store = engine._loop.manager.store
        assert store is not None

        def give_up() -> bool:
            assert store._begin_next()
            return store.stop_reading()

        ended = store.keep
        given_up = list[bool]()
        store.keep = lambda *given: (ended(*given), given_up.append(give_up()))  # before any of it is read
        engine.generate(next(conversation("given up")), **GREEDY)
        acknowledged(engine)
        engine.check()
        assert given_up == [True]
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", KINDS)
def test_a_restarted_engine_goes_on_where_the_last_one_was(saved, tmp_path, name) -> None:
    prompts = list(conversation(name))
    with opened(saved[name], tmp_path / "store") as engine:
        answers = [engine.generate(prompt, **GREEDY) for prompt in prompts]
        acknowledged(engine)
        engine.check()
    with opened(saved[name], tmp_path / "store") as engine, opened(saved[name], None) as cold:
        again = engine.generate(prompts[-1], **GREEDY)
        assert again.token_ids == answers[-1].token_ids == cold.generate(prompts[-1], **GREEDY).token_ids
        assert again.usage.cached_tokens == len(prompts[-1]) - 1
        more = [*prompts[-1], *again.token_ids, 5, 6, 7]
        assert engine.generate(more, **GREEDY).token_ids == cold.generate(more, **GREEDY).token_ids
        branch = [*prompts[0], *tokens(random.Random(name), 40)]
        engine.clear_cache()
        found = engine.generate(branch, **GREEDY)
        assert found.token_ids == cold.generate(branch, **GREEDY).token_ids
        assert found.usage.cached_tokens >= len(prompts[0]) - 1
        stats = engine.stats().store
        assert stats.restored > 0
        assert not stats.failures
        (disk,) = stats.tiers
        assert not disk.failures
        assert 0 < disk.bytes <= disk.limit_bytes
        engine.check()
        engine.clear_cache()
        stats = engine.stats()
        assert (stats.cells_used, stats.cells_cached, stats.rows_used, stats.rows_cached) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", KINDS)
def test_what_memory_had_no_room_for_is_read_back(saved, tmp_path, name) -> None:
    """Four conversations in turn, in memory for two of them."""
    talks = [list(conversation((name, number), turns=4, n=70)) for number in range(4)]
    limits = {
        "cache_bytes": bytes_for(
            ARCHS[name].build(max_position_embeddings=2048), 700, context=600, max_sequences=2, threads=1
        )
    }
    limits |= {"context": 600, "max_sequences": 2}
    with opened(saved[name], tmp_path / "store", **limits) as engine, opened(saved[name], None) as cold:
        for turn in range(4):
            for talk in talks:
                found = engine.generate(talk[turn], **GREEDY)
                assert found.token_ids == cold.generate(talk[turn], **GREEDY).token_ids
                acknowledged(engine)
                engine.check()
        assert engine.stats().store.restored > 0
        (disk,) = engine.stats().store.tiers
        assert disk.bytes <= disk.limit_bytes


def test_what_several_completions_share_is_written_once(saved, tmp_path) -> None:
    prompt = next(conversation("shared"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, n=4, max_tokens=70, temperature=1.0, seed=5, ignore_eos=True)
        acknowledged(engine)
        assert engine.stats().store.written <= len(prompt) + 4 * 70


def test_another_namespace_finds_nothing_in_the_store(saved, tmp_path) -> None:
    prompt = next(conversation("space"))

    def read(engine: Engine, namespace: str) -> int:
        from kvcellar.frontend.result import Collector

        collector = Collector(1)
        engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver, namespace=namespace)
        return collector.result().usage.cached_tokens

    with opened(saved["llama"], tmp_path / "store") as engine:
        assert read(engine, "a") == 0
        acknowledged(engine)
    with opened(saved["llama"], tmp_path / "store") as engine:
        assert (read(engine, "b"), read(engine, ""), read(engine, "a")) == (0, 0, len(prompt) - 1)


def test_other_weights_find_nothing(saved, tmp_path) -> None:
    prompt = next(conversation("weights"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, **GREEDY)
        acknowledged(engine)
    other = ARCHS["llama"].build(max_position_embeddings=2048)
    other.lm_head.weight.data.add_(1.0)
    other.save_pretrained(tmp_path / "other")
    with opened(tmp_path / "other", tmp_path / "store") as engine:
        assert engine.generate(prompt, **GREEDY).usage.cached_tokens == 0


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_damaged_store_is_a_miss(saved, tmp_path, name) -> None:
    prompt = next(conversation("damage"))
    with opened(saved[name], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        acknowledged(engine)
    files = sorted((tmp_path / "store" / "data").iterdir())
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
    with opened(saved[name], tmp_path / "store") as engine:
        found = engine.generate(prompt, **GREEDY)
        assert (found.token_ids, found.usage.cached_tokens) == (wanted, 0)
        assert engine.stats().store.tier("disk").failures["damaged"] >= 1
        engine.check()


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_tier_that_raises_delays_no_request_and_no_later_write(saved, tmp_path, monkeypatch, method) -> None:
    prompt, other = next(conversation("raises")), next(conversation("others"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, **GREEDY)
        acknowledged(engine)
        engine.clear_cache()
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.manager.store.transfers.tiers[0], method, lambda *_: 1 // 0)
            assert engine.generate(prompt, **GREEDY).usage.cached_tokens == (0 if method == "get" else len(prompt) - 1)
            engine.generate(other, **GREEDY)
            acknowledged(engine)
        engine.check()
        engine.generate([*other, *prompt], **GREEDY)
        acknowledged(engine)


def test_what_the_tier_evicts_is_forgotten(saved, tmp_path) -> None:
    with opened(saved["llama"], tmp_path / "store", store_bytes=2**20) as engine:
        store = engine._loop.manager.store
        for number in range(24):
            engine.generate(next(conversation(number)), **GREEDY)
            acknowledged(engine)
        there = {entry.snapshot.key for entry in store.transfers.tiers[0].entries()}
        assert 0 < len(there) < 24
        assert len(store.catalogue) <= len(there)


def test_a_tier_that_is_down_costs_bounded_memory(saved, tmp_path, monkeypatch) -> None:
    with opened(saved["llama"], tmp_path / "store") as engine:
        store = engine._loop.manager.store
        monkeypatch.setattr(type(store.transfers.tiers[0]), "down", True)
        engine._loop.call(lambda: [store.keep("", key_of(range(at, at + 1000))) for at in range(1000)])
        assert MOST_BEHIND - 1000 < store.behind <= MOST_BEHIND
        assert store.failures == {"the tiers are too slow": 1000 - MOST_BEHIND // 1000}
        engine._loop.call(store.stop)
        engine._loop.call(lambda: setattr(store, "_closed", False))
        engine._loop.call(lambda: store.keep("", key_of(range(2 * MOST_BEHIND))))
        assert store.behind == 2 * MOST_BEHIND, "one sequence may be longer"


def test_what_a_kill_loses_beside_a_slow_tier_is_bounded_in_tokens(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store_file, "MOST_BEHIND", 200)
    with opened(saved["llama"], tmp_path / "store") as engine:
        store, goes_on = store_of(engine), threading.Event()
        disk = store.transfers.tiers[0]
        put = disk.put
        monkeypatch.setattr(disk, "put", lambda *given: goes_on.wait(60) and put(*given))
        prompts = [tokens(random.Random(number), 60) for number in range(8)]
        for prompt in prompts:
            engine.generate(prompt, **GREEDY)
            assert engine._loop.call(lambda: store.behind) <= 200
        assert not store._wanted, "all that waits was read, and is being written"
        assert store.failures == {"the tiers are too slow": 5}
        goes_on.set()
        acknowledged(engine)
        assert store.behind == 0
        assert store.written == sum(len(prompt) + 5 for prompt in prompts[:3])


@pytest.mark.parametrize("name", ["llama", "lfm2", "gemma3"])
def test_after_each_step_all_is_read_that_the_budget_allows(saved, name, monkeypatch) -> None:
    """However many sequences end in it, and into however many snapshots each is cut."""
    left: list[int] = []
    with opened(saved[name], None, cache_bytes=60_000_000, host_bytes=50_000_000) as engine:
        store, pump = store_of(engine), engine._loop._pump
        monkeypatch.setattr(store, "_clock", lambda: 0.0)
        monkeypatch.setattr(engine._loop, "_pump", lambda: (pump(), left.append(len(store._wanted)))[0])
        draw = random.Random(name)
        streams = [engine.stream(tokens(draw, 130), **GREEDY) for _ in range(24)]
        assert all(len(list(stream)) for stream in streams)
        acknowledged(engine)
    assert len(left) > 5
    assert not any(left)


class Slow:
    """A clock on which each chunk that is read takes a tick."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_waits_is_bounded_in_seconds_however_slowly_it_is_read(saved, name, monkeypatch) -> None:
    """A step reads for `SLICE` seconds; what ended more than `LATE` seconds before it is read all the same."""
    with opened(saved[name], None, cache_bytes=60_000_000, host_bytes=50_000_000) as engine:
        store = store_of(engine)
        prompts = [tokens(random.Random(number), 130) for number in range(6)]
        with monkeypatch.context() as patch:
            patch.setattr(Store, "pump", lambda self, *_, **__: False)
            for prompt in prompts:
                engine.generate(prompt, **GREEDY)
        clock = Slow(SLICE / 2)
        ages, waits = [], len(store._wanted)
        assert waits >= len(prompts)

        def steps() -> None:
            for number, one in enumerate(store._wanted):
                one.since = 0.4 * number
            store._clock = clock
            for step in range(40):
                clock.now = 0.1 * step
                began = clock.now
                store.pump()
                ages.extend(began - one.since for one in store._wanted)
                if step == 0:
                    assert len(store._wanted) == waits, "a step has read more than its time allows"

        engine._loop.call(steps)
        assert max(ages) < LATE
        assert max(ages) > LATE / 2, "nothing had to wait"


def test_a_directory_that_cannot_be_a_store_is_reported_and_the_engine_serves(saved, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("not a directory")
    with opened(saved["llama"], tmp_path / "file" / "store") as engine:
        assert engine.stats().store is None
        assert engine.generate([5, 6, 7], **GREEDY).token_ids
    assert "running without a store" in caplog.text


def test_a_model_without_files_has_no_store(tmp_path) -> None:
    with pytest.raises(BadRequest, match="has no files"):
        Engine(ARCHS["llama"].build(), store=str(tmp_path), cache_bytes=2_000_000, threads=1)
