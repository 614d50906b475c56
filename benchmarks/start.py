"""start: CPU seconds from the start of a process to the first token of the embedded model, in three parts.

Each start is a new process that runs this file: it imports torch, then the module of the network from transformers,
then runs `kvcellar run` up to the first token. CPU seconds are user and system time of the process and of the compilers
that it starts, which other processes on the machine affect less than wall time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from compileall import compile_dir
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import kvcellar
from benchmarks.row import ROOT, Given, Lines
from kvcellar.errors import KvcellarError

PROMPT = "def read_lines(path):"
WARM = 3  # starts with a filled cache directory, whose medians are reported
TARGET = 1.0  # seconds of `ours`, from the second start on


@dataclass(frozen=True, slots=True)
class Start:
    """CPU seconds of one start. `ours` excludes both imports and the start of the interpreter."""

    python: float
    torch: float
    transformers: float
    ours: float


def starts(directory: Path, settings: Sequence[str], *, warm: int = WARM) -> dict[str, Start]:
    """The first start, with an empty cache directory, and the medians of the next `warm` starts. `settings` are options
    of `kvcellar run`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    if not compile_dir(Path(kvcellar.__file__).parent, quiet=1):  # as pip does at installation
        raise KvcellarError("kvcellar's modules cannot be compiled, so each start would compile them again")
    first = _started(environment, settings)
    others = [_started(environment, settings) for _ in range(warm)]
    parts = {part: median(asdict(one)[part] for one in others) for part in asdict(first)}
    return {"first": first, "second": Start(**parts)}


def row(given: Given) -> Lines:
    settings = ["--threads", str(given.threads), *([] if given.record is None else ["--record", given.record])]
    yield f"{'':13} {'torch':>10} {'transformers':>13} {'ours':>9}   CPU seconds to the first token"
    found = starts(given.directory, settings, warm=1 if given.quick else WARM)
    for name, one in found.items():
        yield f"{name + ' start':13} {one.torch:8.2f} s {one.transformers:11.2f} s {one.ours:7.2f} s"
    yield f"{'':13} {'':10} {'':13} {TARGET:7.2f} s   target, from the second start on"
    return {name: asdict(one) for name, one in found.items()}


def _started(environment: Mapping[str, str], settings: Sequence[str]) -> Start:
    command = [sys.executable, "-m", "benchmarks.start", *settings]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True
    )
    return Start(**json.loads(ran.stdout.splitlines()[-1]))


def _start(settings: Sequence[str]) -> dict[str, Any]:
    """One start, in this process."""
    from kvcellar.engine.models import embedded

    kind = json.loads((embedded.path() / "config.json").read_text())["model_type"]
    marks = [0.0, _cpu_seconds()]
    import_module("torch")
    marks.append(_cpu_seconds())
    import_module(f"transformers.models.{kind}.modeling_{kind}")
    marks.append(_cpu_seconds())
    command = ["run", "embedded", "--max-tokens", "1", *settings, PROMPT]
    import_module("kvcellar.cli.main").cli.main(command, standalone_mode=False)
    marks.append(_cpu_seconds())
    took = [after - before for before, after in pairwise(marks)]
    return asdict(Start(*(round(seconds, 2) for seconds in took)))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1:])))
