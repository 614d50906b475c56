"""compared: prints what `compare` measured, and the limit that reading memory sets: how fast one core
reads it, in huge pages where the system gives them.
"""

import ctypes
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvcellar.kernels
from kvcellar import __version__
from kvcellar.bench.compare import IDLE, QUICK, WORKS, Agreement, Compared, Extent, Measured, Work, compared, same_work
from kvcellar.bench.gguf import write_gguf
from kvcellar.bench.kinds import CACHE_BYTES, EXTENT, KINDS, write_kind
from kvcellar.bench.kinds import WORKS as WORKS_OF_KINDS
from kvcellar.bench.network import LARGER, SMALL, TINY, Size, write, write_tokenizer
from kvcellar.bench.peer import OURS, Side, sides_of
from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.kernels.compiled import library

SOURCE = Path(kvcellar.kernels.__file__).parent / "reads.cpp"
BYTES = 256 << 20  # more than caches hold
WORD = 8


class Reads:
    """Memory that is read again and again. Raises `NotCompiled`."""

    def __init__(self, environment: Mapping[str, str], *, size: int = BYTES) -> None:
        self._read = library(SOURCE, environment).kvcellar_read
        self._read.argtypes, self._read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
        self._memory = mmap.mmap(-1, size)
        if sys.platform == "linux":
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = (ctypes.c_uint64 * (size // WORD)).from_buffer(self._memory)
        self._bytes = size // WORD * WORD
        ctypes.memset(self._words, 1, self._bytes)
        self._seconds: list[float] = []

    def read(self) -> int:
        """Read all of it once; returns the sum of its words, modulo 2^64."""
        before = time.thread_time()
        total = self._read(self._words, self._bytes // WORD)
        self._seconds.append(time.thread_time() - before)
        return total

    @property
    def rate(self) -> float:
        """Bytes per CPU second: the median."""
        return self._bytes / statistics.median(self._seconds)


OTHER_KINDS = "kinds"  # the row of all networks of other kinds
ROWS = (*WORKS, OTHER_KINDS, *KINDS)
SIZES: Mapping[str, Size] = {"0.2b": SMALL, "0.5b": LARGER}  # for the others than the first nothing is aimed at
LIMIT = 0.8  # of the limit that is aimed at, by one sequence in 16 bits
MEMORY = 1.3  # times as much as llama.cpp, beside Python, torch and the model's module
TARGETS: Mapping[tuple[str, str], float] = {
    ("decode-512", "llama.cpp bf16"): 1.05,
    ("decode-512", "llama.cpp q8_0"): 1.3,
    ("decode-512", "llama.cpp q4_0"): 1.2,
    ("decode-4096", "llama.cpp bf16"): 1.8,
    **{("ragged-8", label): 1.9 for label in ("llama.cpp bf16", "openvino fp16", "vllm bf16")},
    **{("ragged-32", label): 1.35 for label in ("llama.cpp bf16", "openvino fp16", "vllm bf16")},
    ("prefill-512", "openvino fp16"): 1.0,
    ("prefill-2048", "openvino fp16"): 0.9,
    ("reuse-4096", "openvino fp16"): 1.15,
    **{(work.name, "transformers bf16"): 4.0 for work in WORKS_OF_KINDS},
}  # CPU time of the peer over ours with as many bits
HEAD = (
    f"  {'':18} {'CPU ms':>9} {'least':>9} {'tokens/s':>9} {'ratio':>7} {'target':>7} {'MB':>6}   tokens equal to ours"
)


def run_against(
    named: Sequence[str],
    pythons: Sequence[str] = (),
    *,
    only: str | None = None,
    quick: bool = False,
    threads: int = 1,
    size: str | None = None,
    record: str | None = None,
    sides: Sequence[Side] | None = None,
) -> None:
    """Measure the sides that are named, print a table and one line of JSON. `only` is one of `ROWS`; without it, all
    but those of networks of other kinds are run. `size` is one of `SIZES`, by default the first; `record` is the
    setting of ours. Raises `KvcellarError` at the end if a peer failed, or computed something else."""
    if only not in (None, *ROWS):
        raise BadRequest(f"there is no row {only!r}; there are {', '.join(ROWS)}", "only")
    sides = sides_of(named, pythons, record=record) if sides is None else sides
    if only is None or only in WORKS:
        works = [work for name, work in WORKS.items() if only in (None, name)]
        _run_works(works, sides, quick=quick, threads=threads, size=size)
        return
    if strange := [side.name for side in sides if side.name not in (OURS, "transformers")]:
        raise BadRequest(f"{only} is compared with transformers; not with {', '.join(strange)}", "against")
    if size is not None:
        raise BadRequest(f"{only} has no other size; leave it out", "size")
    run_kinds(sides, only=None if only == OTHER_KINDS else only, quick=quick, threads=threads)


def _run_works(works: Sequence[Work], sides: Sequence[Side], *, quick: bool, threads: int, size: str | None) -> None:
    chosen = SMALL if size is None else SIZES[size]
    network, extent = (TINY, QUICK) if quick else (chosen, Extent())
    reads = Reads(os.environ, size=1 << 20) if quick else Reads(os.environ)
    table = Table(sides, extent, TARGETS if chosen is SMALL else {}, network, reads)
    with tempfile.TemporaryDirectory() as place:
        parameters = write_for_peers(network, Path(place))
        _print([f"{parameters / 1e6:.0f} million parameters, {threads} thread(s), CPU time"])
        found = compared(Path(place), sides, works, extent, threads=threads, each_round=reads.read, report=table.show)
    ran = {**about(threads=threads, quick=quick), "parameters": parameters}
    print(json.dumps({**ran, "read_gb_s": round(reads.rate / 1e9, 1), **as_json(found)}), flush=True)
    if wrong := [*found.failed.values(), *table.others]:
        raise KvcellarError("\n".join(wrong))


def run_kinds(sides: Sequence[Side], *, only: str | None = None, quick: bool = False, threads: int = 1) -> None:
    """Measure networks of one of `KINDS`, or of all, print a table and one line of JSON. Raises `KvcellarError` as
    `run_against`."""
    table, results, failed = Table(sides, Extent(), TARGETS), dict[str, Any](), list[str]()
    extent = QUICK if quick else EXTENT
    for name in KINDS if only is None else (only,):
        with tempfile.TemporaryDirectory() as place:
            parameters = write_kind(name, Path(place), quick=quick)
            found = compared(Path(place), sides, WORKS_OF_KINDS, extent, threads=threads, cache_bytes=CACHE_BYTES)
        _print([f"{name}: {parameters / 1e6:.0f} million parameters, {threads} thread(s), CPU time"])
        for work in WORKS_OF_KINDS:
            table.show(found, work)
        results[name] = {"parameters": parameters, **as_json(found)}
        failed += found.failed.values()
    print(json.dumps({**about(threads=threads, quick=quick), "kinds": results}), flush=True)
    if wrong := [*failed, *table.others]:
        raise KvcellarError("\n".join(wrong))


def write_for_peers(size: Size, directory: Path) -> int:
    """A model directory with a tokenizer, and a GGUF file of the same. Returns the number of parameters."""
    parameters = write(size, directory)
    write_tokenizer(size.vocabulary, directory)
    write_gguf(size, directory)
    return parameters


class Table:
    """Prints a part of the table for each work; with `reads`, the limit for a network of this size."""

    def __init__(
        self,
        sides: Sequence[Side],
        extent: Extent,
        targets: Mapping[tuple[str, str], float],
        size: Size | None = None,
        reads: Reads | None = None,
    ) -> None:
        self._sides, self._extent, self._targets = {side.label: side for side in sides}, extent, targets
        self._size, self._reads = size, reads
        self.others: list[str] = []  # sides that computed something else

    def show(self, found: Compared, work: Work) -> None:
        _print([f"{work.name}: {work.what}{_beside(found.others[work.name])}", HEAD, *self._rows(found, work)])
        ours, measured = next(iter(found.measured[work.name])), found.measured[work.name]
        if self._reads is not None and work.decoding:
            _print([self._limit(work, measured[ours])])
        if (theirs := measured.get("llama.cpp bf16")) is not None and theirs.bytes and len(work.lengths) == 1:
            imported = found.about[ours]["imported_bytes"]
            _print([_memory_line(measured[ours].bytes, imported, theirs.bytes)])

    def _rows(self, found: Compared, work: Work) -> Iterator[str]:
        measured = found.measured[work.name]
        for label, one in measured.items():
            side, agreement = self._sides[label], found.agreements[work.name].get(label)
            ours = self._ours(measured, side.bits)
            ratio = None if side.name == OURS else one.median / ours.median
            if agreement is not None and not same_work(side, agreement):
                self.others.append(f"{label} computes something else in {work.name}: {_agreed(agreement)}")
            yield _row(label, one, work, ratio, self._targets.get((work.name, label)), agreement)
        for label, reason in found.failed.items():
            yield f"  {label:18} {reason.splitlines()[0]}"

    def _ours(self, measured: Mapping[str, Measured], bits: int) -> Measured:
        """Of our side with as many bits; the first of ours where there is none."""
        ours = [label for label in measured if self._sides[label].name == OURS]
        return measured[next((label for label in ours if self._sides[label].bits == bits), ours[0])]

    def _limit(self, work: Work, ours: Measured) -> str:
        """By the bytes that a step reads: all weights once, and K/V of the tokens at half of the decoded ones."""
        assert self._reads is not None and self._size is not None
        size, steps = self._size, self._extent.burst * (self._extent.bursts + 1)
        per_token = size.layers * 2 * size.kv_heads * size.head_size * 2
        kv = per_token * sum(length + steps // 2 for length in work.lengths)
        weights = 2 * parameters(size)
        seconds = (weights + kv) / self._reads.rate
        aim = f", target {LIMIT:.2f}" if self._targets and work.name == next(iter(WORKS)) else ""
        return (
            f"  {'limit':18} {1000 * seconds:9.2f}   {weights / 1e6:.0f} MB of weights and {kv / 1e6:.0f} MB of K/V at "
            f"{self._reads.rate / 1e9:.1f} GB/s; {seconds / ours.median:.2f} of it is reached{aim}"
        )


def _beside(others: float | None) -> str:
    """What the machine did beside, where that was something."""
    return f" (other processes had {others:.0%} of the CPU time)" if others is not None and others > IDLE else ""


def _memory_line(ours: int, imported: int, theirs: int) -> str:
    return (
        f"  {'memory':18} {ours / 1e6:9.0f} MB; target {(imported + MEMORY * theirs) / 1e6:.0f} MB: "
        f"{imported / 1e6:.0f} MB of Python, torch and transformers, and {MEMORY} times llama.cpp's"
    )


def parameters(size: Size) -> int:
    """Of the matrices that a step reads."""
    queries, keys = size.query_heads * size.head_size, size.kv_heads * size.head_size
    layer = 2 * size.hidden * (queries + keys) + 3 * size.hidden * size.intermediate
    return size.layers * layer + size.vocabulary * size.hidden


def _row(
    label: str, one: Measured, work: Work, ratio: float | None, target: float | None, agreement: Agreement | None
) -> str:
    return (
        f"  {label:18} {1000 * one.median:9.2f} {1000 * min(one.cpu):9.2f} {work.tokens / one.median:9.1f} "
        f"{'' if ratio is None else f'{ratio:.2f}x':>7} {'' if target is None else f'{target:.2f}x':>7} "
        f"{one.bytes / 1e6:6.0f}   {'' if agreement is None else _agreed(agreement)}"
    ).rstrip()


def _agreed(agreement: Agreement) -> str:
    text = f"{agreement.equal} of {agreement.of}"
    return text if agreement.lead is None else f"{text}; where they part, ours led by {agreement.lead:.3f}"


def as_json(found: Compared) -> dict[str, Any]:
    """Everything but single times and tokens."""
    works = {
        name: {
            label: {
                "cpu_ms": round(1000 * one.median, 3),
                "least_cpu_ms": round(1000 * min(one.cpu), 3),
                "bytes": one.bytes,
                **_agreement_json(found.agreements[name].get(label)),
            }
            for label, one in measured.items()
        }
        for name, measured in found.measured.items()
    }
    return {"sides": found.about, "works": works, "others": found.others, "failed": found.failed}


def _agreement_json(agreement: Agreement | None) -> dict[str, Any]:
    if agreement is None:
        return {}
    return {"equal": agreement.equal, "of": agreement.of, "lead": agreement.lead}


def about(*, threads: int, quick: bool) -> dict[str, Any]:
    """Versions, machine and settings of a run."""
    return {
        "kvcellar": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": _cpu(),
        "threads": threads,
        "dtype": "bfloat16",
        "quick": quick,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.is_file() else []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
