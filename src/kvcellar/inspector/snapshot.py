"""snapshot: a picture of an engine as one JSON object, for one viewer. docs/howto/inspector.md describes it.

Always true:
  * its size is bounded, whatever the engine does: by the limits below and those of `engine.control.survey`;
  * a viewer of one tenant sees nothing of the others: neither requests, entries and texts nor a number that they are a
    part of, as what is left of a sum is theirs to the digit; sums are for viewers of all. A text is there only if the
    viewer reads its owner's texts.
"""

import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from kvcellar.engine.control_replies import (
    RECENT_SECONDS,
    CellMap,
    EndedRequest,
    Kind,
    LiveRequest,
    MapRun,
    Picture,
    StepRecord,
    TreeEntry,
    Way,
)
from kvcellar.engine.stats import EngineStats, GroupStats, RecordingStats, ReplicaStats, SpeculationStats
from kvcellar.events import Recall, Speculation
from kvcellar.images.image import ProcessedImage
from kvcellar.serve.answers import Answer

Text = Callable[[tuple[int, ...]], str]
Decode = Callable[[Sequence[int]], str]

VERSION = 2  # of the object; a field that is added does not change it
GROUPS = 16  # that are shown
IMAGES = 32  # of an entry
BEGINNINGS = 4096  # texts of beginnings that are remembered


class SeenEngine(Answer, kw_only=True):
    """Counts of all tenants together; to one API key of several, those of its own completions only, and how the engine
    was set up."""

    running: int
    waiting: int
    steps: int = 0
    preemptions: int = 0
    cache_bytes: int
    limit_bytes: int
    rows: int
    rows_used: int = 0
    rows_cached: int = 0
    state_bytes: int = 0
    pinned: int = 0
    compacted: int = 0
    recording: RecordingStats
    speculation: SpeculationStats | UnsetType = UNSET


class SeenRates(Answer):
    prefill: float  # tokens per second of the last seconds
    decode: float
    seconds: float


class SeenLiveRequest(Answer):
    number: int
    status: Literal["waiting", "prefill", "decode"]
    completions: int
    prompt: int
    computed: int
    produced: int
    seconds: float
    tokens_per_second: float
    restored: int | None


class SeenRecall(Answer):
    asked: int
    matched: int
    restored: int
    seconds: float
    reason: str
    sources: dict[str, int]
    detail: str
    entry: str
    image: str
    ours: str | None
    theirs: str | None


class SeenEndedRequest(Answer):
    number: int
    at: float
    outcome: str
    prompt: int
    produced: int
    has_way: bool
    queued: float
    first_token: float
    decoding: float
    tokens_per_second: float
    recall: SeenRecall | None
    drafts: Speculation | None


class SeenRequests(Answer):
    live: list[SeenLiveRequest]
    more_live: int
    ended: list[SeenEndedRequest]


class SeenGroup(Answer):
    name: str
    layers: int
    cells: int
    bytes: int
    backend: str | None
    counts: dict[Kind, int]
    cells_each: int
    # cells, what has them, and which: an index into the entries of the tree, or the number of a request
    runs: Sequence[tuple[int, Kind, int | None]]


class SeenEntry(Answer):
    name: str
    namespace: str
    start: int
    end: int
    checkpoints: int
    users: int
    reused: bool
    pinned: bool
    expires: float | None
    stored: dict[str, int] | None
    parent: int | None
    begins: str | None


class SeenTree(Answer):
    entries: list[SeenEntry]
    more: int


class SeenTier(Answer):
    name: str
    bytes: int
    limit_bytes: int
    down: bool
    read_bytes: int | None
    written_bytes: int | None
    failures: dict[str, int]


class SeenStore(Answer):
    snapshots: int
    written: int
    restored: int
    declined: int


class SeenTiers(Answer):
    all: list[SeenTier]  # the device first
    store: SeenStore | None


class SeenSteps(Answer):
    """Columns. `modules` is an index into `reasons`; `null`: a recording ran the step."""

    number: list[int]
    at: list[float]
    seconds: list[float]
    prefill: list[int]
    decode: list[int]
    drafts: list[int]
    sequences: list[int]
    modules: list[int | None]
    reasons: list[str]


class SeenModel(Answer):
    name: str
    context: int
    all: list[str]


class Snapshot(Answer):
    version: int
    at: float  # seconds of the wall clock
    sums: bool  # whether there are numbers of all tenants together; else it is of one of them only
    engine: SeenEngine
    rates: SeenRates
    requests: SeenRequests
    groups: list[SeenGroup]
    more_groups: int
    tree: SeenTree
    tiers: SeenTiers
    steps: SeenSteps
    instance: str  # another one after the server was started again
    model: SeenModel
    replica: str  # that all of this is of; empty: the server is not a gateway of a cluster
    replicas: Sequence[ReplicaStats]  # of the model; to one API key of several, only those that are connected, by name


class EntryImage(Answer):
    at: int  # the position of its first token
    width: int  # pixels, of the whole image
    height: int
    thumbnail: str  # a data: URL


class EntryText(Answer):
    name: str
    start: int
    end: int
    reads: bool  # whether the texts of its owner are shown
    text: str | None
    tokens: list[int] | None  # of a model without a tokenizer
    shown: int  # tokens
    images: list[EntryImage]  # of its text, those that the server still keeps


class WayEntry(Answer):
    name: str
    start: int
    end: int
    memory: int  # tokens that came from memory
    begins: str | None


class RequestWay(Answer):
    number: int
    prompt: int
    restored: int
    entries: list[WayEntry]
    at: float


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


def snapshot(
    picture: Picture,
    viewer: Viewer,
    text: Text | None,
    instance: str,
    model: SeenModel,
    replica: str = "",
    replicas: Sequence[ReplicaStats] = (),
) -> Snapshot:
    """`text` decodes a few tokens; None: the model has no tokenizer. `instance` and `model` are of the server; of a
    cluster of `replicas`, as the viewer may see them, the picture is that of one `replica`."""
    picture, all_seen = _own(picture, viewer), viewer.tenant is None
    stats, groups = picture.stats, zip(picture.stats.groups, picture.maps, strict=True)
    live, ended = list(map(_live, picture.live)), [_ended(one, viewer, text) for one in picture.ended]
    return Snapshot(
        version=VERSION,
        at=picture.at,
        sums=all_seen,
        engine=_engine(stats) if all_seen else _engine_of_one(stats, picture.live),
        rates=_rates(picture) if all_seen else _rates_of_one(picture.live),
        requests=SeenRequests(live, picture.more_live, ended),
        groups=[_group(group, cells) for group, cells in groups][:GROUPS],
        more_groups=max(0, len(stats.groups) - GROUPS),
        tree=SeenTree([_entry(entry, viewer, text) for entry in picture.entries], picture.more_entries),
        tiers=_tiers(stats) if all_seen else SeenTiers([], None),
        steps=_steps(picture.steps),
        instance=instance,
        model=model,
        replica=replica,
        replicas=replicas,
    )


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


def _engine_of_one(stats: EngineStats, live: Sequence[LiveRequest]) -> SeenEngine:
    waiting = sum(one.completions for one in live if one.status == "waiting")
    return SeenEngine(
        running=sum(one.completions for one in live) - waiting,
        waiting=waiting,
        cache_bytes=stats.cache_bytes,
        limit_bytes=stats.limit_bytes,
        rows=stats.rows,
        recording=replace(stats.recording, steps=0, by_modules={}),
    )


def _engine(stats: EngineStats) -> SeenEngine:
    return SeenEngine.of(stats, speculation=UNSET if stats.speculation is None else stats.speculation)


def _rates(picture: Picture) -> SeenRates:
    """Tokens per second of the last seconds, as far as steps are remembered."""
    steps = [one for one in picture.steps if one.at >= picture.at - RECENT_SECONDS]
    first = steps[0].at - steps[0].seconds if steps else picture.at
    seconds = max(picture.at - first, 1e-3)
    prefill, decode = sum(one.prefill for one in steps), sum(one.decode for one in steps)
    return SeenRates(prefill / seconds, decode / seconds, seconds)


def _rates_of_one(live: Sequence[LiveRequest]) -> SeenRates:
    """Of the running requests of one tenant, since each began."""
    reading = sum(one.computed / one.seconds for one in live if one.status == "prefill" and one.seconds > 0)
    seconds = max((one.seconds for one in live), default=0.0)
    return SeenRates(reading, sum(map(_rate, live)), seconds)


def _rate(one: LiveRequest) -> float:
    """Tokens per second from the first one on."""
    return max(0, one.produced - one.completions) / one.decoding if one.decoding > 0 else 0.0


def _live(one: LiveRequest) -> SeenLiveRequest:
    restored = one.recall.restored if one.recall is not None else None
    return SeenLiveRequest.of(one, tokens_per_second=_rate(one), restored=restored)


def _ended(one: EndedRequest, viewer: Viewer, text: Text | None) -> SeenEndedRequest:
    timings, usage = one.timings, one.usage
    return SeenEndedRequest(
        number=one.number,
        at=one.at,
        outcome=one.outcome,
        prompt=usage.prompt_tokens,
        produced=usage.completion_tokens,
        has_way=one.text is not None,
        queued=timings.queued,
        first_token=timings.first_token,
        decoding=timings.decoding,
        tokens_per_second=timings.tokens_per_second(usage.completion_tokens),
        recall=_recall(one.recall, viewer.reads(one.owner), text) if one.recall is not None else None,
        drafts=one.speculation,
    )


def _recall(recall: Recall, reads: bool, text: Text | None) -> SeenRecall:
    text = text if reads else None
    ours, theirs = (text(side) if text is not None and side else None for side in (recall.ours, recall.theirs))
    return SeenRecall.of(
        recall,
        sources=dict(recall.sources),
        detail=recall.detail if reads or recall.rewrite is None else "",
        entry=recall.entry if reads else "",
        image=recall.image if reads else "",
        ours=ours,
        theirs=theirs,
    )


def _group(group: GroupStats, cells: CellMap) -> SeenGroup:
    return SeenGroup.of(group, counts=cells.counts, cells_each=cells.cells_each, runs=cells.runs)


def _entry(entry: TreeEntry, viewer: Viewer, text: Text | None) -> SeenEntry:
    return SeenEntry.of(entry, begins=text(entry.tokens) if viewer.reads(entry.owner) and text is not None else None)


def _tiers(stats: EngineStats) -> SeenTiers:
    in_use = sum(group.bytes * (group.used + group.cached) // max(1, group.cells) for group in stats.groups)
    found = [SeenTier("device", in_use, stats.cache_bytes, False, None, None, {})]
    if (store := stats.store) is None:
        return SeenTiers(found, None)
    found += [SeenTier.of(tier, failures=dict(tier.failures)) for tier in store.tiers]
    return SeenTiers(found, SeenStore.of(store))


def _steps(steps: Sequence[StepRecord]) -> SeenSteps:
    reasons = list(dict.fromkeys(one.modules for one in steps if one.modules is not None))
    names = ("number", "at", "seconds", "prefill", "decode", "drafts", "sequences")
    columns: dict[str, Any] = {name: [getattr(one, name) for one in steps] for name in names}
    where = [reasons.index(one.modules) if one.modules is not None else None for one in steps]
    return SeenSteps(**columns, modules=where, reasons=reasons)


def entry_images(start: int, images: Sequence[tuple[int, ProcessedImage]]) -> list[EntryImage]:
    """Of an entry that begins at `start`, with the places of its images in it: the first ones."""
    return [
        EntryImage(start + at, one.width, one.height, f"data:image/jpeg;base64,{b64encode(one.thumbnail).decode()}")
        for at, one in images
        if one.thumbnail
    ][:IMAGES]


def request_way(number: int, way: Way, viewer: Viewer, text: Text | None) -> RequestWay:
    restored = way.recall.restored if way.recall is not None else 0
    text = text if viewer.reads(way.owner) else None
    entries = [
        WayEntry(name, start, end, max(0, min(end, restored) - start), None if text is None else text(tokens))
        for name, start, end, tokens in way.entries
    ]
    return RequestWay(number, way.prompt, restored, entries, time.time())
