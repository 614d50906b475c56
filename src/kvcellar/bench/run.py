"""run: the whole bench, from a random network to the report."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from kvcellar.bench import report, start
from kvcellar.bench.bookkeeping import bookkeeping
from kvcellar.bench.conversation import QUICK, Script, conversation
from kvcellar.bench.fragmented import fragmented
from kvcellar.bench.fragmented import lines as fragmented_lines
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.bench.profile import profile
from kvcellar.bench.revertible import forked, revertible
from kvcellar.bench.workloads import DECODED, Rivals, Row, Scale, workloads
from kvcellar.engine.engine import Engine
from kvcellar.errors import BadRequest
from kvcellar.models.load import load

CACHE_BYTES = 1 << 30
BOOKKEEPING = "bookkeeping"
TURNS, REVERTIBLE, START, FRAGMENTED = "turns", "revertible", "start", "fragmented"
NAMES = (*(workload.name for workload in workloads()), BOOKKEEPING, TURNS, REVERTIBLE, START, FRAGMENTED)


def run(*, quick: bool = False, only: str | None = None, threads: int = 1) -> None:
    """Print a line for each workload as soon as it is measured, and one line of JSON last.

    `quick` runs everything small, to see that it works: its numbers mean nothing. `only` names one of `NAMES`. Starts
    and fragmented memory are measured only if they are named: starts take processes of their own.
    """
    if only not in (None, *NAMES):
        raise BadRequest(f"there is no workload {only!r}; there are {', '.join(NAMES)}", "only")
    apart = {START: partial(run_starts, quick=quick), FRAGMENTED: partial(run_fragmented, quick=quick, threads=threads)}
    if only is not None and only in apart:
        apart[only]()
        return
    torch.set_num_threads(threads)
    size, scale = _extent(quick)
    rows: list[Row] = []
    parameters = 0
    if only not in (BOOKKEEPING, TURNS, REVERTIBLE):
        with tempfile.TemporaryDirectory() as directory:
            parameters = write(size, Path(directory))
            print(f"{parameters / 1e6:.0f} million parameters, bfloat16, {threads} thread(s)", flush=True)
            print(report.HEAD, flush=True)
            with _rivals(Path(directory), threads) as rivals:
                for workload in workloads():
                    if only in (None, workload.name):
                        rows.append(workload.run(rivals, scale))
                        print(report.line(rows[-1]), flush=True)
    kept = (
        bookkeeping(size, [10**n for n in ((3, 4) if quick else (3, 4, 5, 6))]) if only in (None, BOOKKEEPING) else {}
    )
    for line in report.bookkeeping_lines(rows, kept):
        print(line, flush=True)
    found = conversation(QUICK if quick else Script(), small=quick) if only in (None, TURNS) else {}
    for line in report.turns_lines(found):
        print(line, flush=True)
    costs = revertible(small=quick) if only in (None, REVERTIBLE) else {}
    for line in report.revertible_lines(costs):
        print(line, flush=True)
    forks = forked(small=quick) if only in (None, REVERTIBLE) else {}
    for line in report.forked_lines(forks):
        print(line, flush=True)
    about = report.about(parameters=parameters, threads=threads, quick=quick)
    print(report.as_json(rows, kept, found, costs, forks, about), flush=True)


def run_starts(*, quick: bool = False) -> None:
    """Print what starting costs, as a table and as one line of JSON. Threads are as in the environment."""
    found = start.starts(warm=1 if quick else start.WARM)
    for line in start.lines(found):
        print(line, flush=True)
    about = report.about(parameters=0, threads=torch.get_num_threads(), quick=quick)
    about = {name: about[name] for name in about if name not in ("parameters", "dtype")}
    print(json.dumps({**about, "start": {name: asdict(one) for name, one in found.items()}}), flush=True)


def run_fragmented(*, quick: bool = False, threads: int = 1) -> None:
    """Print what compaction saves attention, for each backend, and the same as one line of JSON."""
    torch.set_num_threads(threads)
    found = fragmented(TINY, sequences=4, tokens=128, rounds=2) if quick else fragmented(SMALL)
    for line in fragmented_lines(found):
        print(line, flush=True)
    about = report.about(parameters=0, threads=threads, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "fragmented": {name: one._asdict() for name, one in found.items()}}), flush=True)


def run_profile(name: str, *, quick: bool = False, threads: int = 1) -> None:
    """Print where the time of one of our decoding steps goes, and the same as one line of JSON."""
    if name not in DECODED:
        raise BadRequest(f"only decoding has a profile: {', '.join(DECODED)}; not {name!r}", "profile")
    torch.set_num_threads(threads)
    size, scale = _extent(quick)
    with tempfile.TemporaryDirectory() as directory:
        parameters = write(size, Path(directory))
        attention, parts = profile(Path(directory), DECODED[name](scale), steps=scale.bursts * scale.burst)
    for part, took in parts.items():
        print(f"{part:20} {took:8.2f} ms {took / sum(parts.values()):6.1%}")
    about = report.about(parameters=parameters, threads=threads, quick=quick)
    print(json.dumps({**about, "profile": name, "attention": attention, "ms": parts}), flush=True)


def _extent(quick: bool) -> tuple[Size, Scale]:
    """How large the network is, and how much it is asked."""
    return (TINY, Scale(shorter=64, bursts=2, burst=2, repeats=1)) if quick else (SMALL, Scale())


@contextmanager
def _rivals(directory: Path, threads: int) -> Iterator[Rivals]:
    networks = [load(directory, device="cpu").model.eval().requires_grad_(False) for _ in range(2)]
    with Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=threads) as ours:
        yield Rivals(ours, networks[0], networks[1])
