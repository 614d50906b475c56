"""prefix_cache: the sequences of one memory, the tree of what they computed, and the store below it.

The target model has one, and a drafter with a memory of its own has another. Owners are the keys of completions.

Always true:
  * what no sequence uses may be evicted at any time; its tokens are then computed again when needed;
  * each node of the tree that is locked is so by the place of a sequence, or by what is being read back for an owner.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from math import inf

from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Feed
from kvcellar.memory.prefix.node import TOKEN, Watch, common
from kvcellar.memory.prefix.why import ReadBack
from kvcellar.memory.prefixes import EVERY, NEAR, USUAL, Prefix, Prefixes, Shares
from kvcellar.memory.restores import Fetch
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.memory.spans import Span
from kvcellar.memory.store import BUSY, OpenStore

Owner = tuple[int, int]  # the key of a completion


class PrefixCache:
    """Allocates sequence numbers."""

    def __init__(
        self,
        memory: Memory,
        *,
        in_parts: bool = True,
        spare: int = EVERY,
        shares: Shares = USUAL,
        watch: Watch | None = None,
        open_store: OpenStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`in_parts`: a step can leave checkpoints inside the tokens of a sequence. `spare`: tokens between spare ones
        then. `watch` is told of what the tree
        has. `clock` is that of retention."""
        self.memory, self.in_parts, self.clock = memory, in_parts, clock
        spare = spare if memory.rows.capacity is not None else 0
        self._new_tree = partial(Prefixes, memory, spare=spare, shares=shares, clock=clock, watch=watch)
        self.prefixes = self._new_tree()
        self.store = None if open_store is None else open_store(memory, self.prefixes, self.evict)
        self._numbers = count(1)
        self.fetches: dict[Owner, Fetch] = {}  # what is being read back for owners that have no sequence

    # -- before there is a sequence -----------------------------------------------------------------------------

    def prefetch(self, owner: Owner, namespace: str, key: Callable[[], bytes]) -> None:
        """Begin to read what tiers have of a key."""
        if self.store is not None and owner not in self.fetches:
            self.fetches[owner] = self.store.restores.prefetch(namespace, key)

    def reads_back(self, owner: Owner, key: Callable[[], bytes], *, enters: bool) -> bool:
        """Whether tokens are being read back for an owner. They enter memory when it `enters`: when it could have a
        sequence."""
        if self.store is None or (fetch := self.fetches.get(owner)) is None:
            return False
        return self.store.restores.advance(fetch, key, enters=enters)

    def was_read(self, owner: Owner) -> ReadBack:
        """What was read back for an owner, which has a sequence from now on."""
        fetch = self.fetches.pop(owner, None)
        return fetch.read_back if fetch is not None else ReadBack()

    def cancel(self, owner: Owner) -> None:
        """Read nothing more for an owner. Not an error if nothing is read."""
        if (fetch := self.fetches.pop(owner, None)) is not None and self.store is not None:
            self.store.restores.end(fetch)

    def stop_restore(self) -> bool:
        """End the restore of the youngest owner for which memory is locked. False if there is none."""
        locking = [owner for owner, fetch in self.fetches.items() if fetch.node is not None]
        if self.store is None or not locking:
            return False
        self.store.restores.end(self.fetches[max(locking)])
        return True

    def shared_soon(self, prefix: Prefix, namespace: str, key: bytes, most: int) -> int:
        """How many of the first `most` tokens of a key can be restored once a running sequence has computed its own,
        which leaves a checkpoint there; 0 if memory has nearly as many now."""
        alike = min(common(prefix.key, key), most)
        if prefix.root.namespace != namespace or alike < self.prefixes.restorable(namespace, key) + NEAR:
            return 0
        self.prefixes.want(prefix, alike)
        return alike

    # -- a sequence ---------------------------------------------------------------------------------------------

    def number(self) -> int:
        """That of a new sequence."""
        return next(self._numbers)

    def restore(
        self,
        namespace: str,
        key: bytes,
        marks: Iterable[int] = (),
        options: RetentionOptions = NO_OPTIONS,
        *,
        most: int | None = None,
    ) -> Prefix:
        """Begin a new sequence (see `Prefixes.restore`)."""
        return self.prefixes.restore(self.number(), namespace, key, marks, options, most=most)

    def step_end(self, prefix: Prefix, at: int, most: int) -> int:
        """The position, `most` at the furthest, up to which the next step of a sequence may compute: it ends at a
        checkpoint where the model cannot leave one inside a step."""
        return most if self.in_parts else min(most, self.prefixes.next_wanted(prefix, at) or most)

    def checkpoints(self, prefix: Prefix, new: Span) -> tuple[int, ...]:
        """Where a step that computes the tokens `new` leaves checkpoints."""
        wanted = self.prefixes.checkpoints(prefix, new, spare=self.in_parts)
        return wanted if self.in_parts else tuple(pos for pos in wanted if pos == new.end)

    def with_rows(
        self, feeds: Sequence[Feed], evict: Callable[[None, int], bool], places: Mapping[int, Prefix]
    ) -> tuple[Feed, ...]:
        """The feeds of a step. Where too few state rows are free, checkpoints inside feeds replace those of the tree
        that are of less value, and are left out otherwise. `evict` frees a row that the step needs. `places`: those of
        sequences that have one."""
        if self.memory.rows.capacity is None:
            return tuple(feeds)
        self.free_rows(len(feeds), lambda: evict(None, 1))
        need, left_out = len(feeds), set[tuple[int, int]]()
        inside = (one for feed in feeds if feed.between for one in self._inside(feed, places[feed.seq]))
        for lasts, saves, pos, seq in sorted(inside, reverse=True):
            if self.free_rows(need + 1, partial(self.prefixes.evict_row, saves, spare=not lasts)):
                need += 1
            else:
                left_out.add((seq, pos))
        return tuple(
            feed._replace(checkpoints=tuple(pos for pos in feed.checkpoints if (feed.seq, pos) not in left_out))
            for feed in feeds
        )

    def _inside(self, feed: Feed, place: Prefix) -> Iterator[tuple[bool, int, int, int]]:
        """The checkpoints inside a feed: whether it is not spare; how many tokens it saves, counted from the one
        before, or from such a one; its position; and the sequence."""
        last = feed.pos.start
        for before, pos in pairwise((feed.pos.start, *feed.between)):
            if self.prefixes.spare(place, pos):
                yield False, pos - before, pos, feed.seq
            else:
                yield True, pos - last, pos, feed.seq
                last = pos

    def free_rows(self, need: int, evict: Callable[[], bool]) -> bool:
        """Call `evict` until so many state rows are free. False if it returns False before."""
        rows = self.memory.rows
        rows.trim(most=0, spare=need)
        while (rows.free or 0) < need:
            if not evict():
                return False
        return True

    def fork(self, seq: int) -> int:
        """A new sequence that shares all cells of another one."""
        length, fork = self.memory.length(seq), self.number()
        kept = self.memory.fork(seq, fork, length)
        assert kept == length, f"only {kept} of {length} tokens could be shared"
        return fork

    def end(self, prefix: Prefix, tokens: Sequence[int], *, keep: bool = True, cut: int | None = None) -> None:
        """End a sequence. With `keep`, what it computed is published before, to be resumed at its end, and at the last
        position up to `cut` where that is possible, and tiers may have it."""
        seq, memory = prefix.seq, self.memory
        try:
            if keep and memory.has(seq) and (end := memory.length(seq)) > prefix.restored:
                middle = memory.can_cut(seq, cut) if cut is not None else end
                self.prefixes.publish(prefix, tokens, end, at=(middle, end))
                if self.store is not None and prefix.options.stored:
                    key = prefix.key[: prefix.published * TOKEN]
                    self.store.keep(prefix.root.namespace, key, self.prefixes.retention(prefix))
        finally:
            self.prefixes.release(prefix)
            if memory.has(seq):
                memory.drop(seq)

    # -- memory -------------------------------------------------------------------------------------------------

    def evict(self, group: str | None, cells: int) -> bool:
        """Free some cells of a group that no sequence uses, about as many as given, or, without a group, a state row.
        False if there are none. As many bytes of what waits to be written for the store are read before, as far as
        there is staging memory."""
        if self.store is not None:
            storage = self.memory.storage
            share = cells / storage.capacity()[group] if group is not None else 0.0
            self.store.pump(max(BUSY, int(share * storage.bytes)), seconds=inf)
        found = self.prefixes.evict_row() if group is None else self.prefixes.evict(group, cells)
        return found or (self.store is not None and self.store.stop_reading())

    # -- the whole ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all but the sequences, in whatever state an error has left it: they have no places any more."""
        self.fetches.clear()
        self.memory.claims.clear()
        self.prefixes = self._new_tree(totals=self.prefixes.ended())
        if self.store is not None:
            self.store.reset(self.prefixes)

    def check(self, places: Iterable[Prefix]) -> None:
        """Assert what is always true, where `places` are those of all sequences that have one."""
        self.memory.check()
        locked = [place.node for place in places]
        if self.store is not None:
            self.store.check()
            locked += self.store.restores.locks()
        self.prefixes.check(locked)
