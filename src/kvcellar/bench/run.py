"""run: the whole bench, from a random network to the report."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvcellar.bench import report
from kvcellar.bench.bookkeeping import bookkeeping
from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.bench.workloads import Rivals, Row, Scale, workloads
from kvcellar.engine.engine import Engine
from kvcellar.errors import BadRequest
from kvcellar.models.load import load

CACHE_BYTES = 1 << 30
BOOKKEEPING = "bookkeeping"
NAMES = (*(workload.name for workload in workloads()), BOOKKEEPING)


def run(*, quick: bool = False, only: str | None = None, threads: int = 1) -> None:
    """Print a line for each workload as soon as it is measured, and one line of JSON last.

    `quick` runs everything small, to see that it works: its numbers mean nothing. `only` names one of `NAMES`.
    """
    if only not in (None, *NAMES):
        raise BadRequest(f"there is no workload {only!r}; there are {', '.join(NAMES)}", "only")
    torch.set_num_threads(threads)
    size, scale = (TINY, Scale(shorter=64, bursts=2, burst=2, repeats=1)) if quick else (SMALL, Scale())
    rows: list[Row] = []
    parameters = 0
    if only != BOOKKEEPING:
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
    about = report.about(parameters=parameters, threads=threads, quick=quick)
    print(report.as_json(rows, kept, about), flush=True)


@contextmanager
def _rivals(directory: Path, threads: int) -> Iterator[Rivals]:
    networks = [load(directory, device="cpu").model.eval().requires_grad_(False) for _ in range(2)]
    with Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=threads) as ours:
        yield Rivals(ours, networks[0], networks[1])
