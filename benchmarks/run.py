"""run: the `kvcellar bench` command: chooses workloads, runs them, and prints the report."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks import (
    against,
    attention,
    drafts,
    gaps,
    linear,
    report,
    serve_load,
    speculate,
    start,
    structured,
    two_models,
    waits,
)
from benchmarks.bookkeeping import bookkeeping
from benchmarks.conversation import QUICK, Script, conversation
from benchmarks.counts import all_counts
from benchmarks.counts import lines as count_lines
from benchmarks.fragmented import fragmented
from benchmarks.fragmented import lines as fragmented_lines
from benchmarks.prefix import SMALLEST, Extent, prefix
from benchmarks.prefix import lines as prefix_lines
from benchmarks.profile import profile
from benchmarks.replay import lines as replay_lines
from benchmarks.replay import replayed
from benchmarks.restart import lines as restart_lines
from benchmarks.restart import restart
from benchmarks.revertible import forked, revertible
from benchmarks.threads import run_threads
from benchmarks.workloads import PROMPTS, WORKLOADS, Engines, Prompts, Row, Scale
from kvcellar.bench import report as versions
from kvcellar.bench.compared import run_kinds
from kvcellar.bench.kinds import KINDS, write_kind
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.bench.peer import sides_of
from kvcellar.engine.engine import Engine
from kvcellar.errors import BadRequest
from kvcellar.models.load import load

CACHE_BYTES = 1 << 30
BOOKKEEPING = "bookkeeping"
TURNS, REVERTIBLE, START, FRAGMENTED = "turns", "revertible", "start", "fragmented"
RESTART, REPLAY, PREFIX = "restart", "replay", "prefix"
SPECULATE, DRAFTS, TWO_MODELS, LINEAR = "speculate", "drafts", "two-models", "linear"
OTHER_KINDS, ATTENTION, THREADS, STRUCTURED = "kinds", "attention", "threads", "structured"
SERVE_LOAD, GAPS, WAITS = "serve-load", "gaps", "waits"
NAMES = (
    *(*WORKLOADS, BOOKKEEPING, TURNS, REVERTIBLE, PREFIX),
    *(START, FRAGMENTED, RESTART, REPLAY, SPECULATE, DRAFTS, TWO_MODELS, LINEAR, OTHER_KINDS, ATTENTION),
    *(THREADS, STRUCTURED, SERVE_LOAD, GAPS, WAITS, *KINDS),
)
PROFILES: Mapping[str, Callable[[Scale], Prompts]] = MappingProxyType(
    {
        **PROMPTS,
        "prefill-512": lambda scale: [scale.prompt(512)],
        "prefill-2048": lambda scale: [scale.prompt(2048)],
        **{kind: lambda scale: [scale.prompt(512)] for kind in KINDS},
        **{f"{kind}-8": lambda scale: [scale.prompt(512, seed) for seed in range(8)] for kind in KINDS},
    }
)  # of steps whose parts can be timed: `kind-8` decodes eight sequences
RECORDING = (START, OTHER_KINDS, THREADS, *KINDS)  # those that run an engine with the setting `record`


def run(
    *,
    quick: bool = False,
    only: str | None = None,
    threads: int = 1,
    beside: str | None = None,
    record: str | None = None,
) -> None:
    """Print a line for each workload when it has been measured, and one line of JSON at the end.

    `quick` uses tiny sizes, to test the bench: its numbers mean nothing. `only` is one of `NAMES`. `start`,
    `restart`, `replay`, `fragmented`, `speculate`, `drafts`, `two-models`, `linear`, `kinds` (or one of them),
    `attention`, `structured`, `serve-load`, `gaps`, `waits` and `threads` are measured only if named, because they take
    longer or run processes. `beside` is another system whose cache is counted on the traces of `replay`. `record` is a
    setting of the engines of `RECORDING`.
    """
    if only not in (None, *NAMES):
        raise BadRequest(f"there is no workload {only!r}; there are {', '.join(NAMES)}", "only")
    if beside is not None and (only != REPLAY or beside not in against.SYSTEMS):
        raise BadRequest(
            f"only {REPLAY} is counted against {', '.join(against.SYSTEMS)}; not {only} against {beside}", "against"
        )
    if record is not None and only not in RECORDING:
        given = "runs without --only" if only is None else f"--only {only}"
        raise BadRequest(f"record is for --against and --only {', '.join(RECORDING)}; not for {given}", "record")
    by_kind = partial(run_kinds, sides_of(["transformers"], record=record), quick=quick, threads=threads)
    alone: dict[str, Callable[[], object]] = {
        ATTENTION: partial(run_attention, quick=quick, threads=threads),
        START: partial(run_starts, quick=quick, record=record),
        THREADS: partial(run_threads, quick=quick, threads=max(2, threads), record=record),
        FRAGMENTED: partial(run_fragmented, quick=quick, threads=threads),
        RESTART: partial(run_restart, quick=quick),
        REPLAY: partial(run_replay, quick=quick, beside=beside),
        SPECULATE: partial(run_speculate, quick=quick),
        DRAFTS: partial(run_drafts, quick=quick),
        TWO_MODELS: partial(run_two_models, quick=quick, threads=threads),
        LINEAR: partial(run_linear, quick=quick, threads=threads),
        STRUCTURED: partial(run_structured, quick=quick),
        SERVE_LOAD: partial(run_serve_load, quick=quick),
        GAPS: partial(run_gaps, quick=quick, threads=threads),
        WAITS: partial(run_waits, quick=quick),
        OTHER_KINDS: by_kind,
        **{name: partial(by_kind, only=name) for name in KINDS},
    }
    if only in alone:
        alone[only]()
    else:
        torch.set_num_threads(threads)
        _run_compared(quick, only, threads)


def _run_compared(quick: bool, only: str | None, threads: int) -> None:
    size, scale = _extent(quick)
    found = report.Findings()
    parameters = 0
    if only not in (BOOKKEEPING, TURNS, REVERTIBLE, PREFIX):
        parameters = _run_workloads(found.rows, size, scale, only, threads)
    if only in (None, BOOKKEEPING):
        found.step_ms = bookkeeping(size, [10**n for n in ((3, 4) if quick else (3, 4, 5, 6))])
        _print(report.bookkeeping_lines(found))
    if only in (None, TURNS):
        found.reads = conversation(QUICK if quick else Script(), small=quick)
        _print(report.turns_lines(found.reads))
    if only in (None, REVERTIBLE):
        found.costs, found.forks = revertible(small=quick), forked(small=quick)
        _print([*report.revertible_lines(found.costs), *report.forked_lines(found.forks)])
    if only in (None, PREFIX):
        extent = SMALLEST if quick else Extent(SMALL)
        with tempfile.TemporaryDirectory() as directory:
            found.prefix = prefix(extent, Path(directory))
        _print(prefix_lines(found.prefix, extent))
    print(report.as_json(found, versions.about(parameters=parameters, threads=threads, quick=quick)), flush=True)


def _run_workloads(rows: list[Row], size: Size, scale: Scale, only: str | None, threads: int) -> int:
    """Run the workloads that need a network, and append to `rows`. Returns the number of parameters."""
    with tempfile.TemporaryDirectory() as directory:
        parameters = write(size, Path(directory))
        _print([f"{parameters / 1e6:.0f} million parameters, bfloat16, {threads} thread(s)", report.HEAD])
        with _engines(Path(directory), threads) as engines:
            for name, workload in WORKLOADS.items():
                if only in (None, name):
                    rows.append(workload(engines, scale))
                    _print([report.line(rows[-1])])
    return parameters


def run_starts(*, quick: bool = False, record: str | None = None) -> None:
    """Print the cost of starting, as a table and as one line of JSON. Threads are set by the environment."""
    found = start.starts(warm=1 if quick else start.WARM, record=record)
    _print(start.lines(found))
    about = versions.about(parameters=0, threads=torch.get_num_threads(), quick=quick)
    about = {name: about[name] for name in about if name not in ("parameters", "dtype")}
    print(json.dumps({**about, "start": {name: asdict(one) for name, one in found.items()}}), flush=True)


def run_two_models(*, quick: bool = False, threads: int = 1) -> None:
    """Print how long a stream stalls while another model is loaded, and the same as one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        found = two_models.two_models(Path(directory), quick=quick, threads=threads)
    _print(list(two_models.lines(found)))
    about = versions.about(parameters=0, threads=threads, quick=quick)
    print(json.dumps({**about, "two_models": asdict(found)}), flush=True)


def run_linear(*, quick: bool = False, threads: int = 1) -> None:
    """Print the time of linear layers, and the same as one line of JSON."""
    torch.set_num_threads(1)
    found = linear.products(TINY, threads=threads, rounds=2) if quick else linear.products(SMALL, threads=threads)
    _print(linear.lines(found, threads))
    about = versions.about(parameters=0, threads=threads, quick=quick)
    by_type = {dtype: {rows: one._asdict() for rows, one in by_rows.items()} for dtype, by_rows in found.items()}
    print(json.dumps({**about, "linear": by_type}), flush=True)


def run_structured(*, quick: bool = False) -> None:
    """Print what masks of constrained answers cost beside a step, and the same as one line of JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = structured.structured(structured.SMALLEST if quick else structured.Extent(), Path(directory))
    _print(list(structured.lines(found)))
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "structured": {str(n): one._asdict() for n, one in found.items()}}), flush=True)


def run_serve_load(*, quick: bool = False) -> None:
    """Print what a server costs beside the steps of an engine, and the same as one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        found = serve_load.serve_load(serve_load.SMALLEST if quick else serve_load.Extent(), Path(directory))
    _print(list(serve_load.lines(found)))
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "serve_load": found._asdict()}), flush=True)


def run_gaps(*, quick: bool = False, threads: int = 1) -> None:
    """Print how long a stream waits beside what others do, and the same as one line of JSON."""
    found: dict[str, gaps.Gap] = {}
    for name, gap in gaps.measure(gaps.SMALLEST if quick else gaps.Extent(), threads=threads):
        found[name] = gap
        _print([gaps.line(name, gap)])
    about = versions.about(parameters=0, threads=threads, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "gaps": {name: gap._asdict() for name, gap in found.items()}}), flush=True)


def run_waits(*, quick: bool = False) -> None:
    """Print what short requests wait for beside others, for each key, and the same as one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        found = waits.measure(waits.SMALLEST if quick else waits.Extent(), Path(directory))
    _print([waits.line(one) for one in found])
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "waits": [one._asdict() for one in found]}), flush=True)


def run_attention(*, quick: bool = False, threads: int = 1) -> None:
    """Print the time of a layer's attention, and the same as one line of JSON."""
    torch.set_num_threads(threads)
    tiny = partial(attention.attention, TINY, attention.TINY_CASES, rounds=2)
    found = tiny() if quick else attention.attention(SMALL, attention.CASES)
    _print(attention.lines(found))
    about = versions.about(parameters=0, threads=threads, quick=quick)
    print(json.dumps({**about, "attention": {name: one._asdict() for name, one in found.items()}}), flush=True)


def run_fragmented(*, quick: bool = False, threads: int = 1) -> None:
    """Print what attention gains from compaction, for each backend, and the same as one line of JSON."""
    torch.set_num_threads(threads)
    found = fragmented(TINY, sequences=4, tokens=128, rounds=2) if quick else fragmented(SMALL)
    _print(fragmented_lines(found))
    about = versions.about(parameters=0, threads=threads, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "fragmented": {name: one._asdict() for name, one in found.items()}}), flush=True)


def run_restart(*, quick: bool = False) -> None:
    """Print the time to the first token after a restart, and the same as one line of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        found = restart(TINY, Path(directory), tokens=400) if quick else restart(SMALL, Path(directory))
    _print(restart_lines(found))
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "restart": found._asdict()}), flush=True)


def run_replay(*, quick: bool = False, beside: str | None = None) -> None:
    """Print how many prompt tokens of each trace are computed, and the same as one line of JSON."""
    scale = 0.05 if quick else 1.0
    found = replayed(scale=scale)
    _print(replay_lines(found))
    counts = {f"{trace} {kind}": [one._asdict() for one in both] for (trace, kind), both in found.items()}
    theirs = against.counted(scale=scale) if beside is not None else {}
    if theirs:
        _print(against.lines(found, theirs))
    others = {f"{trace} {kind}": computed for (trace, kind), computed in theirs.items()}
    print(json.dumps({"quick": quick, "replay": counts, **({beside: others} if beside else {})}), flush=True)


def run_speculate(*, quick: bool = False) -> None:
    """Print what rounds of speculation cost, and the same as one line of JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = speculate.speculate(speculate.SMALLEST if quick else speculate.Extent(), Path(directory))
    _print(speculate.lines(found))
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "speculate": speculate.as_json(found)}), flush=True)


def run_drafts(*, quick: bool = False) -> None:
    """Print how many drafts are accepted on held-out code, and the same as one line of JSON."""
    torch.set_num_threads(1)
    found = drafts.drafts(drafts.SMALLEST if quick else drafts.Extent())
    _print(drafts.lines(found))
    about = versions.about(parameters=0, threads=1, quick=quick)
    del about["parameters"]
    print(json.dumps({**about, "drafts": drafts.as_json(found)}), flush=True)


def run_profile(name: str, *, quick: bool = False, threads: int = 1, recorded: bool = False) -> None:
    """Print where the time of a step goes, recorded or by modules, and the same as one line of JSON. `name` is one of
    `PROFILES`."""
    if name not in PROFILES:
        raise BadRequest(f"these have a profile: {', '.join(PROFILES)}; not {name!r}", "profile")
    torch.set_num_threads(threads)
    size, scale = _extent(quick)
    kind, steps, prompts = name.removesuffix("-8"), scale.bursts * scale.burst, PROFILES[name](scale)
    with tempfile.TemporaryDirectory() as place:
        directory, reading = Path(place), name.startswith("prefill")
        parameters = write_kind(kind, directory, quick=quick) if kind in KINDS else write(size, directory)
        attention, parts = profile(
            directory, prompts, scale.repeats if reading else steps, recorded=recorded, reading=reading
        )
    for part, took in parts.items():
        print(f"{part:20} {took:8.2f} ms {took / sum(parts.values()):6.1%}")
    found = all_counts()
    _print(count_lines(found))
    about = versions.about(parameters=parameters, threads=threads, quick=quick)
    per_layer = {name: {str(n): one._asdict() for n, one in by_n.items()} for name, by_n in found.items()}
    measured = {"profile": name, "attention": attention, "ms": parts, "per_layer": per_layer}
    print(json.dumps({**about, **measured}), flush=True)


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _extent(quick: bool) -> tuple[Size, Scale]:
    """The size of the network, and of the workloads."""
    return (TINY, Scale(shorter=64, bursts=2, burst=2, repeats=1)) if quick else (SMALL, Scale())


@contextmanager
def _engines(directory: Path, threads: int) -> Iterator[Engines]:
    networks = [load(directory, device="cpu").model.eval().requires_grad_(False) for _ in range(2)]
    with Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=threads) as ours:
        yield Engines(ours, networks[0], networks[1])
