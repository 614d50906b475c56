"""Memory for what is read: used again, counted against staging, and never given to two readings at once."""

import mmap
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.retention import Retention
from kvcellar.memory.tiers import transfers as transfers_module
from kvcellar.memory.tiers.codec import DIGEST, AesGcm, Replaced
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.transfers import KEPT, Buffers, Outcome, Space, allocated
from tests.tiers.made import made, store
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name
from tests.tiers.test_transfers import SOON, Slow, ended, put, transfers

SIZE = 60  # bytes of what `made` makes


@pytest.fixture
def allocations(monkeypatch) -> list[int]:
    """The bytes of each buffer that transfers have allocated."""
    made_ones: list[int] = []

    def counted(size: int) -> mmap.mmap:
        made_ones.append(size)
        return allocated(size)

    monkeypatch.setattr(transfers_module, "allocated", counted)
    return made_ones


def chunks_of(transfer) -> list[bytes]:
    return [bytes(chunk) for chunk in transfer.loaded.chunks]


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_buffer_that_is_large_enough_is_used_and_the_smallest_ones_are_freed_first(seed) -> None:
    rng, buffers, idle = random.Random(seed), Buffers(), list[int]()
    for _ in range(60):
        size = rng.randint(1, 9000)
        what = rng.choice(("take", "give", "give", "trim"))
        if what == "take":
            fits = [one for one in idle if one >= size]
            found = buffers.take(size)
            assert (None if found is None else len(found)) == min(fits, default=None)
            if found is not None:
                idle.remove(len(found))
        elif what == "give":
            buffers.give(allocated(size))
            idle.append(size)
        else:
            most = rng.randint(0, 40_000)
            buffers.trim(most)
            while sum(idle) > most:
                idle.remove(min(idle))
        assert buffers.bytes == sum(idle)
        buffers.check()


def test_a_space_hands_out_its_buffer_once_in_parts_and_refuses_more() -> None:
    buffer = allocated(10)
    opened: list[mmap.mmap] = []
    space = Space(lambda: opened.append(buffer) or buffer)
    assert not opened
    space(4)[:], space(6)[:] = b"abcd", b"efghij"
    assert buffer[:] == b"abcdefghij"
    assert len(opened) == 1
    with pytest.raises(Replaced, match="more than the 10 bytes"):
        space(1)


@pytest.mark.parametrize("cipher", [None, AesGcm(bytes(32))])
def test_many_readings_one_after_another_allocate_one_buffer(tmp_path, allocations, cipher) -> None:  # noqa: F811
    with closing(store(tmp_path, cipher=cipher)) as disk, transfers(disk, threads=1) as opened:
        for seed in range(6):
            assert disk.put(*made(seed))
        for seed in [*range(6), *range(6)]:
            found = opened.fetch(made(seed)[0])
            assert ended(found) is Outcome.FETCHED
            assert chunks_of(found) == made(seed)[1]
            opened.release(found)
        assert allocations == [SIZE]


def test_what_was_prepared_is_used_by_the_first_readings(tmp_path, allocations) -> None:  # noqa: F811
    with closing(store(tmp_path)) as disk, transfers(disk) as opened:
        for seed in range(4):
            assert disk.put(*made(seed))
        opened.prepare(SIZE)
        assert allocations == [SIZE] * 4
        found = [opened.fetch(made(seed)[0]) for seed in range(4)]
        assert {ended(one) for one in found} == {Outcome.FETCHED}
        assert [chunks_of(one) for one in found] == [made(seed)[1] for seed in range(4)]
        assert allocations == [SIZE] * 4


def test_nothing_is_prepared_beyond_the_part_of_staging_that_may_be_kept(allocations) -> None:
    with transfers(Slow(), staging=5 * SIZE) as opened:
        opened.prepare(SIZE)
        assert sum(allocations) <= 5 * SIZE // KEPT
        assert allocations
        opened.prepare(0)
        assert len(allocations) == 2


def test_a_missed_reading_leaves_its_buffer_to_the_next_tier(tmp_path, allocations) -> None:  # noqa: F811
    snapshot, chunks = made(1)
    with closing(store(tmp_path / "a")) as damaged, closing(store(tmp_path / "b")) as whole:
        for disk in (damaged, whole):
            assert disk.put(snapshot, chunks)
        (file,) = (tmp_path / "a" / "data").iterdir()
        content = bytearray(file.read_bytes())
        content[-3 * DIGEST - 1] ^= 1  # of the last chunk: the first one was read when that is found
        file.write_bytes(content)
        with transfers(damaged, whole) as opened:
            found = opened.fetch(snapshot)
            assert ended(found) is Outcome.FETCHED
            assert chunks_of(found) == chunks
        assert damaged.failures["damaged"] == 1
    assert len(allocations) == 1


def test_what_is_promoted_is_not_overwritten_by_the_next_reading(tmp_path) -> None:  # noqa: F811
    """Nor does a reading wait for the tier that hangs in it: another one is known to have the entry."""
    host, catalogue = Slow("host"), Catalogue(anywhere=True)
    host.go.clear()
    with closing(store(tmp_path)) as disk, transfers(host, disk, catalogue=catalogue) as opened:
        for seed in (1, 2, 3):
            assert disk.put(*made(seed))
        for seed in (1, 2, 3):
            found = opened.fetch(made(seed)[0])
            assert ended(found) is Outcome.FETCHED
            opened.release(found)
        assert opened.staged() == 3 * SIZE, "the bytes that are being promoted are counted"
        assert not host.calls["get"]
    assert [host.get(made(seed)[0].key).chunks for seed in (1, 2, 3)] == [tuple(made(seed)[1]) for seed in (1, 2, 3)]


def test_kept_buffers_and_what_is_staged_are_never_over_the_cap(tmp_path) -> None:  # noqa: F811
    rng = random.Random(7)
    with closing(store(tmp_path)) as disk, transfers(disk, staging=2000) as opened:
        known = [made(seed, size=40 * rng.randint(1, 8)) for seed in range(12)]
        for snapshot, chunks in known[:8]:
            assert disk.put(snapshot, chunks)
        held = []
        for _ in range(150):
            snapshot, chunks = rng.choice(known)
            if rng.random() < 0.4 and held:
                opened.release(held.pop(rng.randrange(len(held))))
            elif rng.random() < 0.3:
                if (stored := put(opened, snapshot, chunks)) is not None:
                    ended(stored)
            elif (found := opened.fetch(snapshot)) is not None:
                if ended(found) is Outcome.FETCHED:
                    assert chunks_of(found) == chunks
                held.append(found)
            opened.check()
        for one in held:
            opened.release(one)
        opened.check()
        assert opened.room() == 1000, "buffers that are kept take nothing from what is going to be stored"


def test_an_entry_that_is_larger_than_was_known_is_not_read(tmp_path) -> None:  # noqa: F811
    snapshot, chunks = made(1)
    with closing(store(tmp_path)) as disk, transfers(disk) as opened:
        assert disk.put(snapshot, chunks)
        found = opened.fetch(replace(snapshot, sizes=(40, 19)))
        assert ended(found) is Outcome.MISSED
        assert found.loaded is None
        assert not opened.staged()
        assert disk.failures == {"replaced": 1}


def test_what_is_read_comes_before_what_is_stored_but_not_for_ever() -> None:
    done, go = list[str](), threading.Event()
    disk = Slow()
    for seed in range(20):
        HostTier.put(disk, *made(seed))
    get, store_in = disk.get, disk.put
    disk.get = lambda key, take: (go.wait(SOON), done.append("get")) and get(key, take)
    disk.put = lambda *given: done.append("put") or store_in(*given)
    with transfers(disk, threads=1) as opened:
        first = opened.fetch(made(0)[0])
        stored = [put(opened, *made(seed)) for seed in (30, 31)]
        found = [opened.fetch(made(seed)[0]) for seed in range(1, 20)]
        go.set()
        for one in (first, *stored, *found):
            assert ended(one) is not None
    assert done.index("put") > 2, "a reading waited for what was to be stored before it"
    assert done.count("put") == 2
    assert "get" in done[done.index("put") :], "what is stored waited for all that is read"


def test_an_entry_is_read_while_a_transaction_of_the_index_is_open(tmp_path) -> None:  # noqa: F811
    """As it is while what is stored is made durable, however long the disk takes for that."""
    with closing(store(tmp_path)) as first:
        assert first.put(*made(1))
    with closing(store(tmp_path)) as disk, ThreadPoolExecutor() as pool:
        assert disk.put(*made(2), Retention(priority=1))
        disk.entries()
        disk.renew([made(1)[0].key], Retention(priority=2))
        with disk._index.transaction():
            for seed, priority in ((1, 2), (2, 1)):
                found = pool.submit(disk.get, made(seed)[0].key).result(SOON)
                assert [bytes(chunk) for chunk in found.chunks] == made(seed)[1]
                assert found.retention.priority == priority


def test_rows_that_other_processes_have_changed_are_looked_up_again(tmp_path) -> None:  # noqa: F811
    now = [0.0]
    key = made(1)[0].key
    with closing(store(tmp_path, clock=lambda: now[0])) as one, closing(store(tmp_path, clock=lambda: now[0])) as other:
        assert one.put(*made(1), Retention(expires=10.0))
        other.remove([key])
        assert other.put(*made(1), Retention(expires=20.0))  # in a file of another name
        assert one.get(key).retention.expires == 20.0
        other.renew([key], Retention(expires=30.0))
        now[0] = 25.0
        assert one.get(key).retention.expires == 30.0
        now[0] = 30.0
        assert one.get(key) is None
        assert other.put(*made(2))
        assert one.get(made(2)[0].key) is not None
        other.remove([made(2)[0].key])
        assert one.get(made(2)[0].key) is None
        assert one.put(*made(3))
        one.remove([made(3)[0].key])
        assert one.get(made(3)[0].key) is None
        assert not one.failures, "what was evicted or has expired is no failure"
