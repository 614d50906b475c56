"""draft_memory: what a drafter computes of texts, kept in a prefix tree and in tiers of its own, beside the target's.

Nothing here is needed to answer a request: what is missing is computed again by the drafter, or there are no drafts. So
the target never waits for it, and what is restored of the target does not depend on it.

A token in memory is an entry at one position. Where the entry at position p depends on tokens behind p (heads that read
the next token), the tree compares these, too (see `snapshot.looking_ahead`).

Always true between two calls:
  * each sequence belongs to one completion, has locked a node of the tree, and holds the first entries of its text, or
    is apart: then it holds later ones, and is never published;
  * each node of the tree that is locked is so by a sequence, or by what is being read back for a completion that has no
    sequence yet;
  * no step is open.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvcellar.cache.memory import Memory
from kvcellar.engine.checkpoint_rows import free_rows, with_rows
from kvcellar.engine.prefixes import NEAR, Prefix, Prefixes
from kvcellar.engine.restores import Fetch
from kvcellar.engine.shares import USUAL, Shares
from kvcellar.engine.store import BUSY, OpenStore, no_store
from kvcellar.plan import Feed
from kvcellar.prefix.node import TOKEN, Node, common
from kvcellar.retention import RetentionOptions
from kvcellar.snapshot import looking_ahead, requested
from kvcellar.spans import Span
from kvcellar.speculate.chain import Key
from kvcellar.speculate.draft_cache import Text

ALL = 1 << 40  # nodes


@dataclass(eq=False, slots=True)
class _Place:
    """A completion with a sequence. `elements` are those of its text that are known; a sequence that is `apart` has
    none, and an empty prefix."""

    seq: int
    prefix: Prefix
    elements: "array[int]"
    apart: bool = False


class DraftMemory:
    """A `DraftCache` over one memory. On the engine's thread."""

    def __init__(
        self,
        memory: Memory,
        *,
        ahead: int = 0,
        in_parts: bool = True,
        shares: Shares = USUAL,
        open_store: OpenStore = no_store,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ahead`: the entry of a token depends on so many tokens that follow it, which are no entries yet. `in_parts`:
        a step can leave checkpoints inside the tokens of a sequence. `clock` is that of retention."""
        self.memory, self.ahead, self._in_parts, self._shares, self._clock = memory, ahead, in_parts, shares, clock
        self.prefixes = Prefixes(memory, shares=shares, clock=clock)
        self.store = open_store(memory, self.prefixes, self.evict)
        self._numbers = count(1)
        self._places: OrderedDict[Key, _Place] = OrderedDict()  # the least recently used first
        self._fetches: dict[Key, Fetch] = {}  # of completions without a place

    # -- texts --------------------------------------------------------------------------------------------------

    def expect(self, key: Key, namespace: str, tokens: Sequence[int]) -> None:
        """A completion waits: begin to read what is stored of its text."""
        if self.store is not None and key not in self._fetches and key not in self._places:
            self._fetches[key] = self.store.restores.prefetch(namespace, lambda: self._elements(tokens, 0).tobytes())

    def open(self, texts: Sequence[Text]) -> list[int | None]:
        found: list[int | None] = []
        first: list[tuple[str, _Place]] = []  # of the texts before: these are computed before others
        for text in texts:
            if text.key not in self._places:
                self._begin(text, first)
            place = self._places.get(text.key)
            if place is not None:
                self._places.move_to_end(text.key)
                if not place.apart:
                    first.append((text.namespace, place))
            found.append(place.seq if place is not None else None)
        return found

    def begin_apart(self, text: Text) -> int:
        self.close(text.key, keep=False)
        seq = next(self._numbers)
        self._places[text.key] = _Place(
            seq, self.prefixes.begin(text.namespace, b"", text.retention), array("q"), apart=True
        )
        return seq

    def _begin(self, text: Text, first: Sequence[tuple[str, _Place]]) -> None:
        """Give a completion its sequence, unless it has to wait."""
        elements = self._elements(text.text, 0)
        key = elements.tobytes()
        if self._read_back(text, key) or self._shared_soon(text.namespace, key, first):
            return
        seq = next(self._numbers)
        prefix = self.prefixes.restore(seq, text.namespace, key, (), text.retention)
        self.prefixes.use(prefix)
        self._places[text.key] = _Place(seq, prefix, elements)

    def _read_back(self, text: Text, key: bytes) -> bool:
        """Whether something that is stored of a text is being read."""
        if self.store is None:
            return False
        restores = self.store.restores
        if text.key not in self._fetches:
            self._fetches[text.key] = restores.prefetch(text.namespace, lambda: key)
        if restores.advance(self._fetches[text.key], lambda: key, enters=True):
            return True
        del self._fetches[text.key]
        return False

    def _shared_soon(self, namespace: str, key: bytes, first: Sequence[tuple[str, _Place]]) -> bool:
        """Whether one of other texts is about to compute what a key needs, too. It leaves a checkpoint there."""
        most = len(key) // TOKEN - 1
        for other, place in first:
            alike = min(common(place.prefix.key, key), most) if other == namespace else 0
            if alike > self.memory.length(place.seq) and alike >= self.prefixes.restorable(namespace, key) + NEAR:
                self.prefixes.want(place.prefix, alike)
                return True
        return False

    def _elements(self, text: Sequence[int], start: int) -> "array[int]":
        """What the tree compares in place of the tokens of a text, from entry `start` on."""
        return looking_ahead(text, self.ahead) if start == 0 else array("q", text[start + self.ahead :])

    def end(self, key: Key, most: int) -> int:
        if self._in_parts:
            return most
        place = self._places[key]
        return min(most, self.prefixes.next_wanted(place.prefix, self.memory.length(place.seq)) or most)

    def feeds(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Feed, ...]:
        feeds = [self._feed(self._places[key], tokens) for key, tokens in wanted]
        return with_rows(feeds, self.memory, self.prefixes, self.evict)

    def _feed(self, place: _Place, tokens: int) -> Feed:
        start = self.memory.length(place.seq)
        new = Span(start, start + tokens)
        if place.apart:
            return Feed(place.seq, new)
        positions = self.prefixes.checkpoints(place.prefix, new)
        if not self._in_parts:
            positions = tuple(pos for pos in positions if pos == new.end)
        return Feed(place.seq, new, checkpoints=positions)

    def keep(self, text: Text, claim: int | None) -> None:
        """What a text began with is kept for others at once, what followed when it is over."""
        if (place := self._places[text.key]).apart:
            return
        end, began = self.memory.length(place.seq), len(place.prefix.key) // TOKEN
        if len(place.elements) < end:
            place.elements += self._elements(text.text, len(place.elements))
        if claim is not None or place.prefix.published < min(end, began):
            self.prefixes.publish(place.seq, place.prefix, place.elements, end, claim)

    def spare(self) -> int:
        return next(self._numbers)

    def fork(self, key: Key, other: Key) -> None:
        if (place := self._places.get(key)) is None or not self.memory.has(place.seq):
            return
        seq = next(self._numbers)
        kept = self.memory.fork(place.seq, seq, self.memory.length(place.seq))
        assert kept == self.memory.length(place.seq), f"only {kept} entries could be shared"
        self._places[other] = replace(
            place, seq=seq, prefix=self.prefixes.fork(place.prefix), elements=place.elements[:]
        )

    def close(self, key: Key, *, keep: bool) -> None:
        if (fetch := self._fetches.pop(key, None)) is not None and self.store is not None:
            self.store.restores.cancel(fetch)
        if (place := self._places.pop(key, None)) is None:
            return
        prefix, end = place.prefix, self.memory.length(place.seq)
        try:
            if keep and not place.apart and end > prefix.restored:
                self.prefixes.publish(place.seq, prefix, place.elements, end, at=(end,))
                self._store(prefix)
        finally:
            self.prefixes.release(prefix)
            if self.memory.has(place.seq):
                self.memory.drop(place.seq)

    def _store(self, prefix: Prefix) -> None:
        """Let tiers have what the tree has of a text."""
        options: RetentionOptions = prefix.options
        if self.store is not None and options.stored:
            key = prefix.key[: prefix.published * TOKEN]
            self.store.keep(prefix.root.namespace, key, options.at(self._clock()))

    # -- memory -------------------------------------------------------------------------------------------------

    def make_free(self, cells: int, rows: int, used: Iterable[Key]) -> bool:
        keys = set(used)
        while (short := self._short(cells, rows)) is not None:
            if not (self.evict(*short) or self._end_idle(keys) or self._stop_restore()):
                return False
        return True

    def _short(self, cells: int, rows: int) -> tuple[str | None, int] | None:
        """A group with too few free cells, and how many are missing; None in its place for state rows."""
        for group, free in self.memory.free().items():
            if free < cells:
                return group, cells - free
        if self.memory.rows.capacity is not None and not free_rows(self.memory, self.prefixes.evict_row, rows):
            return None, 1
        return None

    def evict(self, group: str | None, cells: int) -> bool:
        """Free some cells of a group that no sequence uses, or, without a group, a state row. False if there are
        none."""
        found = self.prefixes.evict_row() if group is None else self.prefixes.evict(group, cells)
        return found or (self.store is not None and self.store.stop_reading())

    def _end_idle(self, used: set[Key]) -> bool:
        """Free the least recently used sequence of those that are not used. False if there is none."""
        key = next((key for key in self._places if key not in used), None)
        if key is not None:
            self.close(key, keep=True)
        return key is not None

    def _stop_restore(self) -> bool:
        """End a restore that has locked memory. False if there is none."""
        fetch = next((fetch for fetch in self._fetches.values() if fetch.node is not None), None)
        if fetch is not None and self.store is not None:
            self.store.restores.cancel(fetch)
        return fetch is not None

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what the tree has; of a namespace, also where fewer tokens than one entry depends on are given."""
        tree = self.prefixes.tree
        key = self._elements(tokens, 0).tobytes()
        named = [root.namespace for root in tree.roots() if namespace in (None, requested(root.namespace))]
        reached = [tree.reached(one, key) for one in named]
        nodes = [node for node, offset in reached if node.start + offset == len(key) // TOKEN]
        while sum(self.prefixes.discard(tree.discarding(nodes), ALL, "what drafts are made of was removed")):
            pass  # removing some may leave others idle

    # -- the whole ----------------------------------------------------------------------------------------------

    def stepped(self, tokens: int, seconds: float) -> None:
        if self.store is not None:
            self.store.stepped(tokens, seconds)

    def pump(self, budget: int = BUSY) -> bool:
        """Between two steps: remove what has expired, go on with restores, and read up to about `budget` bytes for the
        store. False if nothing is left to read."""
        self.prefixes.expire()
        if self.store is None:
            return False
        for fetch in self._fetches.values():
            self.store.restores.advance(fetch, lambda fetch=fetch: fetch.key, enters=False)
        return self.store.pump(budget)

    def reset(self) -> None:
        """Drop everything, in whatever state an error has left it. Completions begin again."""
        self._places.clear()
        self._fetches.clear()
        self.memory.clear()
        self.prefixes = Prefixes(self.memory, shares=self._shares, clock=self._clock)
        if self.store is not None:
            self.store.reset(self.prefixes)

    def shut_down(self) -> None:
        """Free all memory, at the end. Its store has stopped."""
        for key in [*self._places, *self._fetches]:
            self.close(key, keep=False)
        self.prefixes.clear("the engine ends")

    def check(self) -> None:
        assert self.memory.step is None
        self.memory.check()
        locked: list[Node] = [place.prefix.node for place in self._places.values()]
        if self.store is not None:
            self.store.check()
            locked += self.store.restores.locks()
        self.prefixes.check(locked)
        assert set(self.memory.sequences) <= {place.seq for place in self._places.values()}
        assert not self._places.keys() & self._fetches.keys()
        for place in self._places.values():
            assert place.apart or place.prefix.published <= self.memory.length(place.seq) <= len(place.elements)
            assert not (place.apart and (place.prefix.key or place.prefix.published or place.elements))
