"""report: formats the results of the bench as a table and as one line of JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.conversation import Computed
from benchmarks.prefix import Found as PrefixCosts
from benchmarks.revertible import NEW, Cost, Forked
from benchmarks.workloads import Row

HEAD = f"{'':13} {'ours':>10} {'baseline':>10} {'ratio':>7} {'by CPU':>7} {'target':>7}"
MAX_GROWTH = 1.3  # of bookkeeping, from 10^4 to 10^6 cells
MAX_SHARE = 0.05  # of bookkeeping in a decoding step
MAX_REVERTIBLE = 1.05  # of a revertible step over a plain one
MAX_REREAD = 0.02  # prompt tokens computed again, over the ideal cache


@dataclass(slots=True)
class Findings:
    """The results of one run; what was not measured is empty."""

    rows: list[Row] = field(default_factory=list)
    step_ms: Mapping[int, float] = field(default_factory=dict)  # of bookkeeping, by cells in use
    reads: Mapping[int, Computed] = field(default_factory=dict)  # by checkpoints
    costs: Mapping[str, Mapping[int, Cost]] = field(default_factory=dict)  # by kind of network and sequences
    forks: Mapping[str, Forked] = field(default_factory=dict)  # by kind of network
    prefix: PrefixCosts | None = None


def line(row: Row) -> str:
    """A row of the table."""
    cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}x"
    target = "none" if row.target is None else f"{row.target:.1f}x"
    numbers = f"{row.name:13} {row.ours:7.1f} ms {row.baseline:7.1f} ms {row.ratio:6.2f}x {cpu:>7} {target:>7}"
    also = "".join(f"; {name.removesuffix('_ms')}: {_shown(value)}" for name, value in row.also.items())
    return f"{numbers}  {row.what}{also}"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f} ms"


def bookkeeping_lines(found: Findings) -> list[str]:
    lines = [f"begin+commit  {took:7.3f} ms  {n:,} cells in use by 32 sequences" for n, took in found.step_ms.items()]
    numbers = growth(found)
    if (ratio := numbers.get("ratio_1e6_to_1e4")) is not None:
        lines.append(f"{'':14}{ratio:6.2f}x  from 10,000 to 1,000,000 cells; target below {MAX_GROWTH}")
    if (share := numbers.get("share_of_step")) is not None:
        lines.append(f"{'':14}{share:6.1%}   of a step of ragged-32, at most; target below {MAX_SHARE:.0%}")
    return lines


def turns_lines(reads: Mapping[int, Computed]) -> list[str]:
    return [
        f"turns         {found.ours:7} prompt tokens computed with {checkpoints} checkpoints: "
        f"{found.ours / found.ideal - 1:.1%} more than the best choice of checkpoints, target below {MAX_REREAD:.0%}; "
        f"{found.ours / found.by_token - 1:.1%} more than with a checkpoint at every token"
        for checkpoints, found in reads.items()
    ]


def revertible_lines(costs: Mapping[str, Mapping[int, Cost]]) -> list[str]:
    return [
        f"revertible    {cost.all_kept:6.2f}x  if all tokens are accepted, {cost.part_kept:.2f}x if a part is, of "
        f"{width} x {NEW} tokens of {kind}; target {MAX_REVERTIBLE}x"
        for kind, by_width in costs.items()
        for width, cost in by_width.items()
    ]


def forked_lines(forks: Mapping[str, Forked]) -> list[str]:
    return [
        f"fork          {fork.at_once:6} bytes of state of {kind}, and {fork.first_write} with its first token; one "
        f"state row has {fork.row}"
        for kind, fork in forks.items()
    ]


def as_json(found: Findings, about: Mapping[str, Any]) -> str:
    """One line. Times are milliseconds; `ratio` is the baseline's time over ours."""
    bookkeeping = {str(cells): round(took, 4) for cells, took in found.step_ms.items()}
    sections = {
        "results": {row.name: _result(row) for row in found.rows},
        "bookkeeping": {"step_ms": bookkeeping, **growth(found)},
        "turns": {str(checkpoints): reads._asdict() for checkpoints, reads in found.reads.items()},
        "revertible": {
            kind: {str(width): cost._asdict() for width, cost in by_width.items()}
            for kind, by_width in found.costs.items()
        },
        "forks": {kind: fork._asdict() for kind, fork in found.forks.items()},
        "prefix": {} if found.prefix is None else found.prefix.as_json(),
    }
    return json.dumps({**about, **sections})


def _result(row: Row) -> dict[str, Any]:
    return {
        "what": row.what,
        "ours_ms": round(row.ours, 3),
        "baseline_ms": round(row.baseline, 3),
        "ratio": round(row.ratio, 3),
        "target": row.target,
        **({} if row.cpu_ratio is None else {"cpu_ratio": round(row.cpu_ratio, 3)}),
        **{name: value if isinstance(value, str) else round(value, 3) for name, value in row.also.items()},
    }


def growth(found: Findings) -> dict[str, float]:
    """How bookkeeping grows with the cells in use, and its share in a decoding step of as many sequences."""
    numbers: dict[str, float] = {}
    if {10**4, 10**6} <= found.step_ms.keys():
        numbers["ratio_1e6_to_1e4"] = round(found.step_ms[10**6] / found.step_ms[10**4], 3)
    steps = [row.ours for row in found.rows if row.name == "ragged-32"]
    if steps and found.step_ms:
        numbers["share_of_step"] = round(max(found.step_ms.values()) / steps[0], 4)
    return numbers
