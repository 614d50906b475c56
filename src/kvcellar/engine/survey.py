"""survey: a bounded picture of an engine, for a page: what runs and has ended, the prefix tree, the cells.

    survey.pulse()              # differs where a new picture would
    survey.picture()            # at most `NODES` entries of the tree, `LIVE` requests, the cells as runs
    survey.entry(name, most), survey.way(number)

`SurveyClient` describes what they return. All methods may be called from any thread but the engine's. Between two steps
of requests they take a slice of at most about `SECONDS` seconds of the engine's thread, and `TURNS` turns; what the
tree has in a slice is as it was then, and what requests have is as it was in the last one. Without a caller nothing is
done for this.
"""

import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, nlargest
from itertools import count, islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvcellar.engine.cell_map import Holding, mapped
from kvcellar.engine.count_stats import stats
from kvcellar.engine.picture import BEGINNING, RECENT_SECONDS, LiveRequest, Picture, TreeEntry, Way
from kvcellar.engine.request import Completion, Request, Status
from kvcellar.errors import BadRequest
from kvcellar.events import Recall
from kvcellar.plan import Run
from kvcellar.prefix.node import TOKEN, Node, ids_of, key_of, path_digest, root_of, upwards
from kvcellar.prefix.why import NAME, path_key
from kvcellar.snapshot import requested

if TYPE_CHECKING:
    from kvcellar.engine.build import Built

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
        where = [(one.span, store.locations.of(one.key)) for one in chain]
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

    def pulse(self) -> tuple[int, ...]:
        def look() -> tuple[int, ...]:
            loop, memory = self._loop, self._built.memory
            scheduler, store = loop.scheduler, loop.manager.store
            since, (tokens, checkpoints, _, _) = time.time() - RECENT_SECONDS, loop.manager.prefixes.tree.total()
            recent = sum(one.at >= since for one in self._built.runner.recent)
            stored = (len(store.catalogue), sum(store.transfers.traffic.values())) if store is not None else ()
            counts = len(scheduler.running), len(scheduler.waiting), recent, tokens, checkpoints
            return loop.steps, loop.last.count, *counts, *memory.free().values(), *stored

        return self._loop.call(look)

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
            for group, runs in enumerate(memory.storage.runs(completion.seq))
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


def name_of(node: Node) -> str:
    """As in `Recall.entry`."""
    return path_digest(node, node.start + 1)[:NAME].hex()


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
