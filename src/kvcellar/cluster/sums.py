"""sums: the statistics of several engines as those of one."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvcellar.engine.stats import EngineStats

_NAMES = [one.name for one in fields(EngineStats)]
LARGEST = ("layers", "deepest")
MEANS = ("token_seconds", "restore_seconds")  # of those that have measured them


def summed(every: Sequence[EngineStats]) -> EngineStats:
    """Numbers are added, records of one name too; of the `LARGEST` the largest, and of other fields the first is taken.
    It was so when the one that has told nothing for the longest time was; it was started when the last one was."""
    found: dict[str, Any] = {name: _sum([getattr(stats, name) for stats in every]) for name in _NAMES}
    for name in MEANS:
        known = [value for stats in every if (value := getattr(stats, name))]
        found[name] = sum(known) / len(known) if known else 0.0
    found |= {"at": min(stats.at for stats in every), "started": max(stats.started for stats in every)}
    return EngineStats(**found)


def counted(record: Any) -> Any:
    """What an engine had counted that has gone: its other numbers are 0. Also of a part of the statistics."""
    found: dict[str, Any] = {}
    for one in fields(record):
        value, metric = getattr(record, one.name), one.metadata.get("metric")
        if is_dataclass(value):
            found[one.name] = counted(value)
        elif isinstance(value, tuple) and any(map(is_dataclass, parts := list[Any](value))):
            found[one.name] = tuple(map(counted, parts))
        elif isinstance(value, int | float) and (metric is None or metric.kind != "counter"):
            found[one.name] = type(value)()
    return replace(record, **found)


def _sum(values: Sequence[Any], name: str = "") -> Any:
    there = [value for value in values if value is not None]
    first = there[0] if there else None
    if isinstance(first, bool):
        return any(there)
    if isinstance(first, int | float):
        return max(there) if name in LARGEST else sum(there)
    if isinstance(first, Mapping):
        return {key: sum(value.get(key, 0) for value in there) for key in dict.fromkeys(k for v in there for k in v)}
    if is_dataclass(first):
        return type(first)(**{one.name: _sum([getattr(v, one.name) for v in there], one.name) for one in fields(first)})
    if isinstance(first, tuple) and any(map(is_dataclass, every := [one for value in there for one in value])):
        named: dict[str, list[Any]] = {}
        for one in every:
            named.setdefault(one.name, []).append(one)
        return tuple(map(_sum, named.values()))
    return first
