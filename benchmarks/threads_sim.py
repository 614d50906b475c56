"""threads-sim: what a decoding step would take on 8 to 64 cores of 1 to 4 memory nodes, from counts.

This machine has too few cores to measure that. The counts are of the recorded program of a network: the calls that wait
for their threads, the bytes that each of them reads, and how many threads it is worth. Measured here are the rate at
which one core reads weights, and what a wait for one other thread costs. Assumed are what a node's memory gives, the
links between nodes, and that each further thread adds as much to a wait, since all of them change one counter: more
where it is on another node. What is not divided is left out.

Without a partition, the weights are on the node of the thread that loaded them. With one, each node has its share.
"""

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.engine.recording.program import Op
from kvcellar.errors import KvcellarError
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import SOURCES, Threads, library
from kvcellar.kernels.layers import PER_THREAD, OwnLinear, PanelKernel, panel_bytes, panel_linear
from kvcellar.memory.attention.choose import named

CORES, NODES = (8, 16, 32, 64), (1, 2, 4)
MEMORY, LINK = 200.0, 50.0  # GB/s of a node's memory, and from one node to another: current servers have as much
SPINS = 20_000  # instructions of an item whose wait is measured: some microseconds
FARTHER = 2.0  # times as long takes a change of a line that another node has
WAITS = """
#include "threads.h"

// So many calls of two items that take about `spins` instructions each.
extern "C" void calls(Threads* threads, int64_t count, int64_t times, int64_t spins) {
    for (int64_t i = 0; i < times; ++i)
        for_each_item(threads, count, 2, [&](int64_t) noexcept {
            for (int64_t spin = 0; spin < spins; ++spin) asm volatile("");
        });
}
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that waits for its threads: bytes that it reads, and how many threads these are worth."""

    bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`core`: GB/s that one core reads. `wait`: seconds that a wait for one other thread takes."""

    core: float
    wait: float
    memory: float = MEMORY
    link: float = LINK


def seconds(call: Call, machine: Machine, cores: int, nodes: int, *, divided: bool) -> float:
    """Of a call on threads that are spread over the nodes. `divided`: so are its bytes, each node's read there."""
    threads, size = min(cores, call.threads), call.bytes / 1e9
    used = min(nodes, threads)
    read = size / (threads * machine.core)
    if divided:  # a node with fewer threads than its share of bytes has others read some of them
        read = max(read, size / (used * machine.memory))
    else:
        read = max(read, size / machine.memory, size / used / machine.link if used > 1 else 0.0)
    far = (threads - 1) * (1 - 1 / used)
    return read + machine.wait * (threads - 1 + far * (FARTHER - 1))


def row(given: Given) -> Lines:
    torch.set_num_threads(1)
    machine = Machine(core_rate(quick=given.quick), wait_seconds(given.directory, quick=given.quick))
    calls = counted(given.directory / "model", quick=given.quick)
    size = sum(call.bytes for call in calls)
    waits = sum(call.threads > 1 for call in calls)
    yield f"a step waits {waits} times for its threads and reads {size / 1e6:.0f} MB of weights"
    yield f"measured: one core reads {machine.core:.1f} GB/s, a wait for a thread takes {machine.wait * 1e6:.1f} us"
    yield f"assumed: {MEMORY:.0f} GB/s of each node, {LINK:.0f} between two, waits {FARTHER:g} times as long there"
    yield f"  {'cores':>5} {'nodes':>5} {'MB a thread':>11} {'waits, ms':>9} {'undivided, ms':>13} {'divided, ms':>11}"
    found = []
    for cores in CORES:
        for nodes in NODES:
            one = predicted(calls, machine, cores, nodes)
            found.append(one)
            yield (
                f"  {cores:5} {nodes:5} {one['mb_a_thread']:11.1f} {one['waits_ms']:9.3f} {one['undivided_ms']:13.2f}"
                f" {one['divided_ms']:11.2f}"
            )
    return {"waits": waits, "bytes": size, "machine": asdict(machine), "predicted": found}


def predicted(calls: Sequence[Call], machine: Machine, cores: int, nodes: int) -> Mapping[str, float]:
    """Milliseconds of a step, and what its waits are of them."""
    whole, parts = (
        1000 * sum(seconds(call, machine, cores, nodes, divided=divided) for call in calls) for divided in (False, True)
    )
    waits = 1000 * sum(seconds(Call(0, call.threads), machine, cores, nodes, divided=True) for call in calls)
    most = sum(call.bytes / min(cores, call.threads) for call in calls) / 1e6
    return {
        "cores": cores, "nodes": nodes, "mb_a_thread": most, "waits_ms": waits, "undivided_ms": whole,
        "divided_ms": parts,
    }  # fmt: skip


def counted(directory: Path, *, quick: bool) -> list[Call]:
    """The calls of linear layers in a decoding step, from its recorded program."""
    directory.mkdir()
    write(TINY if quick else SMALL, directory)
    network = load(directory, device="cpu").model
    pack_model(network)
    guest = build_guest(network, named(None))
    record_steps(guest, Settings(record="auto"))
    if guest.recording is None:
        raise KvcellarError(f"a step is not recorded: {guest.not_recorded}")
    return list(_calls(guest.recording.captured.program.ops, network))


def _calls(ops: Sequence[Op], network: torch.nn.Module) -> Iterator[Call]:
    for op in ops:
        if op.name == "kvcellar.linear" and isinstance(op.args[1], tuple):
            layers = [one for path in op.args[1] if isinstance(one := network.get_submodule(str(path)), OwnLinear)]
            inner, out = layers[0].in_features, sum(one.out_features for one in layers)
            yield Call(inner * out * 2, 1 + inner * out * 9 // (8 * PER_THREAD))


def core_rate(*, quick: bool) -> float:
    """GB/s at which one core reads the weights of a large layer, the best of some rounds."""
    inner, out = 896, 512 if quick else 65536
    weight, kernel = torch.ones(out, inner, dtype=torch.bfloat16), PanelKernel(os.environ)
    layer = panel_linear(kernel, Arena(panel_bytes(weight)), weight, None)
    x = torch.ones(1, inner, dtype=torch.bfloat16)
    return 2 * inner * out / min(_timed(lambda: layer(x)) for _ in range(3 if quick else 20)) / 1e9


def wait_seconds(directory: Path, *, quick: bool) -> float:
    """What a call on two threads takes beyond half of one on one thread, the least of some rounds."""
    folder = directory / "waits"
    folder.mkdir()
    shutil.copy(SOURCES / "threads.h", folder)
    (folder / "waits.cpp").write_text(WAITS)
    calls = library(folder / "waits.cpp", {**os.environ, "XDG_CACHE_HOME": str(folder)}).calls
    calls.argtypes, pool, times = [ctypes.c_void_p, *[ctypes.c_int64] * 3], Threads(os.environ).address, 2000
    rounds = range(2 if quick else 20)
    one = min(_timed(lambda: calls(pool, 1, times, SPINS)) for _ in rounds) / times
    two = min(_timed(lambda: calls(pool, 2, times, SPINS)) for _ in rounds) / times
    return max(0.0, two - one / 2)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
