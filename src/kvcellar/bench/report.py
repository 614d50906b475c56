"""report: a table for people, and the same as one line of JSON."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvcellar import __version__
from kvcellar.bench.conversation import Reads
from kvcellar.bench.revertible import NEW, Cost, Forked
from kvcellar.bench.workloads import Row

HEAD = f"{'':13} {'ours':>10} {'theirs':>10} {'ratio':>7} {'by CPU':>7} {'target':>7}"
MOST_GROWTH, MOST_SHARE = 1.3, 0.05  # of bookkeeping, from 10^4 to 10^6 cells, and of a decoding step
MOST_REVERTIBLE = 1.05  # of a step that is not
MOST_MORE = 0.02  # of a conversation, read again


def line(row: Row) -> str:
    """A row of the table."""
    cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}x"
    target = "none" if row.target is None else f"{row.target:.1f}x"
    numbers = f"{row.name:13} {row.ours:7.1f} ms {row.theirs:7.1f} ms {row.ratio:6.2f}x {cpu:>7} {target:>7}"
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


def turns_lines(reads: Mapping[int, Reads]) -> list[str]:
    return [
        f"turns         {found.ours:7} tokens of prompts read with {captures} captures: "
        f"{found.ours / found.ideal - 1:.1%} above who knows the future, below {MOST_MORE:.0%} wanted; "
        f"{found.ours / found.by_token - 1:.1%} above who goes back to any token"
        for captures, found in reads.items()
    ]


def revertible_lines(costs: Mapping[str, Mapping[int, Cost]]) -> list[str]:
    return [
        f"revertible    {cost.all_kept:6.2f}x  all kept, {cost.part_kept:.2f}x a part kept, of {width} x {NEW} tokens "
        f"of {kind}; {MOST_REVERTIBLE}x wanted"
        for kind, by_width in costs.items()
        for width, cost in by_width.items()
    ]


def forked_lines(forks: Mapping[str, Forked]) -> list[str]:
    return [
        f"fork          {fork.at_once:6} bytes of state of {kind}, and {fork.first_write} with its first token; one "
        f"row of each recurrent layer has {fork.row}"
        for kind, fork in forks.items()
    ]


def as_json(
    rows: Sequence[Row],
    milliseconds: Mapping[int, float],
    reads: Mapping[int, Reads],
    costs: Mapping[str, Mapping[int, Cost]],
    forks: Mapping[str, Forked],
    about: Mapping[str, Any],
) -> str:
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
    bookkeeping = {"step_ms": kept, **growth(rows, milliseconds)}
    turns = {str(captures): found._asdict() for captures, found in reads.items()}
    reverted = {
        kind: {str(width): cost._asdict() for width, cost in by_width.items()} for kind, by_width in costs.items()
    }
    bytes_of = {kind: fork._asdict() for kind, fork in forks.items()}
    found = {"results": results, "bookkeeping": bookkeeping, "turns": turns, "revertible": reverted, "forks": bytes_of}
    return json.dumps({**about, **found})


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
