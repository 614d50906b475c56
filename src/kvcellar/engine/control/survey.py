"""survey: a bounded picture of an engine, for a page: what runs and has ended, the prefix tree, the cells.

    survey.picture()            # at most `NODES` entries of the tree, `LIVE` requests, the cells as runs
    survey.entry(name, most), survey.way(number)

`CacheClient` describes what they return. All methods may be called from any thread but the engine's. Between two steps
of requests they take a slice of at most about `SECONDS` seconds of the engine's thread, and `TURNS` turns; what the
tree has in a slice is as it was then, and what requests have is as it was in the last one. Without a caller nothing is
done for this.

The map of a group's cells, what they are used for as runs of a bounded number, costs time linear in the cells: it is
made on the caller's thread, from runs.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, nlargest
from itertools import count, islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvcellar.engine.control.count_stats import stats
from kvcellar.engine.control_replies import (
    BEGINNING,
    RUNS,
    CellMap,
    Kind,
    LiveRequest,
    MapRun,
    Picture,
    TreeEntry,
    Way,
)
from kvcellar.engine.core.request import Completion, Request, Status
from kvcellar.errors import BadRequest
from kvcellar.events import Recall
from kvcellar.memory.plan import Run
from kvcellar.memory.prefix.node import TOKEN, Node, ids_of, key_of, path_key, root_of, upwards
from kvcellar.memory.prefix.why import name_of
from kvcellar.memory.snapshot import requested

if TYPE_CHECKING:
    from kvcellar.engine.load.build import Built

FREE, OTHER, SHARED, FIRST = 0, 1, 2, 3  # codes; from `FIRST` on, odd ones are of entries, even ones of requests


class Holding(NamedTuple):
    """Cells of a group, by its index, that an entry of the tree has ("kept") or a running request, by its number."""

    group: int
    kind: Literal["kept", "request"]
    which: int
    runs: tuple[Run, ...]


def mapped(cells: int, free: Iterable[Run], holdings: Sequence[Holding]) -> CellMap:
    """Cells that are neither free nor of a holding are "other". What a request has and an entry, too, is of the
    request."""
    codes = np.full(cells + 1, OTHER, dtype=np.int64)  # by cell; cell 0 is null
    for one in holdings:
        for run in one.runs if one.kind == "kept" else ():
            codes[run.cell : run.end] = FIRST + 2 * one.which
    for one in holdings:
        code = FIRST + 2 * one.which + 1
        for run in one.runs if one.kind == "request" else ():
            part = codes[run.cell : run.end]
            busy = (part == SHARED) | ((part >= FIRST) & (part % 2 == 0) & (part != code))
            codes[run.cell : run.end] = np.where(busy, SHARED, code)
    for run in free:  # an entry may have been evicted since it was looked at
        codes[run.cell : run.end] = FREE
    codes = codes[1:]
    kinds = _kinds(codes)
    counts: dict[Kind, int] = {kind: int((kinds == number).sum()) for number, kind in enumerate(_KINDS)}
    each = 1
    while len(starts := _starts(codes)) > RUNS:
        each, codes = each * 2, _halved(codes)
    ends = [*starts[1:], len(codes)] if len(starts) else []
    runs = [
        _run(int(codes[start]), min(int(end) * each, cells) - int(start) * each)
        for start, end in zip(starts, ends, strict=True)
    ]
    return CellMap(each, runs, counts)


_KINDS: tuple[Kind, ...] = ("free", "other", "kept", "shared", "request")  # the busiest last


def _kinds(codes: np.ndarray) -> np.ndarray:
    """Indices into `_KINDS`."""
    of_entry, of_request = (codes >= FIRST) & (codes % 2 == 1), (codes >= FIRST) & (codes % 2 == 0)
    return np.select([of_request, codes == SHARED, of_entry, codes == OTHER], [4, 3, 2, 1], 0)


def _halved(codes: np.ndarray) -> np.ndarray:
    """Of each two neighbours the busier one."""
    if len(codes) % 2:
        codes = np.append(codes, FREE)
    left, right = codes[::2], codes[1::2]
    return np.where(_kinds(left) >= _kinds(right), left, right)


def _starts(codes: np.ndarray) -> np.ndarray:
    """Where runs begin."""
    if not len(codes):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))


def _run(code: int, cells: int) -> MapRun:
    if code < FIRST:
        return MapRun(cells, ("free", "other", "shared")[code], None)
    return MapRun(cells, "request" if code % 2 == 0 else "kept", (code - FIRST) // 2)


SECONDS, TURNS, CHILDREN = 0.002, 64, 512  # of a slice; an entry or so many children are looked at in a turn
PARTS = 32  # entries of a way that are looked at in a slice
NODES, LIVE = 400, 100
STORED = 1 << 17  # tokens of texts that are looked for in the store, for one picture


class _Place(NamedTuple):
    node: Node
    parent: int | None


class _Walk:
    """Of the tree, the entries that were used last, parents before children."""

    def __init__(self, built: "Built", most: int) -> None:
        self._built, self._most = built, most
        self._tree = built.loop.manager.prefixes.tree
        self.entries: list[TreeEntry] = []
        self.nodes: list[Node] = []  # of the entries
        self.holdings: list[Holding] = []
        self._rest: list[tuple[int, int, _Place]] = []
        self._order = count()
        self._left = STORED
        self._looking = self._looks()

    def go_on(self, until: float) -> bool:
        """Take some turns, at least one and at most `TURNS`. False at the end."""
        for _ in range(TURNS):
            if self._tree is not self._built.loop.manager.prefixes.tree:  # an error replaces the tree
                return False
            if next(self._looking, self) is self:
                return False
            if time.perf_counter() >= until:
                break
        return True

    def _looks(self) -> Iterator[None]:
        """An entry for each turn, or a part of the children of a node, before any of these is an entry."""
        for root in self._tree.roots():
            yield from self._enter(root, None)
        while self._rest and len(self.entries) < self._most:
            _, _, place = heappop(self._rest)
            if place.node.parent is not None:  # else it was removed since
                index = len(self.entries)
                self._look(place)
                yield from self._enter(place.node, index)
            yield

    def _enter(self, node: Node, parent: int | None) -> Iterator[None]:
        """Its children, `CHILDREN` for each turn."""
        children, best = list(node.children.values()), list[Node]()
        for at in range(0, len(children), CHILDREN):
            best = nlargest(self._most, best + children[at : at + CHILDREN], key=_used)
            yield
        for child in best:
            heappush(self._rest, (-_used(child), next(self._order), _Place(child, parent)))

    def _look(self, place: _Place) -> None:
        node, index = place.node, len(self.entries)
        claim = self._built.memory.claims.of(node.claim)
        tables = [(at, table) for at, table in claim.tables.items()]
        tables += [window for one in claim.checkpoints.values() for window in one.windows.items()]
        self.nodes.append(node)
        self.holdings += (Holding(group, "kept", index, tuple(table.runs)) for group, table in tables)
        self.entries.append(
            TreeEntry(
                *(name_of(node), place.parent, requested(root_of(node).namespace), node.retention.owner),
                *(node.start, node.end, len(node.checkpoints), node.users),
                *(node.use is not None and node.use.before > 0, node.retention.pinned, node.retention.expires),
                tuple(memoryview(node.edge)[: BEGINNING * TOKEN].cast("q")),
                None,
            )
        )
        if not node.children and self._left >= node.end:
            self._left -= node.end
            self._look_in_store(node, index)

    def _look_in_store(self, leaf: Node, index: int | None) -> None:
        """What tiers have of the text of a leaf, and so of the entries that it continues."""
        if (store := self._built.loop.manager.store) is None:
            return
        chain = store.catalogue.whole(root_of(leaf).namespace, path_key(leaf, leaf.end))
        where = [(one.span, store.catalogue.of(one.key)) for one in chain]
        while index is not None:
            entry = self.entries[index]
            found: dict[str, int] = {}
            for span, tiers in where:
                common = min(span.end, entry.end) - max(span.start, entry.start)
                for tier in tiers if common > 0 else ():
                    found[tier] = found.get(tier, 0) + common
            if entry.stored is None or sum(found.values()) > sum(entry.stored.values()):
                self.entries[index] = entry._replace(stored=found)
            index = entry.parent

    @property
    def left_out(self) -> int:
        """Entries that were found and not looked at."""
        return len(self._rest)


class Survey:
    """Of one engine."""

    def __init__(self, built: "Built") -> None:
        self._built, self._loop = built, built.loop

    def picture(self) -> Picture:
        walk = self._loop.call(lambda: _Walk(self._built, NODES))
        while self._loop.call(lambda: walk.go_on(time.perf_counter() + SECONDS)):
            pass
        return self._developed(walk, *self._loop.call(lambda: self._look(walk)))

    def _look(self, walk: _Walk) -> tuple[Picture, list[list[Run]], list[Holding]]:
        """The last slice: all but the map of cells."""
        loop, memory = self._loop, self._built.memory
        found = [*loop.scheduler.running, *loop.scheduler.waiting]
        requests = list(dict.fromkeys(completion.request for completion in found))
        live = [_live(request) for request in requests[:LIVE]]
        used = [
            Holding(group, "request", completion.request.number, runs)
            for completion in loop.scheduler.running
            if completion.seq is not None
            for group, runs in enumerate(memory.runs(completion.seq))
        ]
        picture = Picture(
            *(time.time(), stats(self._built), live, len(requests) - len(live), list(loop.last)),
            *(walk.entries, walk.left_out, [], list(self._built.runner.recent)),
        )
        return picture, memory.storage.free_runs(), used

    def _developed(self, walk: _Walk, picture: Picture, free: list[list[Run]], used: list[Holding]) -> Picture:
        """With the map of cells, which is made on the caller's thread."""
        for index, (group, runs) in enumerate(zip(picture.stats.groups, free, strict=True)):
            held = [one for one in (*walk.holdings, *used) if one.group == index]
            picture.maps.append(mapped(group.cells, runs, held))
        return picture

    def entry(self, name: str, most: int) -> tuple[TreeEntry, tuple[int, ...]]:
        walk = self._loop.call(lambda: _Walk(self._built, NODES))
        while self._loop.call(lambda: walk.go_on(time.perf_counter() + SECONDS)):
            pass
        entry = next((one for one in walk.entries if one.name == name), None)
        if entry is None:
            raise BadRequest("there is no such entry in memory; it may have been evicted", "name")
        node = walk.nodes[walk.entries.index(entry)]
        return entry, self._loop.call(lambda: self._tokens(entry, node, most))

    def _tokens(self, entry: TreeEntry, node: Node, most: int) -> tuple[int, ...]:
        """Those that an entry has now, which was this node; none if it is not there any more."""
        for one in upwards(node):  # the node may have been split since
            if one.start == entry.start:
                return tuple(memoryview(one.edge)[: most * TOKEN].cast("q"))
        return ()

    def way(self, number: int) -> Way:
        owner, space, text, prompt, recall = self._text(number)
        key = key_of(text)
        tree = self._loop.call(lambda: self._loop.manager.prefixes.tree)
        node, offset = self._loop.call(lambda: tree.reached(space, key))
        end, path, found = node.start + offset, upwards(node), list[tuple[str, int, int, tuple[int, ...]]]()
        while some := self._loop.call(lambda: [_part(one, end) for one in islice(path, PARTS)]):
            found += some
        return Way(owner, prompt, recall, found[::-1])

    def _text(self, number: int) -> tuple[str, str, tuple[int, ...], int, Recall | None]:
        def look() -> tuple[str, str, tuple[int, ...], int, Recall | None] | None:
            for completion in [*self._loop.scheduler.running, *self._loop.scheduler.waiting]:
                request = completion.request
                if request.number == number:
                    owner, text = request.retention.owner, tuple(completion.tokens)
                    return owner, request.space, text, len(request.prompt), request.recall
            for one in self._loop.last:
                if one.number == number and one.text is not None:
                    whole = tuple(ids_of(b"".join(one.text)))
                    return one.owner, one.space, whole, len(one.text[0]) // TOKEN, one.recall
            return None

        if (found := self._loop.call(look)) is None:
            raise BadRequest("the text of this request is not kept any more", "number")
        return found


def _part(node: Node, end: int) -> tuple[str, int, int, tuple[int, ...]]:
    """An entry of a way that ends at `end`. The rest of the last one is of other texts."""
    own = min(end, node.end)
    begin = memoryview(node.edge)[: min(BEGINNING, own - node.start) * TOKEN].cast("q")
    return name_of(node), node.start, own, tuple(begin)


def _used(node: Node) -> int:
    return node.use.at if node.use is not None else 0


def _live(request: Request) -> LiveRequest:
    now, first = time.perf_counter(), request.first_token
    one = request.completions[0]
    return LiveRequest(
        *(request.number, request.retention.owner, _status(request.completions), len(request.completions)),
        *(len(request.prompt), one.computed, sum(other.sampler.produced for other in request.completions)),
        *(now - request.submitted, now - first if first is not None else 0.0, request.recall),
    )


def _status(completions: Sequence[Completion]) -> Literal["waiting", "prefill", "decode"]:
    states = {one.status for one in completions}
    return "decode" if Status.DECODE in states else "prefill" if Status.PREFILL in states else "waiting"
