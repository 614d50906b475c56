"""The disk store when an operation fails, or the process ends, at any moment: no wrong byte, and no file left over."""

import errno
import os
import random
import shutil
import signal
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvcellar.memory.tiers.disk import DiskTier, StoreUnusable
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.index import Index
from tests.small_process import in_small_process
from tests.tiers.faults import Counting, Failing, Killing, Recording, Short, after_power_loss
from tests.tiers.made import chains, content, made, store
from tests.tiers.test_cap import bytes_in
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name

SEEDS = range(4)


def check_all(directory: Path, acknowledged: set[int]) -> None:
    """After a restart: what was acknowledged is there, what is there is right, and no file is left over."""
    opened = store(directory)
    try:
        known = {made(seed)[0].key: made(seed) for seed in range(64)}
        there = {one.snapshot.key for one in chains(opened.entries())}
        assert there <= known.keys()
        assert {made(seed)[0].key for seed in acknowledged} <= there, "an acknowledged snapshot is gone"
        for key in there:
            assert content(opened, key) == known[key]
        assert not opened.failures["damaged"]
        assert not list((directory / "temporary").iterdir())
        assert {path.name for path in (directory / "data").iterdir()} == opened._index.names()
        assert [path.name for path in (directory / "processes").iterdir()] == [opened._process]
        assert not opened._index.reserved(), "bytes stay reserved"
        check_sum(opened)
    finally:
        opened.close()


def check_sum(opened: DiskTier) -> None:
    """The sums that the index keeps are those of its rows."""
    with opened._index.transaction() as do:
        held = [row for table in ("entries", "reserved") for row in do(f"SELECT owner, size FROM {table}")]
        assert do("SELECT value FROM facts WHERE name='bytes'").fetchone() == (sum(size for _, size in held),)
        owners = Counter[str | None]()
        for owner, size in held:
            owners[owner] += size
        del owners[None]  # damaged files
        assert dict(do("SELECT owner, bytes FROM owners")) == owners
        assert not do(
            "SELECT 1 FROM entries AS e WHERE children<>(SELECT count(*) FROM entries WHERE parent=e.key)"
        ).fetchall()


def operations(directory: Path) -> int:
    """How many operations two puts and a read take."""
    files = Counting()
    opened = store(directory, files=files)
    use(opened)
    opened.close()
    return files.done


def use(opened: DiskTier) -> set[int]:
    acknowledged = {seed for seed in (1, 2) if opened.put(*made(seed))}
    assert content(opened, made(1)[0].key) in (None, made(1))
    return acknowledged


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_any_operation_may_fail_once(tmp_path, error) -> None:  # noqa: F811
    count = operations(tmp_path / "measured")
    for number in range(count):
        directory = tmp_path / str(number)
        files = Failing(number, error)
        acknowledged: set[int] = set()
        with suppress(StoreUnusable), closing(store(directory, files=files)) as opened:
            acknowledged = use(opened)
        check_all(directory, acknowledged if files.failed not in ("read", "open", None) else set())


def test_short_writes_and_reads_change_nothing(tmp_path) -> None:  # noqa: F811
    opened = store(tmp_path, files=Short())
    assert use(opened) == {1, 2}
    opened.close()
    check_all(tmp_path, {1, 2})


def killed(directory: Path, number: int, steps: int | None, **options: Any) -> set[int]:
    """Fork a process that stores snapshots until it is killed before the file operation `number`, or after as many
    instructions of the index; returns what was acknowledged."""
    size = options.pop("size", 40)
    read, write = os.pipe()
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            os.close(read)
            opened = store(directory, files=Killing(number), **options)
            if steps is not None:
                left = [steps]

                def tick() -> int:
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return 0

                opened._index._connection.set_progress_handler(tick, 1)
            for seed in SEEDS:
                if opened.put(*made(seed, size=size)):
                    os.write(write, bytes([seed]))
            opened.remove([made(0)[0].key])
            os.write(write, b"\xff")
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found = set(pipe.read())
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("batch", range(40))
def test_a_process_that_is_killed_loses_nothing_that_was_acknowledged(tmp_path, batch, request) -> None:  # noqa: F811
    in_small_process(kill_while_storing, str(tmp_path), batch, 250 if request.config.getoption("--long") else 50)


def kill_while_storing(folder: str, batch: int, kills: int) -> None:
    directory = Path(folder) / "measured"
    count = Counting()
    opened = store(directory, files=count)
    for seed in SEEDS:
        opened.put(*made(seed))
    opened.close()
    rng = random.Random(batch)
    acknowledged: set[int] = set()
    directory = Path(folder) / "killed"
    for kill in range(kills):
        if kill % 10 == 0:  # the others recover what the one before has left
            shutil.rmtree(directory, ignore_errors=True)
            acknowledged = set()
        in_index = rng.random() < 0.5
        number = 1 << 30 if in_index else (kill * 40 + batch) % count.done
        found = killed(directory, number, rng.randrange(1, 900) if in_index else None)
        acknowledged |= found & set(SEEDS)
        acknowledged -= {0}  # the one that is deleted
        if kill % 3 == 0:
            check_all(directory, acknowledged)


@pytest.mark.parametrize("batch", range(8))
def test_a_process_that_is_killed_while_it_evicts_leaves_no_byte_over_the_cap(tmp_path, batch) -> None:  # noqa: F811
    in_small_process(kill_while_evicting, str(tmp_path), batch)


def kill_while_evicting(folder: str, batch: int) -> None:
    """The cap is that of two entries of four."""
    directory = Path(folder)
    rng, cap = random.Random(batch), 130_000
    known = {made(seed, size=20_000)[0].key: made(seed, size=20_000) for seed in SEEDS}
    for kill in range(40):
        in_index = rng.random() < 0.6
        number = 1 << 30 if in_index else (kill * 8 + batch) % 90
        killed(directory, number, rng.randrange(1, 3000) if in_index else None, max_bytes=cap, size=20_000)
        assert bytes_in(directory) <= cap
        if kill % 2:  # else the next process recovers
            with closing(store(directory, max_bytes=cap)) as opened:
                assert not opened._index.reserved(), "bytes stay reserved"
                assert {path.name for path in (directory / "data").iterdir()} == opened._index.names()
                for entry in opened.entries():
                    assert content(opened, entry.snapshot.key) == known[entry.snapshot.key]
                assert bytes_in(directory) <= opened.size() <= cap
                check_sum(opened)
                assert not opened.failures


def test_what_a_power_loss_may_leave_is_read_whole_or_not_at_all(tmp_path) -> None:  # noqa: F811
    files = Recording()
    opened = store(tmp_path / "store", files=files)
    start = len(files.trace)
    opened.put(*made(1))
    opened.close()
    trace = files.trace[start:]
    (name,) = (path.name for path in (tmp_path / "store" / "data").iterdir())
    seen = 0
    for end in range(len(trace) + 1):
        for left, named in after_power_loss(trace[:end]):
            for indexed in (False, True) if end == len(trace) else (False,):
                seen += 1
                directory = tmp_path / f"lost-{seen}"
                shutil.copytree(tmp_path / "store", directory)
                (directory / "data" / name).unlink()
                (directory / ("data" if named else "temporary") / name).write_bytes(left)
                if not indexed:
                    with closing(Index(directory / "index.sqlite", 1 << 20, HostTier(1))) as index:
                        index.forget([name])
                check_all(directory, {1} if indexed else set())
    assert seen > 50
