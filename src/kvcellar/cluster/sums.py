"""sums: the statistics of several engines as those of one."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from kvcellar.engine.stats import EngineStats

_NAMES = [one.name for one in fields(EngineStats)]
MEANS = ("token_seconds", "decode_seconds", "restore_seconds")  # of those that have measured them


def summed(every: Sequence[EngineStats]) -> EngineStats:
    """Numbers are added, records of one name too; of other fields the first is taken. It was so when the one that has
    told nothing for the longest time was; it was started when the last one was."""
    found: dict[str, Any] = {name: _sum([getattr(stats, name) for stats in every]) for name in _NAMES}
    for name in MEANS:
        known = [value for stats in every if (value := getattr(stats, name))]
        found[name] = sum(known) / len(known) if known else 0.0
    found |= {"at": min(stats.at for stats in every), "started": max(stats.started for stats in every)}
    return EngineStats(**found)


def _sum(values: Sequence[Any]) -> Any:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return sum(value for value in values if value is not None)
    if isinstance(first, Mapping):
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(k for v in values for k in v)}
    if isinstance(first, tuple) and first and is_dataclass(first[0]):
        named = [{one.name: one for one in value} for value in values]
        names = dict.fromkeys(name for one in named for name in one)
        return tuple(_sum([one[name] for one in named if name in one]) for name in names)
    if is_dataclass(first):
        there = [value for value in values if value is not None]
        return type(first)(**{one.name: _sum([getattr(value, one.name) for value in there]) for one in fields(first)})
    return first
