"""levels: what kernels of a wheel take, level by level, beside those that are compiled for this very CPU.

The linear layers of a step are multiplied one after the other, on one thread, with weights of 16, 8 and 4 bits. For
each level that this CPU can run the sources are compiled with its options, which come after `-march=native` and replace
it. Both sides take turns.
"""

import math
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.interleave import in_rounds
from benchmarks.linear import shapes, spent_alone
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size
from kvcellar.errors import KvcellarError
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.built import LEVELS, Level, level_here
from kvcellar.kernels.codes import INT4, Codes
from kvcellar.kernels.layers import OwnLinear, PanelKernel, panel_bytes, panel_linear
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear, most_bytes

COUNTS = (1, 8, 128)  # rows: decoding of one sequence and of several, a prompt
KINDS = ("bfloat16", "int8", "int4")
GROUP = 32  # weights that share a scale


class Sides(NamedTuple):
    """Milliseconds of CPU time, the medians."""

    native: float
    level: float
    ratio: float  # median of the level's over the native ones, round by round


def levels_here() -> Sequence[Level]:
    """Those that this CPU can run, the best first. Raises `KvcellarError` where there is none."""
    if (best := level_here()) is None:
        raise KvcellarError(f"no wheel has kernels for {platform.machine()}")
    levels = LEVELS[platform.machine()]
    return levels[levels.index(best) :]


def compiler_of(level: Level, directory: Path) -> Mapping[str, str]:
    """The environment in which kernels are compiled for a level."""
    script = directory / level.name
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" {shlex.join(level.options)}\n')
    script.chmod(0o700)
    return {**os.environ, "CXX": shlex.quote(str(script)), "XDG_CACHE_HOME": str(directory)}


def compared(level: Level, kind: str, size: Size, directory: Path, rounds: int) -> dict[int, Sides]:
    """By number of rows."""
    sides = [_layers(kind, size, environment) for environment in (os.environ, compiler_of(level, directory))]
    return {count: _at(sides, count, rounds) for count in COUNTS}


def _layers(kind: str, size: Size, environment: Mapping[str, str]) -> list[OwnLinear]:
    if kind == "bfloat16":
        panels = PanelKernel(environment)
        weights = [torch.randn(shape).to(torch.bfloat16) for shape in shapes(size)]
        arena = Arena(sum(map(panel_bytes, weights)))
        return [panel_linear(panels, arena, weight, None) for weight in weights]
    kernel, codes = QuantisedKernel(environment), [_codes(kind, *shape) for shape in shapes(size)]
    arena = Arena(sum(most_bytes(*one.values.shape) for one in codes))
    return [QuantisedLinear(kernel, one, None, torch.bfloat16, arena) for one in codes]


def _codes(kind: str, out: int, inner: int) -> Codes:
    scales = torch.rand(out, math.ceil(inner / GROUP))
    if kind == "int8":
        return Codes(torch.randint(-127, 128, (out, inner), dtype=torch.int8), None, scales)
    return Codes(torch.randint(0, 16, (out, inner), dtype=torch.uint8), INT4, scales)


def _at(sides: Sequence[Sequence[OwnLinear]], rows: int, rounds: int) -> Sides:
    inputs = [torch.randn(rows, layer.in_features).to(layer.dtype) for layer in sides[0]]
    native, level = in_rounds(rounds, *(partial(spent_alone, side, inputs) for side in sides))
    ratio = statistics.median(b / max(a, 1e-9) for a, b in zip(native, level, strict=True))
    return Sides(statistics.median(native), statistics.median(level), ratio)


def row(given: Given) -> Lines:
    size, rounds = (TINY, 2) if given.quick else (SMALL, 10)
    found: dict[str, dict[str, dict[int, Sides]]] = {}
    for level in levels_here()[: 1 if given.quick else None]:
        for kind in KINDS:
            of_kind = found.setdefault(level.name, {})[kind] = compared(level, kind, size, given.directory, rounds)
            for rows, one in of_kind.items():
                yield (
                    f"{level.name:11} {kind:8} {rows:3} row(s) {one.level:8.2f} ms, "
                    f"native {one.native:8.2f} ms: {one.ratio:.2f}x"
                )
    return {
        level: {kind: {rows: one._asdict() for rows, one in by_rows.items()} for kind, by_rows in kinds.items()}
        for level, kinds in found.items()
    }
