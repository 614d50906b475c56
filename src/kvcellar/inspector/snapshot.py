"""snapshot: a picture of an engine as one JSON object, for one viewer. docs/howto/inspector.md describes it.

Always true:
  * its size is bounded, whatever the engine does: by the limits below and those of `engine.control.survey`;
  * a viewer of one tenant sees nothing of the others: neither requests, entries and texts nor a number that they are a
    part of, as what is left of a sum is theirs to the digit; sums are for viewers of all. A text is there only if the
    viewer reads its owner's texts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from kvcellar.engine.control_replies import (
    RECENT_SECONDS,
    CellMap,
    EndedRequest,
    LiveRequest,
    MapRun,
    Picture,
    StepRecord,
    TreeEntry,
    Way,
)
from kvcellar.engine.stats import EngineStats, GroupStats
from kvcellar.events import Recall

Json = dict[str, object]
Decode = Callable[[Sequence[int]], str]

VERSION = 2  # of the object; a field that is added does not change it
GROUPS = 16  # that are shown
BEGINNINGS = 4096  # texts of beginnings that are remembered


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whose requests are shown. `tenant`: the owner of those; None: all of them. `texts`: with the texts of entries
    that the owner `author` has computed; None: of all."""

    tenant: str | None
    texts: bool
    author: str | None

    def sees(self, owner: str) -> bool:
        """Whether the requests and entries of an owner are shown one by one."""
        return self.tenant is None or owner == self.tenant

    def reads(self, owner: str) -> bool:
        """Whether the texts of an owner are shown."""
        return self.texts and (self.author is None or owner == self.author)


class Beginnings:
    """Short texts of the tokens of one model, remembered: the same ones are shown every second."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}

    def decoded(self, decode: Decode, tokens: tuple[int, ...]) -> str:
        if (found := self._known.get(tokens)) is None:
            if len(self._known) >= BEGINNINGS:
                self._known.clear()
            found = self._known[tokens] = decode(tokens)
        return found


def snapshot(picture: Picture, viewer: Viewer, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    """`text` decodes a few tokens; None: the model has no tokenizer."""
    picture, all_seen = _own(picture, viewer), viewer.tenant is None
    stats, groups = picture.stats, zip(picture.stats.groups, picture.maps, strict=True)
    return {
        "version": VERSION,
        "at": picture.at,
        "sums": all_seen,
        "engine": _engine(stats) if all_seen else _engine_of_one(stats, picture.live),
        "rates": _rates(picture) if all_seen else _rates_of_one(picture.live),
        "requests": {
            "live": [_live(one) for one in picture.live],
            "more_live": picture.more_live,
            "ended": [_ended(one, viewer, text) for one in picture.ended],
        },
        "groups": [_group(group, cells) for group, cells in groups][:GROUPS],
        "more_groups": max(0, len(stats.groups) - GROUPS),
        "tree": _tree(picture, viewer, text),
        "tiers": _tiers(stats) if all_seen else {"all": [], "store": None},
        "steps": _steps(picture),
    }


def _own(picture: Picture, viewer: Viewer) -> Picture:
    """What the viewer may see of a picture."""
    if viewer.tenant is None:
        return picture
    live = [one for one in picture.live if viewer.sees(one.owner)]
    places = [at for at, entry in enumerate(picture.entries) if viewer.sees(entry.owner)]
    moved = {before: now for now, before in enumerate(places)}
    entries = [
        one._replace(parent=None if one.parent is None else moved.get(one.parent))
        for one in (picture.entries[at] for at in places)
    ]
    maps = [_own_cells(cells, {one.number for one in live}, moved) for cells in picture.maps]
    ended = [one for one in picture.ended if viewer.sees(one.owner)]
    own = {"live": live, "ended": ended, "entries": entries, "maps": maps, "steps": list[StepRecord]()}
    return replace(picture, more_live=0, more_entries=0, **own)


def _own_cells(cells: CellMap, numbers: set[int], moved: Mapping[int, int]) -> CellMap:
    """All cells but the tenant's own are "other": which of them are free would tell what others have."""
    runs, counts = list[MapRun](), dict.fromkeys(cells.counts, 0)
    for run in cells.runs:
        own = run.which is not None and (run.which in numbers if run.kind == "request" else run.which in moved)
        kind = run.kind if own else "other"
        which = None if run.which is None or not own else run.which if run.kind == "request" else moved[run.which]
        counts[kind] += run.cells
        if runs and (runs[-1].kind, runs[-1].which) == (kind, which):
            runs[-1] = runs[-1]._replace(cells=runs[-1].cells + run.cells)
        else:
            runs.append(MapRun(run.cells, kind, which))
    return CellMap(cells.cells_each, runs, counts)


def _engine_of_one(stats: EngineStats, live: Sequence[LiveRequest]) -> Json:
    """The same for one tenant: how the engine was set up, and the tenant's own completions."""
    waiting = sum(one.completions for one in live if one.status == "waiting")
    own = {"running": sum(one.completions for one in live) - waiting, "waiting": waiting}
    limits = {name: getattr(stats, name) for name in ("cache_bytes", "limit_bytes", "rows")}
    zeros = dict.fromkeys(("steps", "preemptions", "rows_used", "rows_cached", "state_bytes", "pinned", "compacted"), 0)
    return {**own, **limits, **zeros, "recording": {"refused": stats.recording.refused, "steps": 0}}


def _engine(stats: EngineStats) -> Json:
    """Counts of all tenants together."""
    named = ("running", "waiting", "steps", "preemptions", "cache_bytes", "limit_bytes", "rows", "rows_used")
    found: Json = {name: getattr(stats, name) for name in (*named, "rows_cached", "state_bytes", "pinned", "compacted")}
    found["recording"] = {"refused": stats.recording.refused, "steps": stats.recording.steps}
    if (drafts := stats.speculation) is not None:
        counts = {name: getattr(drafts, name) for name in ("drafter", "drafted", "accepted", "seconds_saved")}
        found["speculation"] = counts | {"refused": drafts.refused}
    return found


def _rates(picture: Picture) -> Json:
    """Tokens per second of the last seconds, as far as steps are remembered."""
    steps = [one for one in picture.steps if one.at >= picture.at - RECENT_SECONDS]
    first = steps[0].at - steps[0].seconds if steps else picture.at
    seconds = max(picture.at - first, 1e-3)
    prefill, decode = sum(one.prefill for one in steps), sum(one.decode for one in steps)
    return {"prefill": prefill / seconds, "decode": decode / seconds, "seconds": seconds}


def _rates_of_one(live: Sequence[LiveRequest]) -> Json:
    """Of the running requests of one tenant, since each began."""
    reading = sum(one.computed / one.seconds for one in live if one.status == "prefill" and one.seconds > 0)
    seconds = max((one.seconds for one in live), default=0.0)
    return {"prefill": reading, "decode": sum(map(_rate, live)), "seconds": seconds}


def _rate(one: LiveRequest) -> float:
    """Tokens per second from the first one on."""
    return max(0, one.produced - one.completions) / one.decoding if one.decoding > 0 else 0.0


def _live(one: LiveRequest) -> Json:
    found = {name: getattr(one, name) for name in ("number", "status", "completions", "prompt", "computed", "produced")}
    restored = one.recall.restored if one.recall is not None else None
    return found | {"seconds": one.seconds, "tokens_per_second": _rate(one), "restored": restored}


def _ended(one: EndedRequest, viewer: Viewer, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    timings, usage = one.timings, one.usage
    drafts = one.speculation
    return {
        "number": one.number,
        "at": one.at,
        "outcome": one.outcome,
        "prompt": usage.prompt_tokens,
        "produced": usage.completion_tokens,
        "has_way": one.text is not None,
        "queued": timings.queued,
        "first_token": timings.first_token,
        "decoding": timings.decoding,
        "tokens_per_second": timings.tokens_per_second(usage.completion_tokens),
        "recall": _recall(one.recall, viewer.reads(one.owner), text) if one.recall is not None else None,
        "drafts": {"drafted": drafts.drafted, "accepted": drafts.accepted} if drafts is not None else None,
    }


def _recall(recall: Recall, reads: bool, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    numbers: Json = {name: getattr(recall, name) for name in ("asked", "matched", "restored", "seconds", "reason")}
    sides = {"ours": recall.ours, "theirs": recall.theirs}
    return numbers | {
        "sources": dict(recall.sources),
        "detail": recall.detail if reads or recall.rewrite is None else "",
        "entry": recall.entry if reads else "",
        **{name: text(side) if reads and text is not None and side else None for name, side in sides.items()},
    }


def _group(group: GroupStats, cells: CellMap) -> Json:
    """Each run is [cells, kind, which]; `which` is an index into the entries of the tree, or a request's number."""
    found: Json = {name: getattr(group, name) for name in ("name", "layers", "cells", "bytes", "backend")}
    runs = [[run.cells, run.kind, run.which] for run in cells.runs]
    return found | {"counts": cells.counts, "cells_each": cells.cells_each, "runs": runs}


def _tree(picture: Picture, viewer: Viewer, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    entries = [_entry(entry, viewer, text) for entry in picture.entries]
    return {"entries": entries, "more": picture.more_entries}


def _entry(entry: TreeEntry, viewer: Viewer, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    named = ("name", "namespace", "start", "end", "checkpoints", "users", "reused", "pinned", "expires", "stored")
    begins = text(entry.tokens) if viewer.reads(entry.owner) and text is not None else None
    return {name: getattr(entry, name) for name in named} | {"parent": entry.parent, "begins": begins}


def _tiers(stats: EngineStats) -> Json:
    """The device first."""
    cells = {group.name: (group.cells, group.used + group.cached) for group in stats.groups}
    in_use = sum(group.bytes * cells[group.name][1] // max(1, cells[group.name][0]) for group in stats.groups)
    device: Json = {"name": "device", "bytes": in_use, "limit_bytes": stats.cache_bytes, "down": False}
    found: list[Json] = [device | {"read_bytes": None, "written_bytes": None, "failures": {}}]
    if (store := stats.store) is not None:
        found += [{**asdict(tier), "failures": dict(tier.failures)} for tier in store.tiers]
    tokens: Mapping[str, int] | None = None
    if store is not None:
        tokens = {name: getattr(store, name) for name in ("snapshots", "written", "restored", "declined")}
    return {"all": found, "store": tokens}


def _steps(picture: Picture) -> Json:
    """As columns. `modules` is an index into `reasons`; null: a recording ran the step."""
    steps = picture.steps
    reasons = list(dict.fromkeys(one.modules for one in steps if one.modules is not None))
    names = ("number", "at", "seconds", "prefill", "decode", "drafts", "sequences")
    columns: Json = {name: [getattr(one, name) for one in steps] for name in names}
    where = [reasons.index(one.modules) if one.modules is not None else None for one in steps]
    return columns | {"modules": where, "reasons": reasons}


def way_fields(way: Way, viewer: Viewer, text: Callable[[tuple[int, ...]], str] | None) -> Json:
    """`memory`: how many tokens of an entry's part of the prompt came from memory."""
    restored = way.recall.restored if way.recall is not None else 0
    reads = viewer.reads(way.owner) and text is not None
    parts = [
        {
            "name": name,
            "start": start,
            "end": end,
            "memory": max(0, min(end, restored) - start),
            "begins": text(tokens) if reads and text is not None else None,
        }
        for name, start, end, tokens in way.entries
    ]
    return {"prompt": way.prompt, "restored": restored, "entries": parts, "at": time.time()}
