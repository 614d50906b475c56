"""The remote tier on a real server, on fsspec's file systems, and on stores that fail: right bytes or a miss."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.retention import Retention
from kvcellar.memory.tiers.codec import AesGcm
from kvcellar.memory.tiers.objects import (
    TIDIED,
    FsspecObjects,
    Objects,
    RedisObjects,
    RemoteFailed,
    open_objects,
)
from kvcellar.memory.tiers.remote import CLOCKS, MOST_LISTED, RemoteTier, prefix_of
from kvcellar.memory.tiers.tier import Breaker, Entry
from kvcellar.memory.tiers.transfers import Outcome, Transfer, Transfers
from tests.tiers.in_memory import InMemory
from tests.tiers.made import IDENTITY, chains, content, made, sizes_of, whole
from tests.tiers.redis_server import BINARY, RedisServer

PREFIX = prefix_of(IDENTITY)
needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket is short
        server = RedisServer(Path(directory))
        server.start()
        yield server
        server.kill()


@pytest.fixture(params=["memory", "directory", pytest.param("redis", marks=needs_server)])
def objects(request, tmp_path) -> Iterator[Callable[[], Objects]]:
    """Opens the same store again and again, which is empty at first."""
    if request.param == "redis":
        url = request.getfixturevalue("running").url
        yield lambda: RedisObjects(url, PREFIX)
        RedisObjects(url, PREFIX)._redis.flushall()
    else:
        pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
        url = f"file://{tmp_path}/store" if request.param == "directory" else f"memory://{tmp_path}"
        yield lambda: open_objects(url, PREFIX)
        store = open_objects(url, PREFIX)
        store.delete(store.names(MOST_LISTED))


def tier(objects: Objects, **options) -> RemoteTier:
    return RemoteTier(objects, **({"identity": IDENTITY, "cap": 1 << 20} | options))


def test_what_one_stores_another_lists_and_reads(objects) -> None:
    first = made(1)
    second, long = made(2, first[0]), made(3, tokens=20_000)  # its header is longer than what is read of it first
    retention = Retention(priority=1, owner="x")
    writer = tier(objects())
    for one in (second, first, long):
        assert writer.put(*one, retention)
    reader = tier(objects())
    assert content(reader, first[0].key) == first  # without a listing
    found = chains(reader.entries())
    assert found[-1] == Entry(second[0], retention)
    assert {entry.snapshot.key for entry in found} == {first[0].key, second[0].key, long[0].key}
    assert reader.size() == writer.size() == sum(sizes_of(objects()).values())
    for one in (first, second, long):
        assert reader.contains(one[0].key)
        assert content(reader, one[0].key) == one
    writer.remove([second[0].key])
    assert content(reader, second[0].key) is None
    assert not reader.contains(second[0].key)
    assert reader.failures == {"gone": 1}
    assert not writer.failures


def test_damage_and_foreign_objects_are_misses(objects) -> None:
    opened, one = tier(objects()), made(1)
    name = one[0].key.hex()
    assert opened.put(*one)
    stored = whole(objects(), name)
    assert stored is not None
    for damaged in (stored[:-1], stored + b"x", b"x", stored[:100] + bytes([stored[100] ^ 1]) + stored[101:]):
        objects().write(name, damaged, None)
        assert content(opened, one[0].key) is None
        objects().write(name, damaged, None)
        assert opened.entries() == []
        assert [*sizes_of(objects())] == [], "what is damaged was kept"
    objects().write(made(2)[0].key.hex(), stored, None)
    assert content(opened, made(2)[0].key) is None
    objects().write("notes", b"of another program", None)
    objects().write(name, stored, None)
    assert [entry.snapshot for entry in tier(objects()).entries()] == [one[0]]
    assert whole(objects(), "notes") == b"of another program"


def test_another_cipher_or_identity_reads_nothing_and_deletes_nothing(objects) -> None:
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    one = made(1, size=64)
    opened = tier(objects(), cipher=AesGcm(bytes(32)))
    assert opened.put(*one)
    stored = whole(objects(), one[0].key.hex())
    assert stored is not None
    assert not any(secret in stored for secret in (one[0].tokens, *one[1]))
    other = tier(objects(), cipher=AesGcm(bytes([1]) * 32))
    assert content(other, one[0].key) is None
    assert other.entries() == []
    assert other.failures["foreign"] == 2
    assert content(opened, one[0].key) == one


def test_the_cap_holds_and_what_others_have_stored_is_forgotten_and_not_deleted() -> None:
    store = InMemory()
    for seed in range(4):
        assert tier(store).put(*made(seed, size=1000))
    before = sum(sizes_of(store).values())
    opened = tier(store, cap=before + 100)
    assert len(opened.entries()) == 4
    for seed in range(4, 40):
        assert opened.put(*made(seed, size=1000))
        assert opened.size() <= opened.cap
        opened.check()
    assert {made(seed, size=1000)[0] for seed in range(4)} <= {one.snapshot for one in tier(store).entries()}
    assert sum(sizes_of(store).values()) <= before + opened.cap
    assert not opened.put(*made(50, size=before))
    assert opened.failures["too large"] == 1


def test_bytes_that_could_not_be_deleted_stay_counted() -> None:
    store = InMemory()
    opened = tier(store, breaker=Breaker(after=10**6))
    assert opened.put(*made(1))
    size = opened.size()
    store.fails = True
    opened.remove([made(1)[0].key])
    assert opened.size() == size
    assert not opened.contains(made(1)[0].key)
    store.fails = False
    assert opened.put(*made(2))
    assert opened.size() == sum(sizes_of(store).values()) == size


def test_bytes_of_what_expires_are_freed_though_a_deletion_before_it_fails() -> None:
    now, store = [100.0], InMemory()
    opened = tier(store, breaker=Breaker(after=10**6), clock=lambda: now[0])
    assert opened.put(*made(1))
    assert opened.put(*made(2), Retention(expires=110.0))
    store.fails = True
    opened.remove([made(1)[0].key])
    now[0] = 110.0
    assert not opened.put(*made(3))
    store.fails = False
    assert opened.put(*made(3))
    assert sizes_of(store) == {made(3)[0].key.hex(): opened.size()}


def test_a_store_that_fails_is_left_alone_for_a_while_and_costs_misses_only(caplog) -> None:
    now = [0.0]
    store = InMemory()
    opened = tier(store, breaker=Breaker(after=1, wait=5.0, clock=lambda: now[0]))
    assert opened.put(*made(1))
    store.fails = True
    assert content(opened, made(1)[0].key) is None
    assert opened.down
    assert opened.failures == {"unreachable": 1}
    assert len(caplog.records) == 1
    calls = store.calls
    assert content(opened, made(1)[0].key) is None
    assert not opened.put(*made(2))
    opened.remove([made(3)[0].key])
    assert [entry.snapshot for entry in opened.entries()] == [made(1)[0]]  # as it is known
    assert (store.calls, opened.failures["down"]) == (calls, 4)
    store.fails, now[0] = False, 5.0
    assert content(opened, made(1)[0].key) == made(1)
    assert not opened.down


def test_entries_expire_by_the_clock_and_in_the_store_by_itself() -> None:
    now, store = [100.0], InMemory()
    opened = tier(store, clock=lambda: now[0])
    assert opened.put(*made(1), Retention(expires=110.0))
    assert store.seconds == {made(1)[0].key.hex(): 10.0}
    now[0] = 110.0
    assert opened.entries() == []
    assert content(tier(store, clock=lambda: now[0]), made(1)[0].key) is None
    now[0] = 110.0 + CLOCKS
    assert content(tier(store, clock=lambda: now[0]), made(1)[0].key) is None
    assert not store.content


def test_an_owner_over_its_quota_evicts_its_own_entries() -> None:
    store = InMemory()
    assert tier(store).put(*made(1), Retention(owner="a"))
    each = sum(sizes_of(store).values())
    opened = tier(store, quota=each)
    assert len(opened.entries()) == 1
    assert opened.put(*made(2), Retention(owner="b"))
    assert opened.put(*made(3), Retention(owner="a"))
    assert opened.contains(made(2)[0].key)
    assert opened.contains(made(3)[0].key)
    assert not opened.contains(made(1)[0].key)


def test_a_directory_is_for_its_owner_alone(tmp_path) -> None:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    FsspecObjects(f"file://{tmp_path}/store", PREFIX)
    assert (tmp_path / "store" / PREFIX).stat().st_mode & 0o077 == 0


@pytest.fixture
def directory(tmp_path) -> Path:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    return tmp_path / "store" / PREFIX


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_a_directory_is_brought_below_the_cap_by_one_of_all_at_times(directory) -> None:
    writer = tier(open_objects(f"file://{directory.parent}", PREFIX))
    for seed in range(6):
        assert writer.put(*made(seed))
        aged(directory / made(seed)[0].key.hex(), 10_000 - seed)
    size = writer.size() // 6
    cap = 3 * size + 10  # and the part of a file
    assert content(writer, made(0)[0].key) == made(0)  # it is read
    (directory / f"{made(9)[0].key.hex()}.part").write_bytes(b"half")
    aged(directory / f"{made(9)[0].key.hex()}.part", 2 * TIDIED)
    for name in os.listdir(directory / "buckets"):
        for member in (directory / "buckets" / name).iterdir():
            aged(member, 2 * TIDIED)
    one = tier(open_objects(f"file://{directory.parent}", PREFIX), cap=cap)
    assert one.put(*made(20))
    assert len(one._objects.names(MOST_LISTED)) == 8, "others were tidy just now"
    aged(directory.parent / f"{PREFIX}.tidied", 2 * TIDIED)
    assert one.put(*made(21))
    one._objects.tidying.join()
    left = sizes_of(one._objects)
    assert set(left) == {made(seed)[0].key.hex() for seed in (0, 5, 20, 21)}, "what was not read for the longest time"
    assert sum(left.values()) <= cap + size
    assert len(os.listdir(directory / "buckets")) == 4
    assert not writer.failures | one.failures


def test_a_reader_never_finds_a_part_of_a_file(directory, monkeypatch) -> None:
    objects = open_objects(f"file://{directory.parent}", PREFIX)
    objects.write("a", b"whole", None)
    monkeypatch.setattr(os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(RemoteFailed):
        objects.write("a", b"another", None)
    assert objects.read(["a", "b"], 3) == [(b"who", 5), None]
    assert os.listdir(directory) == ["a"]


def put(transfers: Transfers, seed: int) -> Transfer | None:
    """None while the server is down."""
    snapshot, chunks = made(seed)
    if (transfer := transfers.reserve(snapshot)) is not None:
        transfers.put(transfer, chunks)
    return transfer


def finished(transfers: Transfers, moved: list[Transfer | None]) -> int:
    """Wait for all; returns how many were read back, with the right bytes."""
    found = 0
    for transfer in moved:
        if transfer is None:
            continue
        assert transfer.ended.wait(120)
        if transfer.loaded is not None:
            found += 1
            expected = next(one for one in map(made, range(20)) if one[0] == transfer.snapshot)
            assert list(transfer.loaded.chunks) == expected[1]
        transfers.release(transfer)
    return found


@needs_server
def test_a_server_that_is_killed_and_started_again_under_load_costs_misses_only() -> None:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        opened = tier(RedisObjects(server.url, PREFIX, timeout=1.0), breaker=Breaker(after=1, wait=0.01, longest=0.02))
        found = 0
        transfers = Transfers([opened], staging=1 << 20, catalogue=Catalogue(anywhere=True))
        for around in range(6):
            moved = [put(transfers, seed) for seed in range(20)]
            if around % 2 == 0:
                assert all(transfer is None or transfer.ended.wait(120) for transfer in moved)
            for seed in range(20):
                moved.append(transfers.fetch(made(seed)[0]))
                if seed == 10 and around % 2:
                    server.kill()
                if seed == 15 and around % 2:
                    server.start()
            found += finished(transfers, moved)
        assert found
        server.kill()
        assert content(opened, made(1)[0].key) is None
        assert opened.failures["unreachable"]
        server.start()
        while opened.down:
            pass
        last = put(transfers, 99)
        assert last is not None
        assert last.ended.wait(120)
        assert last.outcome is Outcome.STORED
        assert content(opened, made(99)[0].key) == made(99)
        assert transfers.close(20)
        opened.close()
        server.kill()


@needs_server
def test_a_full_server_and_one_that_evicts_by_itself_cost_misses_only(caplog) -> None:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    for policy in ("noeviction", "allkeys-lru", "volatile-lru"):
        with tempfile.TemporaryDirectory() as directory:
            server = RedisServer(Path(directory))
            server.start("--maxmemory", "3mb", "--maxmemory-policy", policy)
            opened = tier(RedisObjects(server.url, PREFIX), cap=1 << 30, breaker=Breaker(after=10**6))
            caplog.clear()
            stored = [opened.put(*made(seed, size=100_000)) for seed in range(30)]
            found = [content(opened, made(seed, size=100_000)[0].key) for seed in range(30)]
            assert all(one in (None, made(seed, size=100_000)) for seed, one in enumerate(found))
            assert None in found
            assert any(found)
            assert (False in stored) == (policy == "noeviction")
            warned = [one.getMessage() for one in caplog.records if "maxmemory-policy" in one.getMessage()]
            assert len(warned) == (policy == "allkeys-lru")
            assert opened.failures["unreachable" if policy == "noeviction" else "gone"]
            server.kill()


def test_other_bytes_that_another_process_has_stored_under_a_key_are_left_alone() -> None:
    """Two that compute the same tokens have other K/V bits where their steps differ."""
    store = InMemory()
    ours, (snapshot, chunks) = tier(store), made(1)
    assert ours.put(snapshot, chunks)
    other = tier(InMemory())
    theirs = [bytes(255 - byte for byte in bytes(chunk)) for chunk in chunks]
    assert other.put(snapshot, theirs)
    name = snapshot.key.hex()
    kept = whole(other._objects, name)
    assert kept is not None
    store.write(name, kept, None)
    assert content(ours, snapshot.key) is None
    assert ours.failures["replaced"] == 1
    assert content(tier(store), snapshot.key) == (snapshot, theirs)


def test_what_could_not_be_written_for_sure_is_not_deleted_later() -> None:
    """Others may have stored it meanwhile."""
    store = InMemory()
    ours, one = tier(store), made(1)
    writes = store.write

    def fails(*given: object) -> None:
        writes(*given)  # type: ignore[arg-type]
        raise RemoteFailed("no result within 2 s")

    store.write = fails  # type: ignore[method-assign]
    assert not ours.put(*one)
    store.write = writes  # type: ignore[method-assign]
    ours._breaker._until = -float("inf")
    assert ours.put(*made(2))
    assert content(tier(store), one[0].key) is not None
