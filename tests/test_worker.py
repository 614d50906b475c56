"""What a job does to its process is its own error, and no other job, and not its owner, has harm of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest
from kvcellar.errors import EngineClosed, EngineFailed
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker
from tests.jobs import Setup

ROOT = str(Path(__file__).parents[1])
TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the module of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("tests.jobs", lambda: Setup("> "))
    yield made
    made.close()


def asked(worker: Worker, *job: Any, seconds: float = TIMEOUT) -> Any:
    return decode(worker.run(list(job), seconds), Any)


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_job_returns_or_raises_what_its_module_does(worker) -> None:
    assert asked(worker, "echo", "text" * 10**6) == "> " + "text" * 10**6
    with pytest.raises(BadRequest, match="because") as caught:
        asked(worker, "refuse", "because")
    assert (caught.value.param, caught.value.hint) == ("field", "a hint")
    with pytest.raises(EngineFailed, match="KeyError"):
        asked(worker, "unknown")


def test_each_job_has_a_process_of_its_own(worker) -> None:
    found = [asked(worker, "ids") for _ in range(3)]
    assert {parent for _, parent in found} == {worker.pid}
    assert len({own for own, _ in found} | {worker.pid, os.getpid()}) == 5
    assert [asked(worker, "allocate", 1) for _ in range(2)] == [1, 1], "nothing is left of the one before"
    eventually(lambda: not any(there(own) for own, _ in found))


@pytest.mark.parametrize(
    "job",
    [("signal", signal.SIGSEGV), ("signal", signal.SIGKILL), ("recurse",), ("allocate", 1 << 29)],
    ids=lambda job: "-".join(map(str, job)),
)
def test_a_job_that_ends_its_process_harms_no_other(worker, tmp_path, job) -> None:
    """One that runs beside it, and one that comes later, in the same process of the module."""
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(asked, worker, "wait", str(gate))
        eventually(lambda: worker.pid is not None)
        try:
            with pytest.raises(JobEnded) as caught:
                asked(worker, *job)
            assert not caught.value.late
            before = worker.pid
        finally:
            gate.touch()
        assert beside.result(TIMEOUT) > 0
    assert asked(worker, "echo", "") == "> "
    assert worker.pid == before


def test_memory_within_the_limit_can_be_used(worker) -> None:
    assert asked(worker, "allocate", 1 << 27) == 1


@pytest.mark.parametrize("job", [("stall",), ("wait", "/no/such/file")], ids=lambda job: job[0])
def test_a_job_whose_time_is_over_is_ended(worker, job) -> None:
    with pytest.raises(JobEnded) as caught:
        asked(worker, *job, seconds=0.05)
    assert caught.value.late
    assert asked(worker, "echo", "") == "> "


def test_time_in_which_a_job_has_no_cpu_counts_less(worker) -> None:
    """As on a machine that others keep busy."""
    assert asked(worker, "sleep", 0.6, seconds=0.5) is None


def test_a_process_that_has_ended_is_started_again_and_no_job_is_blamed_for_it(worker, tmp_path) -> None:
    with ThreadPoolExecutor() as pool:
        assert asked(worker, "echo", "") == "> "
        os.kill(first := worker.pid, signal.SIGKILL)
        eventually(lambda: not there(first))
        assert asked(worker, "echo", "a") == "> a"
        assert worker.pid != first
        os.kill(worker.pid, signal.SIGSTOP)
        waiting = pool.submit(asked, worker, "echo", "b")
        time.sleep(0.05)
        os.kill(second := worker.pid, signal.SIGKILL)
        assert waiting.result(TIMEOUT) == "> b", "it had not begun, and is run again"
        assert worker.pid != second


def test_one_that_cannot_be_started_is_an_error_of_the_job(worker) -> None:
    broken = Worker("tests.jobs", lambda: Setup("cannot start"))
    for _ in range(2):
        with pytest.raises(EngineFailed, match=r"tests\.jobs could not be started"):
            asked(broken, "echo", "")
    broken.close()


def test_what_is_closed_takes_no_job_and_leaves_no_process(worker, tmp_path) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(asked, worker, "wait", str(tmp_path / "never"))
        eventually(lambda: worker.pid is not None and len(forks(worker.pid)) == 1)
        (job,), pid = forks(worker.pid), worker.pid
        worker.close()
        with pytest.raises(EngineClosed):
            running.result(TIMEOUT)
    with pytest.raises(EngineClosed):
        asked(worker, "echo", "")
    assert not there(pid)
    eventually(lambda: not there(job))


def test_a_process_that_rests_lets_jobs_go_on_and_is_started_again(worker, tmp_path) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(asked, worker, "wait", str(gate := tmp_path / "gate"))
        eventually(lambda: worker.pid is not None and len(forks(worker.pid)) == 1)
        before = worker.pid
        worker.rest()
        assert worker.pid is None
        assert not there(before)
        assert asked(worker, "ids")[1] == worker.pid != before
        gate.touch()
        assert running.result(TIMEOUT) > 0


OWNER = """
import os, threading, time
from kvcellar.worker import Worker
from kvcellar.wire import decode
from tests.jobs import Setup
worker = Worker("tests.jobs", lambda: Setup(""))
print(decode(worker.run(["ids"], 60), list)[1], flush=True)
if (pid := os.fork()) == 0:  # it has what the owner has
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
threading.Thread(target=worker.run, args=(["stall"], 1.0), daemon=True).start()
time.sleep(60)
"""


def test_it_ends_when_its_owner_dies_though_a_fork_of_the_owner_lives() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with owner:
        assert owner.stdout is not None
        pid, fork = (int(owner.stdout.readline()) for _ in range(2))
        found: list[int] = []
        eventually(lambda: found.extend(forks(pid)) is None and len(found) > 0)
        (stalled,) = found
        owner.kill()
        owner.wait()
        eventually(lambda: not there(pid))
        eventually(lambda: not there(stalled))
        assert there(fork)
        os.kill(fork, signal.SIGKILL)


def forks(pid: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def test_several_threads_start_one_process(worker) -> None:
    gate = threading.Barrier(4)

    def one(_: int) -> int:
        gate.wait(TIMEOUT)
        return asked(worker, "ids")[1]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {worker.pid}


def test_a_fork_that_is_used_again_has_one_job_at_a_time_and_is_replaced_when_it_ends(tmp_path) -> None:
    """Where it ended between two jobs, the second one is not blamed."""
    again, gate = Worker("tests.jobs", lambda: Setup("> "), again=True), tmp_path / "gate"
    first, _ = asked(again, "ids")
    assert asked(again, "ids")[0] == first
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(asked, again, "wait", str(gate))
        eventually(lambda: not again._idle)
        assert asked(again, "ids")[0] != first, "the first one is busy"
        gate.touch()
        assert waiting.result(TIMEOUT) == first
    for pid in forks(again.pid):
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not there(pid))
    assert asked(again, "echo", "a") == "> a"
    with pytest.raises(JobEnded):
        asked(again, "signal", signal.SIGSEGV)
    assert asked(again, "echo", "b") == "> b"
    again.close()


def test_a_fork_in_which_a_job_has_left_much_memory_does_no_other_job() -> None:
    """The next one has all the memory that it may use, and is not blamed for what is missing."""
    again = Worker("tests.jobs", lambda: Setup("> "), again=True)
    first, _ = asked(again, "ids")
    for _ in range(3):
        assert asked(again, "allocate", 5 << 26) == 1, "of 8 << 26; nothing is left of the one before"
    assert asked(again, "ids")[0] != first
    again.close()
