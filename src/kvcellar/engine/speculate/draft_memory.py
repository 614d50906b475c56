"""draft_memory: what a drafter computes of texts, kept in a prefix tree and in tiers of its own, beside the target's.

    seq, = cache.open([text])                  # begins with what is kept of the text
    plan = memory.begin(Batch(cache.feeds([(text.key, n)])))
    ...                                        # the drafter's forward
    cache.keep(text, memory.commit().get(seq)) # other completions find it from now on
    cache.close(text.key, keep=True)           # the completion is over

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from kvcellar.engine.speculate.chain import Key
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Feed
from kvcellar.memory.prefix.node import TOKEN
from kvcellar.memory.prefix_cache import PrefixCache
from kvcellar.memory.prefixes import USUAL, Prefix, Shares
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.snapshot import looking_ahead, requested
from kvcellar.memory.spans import Span
from kvcellar.memory.store import BUSY, OpenStore, Store

ALL = 1 << 40  # nodes


class Text(Protocol):
    """The text of a completion, the prompt and the tokens so far, and how what is computed of it is to be kept."""

    @property
    def key(self) -> Key: ...

    @property
    def namespace(self) -> str: ...

    @property
    def text(self) -> Sequence[int]: ...

    @property
    def retention(self) -> RetentionOptions: ...


@dataclass(eq=False, slots=True)
class _Place:
    """A completion with a sequence. `elements` are those of its text that are known; a sequence that is `apart` has
    none, and an empty prefix."""

    prefix: Prefix
    elements: "array[int]"
    apart: bool = False


class DraftMemory:
    """A memory whose sequences belong to completions. Between two calls of a drafter each of them holds a prefix of the
    text of its completion (unless it is apart), and there are no others. On the engine's thread."""

    def __init__(
        self,
        memory: Memory,
        *,
        ahead: int = 0,
        in_parts: bool = True,
        shares: Shares = USUAL,
        open_store: OpenStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ahead`: the entry of a token depends on so many tokens that follow it, which are no entries yet. For the
        others see `PrefixCache`."""
        self.memory, self.ahead = memory, ahead
        self.cache = PrefixCache(memory, in_parts=in_parts, shares=shares, open_store=open_store, clock=clock)
        self._places: OrderedDict[Key, _Place] = OrderedDict()  # the least recently used first

    @property
    def store(self) -> Store | None:
        return self.cache.store

    # -- texts --------------------------------------------------------------------------------------------------

    def expect(self, key: Key, namespace: str, tokens: Sequence[int]) -> None:
        """A completion waits: begin to read what is stored of its text."""
        if key not in self._places:
            self.cache.prefetch(key, namespace, lambda: self._elements(tokens, 0).tobytes())

    def open(self, texts: Sequence[Text]) -> list[int | None]:
        """The sequence of each of these texts. That of a new completion begins with what is kept of its text; at least
        one token is left to compute.

        None where it is not to be computed yet: what is stored of it is being read, or another of these texts has to
        be computed first, because it begins alike.
        """
        found: list[int | None] = []
        first: list[_Place] = []  # of the texts before: these are computed before others
        for text in texts:
            if text.key not in self._places:
                self._begin(text, first)
            place = self._places.get(text.key)
            if place is not None:
                self._places.move_to_end(text.key)
                if not place.apart:
                    first.append(place)
            found.append(place.prefix.seq if place is not None else None)
        return found

    def begin_apart(self, text: Text) -> int:
        """Give a completion another sequence, which is empty, and return it. Its entries begin at a position that the
        drafter chooses, so it is not shared, nor kept when the completion is over."""
        self.close(text.key, keep=False)
        seq = self.cache.number()
        prefix = self.cache.prefixes.begin(seq, text.namespace, b"", text.retention)
        self._places[text.key] = _Place(prefix, array("q"), apart=True)
        return seq

    def _begin(self, text: Text, first: Sequence[_Place]) -> None:
        """Give a completion its sequence, unless it has to wait for what is read back, or for another text."""
        elements = self._elements(text.text, 0)
        key = elements.tobytes()
        self.cache.prefetch(text.key, text.namespace, lambda: key)
        if self.cache.reads_back(text.key, lambda: key, enters=True) or self._shared_soon(text.namespace, key, first):
            return
        prefix = self.cache.restore(text.namespace, key, (), text.retention)
        self.cache.was_read(text.key)
        self.cache.prefixes.use(prefix)
        self._places[text.key] = _Place(prefix, elements)

    def _shared_soon(self, namespace: str, key: bytes, first: Sequence[_Place]) -> bool:
        """Whether one of other texts is about to compute what a key needs, too. It leaves a checkpoint there."""
        most = len(key) // TOKEN - 1
        return any(
            self.cache.shared_soon(place.prefix, namespace, key, most) > self.memory.length(place.prefix.seq)
            for place in first
        )

    def _elements(self, text: Sequence[int], start: int) -> "array[int]":
        """What the tree compares in place of the tokens of a text, from entry `start` on."""
        return looking_ahead(text, self.ahead) if start == 0 else array("q", text[start + self.ahead :])

    def end(self, key: Key, most: int) -> int:
        """The position, `most` at the furthest, up to which the next step may compute a text."""
        place = self._places[key]
        return self.cache.step_end(place.prefix, self.memory.length(place.prefix.seq), most)

    def feeds(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Feed, ...]:
        """The feeds of a step that computes so many new tokens of each of these completions."""
        feeds = [self._feed(self._places[key], tokens) for key, tokens in wanted]
        places = {self._places[key].prefix.seq: self._places[key].prefix for key, _ in wanted}
        return self.cache.with_rows(feeds, self.cache.evict, places)

    def _feed(self, place: _Place, tokens: int) -> Feed:
        seq = place.prefix.seq
        start = self.memory.length(seq)
        new = Span(start, start + tokens)
        if place.apart:
            return Feed(seq, new)
        claimed = self.cache.prefixes.claimed(place.prefix, new)
        return Feed(seq, new, checkpoints=self.cache.checkpoints(place.prefix, new), claimed=claimed)

    def keep(self, text: Text, claim: int | None) -> None:
        """What a text began with is kept for others at once, what followed when it is over."""
        if (place := self._places[text.key]).apart:
            return
        end, began = self.memory.length(place.prefix.seq), len(place.prefix.key) // TOKEN
        if len(place.elements) < end:
            place.elements += self._elements(text.text, len(place.elements))
        if claim is not None or place.prefix.published < min(end, began):
            self.cache.prefixes.publish(place.prefix, place.elements, end, claim)

    @contextmanager
    def forks(self) -> Iterator[Callable[[int], int]]:
        """Within the block: what returns the fork of a sequence, made when it is first asked for. Forks are dropped at
        its end."""
        made: dict[int, int] = {}

        def fork(seq: int) -> int:
            if seq not in made:
                made[seq] = self.cache.number()
                self.memory.fork(seq, made[seq], self.memory.length(seq))
            return made[seq]

        try:
            yield fork
        finally:
            for one in filter(self.memory.has, made.values()):
                self.memory.drop(one)

    def fork(self, key: Key, other: Key) -> None:
        """The completion `other` begins with the text of `key`."""
        if (place := self._places.get(key)) is None or not self.memory.has(place.prefix.seq):
            return
        prefix = self.cache.prefixes.fork(place.prefix, self.cache.fork(place.prefix.seq))
        self._places[other] = replace(place, prefix=prefix, elements=place.elements[:])

    def close(self, key: Key, *, keep: bool) -> None:
        """A completion is over, or its text was changed: free its sequence. What was computed is kept for others if
        `keep` is true. Not an error if there is none."""
        self.cache.cancel(key)
        if (place := self._places.pop(key, None)) is not None:
            self.cache.end(place.prefix, place.elements, keep=keep and not place.apart)

    # -- memory -------------------------------------------------------------------------------------------------

    def make_free(self, cells: int, rows: int, used: Iterable[Key]) -> bool:
        """Evict until so many cells of every group and so many state rows are free: first what no completion uses, then
        what completions other than the `used` ones have. False if that does not suffice."""
        keys = set(used)
        while (short := self._short(cells, rows)) is not None:
            if not (self.cache.evict(*short) or self._end_idle(keys) or self.cache.stop_restore()):
                return False
        return True

    def _short(self, cells: int, rows: int) -> tuple[str | None, int] | None:
        """A group with too few free cells, and how many are missing; None in its place for state rows."""
        for group, free in self.memory.free().items():
            if free < cells:
                return group, cells - free
        if self.memory.rows.capacity is not None and not self.cache.free_rows(rows, self.cache.prefixes.evict_row):
            return None, 1
        return None

    def _end_idle(self, used: set[Key]) -> bool:
        """Free the least recently used sequence of those that are not used. False if there is none."""
        key = next((key for key in self._places if key not in used), None)
        if key is not None:
            self.close(key, keep=True)
        return key is not None

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what the tree has; of a namespace, also where fewer tokens than one entry depends on are given."""
        prefixes, tree = self.cache.prefixes, self.cache.prefixes.tree
        key = self._elements(tokens, 0).tobytes()
        named = [root.namespace for root in tree.roots() if namespace in (None, requested(root.namespace))]
        reached = [tree.reached(one, key) for one in named]
        nodes = [node for node, offset in reached if node.start + offset == len(key) // TOKEN]
        while sum(prefixes.discard(tree.discarding(nodes), ALL, "what drafts are made of was removed")):
            pass  # removing some may leave others idle

    # -- the whole ----------------------------------------------------------------------------------------------

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of the drafter has computed so many tokens of texts in so many seconds."""
        if self.store is not None:
            self.store.stepped(tokens, seconds)

    def pump(self, budget: int = BUSY) -> bool:
        """Between two steps: remove what has expired, go on with restores, and read up to about `budget` bytes for the
        store. False if nothing is left to read."""
        self.cache.prefixes.expire()
        if self.store is None:
            return False
        for fetch in self.cache.fetches.values():
            self.store.restores.advance(fetch, lambda fetch=fetch: fetch.key, enters=False)
        return self.store.pump(budget)

    def reset(self) -> None:
        """Drop everything, in whatever state an error has left it. Completions begin again."""
        self._places.clear()
        self.cache.reset()
        self.memory.clear()

    def shut_down(self) -> None:
        """Free all memory, at the end. Its store has stopped."""
        for key in [*self._places, *self.cache.fetches]:
            self.close(key, keep=False)
        self.cache.prefixes.clear("the engine ends")

    def check(self) -> None:
        """Assert what is always true between two calls of the drafter."""
        assert self.memory.step is None
        self.cache.check(place.prefix for place in self._places.values())
        assert set(self.memory.sequences) <= {place.prefix.seq for place in self._places.values()}
        assert not self._places.keys() & self.cache.fetches.keys()
        for place in self._places.values():
            prefix = place.prefix
            assert place.apart or prefix.published <= self.memory.length(prefix.seq) <= len(place.elements)
            assert not (place.apart and (prefix.key or prefix.published or place.elements))
