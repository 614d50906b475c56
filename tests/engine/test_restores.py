"""Restores of waiting requests: what they free, when they go on, and what ends them."""

import threading
import time
from collections import deque

import pytest

from kvcellar.errors import CacheFull
from kvcellar.frontend.result import Collector
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.restores import Fetch, Restores
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.transfers import Outcome, Transfer
from tests.engine.test_slow_tiers import Clock
from tests.engine.test_store import GREEDY, always, conversation, opened, saved  # noqa: F401
from tests.engine.tiered import settled, store_of

LATE = 60.0  # seconds after which a test fails


def until(true, message: str) -> None:
    """Poll without a call to the engine, which would wake it."""
    end = time.monotonic() + LATE
    while not true():
        assert time.monotonic() < end, message
        time.sleep(0.005)


@pytest.fixture
def frozen(monkeypatch) -> None:
    """The clock of stores stands still: no read takes long, and no engine wakes by itself."""
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "clock", Clock())
    monkeypatch.setattr(Restores, "look_again", lambda self: None)


def test_a_snapshot_whose_beginning_is_gone_is_dropped_and_not_counted(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("dropped", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        store = store_of(engine)
        store._segment = 64
        engine.generate(prompt, **GREEDY)
        settled(engine)
        engine.clear_cache()
        manager, restores, (disk,) = engine._loop.manager, store.restores, store.transfers.tiers
        second = next(entry.snapshot for entry in disk.entries() if entry.snapshot.span.start == 64)

        def enters() -> tuple[bool, int, dict[str, int], dict[str, int]]:
            tree = manager.prefixes.tree
            root, free = tree.root(""), dict(manager.memory.free())
            tree.share(root)
            fetch = Fetch("", deque(), key=key_of(prompt), root=root, node=root)
            transfer = Transfer(second, 0, stores=False)
            transfer.outcome, transfer.loaded, transfer.tiers = Outcome.FETCHED, disk.get(second.key), ("disk",)
            entered = restores._enter(fetch, second, transfer)
            assert fetch.node is not None
            tree.unlock(fetch.node)
            return entered, fetch.tokens.total(), free, dict(manager.memory.free())

        entered, tokens, before, after = engine._loop.call(enters)
        assert (entered, tokens) == (False, 0)
        assert before == after, "cells of a claim that was dropped stay in use"
        settled(engine)


def test_what_is_written_before_the_snapshot_that_it_continues_is_found(saved, tmp_path, monkeypatch) -> None:  # noqa: F811
    prompt = next(conversation("order", 1, 300))
    with opened(saved["llama"], tmp_path / "store") as engine:
        store = store_of(engine)
        store._segment = 64
        (disk,), go, ends = store.transfers.tiers, threading.Event(), list[int]()
        put = disk.put

        def slowly(snapshot, *given) -> bool:
            assert snapshot.span.start or go.wait(LATE)
            stored = put(snapshot, *given)
            ends.append(snapshot.span.end)
            if len(ends) == 4:
                go.set()
            return stored

        monkeypatch.setattr(disk, "put", slowly)
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        assert ends.index(64) >= 4, "the first one was not the last"
        engine.clear_cache()
        collector = Collector(1)
        engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
        found = collector.result()
        assert (found.token_ids, dict(found.recall.sources)) == (wanted, {"disk": len(prompt) - 1})
        settled(engine)


def test_a_restore_goes_on_when_promotions_free_staging_memory(saved, tmp_path, monkeypatch, frozen) -> None:  # noqa: F811
    prompt = next(conversation("promoted", 1, 700))
    with opened(saved["llama"], tmp_path / "store", host_bytes=2_000_000) as engine:
        store = store_of(engine)
        store._segment = 64
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        engine.clear_cache()
        host, disk = store.transfers.tiers
        entries = disk.entries()
        host.remove([entry.snapshot.key for entry in entries])
        store.transfers.staging = 4 * max(store.transfers.need(entry.snapshot) for entry in entries)
        put, go = host.put, threading.Event()
        monkeypatch.setattr(host, "put", lambda *given: go.wait(LATE) and put(*given))
        collector, restores, loop = Collector(1), store.restores, engine._loop
        engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)

        def sleeps() -> bool:
            short = any(one.node and one.chain and not one.reads for one in list(restores._fetches))
            return short and loop._stalled and not loop._inbox

        until(sleeps, "the promotions do not hold the staging memory")
        go.set()
        until(lambda: list(collector.arrived()) or collector.over, "the engine sleeps although staging memory is free")
        assert collector.result().token_ids == wanted
        assert dict(collector.result().recall.sources) == {"disk": len(prompt) - 1}
        settled(engine)


def test_a_context_shift_takes_the_memory_that_a_restore_has_locked(saved, tmp_path, monkeypatch, frozen) -> None:  # noqa: F811
    prompt = next(conversation("shifts", 1, 180))
    long = {"max_tokens": 230, "temperature": 0.0, "ignore_eos": True, "shift": True}
    settings = {"context": 200, "max_sequences": 2}
    with opened(saved["llama"], None, **settings) as cold:
        wanted, answer = (cold.generate(given, **how).token_ids for given, how in (([9] * 10, long), (prompt, GREEDY)))
    with opened(saved["llama"], tmp_path / "store", **settings) as engine:
        store, manager = store_of(engine), engine._loop.manager
        store._segment = 64
        engine.generate(prompt, **GREEDY)
        settled(engine)
        engine.clear_cache()
        (disk,), go, shift, full = store.transfers.tiers, threading.Event(), manager.shift, []
        get, last = disk.get, {one.snapshot.key for one in disk.entries() if one.snapshot.span.start >= 128}
        monkeypatch.setattr(disk, "get", lambda key, take: (key not in last or go.wait(LATE)) and get(key, take))
        monkeypatch.setattr(manager.prefixes, "evict", lambda *given: False)  # as if all that is in memory were locked
        monkeypatch.setattr(manager, "clear_cache", lambda: False)

        def shifts(completion, span):
            if any(fetch.node is not None for fetch in store.restores._fetches):
                full.append(span)
                raise CacheFull(manager.memory.storage.groups[0].name, 64, 0)
            return shift(completion, span)

        monkeypatch.setattr(manager, "shift", shifts)
        runs, waits = Collector(1), Collector(1)
        engine.submit(prompt, engine.params(**GREEDY), deliver=waits.deliver)
        until(lambda: any(one.node for one in list(store.restores._fetches)), "the restore has not begun")
        engine.submit([9] * 10, engine.params(**long), deliver=runs.deliver)
        assert runs.result().token_ids == wanted
        go.set()
        stats = engine.stats()
        assert (len(full), stats.shifts > 0, stats.recomputes, stats.preemptions) == (1, True, {}, 0)
        assert waits.result().token_ids == answer
        settled(engine)
