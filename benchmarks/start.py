"""start: CPU seconds from the start of a process to the first token of the embedded model, beside those of torch.

Each start is a new process that runs this file: it imports torch, then runs `kvcellar run` up to the first token, which
imports transformers where the model was not loaded before. CPU seconds are user and system time of the process and of
the compilers that it starts, which other processes on the machine affect less than wall time.
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
from typing import Any

import kvcellar
from benchmarks.row import ROOT, Given, Lines
from kvcellar.errors import KvcellarError

PROMPT = "def read_lines(path):"
WARM = 3  # starts with a filled cache directory, whose medians are reported
TARGET = 1.6  # a whole start over the import of torch, from the second start on


@dataclass(frozen=True, slots=True)
class Start:
    """CPU seconds of one start: of the interpreter, of the import of torch, and of all that follows. `transformers`:
    whether it was imported, which is a part of the rest."""

    python: float
    torch: float
    rest: float
    transformers: bool

    @property
    def ratio(self) -> float:
        """The whole over the import of torch."""
        return (self.python + self.torch + self.rest) / self.torch


def starts(directory: Path, settings: Sequence[str], *, warm: int = WARM) -> dict[str, Start]:
    """The first start, with an empty cache directory, and the one of the next `warm` starts whose ratio is the median.
    `settings` are options of `kvcellar run`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    if not compile_dir(Path(kvcellar.__file__).parent, quiet=1):  # as pip does at installation
        raise KvcellarError("kvcellar's modules cannot be compiled, so each start would compile them again")
    first = _started(environment, settings)
    others = [_started(environment, settings) for _ in range(warm)]
    middle = sorted(others, key=lambda one: one.ratio)[len(others) // 2]
    return {"first": first, "second": middle}


def row(given: Given) -> Lines:
    settings = ["--threads", str(given.threads), *([] if given.record is None else ["--record", given.record])]
    yield f"{'':13} {'torch':>10} {'rest':>9} {'whole/torch':>13}   CPU seconds to the first token"
    found = starts(given.directory, settings, warm=1 if given.quick else WARM)
    for name, one in found.items():
        imported = "" if one.transformers else "   without transformers"
        yield f"{name + ' start':13} {one.torch:8.2f} s {one.rest:7.2f} s {one.ratio:13.2f}{imported}"
    yield f"{'':13} {'':10} {'':9} {TARGET:13.2f}   target, from the second start on"
    return {name: asdict(one) | {"ratio": round(one.ratio, 2)} for name, one in found.items()}


def _started(environment: Mapping[str, str], settings: Sequence[str]) -> Start:
    command = [sys.executable, "-m", "benchmarks.start", *settings]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True
    )
    return Start(**json.loads(ran.stdout.splitlines()[-1]))


def _start(settings: Sequence[str]) -> dict[str, Any]:
    """One start, in this process."""
    marks = [0.0, _cpu_seconds()]
    import_module("torch")
    marks.append(_cpu_seconds())
    command = ["run", "embedded", "--max-tokens", "1", *settings, PROMPT]
    import_module("kvcellar.cli.main").cli.main(command, standalone_mode=False)
    marks.append(_cpu_seconds())
    took = [after - before for before, after in pairwise(marks)]
    return asdict(Start(*(round(seconds, 2) for seconds in took), transformers="transformers" in sys.modules))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1:])))
