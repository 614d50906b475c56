"""Transfers: bounded bytes and waiting, one end for each, and no tier in the way of another."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.tier import Loaded, Take, fresh
from kvcellar.memory.tiers.transfers import Outcome, Transfer, Transfers
from tests.tiers.made import made

SOON = 120.0  # seconds after which a test fails


class Slow(HostTier):
    """A tier whose calls wait until `go` is set, and that can be down."""

    def __init__(self, name: str = "disk", cap: int = 1 << 20) -> None:
        super().__init__(cap)
        self.name, self.go, self.inside, self.stopped = name, threading.Event(), threading.Semaphore(0), False
        self.calls: Counter[str] = Counter()
        self.go.set()

    @property
    def down(self) -> bool:
        return self.stopped

    def _wait(self, call: str) -> None:
        self.calls[call] += 1
        self.inside.release()
        assert self.go.wait(SOON)

    def put(self, snapshot: Snapshot, chunks: Iterable[bytes], retention: Retention = DEFAULT) -> bool:
        self._wait("put")
        return super().put(snapshot, chunks, retention)

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        self._wait("get")
        return super().get(key, take)

    def used(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self.calls["used"] += len(keys)
        super().used(keys)


@contextmanager
def transfers(*tiers: Any, **options: Any) -> Iterator[Transfers]:
    """Closed at the end, when no bytes may stay reserved but those of what was fetched."""
    done: list[Transfer] = []
    given = {"staging": 10_000, "completed": done.append, "catalogue": Catalogue(anywhere=True)}
    opened = Transfers(tiers, **(given | options))
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


def ended(transfer: Transfer | None) -> Outcome | None:
    assert transfer is not None, "no memory was free for it"
    assert transfer.ended.wait(SOON), "it did not end"
    return transfer.outcome


def put(
    opened: Transfers, snapshot: Snapshot, chunks: Sequence[bytes], retention: Retention = DEFAULT
) -> Transfer | None:
    if (transfer := opened.reserve(snapshot)) is not None:
        opened.put(transfer, chunks, retention)
    return transfer


def test_what_is_put_is_in_all_tiers_and_fetched_from_the_first() -> None:
    host, disk = Slow("host"), Slow("disk")
    snapshot, chunks = made(1)
    catalogue = Catalogue(anywhere=True)
    with transfers(host, disk, catalogue=catalogue) as opened:
        stored = put(opened, snapshot, chunks, Retention(priority=2))
        assert ended(stored) is Outcome.STORED
        assert stored.tiers == ("host", "disk")
        assert catalogue.of(snapshot.key) == {"host", "disk"}
        assert opened.source(snapshot.key) == "host"
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


def test_uses_are_counted_when_nothing_is_read() -> None:
    """A transaction of a tier delays what is read from it."""
    disk = Slow("disk")
    first, second = made(1)[0], made(2)[0]
    disk.put(*made(1))
    disk.put(*made(2))
    held, get = threading.Event(), disk.get
    disk.get = lambda key, take: (key != second.key or held.wait(SOON)) and get(key, take)
    with transfers(disk) as opened:
        slow, fast = opened.fetch(second), opened.fetch(first)
        assert ended(fast) is Outcome.FETCHED
        assert ended(opened.fetch(first)) is Outcome.FETCHED  # in the thread that could have counted
        assert not disk.calls["used"]
        held.set()
        assert ended(slow) is Outcome.FETCHED
    assert disk.calls["used"] == 3


def test_bytes_that_a_promotion_frees_are_reported_once_they_are_free() -> None:
    host, disk = Slow("host"), Slow("disk")
    disk.put(*made(1))
    held, freed, staged = threading.Event(), threading.Event(), list[int]()
    put_now = host.put
    host.put = lambda *given: held.wait(SOON) and put_now(*given)
    with transfers(host, disk, freed=lambda: (staged.append(opened.staged()), freed.set())) as opened:
        fetched = opened.fetch(made(1)[0])
        assert ended(fetched) is Outcome.FETCHED
        opened.release(fetched)
        assert opened.staged()
        assert not freed.is_set()
        held.set()
        assert freed.wait(SOON), "the end of the promotion was not reported"
        assert staged == [0]


def test_what_is_nowhere_is_missed_and_nothing_is_held() -> None:
    catalogue = Catalogue(anywhere=True)
    catalogue.stored("disk", made(1)[0], Retention())
    with transfers(Slow(), Slow(), catalogue=catalogue) as opened:
        assert ended(opened.fetch(made(1)[0])) is Outcome.MISSED
        assert opened.staged() == 0
    assert made(1)[0].key not in catalogue


def test_bytes_on_the_way_stay_below_their_cap() -> None:
    disk = Slow()
    each = made(0)[0].size
    stored = [made(seed) for seed in range(6)]
    for one in stored:
        disk.put(*one)
    with transfers(disk, staging=4 * each + each // 2) as opened:
        fetched = [opened.fetch(snapshot) for snapshot, _ in stored]
        assert [one is None for one in fetched] == [False] * 4 + [True] * 2
        assert opened.reserve(made(9)[0]) is None
        for transfer in fetched[:4]:
            assert ended(transfer) is Outcome.FETCHED
            assert transfer is not None
            opened.release(transfer)
            opened.release(transfer)  # again, which changes nothing
        assert opened.staged() == 0


def test_puts_leave_half_of_the_bytes_to_fetches() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.put(*made(9))
    disk.go.clear()
    with transfers(disk, staging=4 * each) as opened:
        puts = [put(opened, *made(seed)) for seed in range(3)]
        assert puts[2] is None
        assert opened.room() == 0
        assert opened.staged() == 2 * each
        assert opened.fetch(made(9)[0]) is not None
        assert opened.staged() == 3 * each
        disk.go.set()
        assert {ended(one) for one in puts[:2]} == {Outcome.STORED}


def test_what_was_reserved_and_is_not_stored_is_given_back() -> None:
    with transfers(Slow()) as opened:
        transfer = opened.reserve(made(1)[0])
        assert transfer is not None
        assert opened.staged() == transfer.need
        opened.cancel(transfer)
        assert opened.staged() == 0


def test_a_tier_that_hangs_delays_only_what_needs_it() -> None:
    now = [0.0]
    host, disk, remote = Slow("host"), Slow("disk"), Slow("remote")
    one, other = made(1), made(2)
    host.put(*one)
    remote.put(*other)
    with transfers(host, disk, remote, threads=1, patience=5.0, clock=lambda: now[0]) as opened:
        disk.go.clear()
        stuck = opened.fetch(other[0])
        assert stuck is not None
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


def test_a_transfer_waits_while_its_job_runs_or_its_tier_begins_none() -> None:
    now, turns, inside = [0.0], threading.Semaphore(0), threading.Semaphore(0)
    disk = HostTier(1 << 20)
    for seed in range(3):
        disk.put(*made(seed))
    get = disk.get
    disk.get = lambda key, take: (inside.release(), turns.acquire(timeout=SOON)) and get(key, take)
    with transfers(disk, threads=1, clock=lambda: now[0]) as opened:
        first, second, third = (opened.fetch(made(seed)[0]) for seed in range(3))
        assert inside.acquire(timeout=SOON)
        now[0] = 3.0
        assert [opened.waited(one) for one in (first, second, third)] == [3.0] * 3
        turns.release()
        assert inside.acquire(timeout=SOON)
        now[0] = 4.0
        assert [opened.waited(one) for one in (first, second, third)] == [0.0, 1.0, 1.0]
        turns.release(2)
        assert {ended(one) for one in (second, third)} == {Outcome.FETCHED}


def test_a_tier_with_a_read_that_took_too_long_is_skipped_for_a_while_that_doubles() -> None:
    now = [0.0]
    disk, remote = Slow("disk"), Slow("remote")
    for tier in (disk, remote):
        tier.put(*made(1))
    remote.calls.clear()
    with transfers(disk, remote, threads=4, clock=lambda: now[0]) as opened:
        late = []
        for wait in (1.0, 2.0, 4.0):
            disk.go.clear()
            late.append(opened.fetch(made(1)[0]))
            while disk.calls["get"] < len(late):
                assert disk.inside.acquire(timeout=SOON)
            assert opened.overdue(late[-1]) == opened.overdue(late[-1]) == "disk"
            assert disk.failures["too slow"] == len(late), "one read was counted twice"
            assert (opened.down(0), opened.down(1)) == (True, False)
            found = opened.fetch(made(1)[0])
            assert ended(found) is Outcome.FETCHED
            assert found.tiers == ("remote",)
            now[0] += 0.9 * wait
            assert opened.down(0)
            now[0] += 0.2 * wait
            assert not opened.down(0)
        for transfer in late:
            opened.cancel(transfer)
        held = opened.staged()
        assert held >= sum(transfer.need for transfer in late), "bytes of reads that go on were freed"
        disk.go.set()
        assert {ended(transfer) for transfer in late} == {Outcome.CANCELLED}


def test_renewals_that_wait_are_one_call_for_each_retention() -> None:
    disk, renewed = Slow(), list[tuple[set[bytes], Retention]]()
    renew = disk.renew
    disk.renew = lambda keys, retention: (renewed.append((set(keys), retention)), renew(keys, retention))
    stored = [made(seed) for seed in range(3)]
    keys = [snapshot.key for snapshot, _ in stored]
    for one in stored:
        disk.put(*one)
    with transfers(disk, threads=1) as opened:
        disk.go.clear()
        waits = opened.fetch(stored[0][0])
        for turn in range(100):
            opened.renew(keys[: 2 + (turn == 99)], Retention(expires=1e12 + turn, priority=turn % 3))
        disk.go.set()
        assert ended(waits) is Outcome.FETCHED
    assert len(renewed) == 2
    assert {frozenset(found): retention for found, retention in renewed} == {
        frozenset(keys[:2]): Retention(expires=1e12 + 99, priority=2),
        frozenset(keys[2:]): Retention(expires=1e12 + 99, priority=0),
    }


def test_a_tier_that_is_down_is_skipped_and_used_again_later() -> None:
    host, disk = Slow("host"), Slow("disk")
    with transfers(host, disk) as opened:
        disk.stopped = True
        stored = put(opened, *made(1))
        assert ended(stored) is Outcome.STORED
        assert stored.tiers == ("host",)
        host.stopped = True
        assert put(opened, *made(2)) is None
        assert ended(opened.fetch(made(1)[0])) is Outcome.MISSED
        assert opened.source(made(1)[0].key) is None
        host.stopped = disk.stopped = False
        assert opened.source(made(1)[0].key) == "host", "it was forgotten because a tier was down"
        stored = put(opened, *made(3))
        assert ended(stored) is Outcome.STORED
        assert stored.tiers == ("host", "disk")


def test_cancelling_ends_what_waits_at_once_and_what_runs_after_its_job() -> None:
    disk, each = Slow(), made(0)[0].size
    disk.go.clear()
    with transfers(disk, staging=4 * each, threads=1) as opened:
        runs = put(opened, *made(1))
        assert disk.inside.acquire(timeout=SOON)
        waits = put(opened, *made(2))
        opened.cancel(waits)
        assert waits.outcome is Outcome.CANCELLED
        opened.cancel(runs)
        assert runs.outcome is None
        disk.go.set()
        assert ended(runs) is Outcome.CANCELLED
    assert not disk.contains(made(2)[0].key)


class InChunks(Slow):
    """A tier that takes memory for each chunk, and calls `between` after it."""

    taken = 0

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        found = HostTier.get(self, key)
        for chunk in found.chunks if found is not None else ():
            take(len(chunk))
            self.taken += 1
            self.between()
        return found

    def between(self) -> None:
        self._wait("chunk")


def test_a_cancelled_reading_ends_with_its_present_chunk(caplog) -> None:
    """Its thread and its memory are free for others then, and nothing is put into other tiers."""
    host, disk = HostTier(1 << 20), InChunks()
    one, other = made(1), made(2)
    for snapshot, chunks in (one, other):
        assert HostTier.put(disk, snapshot, chunks)
    with transfers(host, disk, threads=1, staging=one[0].size) as opened:
        disk.go.clear()
        orphan = opened.fetch(one[0])
        assert disk.inside.acquire(timeout=SOON)
        opened.cancel(orphan)
        assert opened.fetch(other[0]) is None, "a chunk is being read into its memory"
        disk.go.set()
        assert ended(orphan) is Outcome.CANCELLED
        assert disk.taken == 1
        assert not opened.staged()
        assert ended(opened.fetch(other[0])) is Outcome.FETCHED
    assert not host.contains(one[0].key)
    assert "has failed" not in caplog.text


def test_cancelling_what_was_fetched_releases_it() -> None:
    disk = Slow()
    disk.put(*made(1))
    with transfers(disk) as opened:
        fetched = opened.fetch(made(1)[0])
        assert ended(fetched) is Outcome.FETCHED
        opened.cancel(fetched)
        assert fetched.loaded is None
        assert opened.staged() == 0


def test_an_error_of_a_tier_fails_its_transfer_only(caplog) -> None:
    disk = Slow()
    with transfers(disk) as opened:
        snapshot = replace(made(1)[0], sizes=(0, 10))
        assert ended(put(opened, snapshot, [b"one chunk of another size"])) is Outcome.FAILED
        assert opened.staged() == 0
        assert ended(put(opened, *made(2))) is Outcome.STORED
    assert "a transfer has failed" in caplog.text


def test_each_transfer_is_handed_over_once_when_it_has_ended() -> None:
    done: list[Transfer] = []
    disk = Slow()
    with transfers(disk, completed=done.append, staging=10**6) as opened:
        all_of_them = [put(opened, *made(seed)) for seed in range(20)]
        all_of_them += [opened.fetch(made(seed)[0]) for seed in range(40)]
        for transfer in all_of_them[::3]:
            opened.cancel(transfer)
        for transfer in all_of_them:
            assert ended(transfer) is not None
            opened.release(transfer)
    assert Counter(map(id, done)) == Counter(map(id, all_of_them))


def test_entries_are_renewed_and_removed_in_all_tiers() -> None:
    host, disk = Slow("host"), Slow("disk")
    snapshot = made(1)[0]
    catalogue = Catalogue(anywhere=True)
    with transfers(host, disk, catalogue=catalogue) as opened:
        assert ended(put(opened, *made(1))) is Outcome.STORED
        opened.renew([snapshot.key], Retention(priority=3, pinned=True))
        opened.close(SOON)
    for tier in (host, disk):
        assert [entry.retention for entry in tier.entries()] == [Retention(priority=3, pinned=True)]
    with transfers(host, disk) as opened:
        opened.remove([snapshot.key])
        opened.close(SOON)
    assert not host.entries() + disk.entries()


def test_closing_stores_what_was_accepted() -> None:
    disk = Slow()
    with transfers(disk, staging=10**6) as opened:
        puts = [put(opened, *made(seed)) for seed in range(20)]
        assert opened.close(SOON)
        assert {ended(one) for one in puts} == {Outcome.STORED}
        assert put(opened, *made(30)) is None
        assert opened.fetch(made(1)[0]) is None


def test_closing_ends_at_its_deadline_and_cancels_the_rest() -> None:
    disk = Slow()
    disk.go.clear()
    with transfers(disk, staging=10**6) as opened:
        puts = [put(opened, *made(seed)) for seed in range(5)]
        assert disk.inside.acquire(timeout=SOON)
        assert not opened.close(0.01)
        assert Outcome.CANCELLED in {one.outcome for one in puts if one is not None}
        disk.go.set()
        assert {ended(one) for one in puts} <= {Outcome.CANCELLED, Outcome.STORED}


def test_an_error_of_the_callback_stops_nothing(caplog) -> None:
    done: list[Transfer] = []

    def completed(transfer: Transfer) -> None:
        done.append(transfer)
        raise RuntimeError("of the callback")

    with transfers(Slow(), completed=completed) as opened:
        for seed in range(3):
            assert ended(put(opened, *made(seed))) is Outcome.STORED
    assert len(done) == 3
    assert caplog.text.count("a job of the transfers has failed") == 3
