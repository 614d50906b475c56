"""Transfers: bounded bytes and waiting, one end for each, and no tier in the way of another."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvcellar.retention import DEFAULT, Retention
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.host import HostTier
from kvcellar.tiers.tier import Loaded
from kvcellar.tiers.transfers import Outcome, Transfer, Transfers
from tests.tiers.made import made

SOON = 10.0  # seconds after which a test fails


class Slow(HostTier):
    """A tier whose calls wait until `go` is set, and that can be down."""

    def __init__(self, name: str = "disk", cap: int = 1 << 20) -> None:
        super().__init__(cap)
        self.name, self.go, self.inside, self.down = name, threading.Event(), threading.Semaphore(0), False
        self.calls: Counter[str] = Counter()
        self.go.set()

    def _wait(self, call: str) -> None:
        self.calls[call] += 1
        self.inside.release()
        assert self.go.wait(SOON)

    def put(self, snapshot: Snapshot, chunks: Iterable[bytes], retention: Retention = DEFAULT) -> bool:
        self._wait("put")
        return super().put(snapshot, chunks, retention)

    def get(self, key: bytes) -> Loaded | None:
        self._wait("get")
        return super().get(key)

    def used(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self.calls["used"] += len(keys)
        super().used(keys)


@contextmanager
def transfers(*tiers: Any, **options: Any) -> Iterator[Transfers]:
    """Closed at the end, when no bytes may stay reserved but those of what was fetched."""
    done: list[Transfer] = []
    opened = Transfers(tiers, **({"staging": 10_000, "completed": done.append} | options))
    try:
        yield opened
    finally:
        for tier in tiers:
            if isinstance(tier, Slow):
                tier.go.set()
        opened.close(SOON)
        for transfer in done:
            opened.release(transfer)
        assert not opened.staged(), "bytes stay reserved"


def ended(transfer: Transfer) -> Outcome | None:
    assert transfer.ended.wait(SOON), "it did not end"
    return transfer.outcome


def test_what_is_put_is_in_all_tiers_and_fetched_from_the_first() -> None:
    host, disk = Slow("host"), Slow("disk")
    snapshot, chunks = made(1)
    with transfers(host, disk) as opened:
        put = opened.put(snapshot, chunks, Retention(priority=2))
        assert ended(put) is Outcome.STORED
        assert put.tiers == ("host", "disk")
        fetched = opened.fetch(snapshot)
        assert ended(fetched) is Outcome.FETCHED
        assert fetched.tiers == ("host",)
        assert fetched.loaded == Loaded(snapshot, Retention(priority=2), tuple(chunks))
        opened.release(fetched)
        assert fetched.loaded is None
        assert disk.calls["get"] == 0


def test_what_is_fetched_from_below_is_promoted_and_counted_as_used() -> None:
    host, disk, remote = Slow("host"), Slow("disk"), Slow("remote")
    snapshot, chunks = made(1)
    remote.put(snapshot, chunks, Retention(owner="x"))
    with transfers(host, disk, remote) as opened:
        fetched = opened.fetch(snapshot)
        assert ended(fetched) is Outcome.FETCHED
        assert fetched.tiers == ("remote",)
        opened.release(fetched)
    assert host.get(snapshot.key) == disk.get(snapshot.key) == Loaded(snapshot, Retention(owner="x"), tuple(chunks))
    assert remote.calls["used"] == 1
    assert opened.reads["remote"].seconds(100) > 0


def test_what_is_nowhere_is_missed_and_nothing_is_held() -> None:
    with transfers(Slow(), Slow()) as opened:
        assert ended(opened.fetch(made(1)[0])) is Outcome.MISSED
        assert opened.staged() == 0


def test_bytes_on_the_way_stay_below_their_cap_and_more_wait() -> None:
    disk = Slow()
    each = made(0)[0].size
    stored = [made(seed) for seed in range(6)]
    for one in stored:
        disk.put(*one)
    with transfers(disk, staging=2 * each + each // 2) as opened:
        waiting = [opened.fetch(snapshot) for snapshot, _ in stored]
        for transfer in waiting:
            assert ended(transfer) is Outcome.FETCHED
            assert 0 < opened.staged() <= 2 * each
            opened.release(transfer)
            opened.release(transfer)  # again, which changes nothing


def test_a_snapshot_that_never_fits_and_too_many_that_wait_are_refused() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.go.clear()
    with transfers(disk, staging=2 * each, waiting=2) as opened:
        assert ended(opened.put(*made(1, size=400))) is Outcome.REFUSED
        first = opened.put(*made(2))
        assert disk.inside.acquire(timeout=SOON)
        more = [opened.put(*made(seed)) for seed in (3, 4)]
        assert ended(opened.put(*made(5))) is Outcome.REFUSED
        assert first.outcome is more[0].outcome is None
        disk.go.set()
        assert [ended(transfer) for transfer in (first, *more)] == [Outcome.STORED] * 3


def test_puts_leave_half_of_the_bytes_to_fetches() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.put(*made(9))
    disk.go.clear()
    with transfers(disk, staging=4 * each) as opened:
        puts = [opened.put(*made(seed)) for seed in range(4)]
        assert disk.inside.acquire(timeout=SOON)
        assert opened.staged() <= 2 * each
        opened.fetch(made(9)[0])
        assert opened.staged() == 3 * each
        disk.go.set()
        assert {ended(put) for put in puts} == {Outcome.STORED}


def test_a_tier_that_hangs_delays_only_what_needs_it() -> None:
    now = [0.0]
    host, disk, remote = Slow("host"), Slow("disk"), Slow("remote")
    one, other = made(1), made(2)
    host.put(*one)
    remote.put(*other)
    with transfers(host, disk, remote, threads=1, patience=5.0, clock=lambda: now[0]) as opened:
        disk.go.clear()
        stuck = opened.fetch(other[0])
        while disk.calls["get"] == 0:
            assert disk.inside.acquire(timeout=SOON)
        assert ended(opened.fetch(one[0])) is Outcome.FETCHED
        now[0] = 6.0
        found = opened.fetch(other[0])
        assert ended(found) is Outcome.FETCHED
        assert found.tiers == ("remote",)
        assert stuck.outcome is None
        disk.go.set()
        assert ended(stuck) is Outcome.FETCHED


def test_a_tier_that_is_down_is_skipped_and_used_again_later() -> None:
    host, disk = Slow("host"), Slow("disk")
    with transfers(host, disk) as opened:
        disk.down = True
        put = opened.put(*made(1))
        assert ended(put) is Outcome.STORED
        assert put.tiers == ("host",)
        host.down = True
        assert ended(opened.put(made(2)[0], raises())) is Outcome.REFUSED  # without a look at its chunks
        assert ended(opened.fetch(made(1)[0])) is Outcome.MISSED
        host.down = disk.down = False
        put = opened.put(*made(3))
        assert ended(put) is Outcome.STORED
        assert put.tiers == ("host", "disk")


def test_cancelling_ends_what_waits_at_once_and_what_runs_after_its_job() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.go.clear()
    with transfers(disk, staging=2 * each) as opened:
        runs = opened.put(*made(1))
        assert disk.inside.acquire(timeout=SOON)
        waits = opened.put(*made(2))
        opened.cancel(waits)
        assert waits.outcome is Outcome.CANCELLED
        opened.cancel(runs)
        assert runs.outcome is None
        disk.go.set()
        assert ended(runs) is Outcome.CANCELLED
    assert not disk.contains(made(2)[0].key)


def test_cancelling_what_was_fetched_releases_it() -> None:
    disk = Slow()
    disk.put(*made(1))
    with transfers(disk) as opened:
        fetched = opened.fetch(made(1)[0])
        assert ended(fetched) is Outcome.FETCHED
        opened.cancel(fetched)
        assert fetched.loaded is None
        assert opened.staged() == 0


def raises() -> Iterator[bytes]:
    yield b""
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("chunks", [raises, lambda: [b"one chunk of another size"]])
def test_chunks_that_cannot_be_read_fail_their_transfer_only(chunks: Callable[[], Iterable[bytes]], caplog) -> None:
    disk = Slow()
    with transfers(disk) as opened:
        snapshot = replace(made(1)[0], sizes=(0, 10))
        assert ended(opened.put(snapshot, chunks())) is Outcome.FAILED
        assert opened.staged() == 0
        assert ended(opened.put(*made(2))) is Outcome.STORED
    assert disk.calls["put"] == 1
    assert "a transfer has failed" in caplog.text


def test_each_transfer_is_handed_over_once_when_it_has_ended() -> None:
    done: list[Transfer] = []
    disk = Slow()
    with transfers(disk, completed=done.append, staging=10**6) as opened:
        all_of_them = [opened.put(*made(seed)) for seed in range(20)]
        all_of_them += [opened.fetch(made(seed)[0]) for seed in range(40)]
        for transfer in all_of_them[::3]:
            opened.cancel(transfer)
        for transfer in all_of_them:
            assert ended(transfer) is not None
            opened.release(transfer)
    assert Counter(map(id, done)) == Counter(map(id, all_of_them))
    assert sum(opened.counts.values()) == 60


def test_closing_stores_what_was_accepted() -> None:
    disk = Slow()
    with transfers(disk, staging=10**6) as opened:
        puts = [opened.put(*made(seed)) for seed in range(20)]
        assert opened.close(SOON)
        assert {put.outcome for put in puts} == {Outcome.STORED}
        assert ended(opened.put(*made(30))) is Outcome.REFUSED


def test_closing_ends_at_its_deadline_and_cancels_the_rest() -> None:
    disk = Slow()
    disk.go.clear()
    with transfers(disk, staging=10**6) as opened:
        puts = [opened.put(*made(seed)) for seed in range(5)]
        assert disk.inside.acquire(timeout=SOON)
        assert not opened.close(0.01)
        assert Outcome.CANCELLED in {put.outcome for put in puts}
        disk.go.set()
        assert {ended(put) for put in puts} <= {Outcome.CANCELLED, Outcome.STORED}


def test_no_put_passes_a_fetch_that_waits_for_its_bytes() -> None:
    disk, each = Slow(), made(0)[0].size
    large = made(9, size=4 * 40)
    disk.put(*large)
    disk.go.clear()
    with transfers(disk, staging=4 * each) as opened:
        first = opened.put(*made(1))
        fetched = opened.fetch(large[0])
        later = opened.put(*made(2))
        disk.go.set()
        assert ended(first) is Outcome.STORED
        assert ended(fetched) is Outcome.FETCHED
        assert opened.staged() == 4 * each
        assert later.outcome is None
        opened.release(fetched)
        assert ended(later) is Outcome.STORED


def test_any_number_may_end_at_once() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.put(*made(0))
    with transfers(disk, staging=each, waiting=2000) as opened:
        first = opened.fetch(made(0)[0])
        assert ended(first) is Outcome.FETCHED
        waiting = [opened.fetch(made(1)[0]) for _ in range(1500)]
        disk.down = True
        opened.release(first)
        assert {ended(transfer) for transfer in waiting} == {Outcome.MISSED}


def test_an_error_of_the_callback_stops_nothing(caplog) -> None:
    done: list[Transfer] = []

    def completed(transfer: Transfer) -> None:
        done.append(transfer)
        raise RuntimeError("of the callback")

    with transfers(Slow(), completed=completed) as opened:
        for seed in range(3):
            assert ended(opened.put(*made(seed))) is Outcome.STORED
    assert len(done) == 3
    assert caplog.text.count("a job of the transfers has failed") == 3
