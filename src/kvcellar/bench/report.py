"""report: a table for people, and the same as one line of JSON."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvcellar import __version__
from kvcellar.bench.workloads import Row

HEAD = f"{'':13} {'ours':>10} {'theirs':>10} {'ratio':>7} {'by CPU':>7} {'target':>7}"
MOST_GROWTH, MOST_SHARE = 1.3, 0.05  # of bookkeeping, from 10^4 to 10^6 cells, and of a decoding step


def line(row: Row) -> str:
    """A row of the table."""
    cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}x"
    numbers = f"{row.name:13} {row.ours:7.1f} ms {row.theirs:7.1f} ms {row.ratio:6.2f}x {cpu:>7} {row.target:6.1f}x"
    also = "".join(f"; {name.removesuffix('_ms')}: {_in_words(value)}" for name, value in row.also.items())
    return f"{numbers}  {row.what}{also}"


def _in_words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f} ms"


def bookkeeping_lines(rows: Sequence[Row], milliseconds: Mapping[int, float]) -> list[str]:
    lines = [
        f"begin+commit  {took:7.3f} ms  {cells:,} cells in use by 32 sequences" for cells, took in milliseconds.items()
    ]
    found = growth(rows, milliseconds)
    if "ratio_1e6_to_1e4" in found:
        lines.append(
            f"{'':14}{found['ratio_1e6_to_1e4']:6.2f}x  from 10,000 to 1,000,000 cells; below {MOST_GROWTH} wanted"
        )
    if "share_of_step" in found:
        lines.append(
            f"{'':14}{found['share_of_step']:6.1%}   of ragged-32's step, at most; below {MOST_SHARE:.0%} wanted"
        )
    return lines


def as_json(rows: Sequence[Row], milliseconds: Mapping[int, float], about: Mapping[str, Any]) -> str:
    """One line. Times are milliseconds; `ratio` is theirs over ours."""
    results = {
        row.name: {
            "what": row.what,
            "ours_ms": round(row.ours, 3),
            "theirs_ms": round(row.theirs, 3),
            "ratio": round(row.ratio, 3),
            "target": row.target,
            **({} if row.cpu_ratio is None else {"cpu_ratio": round(row.cpu_ratio, 3)}),
            **{name: value if isinstance(value, str) else round(value, 3) for name, value in row.also.items()},
        }
        for row in rows
    }
    kept = {str(cells): round(took, 4) for cells, took in milliseconds.items()}
    return json.dumps({**about, "results": results, "bookkeeping": {"step_ms": kept, **growth(rows, milliseconds)}})


def growth(rows: Sequence[Row], milliseconds: Mapping[int, float]) -> dict[str, float]:
    """How bookkeeping grows with the cells in use, and what share it has of a decoding step of as many sequences."""
    found: dict[str, float] = {}
    if {10**4, 10**6} <= milliseconds.keys():
        found["ratio_1e6_to_1e4"] = round(milliseconds[10**6] / milliseconds[10**4], 3)
    of_many = [row.ours for row in rows if row.name == "ragged-32"]
    if of_many and milliseconds:
        found["share_of_step"] = round(max(milliseconds.values()) / of_many[0], 4)
    return found


def about(*, parameters: int, threads: int, quick: bool) -> dict[str, Any]:
    """What was measured, and on what."""
    return {
        "kvcellar": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": _cpu(),
        "threads": threads,
        "dtype": "bfloat16",
        "parameters": parameters,
        "quick": quick,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.is_file() else []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
