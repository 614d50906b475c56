"""Threads are compared with one by wall time, and a row says when cores were not idle."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import threads
from benchmarks.row import Given
from benchmarks.run import printed
from benchmarks.threads import TARGETS
from kvcellar.bench.compare import BUSY, Others
from kvcellar.bench.peer import Side
from kvcellar.errors import BadRequest, KvcellarError

FAKE = Path(__file__).parent / "fake_peer.py"
SIDES = [Side("fake", "a", 16, FAKE, threads=count) for count in (1, 2)]


def tick(root: Path, *, busy: int, idle: int, of: dict[int, int]) -> None:
    """Write the files of a kernel: its first line sums all CPUs; `of` are the ticks of each process."""
    columns = [busy // len(BUSY) if at in BUSY else idle for at in range(8)]
    (root / "stat").write_text(f"cpu  {' '.join(map(str, columns))} 0 0\ncpu0 1 2 3\n")
    for pid, ticks in of.items():
        (root / str(pid)).mkdir(exist_ok=True)
        before = " ".join(["S", *("0" for _ in range(10))])
        (root / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {before} {ticks} 0 0 0 20 0\n")


def test_time_of_others_is_what_is_busy_without_those_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, hertz = [100.0], os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("kvcellar.bench.compare.time.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("kvcellar.bench.compare.os.cpu_count", lambda: 2)
    me = os.getpid()
    tick(tmp_path, busy=6 * hertz, idle=5, of={me: 0, 77: hertz})
    others = Others([77, 78], root=tmp_path)
    tick(tmp_path, busy=18 * hertz, idle=500, of={me: 2 * hertz, 77: 5 * hertz})
    seconds[0] += 10
    assert others.share() == pytest.approx((12 - 2 - 4) / (2 * 10))
    tick(tmp_path, busy=18 * hertz, idle=500, of={me: 2 * hertz, 77: 15 * hertz})
    assert others.share() == 0.0, "clocks are read one after the other"
    (tmp_path / "stat").unlink()
    assert others.share() is None


@pytest.mark.parametrize(
    ("others", "said"),
    [(0.01, "1% of the CPU time"), (0.34, "34% of the CPU time: the cores were not idle, measure again"),
     (None, "not known: cores may have been busy")],
)  # fmt: skip
def test_a_row_says_whether_cores_were_idle(
    others: float | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Others, "share", lambda self: others)
    monkeypatch.setattr("benchmarks.threads.os.cpu_count", lambda: 2)
    result = printed(threads.row(Given(tmp_path, quick=True), SIDES))
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["other", "processes"]
    rows, (between, *beside) = rows[: len(TARGETS)], rows[len(TARGETS) :]
    assert between.split()[-3:] == ["beside", "other", "work"]
    assert [row.split()[0] for row in beside] == list(TARGETS)
    assert [row.split()[0] for row in rows] == list(TARGETS)
    assert all(row.endswith(said) for row in rows)
    found = result["works"]
    assert {work: one["idle"] for work, one in found.items()} == dict.fromkeys(TARGETS, others == 0.01)
    assert all(one["one_ms"] > 0 and one["many_ms"] > 0 for one in found.values())
    assert result["beside"].keys() == found.keys()


def test_what_cannot_be_compared_with_one_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.threads.os.cpu_count", lambda: 1)
    with pytest.raises(BadRequest, match="threads is 2; 2 to 1, the CPUs here"):
        printed(threads.row(Given(tmp_path, quick=True), SIDES))
    monkeypatch.undo()
    with pytest.raises(KvcellarError, match="fake missing x2 failed, loading the model"):
        printed(threads.row(Given(tmp_path, quick=True), [SIDES[0], replace(SIDES[1], precision="missing")]))


def test_beside_other_work_each_core_has_a_busy_process() -> None:
    with threads.busy_cores() as loops:
        cores = {frozenset({core}) for core in os.sched_getaffinity(0)}
        while {frozenset(os.sched_getaffinity(loop.pid)) for loop in loops} != cores:
            assert all(loop.poll() is None for loop in loops)
            os.sched_yield()
    assert all(loop.poll() is not None for loop in loops)
