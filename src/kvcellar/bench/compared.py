"""compared: prints what `compare` measured."""

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvcellar import __version__
from kvcellar.bench.compare import IDLE, QUICK, WORKS, Agreement, Compared, Extent, Measured, Work, compared, same_work
from kvcellar.bench.gguf import write_gguf
from kvcellar.bench.kinds import CACHE_BYTES, EXTENT, IN_LLAMA_CPP, KINDS, write_kind
from kvcellar.bench.kinds import WORKS as WORKS_OF_KINDS
from kvcellar.bench.network import SMALL, TINY, Size, write, write_tokenizer
from kvcellar.bench.peer import OURS, Side, ours_like, sides_of
from kvcellar.errors import BadRequest, KvcellarError

OTHER_KINDS = "kinds"  # the row of all networks of other kinds
ROWS = (*WORKS, OTHER_KINDS, *KINDS)
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
    **{(work.name, "transformers bf16"): 4.0 for work in WORKS_OF_KINDS if work.decoding},
}  # CPU time of the peer over ours with as many bits
HEAD = (
    f"  {'':18} {'CPU ms':>9} {'tokens/s':>9} {'ratio':>7} {'spread':>7} {'target':>7} {'MB':>6}   tokens that ours "
    "would choose"
)


def run_against(
    named: Sequence[str],
    pythons: Sequence[str] = (),
    *,
    only: str | None = None,
    quick: bool = False,
    threads: int = 1,
    record: str | None = None,
    sides: Sequence[Side] | None = None,
) -> None:
    """Measure the sides that are named, print a table and one line of JSON. `only` is one of `ROWS`; without it, all
    but those of networks of other kinds are run. `record` is the setting of ours. Raises `KvcellarError` at the end if
    a peer failed, or computed something else."""
    if only not in (None, *ROWS):
        raise BadRequest(f"there is no row {only!r}; there are {', '.join(ROWS)}", "only")
    sides = sides_of(named, pythons, record=record) if sides is None else sides
    if only is None or only in WORKS:
        works = [work for name, work in WORKS.items() if only in (None, name)]
        _run_works(works, sides, quick=quick, threads=threads)
        return
    if strange := [side.name for side in sides if side.name not in (OURS, "transformers", "llama.cpp")]:
        raise BadRequest(f"{only} is compared with transformers and llama.cpp; not with {strange[0]}", "against")
    run_kinds(sides, only=None if only == OTHER_KINDS else only, quick=quick, threads=threads)


def _run_works(works: Sequence[Work], sides: Sequence[Side], *, quick: bool, threads: int) -> None:
    network, extent = (TINY, QUICK) if quick else (SMALL, Extent())
    table = Table(sides)
    with tempfile.TemporaryDirectory() as place:
        parameters = write_for_peers(network, Path(place))
        _print([f"{parameters / 1e6:.0f} million parameters, {threads} thread(s), CPU time"])
        found = compared(Path(place), sides, works, extent, threads=threads, report=table.show)
    ran = {**about(threads=threads, quick=quick), "parameters": parameters}
    finish({**ran, **as_json(found)}, [*found.failed.values(), *table.others])


def run_kinds(sides: Sequence[Side], *, only: str | None = None, quick: bool = False, threads: int = 1) -> None:
    """Measure networks of one of `KINDS`, or of all, print a table and one line of JSON. Raises `KvcellarError` as
    `run_against`."""
    table, results, failed = Table(sides), dict[str, Any](), list[str]()
    extent = QUICK if quick else EXTENT
    for name in KINDS if only is None else (only,):
        with tempfile.TemporaryDirectory() as place:
            parameters = write_kind(name, Path(place), quick=quick)
            here = [side for side in sides if side.name != "llama.cpp" or name in IN_LLAMA_CPP]
            found = compared(Path(place), here, WORKS_OF_KINDS, extent, threads=threads, cache_bytes=CACHE_BYTES)
        _print([f"{name}: {parameters / 1e6:.0f} million parameters, {threads} thread(s), CPU time"])
        _print([f"  {side.label:18} no GGUF file of {name} is written here" for side in sides if side not in here])
        for work in WORKS_OF_KINDS:
            table.show(found, work)
        results[name] = {"parameters": parameters, **as_json(found)}
        failed += found.failed.values()
    finish({**about(threads=threads, quick=quick), "kinds": results}, [*failed, *table.others])


def write_for_peers(size: Size, directory: Path) -> int:
    """A model directory with a tokenizer, and a GGUF file of the same. Returns the number of parameters."""
    parameters = write(size, directory)
    write_tokenizer(size.vocabulary, directory)
    write_gguf(directory)
    return parameters


def finish(ran: Mapping[str, Any], wrong: Sequence[str]) -> None:
    """Print the line of JSON. Raises `KvcellarError` with what went `wrong`."""
    print(json.dumps(ran), flush=True)
    if wrong:
        raise KvcellarError("\n".join(wrong))


class Table:
    """Prints a part of the table for each work."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = {side.label: side for side in sides}
        self.others: list[str] = []  # sides that computed something else

    def show(self, found: Compared, work: Work) -> None:
        if len(found.measured) == 1:
            _print([f"  {label:18} {one['version']}; {one['flags']}" for label, one in found.about.items()])
        _print([f"{work.name}: {work.what}{beside(found.others[work.name])}", HEAD, *self._rows(found, work)])

    def _rows(self, found: Compared, work: Work) -> Iterator[str]:
        measured = found.measured[work.name]
        for label, one in measured.items():
            side, agreement = self._sides[label], found.agreements[work.name].get(label)
            ours = measured[ours_like(side, [self._sides[name] for name in measured]).label]
            if agreement is not None and not same_work(side, agreement):
                self.others.append(f"{label} computes something else in {work.name}: {_agreed(agreement)}")
            over = None if side.name == OURS else one.over(ours)
            yield _row(label, one, work, over, TARGETS.get((work.name, label)), agreement)
            if side.name == "llama.cpp" and one.bytes and len(work.lengths) == 1:
                imported = found.about[next(iter(measured))]["imported_bytes"]
                yield _memory_line(ours.bytes, imported, one.bytes)
        for label, reason in found.failed.items():
            yield f"  {label:18} {reason.splitlines()[0]}"


def beside(others: float | None) -> str:
    """What the machine did beside, where that was something."""
    return f" (other processes had {others:.0%} of the CPU time)" if others is not None and others > IDLE else ""


def _memory_line(ours: int, imported: int, theirs: int) -> str:
    return (
        f"  {'memory':18} {ours / 1e6:9.0f} MB; target {(imported + MEMORY * theirs) / 1e6:.0f} MB: "
        f"{imported / 1e6:.0f} MB of Python, torch and transformers, and {MEMORY} times llama.cpp's"
    )


def _row(
    label: str,
    one: Measured,
    work: Work,
    over: tuple[float, float] | None,
    target: float | None,
    agreement: Agreement | None,
) -> str:
    ratio, spread = ("", "") if over is None else (f"{over[0]:.2f}x", f"{over[1]:.2f}")
    return (
        f"  {label:18} {1000 * one.median:9.2f} {work.tokens / one.median:9.1f} {ratio:>7} {spread:>7} "
        f"{'' if target is None else f'{target:.2f}x':>7} {one.bytes / 1e6:6.0f}   "
        f"{'' if agreement is None else _agreed(agreement)}"
    ).rstrip()


def _agreed(agreement: Agreement) -> str:
    text = f"{agreement.equal} of {agreement.of}"
    return text if agreement.lead is None else f"{text}; of the others, ours led by {agreement.lead:.3f} at most"


def as_json(found: Compared) -> dict[str, Any]:
    """Everything but single times and tokens."""
    works = {
        name: {
            label: {
                "cpu_ms": round(1000 * one.median, 3),
                "rounds_ms": [round(1000 * one, 3) for one in one.rounds],
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
