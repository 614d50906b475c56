"""What leaves the device is found in host memory, on disk and elsewhere: warm equals cold, within the caps, whatever a
tier does meanwhile."""

import random
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.frontend.result import Collector
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.retention import RetentionOptions
from tests.engine.mixes import bytes_for, tokens
from tests.engine.test_store import GREEDY, always, conversation, opened, saved  # noqa: F401
from tests.engine.tiered import Watch, acknowledged, settled, store_of
from tests.tiers.redis_server import BINARY, RedisServer
from tests.zoo import ARCHS

KINDS = ["llama", "gemma3", "llama4", "lfm2"]


def small(name: str, cells: int, context: int = 400) -> dict[str, int]:
    """Settings of an engine with room for so many tokens."""
    model = ARCHS[name].build(max_position_embeddings=2048)
    settings = {"context": context, "max_sequences": 2, "threads": 1}
    return settings | {"cache_bytes": bytes_for(model, cells, **settings)}


def asked(engine: Engine, prompt: list[int], **options):
    """A result with its recall."""
    collector = Collector(1)
    engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver, **options)
    return collector.result()


@pytest.mark.parametrize("name", KINDS)
def test_caps_of_a_tenth_hold_at_every_moment_and_answers_are_right(saved, tmp_path, name) -> None:  # noqa: F811
    talks = [list(conversation((name, number), turns=2, n=110)) for number in range(8)]
    with opened(saved[name], None) as cold:
        wanted = [[cold.generate(prompt, **GREEDY).token_ids for prompt in talk] for talk in talks]
    limits = small(name, 260, 260)
    limits["cache_bytes"] += (host := 300_000)
    tiers = {"host_bytes": host, "store_bytes": 2**18, "staging_bytes": 600_000}
    with opened(saved[name], tmp_path / "store", **limits, **tiers) as engine:
        watch = Watch(engine, tmp_path / "store")
        for turn in range(2):
            for talk, answers in zip(talks, wanted, strict=True):
                assert engine.generate(talk[turn], **GREEDY).token_ids == answers[turn]
                watch.sample()
        acknowledged(engine)
        for talk, answers in list(zip(talks, wanted, strict=True))[:-3:-1]:  # the tiers have the last one
            engine.clear_cache()
            assert engine.generate(talk[1], **GREEDY).token_ids == answers[1]
        settled(engine)
        assert not watch.wrong
        assert watch.samples > 100
        assert engine.stats().store.restored > 0


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_the_device_evicts_comes_back_from_host_memory(saved, name) -> None:  # noqa: F811
    """Also of a model that was given as an object, which has no store."""
    prompt = next(conversation(name))
    with Engine(
        ARCHS[name].build(max_position_embeddings=2048),
        cache_bytes=12_000_000,
        context=1500,
        max_sequences=8,
        threads=1,
        host_bytes=4_000_000,
    ) as engine:
        first = asked(engine, prompt)
        acknowledged(engine)
        engine.clear_cache()
        again = asked(engine, prompt)
        assert again.token_ids == first.token_ids
        assert dict(again.recall.sources) == {"host": len(prompt) - 1}
        settled(engine)


def test_each_tier_serves_what_the_ones_above_have_lost(saved, tmp_path) -> None:  # noqa: F811
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    prompt = next(conversation("tiers"))
    settings = {"host_bytes": 2_000_000, "store_remote": f"file://{tmp_path}/elsewhere"}
    with opened(saved["llama"], tmp_path / "store", **settings) as engine:
        wanted = asked(engine, prompt).token_ids
        acknowledged(engine)
        host, disk, _ = store_of(engine).transfers.tiers
        keys = [entry.snapshot.key for entry in disk.entries()]
        for lost, expected in (((), "host"), ((host,), "disk"), ((host, disk), "remote"), ((), "host")):
            for tier in lost:
                tier.remove(keys)
            engine.clear_cache()
            found = asked(engine, prompt)
            assert (found.token_ids, dict(found.recall.sources)) == (wanted, {expected: len(prompt) - 1})
            settled(engine)
    with opened(saved["llama"], None, store_remote=settings["store_remote"]) as engine:  # another machine
        found = asked(engine, prompt)
        assert (found.token_ids, dict(found.recall.sources)) == (wanted, {"remote": len(prompt) - 1})


def test_host_memory_is_a_part_of_the_cap_on_a_cpu(saved) -> None:  # noqa: F811
    with opened(saved["llama"], None) as engine:
        alone = engine.stats()
        assert alone.store is None, "the host tier is on without having been asked for"
    with opened(saved["llama"], None, host_bytes=2_000_000) as engine:
        assert engine.stats().limit_bytes + 2_000_000 == alone.limit_bytes
        assert engine.stats().store.tier("host").limit_bytes == 2_000_000
    with pytest.raises(BadRequest, match="host_bytes is 8000000 of the 8000000 bytes of cache_bytes"):
        opened(saved["llama"], None, cache_bytes=8_000_000, host_bytes=8_000_000)


def test_every_waiting_request_is_read_ahead_within_a_part_of_the_staging_memory(saved, tmp_path, monkeypatch) -> None:  # noqa: F811
    talks = [next(conversation(("ahead", number), 1, 200)) for number in range(4)]
    with opened(saved["llama"], tmp_path / "store", max_sequences=1) as engine:
        wanted = [engine.generate(talk, **GREEDY).token_ids for talk in talks]
        acknowledged(engine)
        engine.clear_cache()
        held, store = threading.Event(), store_of(engine)
        runs = Collector(1)
        engine.submit([9] * 30, engine.params(max_tokens=200, temperature=0.0, ignore_eos=True), deliver=runs.deliver)
        collectors = [Collector(1) for _ in talks]
        monkeypatch.setattr(engine._loop.scheduler, "_max_sequences", 1)
        for talk, collector in zip(talks, collectors, strict=True):
            engine.submit(talk, engine.params(**GREEDY), deliver=collector.deliver)
        until = time.monotonic() + 240
        while not held.is_set():  # all four are read while the first request runs, or waits for the others
            staged = engine._loop.call(lambda: [one.transfer.snapshot.span for one in store.restores._staged.values()])
            if len(staged) + store.restores.restored // 200 >= 3:
                held.set()
            assert time.monotonic() < until, f"only {staged} were read"
        assert [collector.result().token_ids for collector in collectors] == wanted
        assert all(collector.result().recall.sources for collector in collectors)
        settled(engine)


def test_requests_that_share_a_stored_beginning_read_it_once(saved, tmp_path) -> None:  # noqa: F811
    common = next(conversation("shared", 1, 300))
    prompts = [[*common, *tokens(random.Random(number), 20)] for number in range(6)]
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(common, **GREEDY)
        acknowledged(engine)
    with opened(saved["llama"], tmp_path / "store") as engine, opened(saved["llama"], None) as cold:
        disk = store_of(engine).transfers.tiers[0]
        reads: list[bytes] = []
        get = disk.get
        disk.get = lambda key, take: reads.append(key) or get(key, take)
        collectors = [Collector(1) for _ in prompts]
        for prompt, collector in zip(prompts, collectors, strict=True):
            engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
        for prompt, collector in zip(prompts, collectors, strict=True):
            assert collector.result().token_ids == cold.generate(prompt, **GREEDY).token_ids
            assert collector.result().usage.cached_tokens >= len(common) - 1
        assert len(reads) == len(set(reads))
        settled(engine)


def test_another_key_finds_nothing_and_is_counted(saved, tmp_path) -> None:  # noqa: F811
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    prompt = next(conversation("key"))
    cached = []
    for key in (b"a" * 32, b"a" * 32, b"b" * 32, None, b"a" * 32):
        with opened(saved["llama"], tmp_path / "store", store_key=key) as engine:
            cached.append(engine.generate(prompt, **GREEDY).usage.cached_tokens)
            assert bool(engine.stats().store.tier("disk").failures.get("foreign")) == (len(cached) > 2)
            acknowledged(engine)
    assert cached == [0, len(prompt) - 1, 0, 0, len(prompt) - 1]


def test_what_is_stored_with_a_key_has_none_of_the_tokens(saved, tmp_path) -> None:  # noqa: F811
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    prompt = next(conversation("secret"))
    for key in (None, b"a" * 32):
        with opened(saved["llama"], tmp_path / str(key), store_key=key) as engine:
            engine.generate(prompt, **GREEDY)
        files = [file for file in (tmp_path / str(key)).rglob("*") if file.is_file()]
        assert any(key_of(prompt[:32]) in file.read_bytes() for file in files) == (key is None)


def test_two_engines_share_one_directory_at_once(saved, tmp_path) -> None:  # noqa: F811
    talks = [list(conversation(("both", number), turns=2, n=90)) for number in range(4)]
    with opened(saved["llama"], None) as cold:
        wanted = {tuple(prompt): cold.generate(prompt, **GREEDY).token_ids for talk in talks for prompt in talk}
    failed: list[object] = []

    def plays(engine: Engine, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(16):
            prompt = draw.choice(draw.choice(talks))
            if (found := engine.generate(prompt, **GREEDY).token_ids) != wanted[tuple(prompt)]:
                failed.append((prompt, found))
            if draw.random() < 0.4:
                engine.clear_cache()

    limits = {"store_bytes": 400_000}
    with opened(saved["llama"], tmp_path / "store", **limits) as one:
        with opened(saved["llama"], tmp_path / "store", **limits) as two:
            threads = [threading.Thread(target=plays, args=pair) for pair in ((one, 1), (two, 2))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failed
            for engine in (one, two):
                settled(engine)
                disk = engine.stats().store.tier("disk")
                assert "damaged" not in disk.failures
                assert disk.bytes <= disk.limit_bytes


def test_a_tenant_has_no_more_than_its_share_and_keeps_it(saved, tmp_path) -> None:  # noqa: F811
    first = next(conversation("first"))
    settings = {"store_bytes": 1_200_000, "tenant_share": 0.4, "host_bytes": 1_200_000}
    with opened(saved["llama"], tmp_path / "store", **settings) as engine:
        asked(engine, first, retention=RetentionOptions(owner="a"))
        acknowledged(engine)
        for number in range(9):
            asked(engine, next(conversation(("b", number))), retention=RetentionOptions(owner="b"))
            acknowledged(engine)
        engine.clear_cache()
        for tier in store_of(engine).transfers.tiers:
            entries = tier.entries()
            of_b = sum(entry.snapshot.size for entry in entries if entry.retention.owner == "b")
            assert 0 < of_b <= 0.4 * tier.cap
            assert any(entry.retention.owner == "a" for entry in entries)
        assert asked(engine, first, retention=RetentionOptions(owner="a")).usage.cached_tokens == len(first) - 1


def test_entries_expire_and_those_of_priority_outlast_others(saved, tmp_path) -> None:  # noqa: F811
    brief, kept = next(conversation("brief")), next(conversation("kept"))
    with opened(saved["llama"], tmp_path / "store", store_bytes=2**19) as engine:
        asked(engine, brief, retention=RetentionOptions(ttl=0.2))
        asked(engine, kept, retention=RetentionOptions(priority=8))
        acknowledged(engine)
        time.sleep(0.25)
        for number in range(12):
            engine.generate(next(conversation(("other", number))), **GREEDY)
            acknowledged(engine)
    with opened(saved["llama"], tmp_path / "store", store_bytes=2**19) as engine:
        assert asked(engine, brief).usage.cached_tokens == 0
        assert asked(engine, kept).usage.cached_tokens == len(kept) - 1


def test_what_waits_to_be_written_is_read_before_memory_is_evicted(saved, tmp_path, monkeypatch) -> None:  # noqa: F811
    talks = [next(conversation(("waits", number), 1, 100)) for number in range(5)]
    with opened(saved["llama"], tmp_path / "store", **small("llama", 260, 260)) as engine:
        with monkeypatch.context() as busy:
            busy.setattr(engine._loop, "_pump", lambda: False)  # as if much more were computed between two steps
            wanted = [engine.generate(talk, **GREEDY).token_ids for talk in talks]
        settled(engine)
        engine.clear_cache()
        found = [asked(engine, talk) for talk in talks[:2]]
        assert [one.token_ids for one in found] == wanted[:2]
        assert [dict(one.recall.sources) for one in found] == [{"disk": len(talk) - 1} for talk in talks[:2]]
        settled(engine)


def test_what_is_not_to_be_stored_is_not(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("private"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        asked(engine, prompt, retention=RetentionOptions(stored=False))
        acknowledged(engine)
        assert engine.stats().store.written == 0


def test_entries_that_are_used_again_are_kept_as_the_last_request_wants(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("renewed"))
    with opened(saved["llama"], tmp_path / "store", host_bytes=2_000_000) as engine:
        asked(engine, prompt)
        acknowledged(engine)
        asked(engine, [*prompt, *tokens(random.Random(1), 10)], retention=RetentionOptions(priority=3))
        until = time.monotonic() + 240
        for tier in store_of(engine).transfers.tiers:
            while not any(entry.retention.priority == 3 for entry in tier.entries()):
                assert time.monotonic() < until, f"{tier.name} has not renewed its entry"


def test_a_later_request_without_a_ttl_keeps_what_was_stored_with_one(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("lifted"))

    def expiring(engine: Engine) -> set[bool]:
        return {entry.retention.expires is not None for entry in store_of(engine).transfers.tiers[0].entries()}

    def lifted(engine: Engine) -> None:
        until = time.monotonic() + 240
        asked(engine, prompt)
        while True in expiring(engine):
            assert time.monotonic() < until, "what a request without a TTL has used expires"
            time.sleep(0.005)
        settled(engine)

    for restarted in (False, True):
        directory = tmp_path / f"store {restarted}"
        with opened(saved["llama"], directory) as engine:
            asked(engine, prompt, retention=RetentionOptions(ttl=3600.0))
            acknowledged(engine)
            assert expiring(engine) == {True}
            if not restarted:
                lifted(engine)
        if restarted:
            with opened(saved["llama"], directory) as engine:
                lifted(engine)


def test_a_cancelled_request_frees_what_was_read_for_it(saved, tmp_path, monkeypatch) -> None:  # noqa: F811
    prompt = next(conversation("cancelled", 1, 400))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        acknowledged(engine)
        engine.clear_cache()
        disk, go = store_of(engine).transfers.tiers[0], threading.Event()
        get = disk.get
        monkeypatch.setattr(disk, "get", lambda key, take: go.wait(240) and get(key, take))
        collector = Collector(1)
        ticket = engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
        ticket.cancel()
        assert collector.result().finish_reason == "cancelled"
        go.set()
        settled(engine)
        assert not engine._loop.manager._waiting
        assert engine.generate(prompt, **GREEDY).token_ids == wanted


def test_a_running_request_gets_the_memory_that_restores_of_waiting_ones_hold(saved, tmp_path, monkeypatch) -> None:  # noqa: F811
    prompt, long = next(conversation("waits", 1, 180)), {"max_tokens": 170, "temperature": 0.0, "ignore_eos": True}
    with opened(saved["llama"], None) as cold:
        wanted, answer = (cold.generate(given, **how).token_ids for given, how in (([9] * 10, long), (prompt, GREEDY)))
    with opened(saved["llama"], tmp_path / "store", **small("llama", 200)) as engine:
        store = store_of(engine)
        store._segment = 64
        engine.generate(prompt, **GREEDY)
        settled(engine)
        engine.clear_cache()
        (disk,), go = store.transfers.tiers, threading.Event()
        get, last = disk.get, {one.snapshot.key for one in disk.entries() if one.snapshot.span.start >= 128}
        monkeypatch.setattr(disk, "get", lambda key, take: (key not in last or go.wait(240)) and get(key, take))
        runs, waits = Collector(1), Collector(1)
        engine.submit([9] * 10, engine.params(**long), deliver=runs.deliver)
        engine.submit(prompt, engine.params(**GREEDY), deliver=waits.deliver)
        assert runs.result().token_ids == wanted
        assert store.restores.restored, "the restore held no memory"
        go.set()
        assert waits.result().token_ids == answer
        settled(engine)


def test_a_snapshot_that_is_too_large_for_staging_is_counted_and_reported(saved, tmp_path, caplog) -> None:  # noqa: F811
    with opened(saved["llama"], tmp_path / "store", staging_bytes=2**16) as engine:
        engine.generate(next(conversation("large", 1, 300)), **GREEDY)
        acknowledged(engine)
        store = engine.stats().store
        assert (store.written, store.failures) == (0, {"too large for staging": 1})
        assert "staging_bytes" in caplog.text
        settled(engine)


@pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")
def test_a_server_that_is_killed_and_started_again_costs_misses_only(saved) -> None:  # noqa: F811
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    talks = [list(conversation(("redis", number), turns=2, n=80)) for number in range(4)]
    with opened(saved["llama"], None) as cold:
        wanted = {tuple(prompt): cold.generate(prompt, **GREEDY).token_ids for talk in talks for prompt in talk}
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket is short
        server = RedisServer(Path(directory))
        server.start()
        with opened(saved["llama"], None, store_remote=server.url) as engine:
            remote = store_of(engine).transfers.tiers[0]
            remote._breaker._first = remote._breaker._wait = 0.02
            for around in range(6):
                collectors = []
                for talk in talks:
                    for prompt in talk:
                        collectors.append((prompt, collector := Collector(1)))
                        engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
                if around % 2:
                    server.kill()
                for prompt, collector in collectors:
                    assert collector.result().token_ids == wanted[tuple(prompt)]
                engine.clear_cache()
                if around % 2:
                    engine.generate(talks[0][0], **GREEDY)
                    server.start()
            assert remote.failures["unreachable"]
            while remote.down:
                time.sleep(0.01)
            last = next(conversation("last"))
            engine.generate(last, **GREEDY)
            acknowledged(engine)
            engine.clear_cache()
            assert dict(asked(engine, last).recall.sources) == {"remote": len(last) - 1}
            settled(engine)
        server.kill()


@pytest.mark.parametrize("url", ["nowhere", "unknownfs://bucket"])
def test_a_url_that_is_no_store_is_refused_without_being_shown(saved, url) -> None:  # noqa: F811
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    with pytest.raises(BadRequest, match="store_remote") as caught:
        opened(saved["llama"], None, store_remote=url)
    assert url not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("store_key", b"short"), ("store_key", "text"), ("host_bytes", -1)],
)
def test_settings_of_tiers_out_of_bounds_are_refused(saved, name, value) -> None:  # noqa: F811
    with pytest.raises(BadRequest, match=name) as caught:
        opened(saved["llama"], None, **{name: value})
    assert "short" not in str(caught.value)


def test_a_namespace_gets_its_tokens_back_behind_a_prompt_pinned_for_all(saved, tmp_path) -> None:  # noqa: F811
    talk = list(conversation("pinned"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.pin(talk[1])
        for prompt in (talk[0], talk[2]):  # the second one is stored in two parts, the first within what is pinned
            asked(engine, prompt, namespace="a")
            acknowledged(engine)
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.pin(talk[1])
        again = asked(engine, [*talk[2], *talk[0]], namespace="a")
        assert dict(again.recall.sources) == {"disk": len(talk[2])}
        settled(engine)


def test_what_was_removed_from_all_tiers_is_not_known_and_is_stored_again(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("evicted"))
    with opened(saved["llama"], tmp_path / "store") as engine:
        asked(engine, prompt)
        acknowledged(engine)
        store = store_of(engine)
        store.remove_all()
        assert not len(store.catalogue)
        engine.clear_cache()
        asked(engine, prompt)
        acknowledged(engine)
        assert len(store.catalogue)
        assert all(store.transfers.has(one.key) for one in store.catalogue)
