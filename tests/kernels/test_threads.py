"""Every item of work is computed once, by the caller or by a thread beside it, whatever else happens meanwhile."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from kvcellar.kernels.compiled import COMPILERS, SOURCES, THREADS, Threads, library, nodes_of
from kvcellar.kernels.structures import structure

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here")

COUNTED = """
#include <atomic>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include "threads.h"

// Adds 1 to counts[item] for each item, `times` times. Returns how many items a thread other than the caller computed.
extern "C" int64_t count(Threads* threads, int64_t at_most, int64_t items, int64_t times, int64_t* counts) {
    const pthread_t caller = pthread_self();
    std::atomic<int64_t> elsewhere{0};
    for (int64_t i = 0; i < times; ++i)
        for_each_item(threads, at_most, items, [&](int64_t item) noexcept {
            counts[item] += item + 1;
            elsewhere += !pthread_equal(pthread_self(), caller);
        });
    return elsewhere;
}

// Returns once two threads have been inside items at the same time, which needs a worker: 1; or 0 after 30 seconds.
extern "C" int meet(Threads* threads) {
    std::atomic<int> inside{0};
    std::atomic<bool> met{false};
    for (int64_t i = 0; i < 30000 && !met; ++i)
        for_each_item(threads, 2, 2, [&](int64_t) noexcept {
            if (++inside == 2) met = true;
            const timespec nap{0, 1000000};
            if (!met) nanosleep(&nap, nullptr);
            --inside;
        });
    return met;
}

// As `meet`; `cpus` [2] gets the CPU that each item was computed on when they met.
extern "C" int meet_on(Threads* threads, int64_t* cpus) {
    std::atomic<bool> met{false};
    for (int64_t i = 0; i < 30000 && !met; ++i) {
        std::atomic<int> inside{0};
        for_each_item(threads, 2, 2, [&](int64_t item) noexcept {
            cpus[item] = sched_getcpu();
            if (++inside == 2) met = true;
            const timespec nap{0, 1000000};
            nanosleep(&nap, nullptr);
            if (!met) --inside;
        });
    }
    return met;
}

// A call of two items that take a millisecond, or on a worker so many.
extern "C" void slow_elsewhere(Threads* threads, int64_t milliseconds) {
    const pthread_t caller = pthread_self();
    for_each_item(threads, 2, 2, [&](int64_t) noexcept {
        const timespec nap{0, (pthread_equal(pthread_self(), caller) ? 1 : milliseconds) * 1000000};
        nanosleep(&nap, nullptr);
    });
}
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("source")
    shutil.copy(SOURCES / "threads.h", path)
    (path / "counted.cpp").write_text(COUNTED)
    found = library(path / "counted.cpp", {**os.environ, "XDG_CACHE_HOME": str(path)})
    found.count.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    found.count.restype = ctypes.c_int64
    found.meet.argtypes = [ctypes.c_void_p]
    found.slow_elsewhere.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return found


@pytest.fixture(scope="module")
def pool() -> Threads:
    return Threads(os.environ)


def counts(found: ctypes.CDLL, address: int | None, *, threads: int, items: int, times: int) -> tuple[list[int], int]:
    """What each item was counted as in units of its number, and the items that other threads than the caller had."""
    numbers = (ctypes.c_int64 * max(1, items))()
    elsewhere = found.count(address, threads, items, times, numbers)
    return [number // (item + 1) for item, number in enumerate(numbers[:items])], elsewhere


def test_every_item_is_computed_once(counted: ctypes.CDLL, pool: Threads) -> None:
    for threads in (1, 2, 3, 8):
        for items in (0, 1, 2, 7, 500):
            found, _ = counts(counted, pool.address, threads=threads, items=items, times=50)
            assert found == [50] * items


def test_without_threads_the_caller_computes_all(counted: ctypes.CDLL, pool: Threads) -> None:
    for address, threads in ((None, 8), (pool.address, 1), (pool.address, 0)):
        assert counts(counted, address, threads=threads, items=100, times=3) == ([3] * 100, 0)


def test_there_are_threads(counted: ctypes.CDLL, pool: Threads) -> None:
    assert counted.meet(pool.address)


def test_several_callers_at_once_each_get_all_of_their_items(counted: ctypes.CDLL, pool: Threads) -> None:
    results: list[list[int]] = []

    def call() -> None:
        results.append(counts(counted, pool.address, threads=3, items=200, times=300)[0])

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [[300] * 200] * 4


def test_there_is_one_pool_in_a_process(pool: Threads) -> None:
    assert Threads(os.environ).address == pool.address


FORKED = """
import ctypes, os, sys
from pathlib import Path
from kvcellar.kernels.compiled import library
from kvcellar.kernels.compiled import Threads
found = library(Path(sys.argv[1]), os.environ)
found.count.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
found.count.restype = ctypes.c_int64
address = Threads(os.environ).address
def all_counted():
    numbers = (ctypes.c_int64 * 50)()
    elsewhere = found.count(address, 3, 50, 20, numbers)
    return [20 * (item + 1) for item in range(50)] == list(numbers), elsewhere
assert all_counted()[0]
if (child := os.fork()) == 0:
    os._exit(0 if all_counted() == (True, 0) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the fork"
assert all_counted()[0]
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_has_no_threads_and_a_process_ends_with_them(counted: ctypes.CDLL, tmp_path: Path) -> None:
    source = Path(counted._name).parents[1] / "counted.cpp"
    environment = {**os.environ, "XDG_CACHE_HOME": str(source.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "forked.py").write_text(FORKED)
    command = [sys.executable, str(tmp_path / "forked.py"), str(source)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


@pytest.mark.parametrize(
    ("lists", "allowed", "nodes"),
    [
        (["0-1,4-5", "2-3,6-7"], range(8), [0, 0, 1, 1, 0, 0, 1, 1]),
        (["0-1,4-5", "2-3,6-7"], (3, 6), [-1, -1, -1, 0, -1, -1, 0]),  # those of one node
        (["0", "", "1"], (0, 1), [0, 1]),  # a node without CPUs
        ([], (0, 2), [0, -1, 0]),
        (["0-3", "4-7"], (0, 1, 2, 4), [0, 0, 0, -1, 0]),  # their shares of work are equal
        (["0-1", "2-x"], range(4), [0, 0, 0, 0]),
    ],
)
def test_cpus_belong_to_memory_nodes(
    lists: list[str], allowed: Collection[int], nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in enumerate(lists):
        folder = tmp_path / "sys/devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    assert nodes_of(tmp_path) == nodes


NODES = """
import ctypes, os, sys
from pathlib import Path
import torch
from kvcellar.kernels.arena import Arena
from kvcellar.kernels import compiled
from kvcellar.kernels.compiled import Threads, library
from kvcellar.kernels.layers import PanelKernel, merged, panel_bytes, panel_linear
from kvcellar.kernels.codes import Codes
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear
from kvcellar.engine.models.quantize.rounding import eight_bits

cpus = sorted(os.sched_getaffinity(0))
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
weights = [torch.randn(n, 96, generator=draw) for n in (64, 200, 1000, 30)]
x = torch.randn(9, 96, generator=draw)
def results():
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        kernel, some = PanelKernel(os.environ), [one.to(dtype) for one in weights]
        layers = [panel_linear(kernel, Arena(panel_bytes(one)), one, None) for one in some]
        made += [layer(x.to(dtype)) for layer in (*layers, merged(layers))]
        codes = QuantisedKernel(os.environ)
        coded = [QuantisedLinear(codes, eight_bits(one), None, dtype, Arena(1 << 20)) for one in some]
        made += [layer(x.to(dtype)) for layer in (*coded, merged(coded))]
    return made
alone = results()
nodes = [cpus.index(cpu) % 2 if cpu in cpus else -1 for cpu in range(cpus[-1] + 1)]
compiled.nodes_of = lambda: nodes
pool = Threads(os.environ)
os.sched_setaffinity(0, cpus[:1])
torch.set_num_threads(3)
assert all(map(torch.equal, alone, results())), "bits"
assert os.sched_getaffinity(0) == {cpus[0]}, "affinity"
found = library(Path(sys.argv[1]), os.environ)
found.count.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
found.meet_on.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
for items in (2, 3, 7, 500):
    numbers = (ctypes.c_int64 * items)()
    found.count(pool.address, 3, items, 50, numbers)
    assert [50 * (item + 1) for item in range(items)] == list(numbers), "counts"
where = (ctypes.c_int64 * 2)(-1, -1)
assert found.meet_on(pool.address, where)
print([cpus.index(cpu) % 2 for cpu in where])
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="each of two nodes needs a CPU, on Linux"
)
def test_each_memory_node_computes_its_share_of_items_with_the_same_bits(counted: ctypes.CDLL, tmp_path: Path) -> None:
    """In a process of its own, with nodes that are made up. Two items that run at the same time are on the nodes that
    their weights are on."""
    source = Path(counted._name).parents[1] / "counted.cpp"
    (tmp_path / "nodes.py").write_text(NODES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "nodes.py"), str(source)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "[0, 1]\n"), ran.stderr


def pool_counts() -> ctypes.Structure:
    found = structure(THREADS, "Counts")()
    library(THREADS, os.environ).kvcellar_threads_counts(ctypes.byref(found))
    return found


def test_workers_that_cost_more_than_they_gain_are_not_used_and_sleep(counted: ctypes.CDLL, pool: Threads) -> None:
    """The last test here: they rest for some seconds."""
    before = pool_counts()
    for _ in range(64):  # one of them is measured without workers
        counted.slow_elsewhere(pool.address, 1)
    while (after := pool_counts()).rests == before.rests:
        counted.slow_elsewhere(pool.address, 100)
    assert counts(counted, pool.address, threads=2, items=100, times=50) == ([50] * 100, 0)
    assert pool_counts().shared == after.shared
    while (found := pool_counts()).sleeping < found.workers:  # they wait for work for a short time
        os.sched_yield()
    assert counts(counted, pool.address, threads=2, items=100, times=50) == ([50] * 100, 0)
    assert pool_counts().sleeping == found.workers > 0
