"""threads: our engine on several threads against one: by wall time on idle cores, and by both clocks beside other work,
which is a busy loop on each core."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.row import Given, Lines
from kvcellar.bench.compare import IDLE, QUICK, WORKS, Compared, Extent, Work, compared
from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.bench.peer import Side, sides_of
from kvcellar.errors import BadRequest, KvcellarError

TARGETS: Mapping[str, float] = {"prefill-512": 1.7, "ragged-8": 1.4, "decode-512": 1.2}  # on two threads
HEAD = f"  {'':14} {'1, wall ms':>11} {'N, wall ms':>11} {'faster':>7} {'target':>7}   other processes"
BESIDE = f"{HEAD[:48]} {'1, CPU ms':>10} {'N, CPU ms':>10}   beside other work"
LOOP = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"


def row(given: Given, sides: Sequence[Side] | None = None) -> Lines:
    """One thread and the given number, at least two. `sides`: one of one thread, and another."""
    count = max(2, given.threads)
    if count > (os.cpu_count() or 1):
        raise BadRequest(f"threads is {count}; 2 to {os.cpu_count()}, the CPUs here, are compared with 1", "threads")
    if sides is None:
        ours = sides_of([], record=given.record)[0]
        sides = [replace(ours, threads=each) for each in (1, count)]
    size, extent = (TINY, QUICK) if given.quick else (SMALL, Extent())
    parameters, works = write(size, given.directory), [WORKS[name] for name in TARGETS]
    yield f"{parameters / 1e6:.0f} million parameters, {count} threads against 1, wall time"
    yield HEAD
    found = compared(given.directory, sides, works, extent, report=_stop_where_one_failed)
    yield from (_row(found, work) for work in works)
    yield BESIDE
    with busy_cores():
        beside = compared(given.directory, sides, works, extent, report=_stop_where_one_failed)
    yield from (_beside(beside, work) for work in works)
    return {"threads": count, "works": dict(_as_json(found)), "beside": dict(_as_json(beside))}


@contextmanager
def busy_cores() -> Iterator[Sequence["subprocess.Popen[bytes]"]]:
    """Within the block, a process of its own keeps each core busy that this one may use."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) for core in os.sched_getaffinity(0)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _stop_where_one_failed(found: Compared, work: Work) -> None:
    if found.failed:
        raise KvcellarError("\n".join(found.failed.values()))


def _walls(found: Compared, work: str) -> tuple[float, float]:
    """Milliseconds on one thread and on all, the medians."""
    one, many = found.measured[work].values()
    return 1000 * statistics.median(one.wall), 1000 * statistics.median(many.wall)


def _row(found: Compared, work: Work) -> str:
    one, many = _walls(found, work.name)
    others = found.others[work.name]
    target = f"{TARGETS[work.name]:.2f}x"
    return f"  {work.name:14} {one:11.2f} {many:11.2f} {one / many:6.2f}x {target:>7}   {_busy(others)}"


def _beside(found: Compared, work: Work) -> str:
    """Means: what waits for a core does so now and then."""
    (one, many), (one_cpu, many_cpu) = _means(found, work.name)
    return f"  {work.name:14} {one:11.2f} {many:11.2f} {one / many:6.2f}x {one_cpu:10.2f} {many_cpu:10.2f}"


def _means(found: Compared, work: str) -> list[list[float]]:
    """Milliseconds on one thread and on all: of wall time, then of CPU time."""
    one, many = found.measured[work].values()
    return [[1000 * statistics.fmean(clock) for clock in of] for of in ((one.wall, many.wall), (one.cpu, many.cpu))]


def _busy(others: float | None) -> str:
    if others is None:
        return "not known: cores may have been busy"
    return f"{others:.0%} of the CPU time" + ("" if others <= IDLE else ": the cores were not idle, measure again")


def _as_json(found: Compared) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for work in found.measured:
        one, many = _walls(found, work)
        others = found.others[work]
        (one_mean, many_mean), (one_cpu, many_cpu) = _means(found, work)
        yield work, {
            "one_ms": one, "many_ms": many, "others": others, "idle": others is not None and others <= IDLE,
            "one_mean_ms": one_mean, "many_mean_ms": many_mean, "one_cpu_ms": one_cpu, "many_cpu_ms": many_cpu,
        }  # fmt: skip
