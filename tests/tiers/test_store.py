"""The store on disk over its life: which process may delete what, how long entries stay, and how it is opened again."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvcellar.files import Files
from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.codec import AesGcm
from kvcellar.memory.tiers.disk import DiskTier, StoreUnusable
from kvcellar.memory.tiers.folder import DATA, PROCESSES, QUARANTINE, TEMPORARY, Folder
from kvcellar.memory.tiers.host import OVERHEAD, HostTier
from kvcellar.memory.tiers.remote import RemoteTier
from kvcellar.memory.tiers.tier import Entry, Tier
from kvcellar.memory.tiers.upkeep import verified
from tests.tiers.faults import Killing
from tests.tiers.in_memory import InMemory
from tests.tiers.made import IDENTITY, content, made, store
from tests.tiers.test_cap import bytes_in
from tests.tiers.test_disk import EMPTY, LARGE, LARGER, only_file, tmp_path  # noqa: F401  # pytest finds it by name


class At(Files):
    """Calls `do` once, before the first operation of a name."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        found = getattr(self, name)

        def once(*arguments):
            do, self._do = self._do, None
            if do is not None:
                do()
            return found(*arguments)

        setattr(self, name, once)


def names(directory: Path, folder: str) -> set[str]:
    return {path.name for path in (directory / folder).iterdir()}


@pytest.mark.parametrize("step", ["create", "write_some", "sync", "rename", "sync_directory"])
def test_opening_the_store_deletes_nothing_that_another_process_is_storing(tmp_path, step) -> None:  # noqa: F811
    one = made(1)
    opened = store(tmp_path)
    opened._files = At(step, lambda: store(tmp_path).close())
    opened._folder._files = opened._files
    assert opened.put(*one)
    assert content(opened, one[0].key) == one
    assert not opened.failures


def test_a_process_is_alive_from_before_it_can_be_seen_until_its_file_is_gone(tmp_path) -> None:  # noqa: F811
    """Another process that opens the store while this one begins or ends never sees its file without a lock."""
    seen: list[set[str]] = []
    lister = Folder(Files(), tmp_path, "lister")

    def look() -> None:
        seen.append(names(tmp_path, PROCESSES) - lister.alive())

    folder = Folder(Files(), tmp_path, "p")
    with folder.locked():
        folder.enter()
    assert lister.alive() == {"p"}
    files = At("unlink", look)
    folder._files = files
    close = files.close

    def closing_it(file: int) -> None:
        look()
        close(file)

    files.close = closing_it  # type: ignore[method-assign]
    folder.leave()
    assert seen == [set(), set()]
    assert not names(tmp_path, PROCESSES)


def test_one_process_at_a_time_opens_the_store(tmp_path) -> None:  # noqa: F811
    folder, order = Folder(Files(), tmp_path, "p"), []
    with folder.locked():
        other = threading.Thread(target=lambda: (store(tmp_path).close(), order.append("opened")))
        other.start()
        other.join(0.05)
        order.append("unlocked")
    other.join(10)
    assert order == ["unlocked", "opened"]


def test_a_process_that_hangs_while_it_opens_the_store_does_not_hang_others(tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("kvcellar.memory.tiers.folder.WAIT", 0.02)
    with Folder(Files(), tmp_path, "p").locked(), pytest.raises(StoreUnusable, match="has been opening it"):
        store(tmp_path)
    store(tmp_path).close()


def test_retention_survives_a_restart_and_a_lost_index(tmp_path) -> None:  # noqa: F811
    now = [1000.0]
    kept = {
        made(1)[0]: Retention(priority=-3, pinned=True, owner="someone"),
        made(2)[0]: Retention(expires=2000.0),
        made(3)[0]: Retention(),
    }
    with closing(store(tmp_path, clock=lambda: now[0])) as opened:
        for seed in (1, 2, 3):
            assert opened.put(*made(seed), kept[made(seed)[0]])
    for lost in (False, True):
        if lost:
            (tmp_path / "index.sqlite").unlink()
        with closing(store(tmp_path, clock=lambda: now[0])) as opened:
            assert dict(opened.entries()) == kept
    now[0] = 2000.0
    with closing(store(tmp_path, clock=lambda: now[0])) as opened:
        assert content(opened, made(2)[0].key) is None
        assert not opened.contains(made(2)[0].key)
        assert opened.put(*made(4))
        assert len(names(tmp_path, DATA)) == 3


def test_putting_again_keeps_an_entry_at_least_as_long(tmp_path) -> None:  # noqa: F811
    opened = store(tmp_path)
    opened.put(*made(1), Retention(expires=10.0**10, owner="a"))
    opened.put(*made(1), Retention(expires=10.0**11, pinned=True, owner="b"))
    opened.put(*made(1), Retention(expires=10.0**9))
    assert opened.entries() == [Entry(made(1)[0], Retention(expires=10.0**11, pinned=True, owner="a"))]


def test_an_owner_over_its_quota_evicts_its_own_entries(tmp_path) -> None:  # noqa: F811
    one, two, other, more = (made(seed, size=LARGE) for seed in range(4))
    opened = store(tmp_path, quota=2 * LARGER + EMPTY // 3)
    for entry, owner in ((one, "a"), (two, "a"), (other, "b"), (more, "a")):
        assert opened.put(*entry, Retention(owner=owner))
    assert {entry.snapshot.key for entry in opened.entries()} == {entry[0].key for entry in (two, other, more)}
    opened.renew([two[0].key, more[0].key], Retention(pinned=True))
    assert not opened.put(*one, Retention(owner="a"))
    assert opened.put(*one, Retention(owner="b"))


def test_a_higher_priority_stays_longer(tmp_path) -> None:  # noqa: F811
    opened = store(tmp_path, max_bytes=EMPTY + 2 * LARGER)
    for seed, priority in ((1, 0), (2, 3), (3, 0), (4, 0)):
        assert opened.put(*made(seed, size=LARGE), Retention(priority=priority))
    assert {entry.snapshot.key for entry in opened.entries()} == {made(seed, size=LARGE)[0].key for seed in (2, 4)}


def test_damaged_files_are_kept_within_a_part_of_the_cap_and_go_before_entries(tmp_path) -> None:  # noqa: F811
    opened = store(tmp_path, max_bytes=EMPTY + 30 * LARGER)
    for seed in range(20):
        one = made(seed, size=LARGE if seed == 3 else 1000)
        assert opened.put(*one)
        path = only_file(tmp_path)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert content(opened, one[0].key) is None
        assert len(names(tmp_path, QUARANTINE)) <= 8
    assert names(tmp_path, QUARANTINE)
    damaged = bytes_in(tmp_path / QUARANTINE)
    assert 0 < damaged <= opened.cap // 16
    opened.close()
    opened = store(tmp_path, max_bytes=EMPTY + LARGER)
    assert opened.put(*made(100))
    assert opened.put(*made(101, size=LARGE))
    assert opened.contains(made(100)[0].key)
    assert bytes_in(tmp_path) <= opened.cap


def test_a_smaller_cap_evicts_when_the_store_is_opened_and_pinned_entries_refuse_it(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)) as opened:
        for seed in range(5):
            assert opened.put(*made(seed, size=LARGE))
    with closing(store(tmp_path, max_bytes=EMPTY + 2 * LARGER)) as opened:
        assert len(opened.entries()) == 2
        assert bytes_in(tmp_path) <= opened.cap
        opened.renew([entry.snapshot.key for entry in opened.entries()], Retention(pinned=True))
    with pytest.raises(StoreUnusable, match="pinned"):
        store(tmp_path, max_bytes=EMPTY + LARGER)
    with pytest.raises(StoreUnusable, match="too few"):
        store(tmp_path, max_bytes=20_000)


def test_a_lost_index_is_not_made_again_while_another_process_uses_the_store(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)) as opened:
        assert opened.put(*made(1))
        (tmp_path / "index.sqlite").unlink()
        with pytest.raises(StoreUnusable, match="other processes use it"):
            store(tmp_path)
        assert not opened.put(*made(2))  # what is written now would be lost
    with closing(store(tmp_path)) as opened:
        assert content(opened, made(1)[0].key) == made(1)
        assert len(names(tmp_path, DATA)) == 1


def test_a_process_killed_while_it_makes_the_index_again_loses_nothing(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)) as opened:
        for seed in range(3):
            assert opened.put(*made(seed))
    for number in range(30):
        (tmp_path / "index.sqlite").unlink()
        child = os.fork()
        if not child:  # nothing of pytest may run here
            try:
                store(tmp_path, files=Killing(number))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with closing(store(tmp_path)) as opened:
            assert {entry.snapshot for entry in opened.entries()} == {made(seed)[0] for seed in range(3)}


def test_another_key_gives_misses_and_room_and_no_errors(tmp_path) -> None:  # noqa: F811
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    first, second = AesGcm(bytes(32)), AesGcm(bytes([1]) * 32)
    with closing(store(tmp_path, cipher=first)) as opened:
        assert opened.put(*made(1), Retention(owner="a"))
    with closing(store(tmp_path, cipher=second)) as opened:
        assert opened.entries() == []
        assert content(opened, made(1)[0].key) is None
        assert opened.failures.keys() == {"foreign"}
        assert not opened.down
        assert opened.put(*made(1))  # in place of what it cannot read
        assert content(opened, made(1)[0].key) == made(1)
        assert verified(opened).damaged == 0


def test_a_directory_that_is_removed_costs_misses_only(tmp_path, caplog) -> None:  # noqa: F811
    opened = store(tmp_path)
    assert opened.put(*made(1))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert content(opened, made(1)[0].key) is None
    assert not opened.put(*made(2))
    assert not opened.put(*made(3))
    opened.remove([made(1)[0].key])
    opened.used([made(1)[0].key])
    opened.close()
    assert opened.failures


def test_a_disk_that_fails_is_down_and_is_tried_again(tmp_path) -> None:  # noqa: F811
    class Broken(Files):
        broken = False

        def create(self, path: Path) -> int:
            if self.broken:
                raise OSError(5, "it is broken")
            return super().create(path)

    files = Broken()
    opened = store(tmp_path, files=files)
    files.broken = True
    for seed in range(3):
        assert not opened.down
        assert not opened.put(*made(seed))
    assert opened.down
    files.broken = False
    assert opened.put(*made(4))
    assert opened._breaker._in_row == 0


def test_identities_share_the_cap_and_evict_each_other(tmp_path) -> None:  # noqa: F811
    one, two = made(1, size=LARGE), made(2, size=LARGE)
    first = store(tmp_path, max_bytes=EMPTY + LARGER)
    other = DiskTier(tmp_path, identity=bytes(32), max_bytes=EMPTY + LARGER, share_of_free=1.0)
    assert first.put(*one)
    assert other.put(*two)
    assert not first.contains(one[0].key)
    assert IDENTITY != bytes(32)
    assert names(tmp_path, TEMPORARY) == set()


class Recorder:
    """All that a tier has reported: whether it was stored, or why it was removed."""

    def __init__(self, tier: Tier) -> None:
        self.seen: list[tuple[bytes, str]] = []
        tier.catalogue = self

    def stored(self, tier: str, snapshot: Snapshot, retention: Retention) -> None:
        self.seen.append((snapshot.key, "stored"))

    def removed(self, tier: str, key: bytes, why: str) -> None:
        self.seen.append((key, why))

    def of(self, key: bytes) -> frozenset[str]:
        raise NotImplementedError


def test_what_is_stored_and_removed_is_reported_in_order_with_the_reason(tmp_path) -> None:  # noqa: F811
    now = [0.0]
    options = {"clock": lambda: now[0]}
    each = made(0, size=LARGE)[0].size + 2 * OVERHEAD
    for tier in (
        store(tmp_path, max_bytes=EMPTY + 2 * LARGER, **options),
        HostTier(2 * each, **options),
        RemoteTier(InMemory(), identity=IDENTITY, cap=2 * each, **options),
    ):
        now[0] = 0.0
        seen = Recorder(tier).seen
        assert tier.put(*made(1, size=LARGE))
        assert tier.put(*made(2, size=LARGE), Retention(expires=10.0, priority=1))
        assert tier.put(*made(3, size=LARGE))
        now[0] = 10.0
        assert tier.put(*made(4, size=LARGE))
        tier.remove([made(3)[0].key, made(5)[0].key])
        tier.close()
        keys = {made(seed)[0].key: seed for seed in (1, 2, 3, 4)}
        assert [(keys[key], why) for key, why in seen[:7]] == [
            (1, "stored"), (2, "stored"), (1, "evicted"), (3, "stored"), (2, "expired"), (4, "stored"), (3, "removed"),
        ]  # fmt: skip
        assert {why for _, why in seen[7:]} <= {"removed"}


def test_a_damaged_entry_is_reported(tmp_path) -> None:  # noqa: F811
    opened = store(tmp_path)
    seen = Recorder(opened).seen
    assert opened.put(*made(1))
    only_file(tmp_path).write_bytes(b"")
    assert content(opened, made(1)[0].key) is None
    assert seen == [(made(1)[0].key, "stored"), (made(1)[0].key, "damaged")]
