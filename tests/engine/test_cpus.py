"""How many threads torch gets: as asked, as OMP_NUM_THREADS says, or no more than a quota lets it use."""

import os

import pytest

from kvcellar import BadRequest
from kvcellar.engine.load.machine import Threads, most_threads, threads_of
from kvcellar.engine.load.settings import Settings
from kvcellar.verify.diagnosis import diagnose
from tests.zoo import ARCHS

FREE: dict[str, str] = {}  # an environment that says nothing


def machine(root, membership, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),  # half a CPU
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "cpu.max": "max 1\n"}, 1),
        ("0::/not/mounted\n", {"cpu.max": "100000 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/box\n0::/\n",
            {"cpu/box/cpu.cfs_quota_us": "100000", "cpu/box/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("5:cpu,cpuacct:/box\n", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, None),
        ("5:cpu:/box\n", {"cpu/cpu.cfs_quota_us": "1000", "cpu/cpu.cfs_period_us": "1000"}, 1),
        ("4:memory:/box\n", {"memory/box/cpu.cfs_quota_us": "1000", "memory/box/cpu.cfs_period_us": "1000"}, None),
    ],
)
def test_a_quota_of_a_container_counts(tmp_path, monkeypatch, membership, files, count) -> None:
    monkeypatch.setattr("kvcellar.engine.load.machine._allowed", lambda: 64)
    found = threads_of(None, 8, root=machine(tmp_path, membership, files), environment=FREE)
    if count is None:
        assert found == Threads(8, "torch's default")
    else:
        assert found.count == count
        assert "quota" in found.because


def test_a_quota_is_rounded_down_and_the_smallest_limit_counts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.engine.load.machine._allowed", lambda: 64)
    root = machine(tmp_path, "0::/a\n", {"a/cpu.max": "390000 100000\n", "cpu.max": "1000000 100000\n"})
    assert threads_of(None, 8, root=root, environment=FREE) == Threads(3, "a CPU quota of 3.9")
    assert threads_of(None, 2, root=root, environment=FREE).count == 2
    assert threads_of(7, 2, root=root, environment=FREE) == Threads(7, "threads")
    assert threads_of(None, 6, root=root, environment={"OMP_NUM_THREADS": "6"}) == Threads(6, "OMP_NUM_THREADS")
    monkeypatch.setattr("kvcellar.engine.load.machine._allowed", lambda: 2)
    assert threads_of(None, 8, root=root, environment=FREE).count == 2


def test_no_system_that_says_nothing_is_refused(tmp_path) -> None:
    assert threads_of(None, 1, root=tmp_path, environment=FREE).count == 1


def test_more_threads_than_a_stack_can_name_are_refused() -> None:
    assert most_threads() == 4 * os.cpu_count()
    assert Settings(threads=most_threads()).threads == most_threads()
    for bad in (most_threads() + 1, 100_000, 2**62):
        with pytest.raises(BadRequest, match=r"threads is \d+; at most \d+ are allowed here, 4 for each") as refused:
            Settings(threads=bad)
        assert refused.value.param == "threads"


def test_the_diagnosis_says_how_many_and_why() -> None:
    found = diagnose(ARCHS["llama"].build(), Settings(cache_bytes=4_000_000, threads=1), kv_quality=False)
    assert "CPU threads: 1 (threads)" in found.notes
