"""sums: the statistics and replies of several engines as those of one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvcellar.engine.control_replies import Removed
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


def merged(found: Sequence[Any]) -> Any:
    """Replies to one control: what was removed, and what namespaces have, is added up; others are alike."""
    first = found[0]
    if isinstance(first, list):
        namespaces = _added((one for some in found for one in some), "namespace")
        return sorted(namespaces, key=lambda one: -one.tokens)
    return _sum(found) if isinstance(first, Removed) else first


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
        return tuple(_added(every, "name"))
    return first


def _added(records: Iterable[Any], name: str) -> list[Any]:
    """Records of one name, which is their field `name`, as one."""
    named: dict[str, list[Any]] = {}
    for one in records:
        named.setdefault(getattr(one, name), []).append(one)
    return list(map(_sum, named.values()))
