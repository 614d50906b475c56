"""sequence_manager: assigns sequences of memory to completions, and keeps what they computed in the prefix tree. The
scheduler's view of memory.

Always true:
  * every sequence in memory belongs to exactly one running completion;
  * a completion without a `Prefix` has K/V that encode removed text, which are never shared.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from kvcellar.engine.core.drafting import Drafting
from kvcellar.engine.core.request import Completion, Scheduled, Status
from kvcellar.engine.messages import Admitted
from kvcellar.errors import NotSupported
from kvcellar.memory.plan import Feed
from kvcellar.memory.prefix.kv_events import KvEvents
from kvcellar.memory.prefix.node import TOKEN, Reuse, key_of
from kvcellar.memory.prefix_cache import PrefixCache
from kvcellar.memory.prefixes import EVERY, SLICE, USUAL, Prefix, Prefixes, Shares
from kvcellar.memory.snapshot import StoredImage
from kvcellar.memory.spans import Span
from kvcellar.memory.store import OpenStore, Store

if TYPE_CHECKING:
    from kvcellar.engine.core.seeing import Seeing
    from kvcellar.memory.memory import Memory

log = logging.getLogger("kvcellar.engine")
COMPUTED_WHOLE = "all tokens of a prompt see each other, so it is computed whole, and no other prompt begins with it"


@dataclass(eq=False, slots=True)
class _Waiting:
    """What is known of a completion that waits. Its tokens do not change meanwhile."""

    key: bytes  # of its tokens
    shared: dict[int, int] = field(default_factory=dict[int, int])  # how many tokens it waits for, by prompt's sequence


class SequenceManager:
    def __init__(
        self,
        memory: "Memory",
        drafting: Drafting,
        *,
        in_parts: bool = True,
        spare: int = EVERY,
        shares: Shares = USUAL,
        events: KvEvents | None = None,
        open_store: OpenStore | None = None,
        seeing: "Seeing | None" = None,
    ) -> None:
        """`in_parts` and `spare` as `PrefixCache` has them. `events`: what is in memory is published there. `seeing`:
        features of images; None: the model takes none."""
        self.memory, self.drafting, self.events, self.seeing = memory, drafting, events, seeing
        self.cache = PrefixCache(
            memory, in_parts=in_parts, spare=spare, shares=shares, watch=events, open_store=open_store
        )
        if seeing is not None and self.store is not None:
            seeing.use_tiers(self.store.features)
        self._waiting: dict[Completion, _Waiting] = {}
        self._running: dict[int, tuple[Completion, Prefix]] = {}  # those that have a prefix, by sequence
        self.pins_refused = self.pins_released = 0
        self.shifts = 0  # context shifts that rotated keys
        self.recomputes: Counter[str] = Counter()  # context shifts that recompute text instead, by reason

    @property
    def prefixes(self) -> Prefixes:
        return self.cache.prefixes

    @property
    def store(self) -> Store | None:
        return self.cache.store

    # -- cells ------------------------------------------------------------------------------------------------------

    def free(self) -> Mapping[str, int]:
        """Free cells of each group."""
        return self.memory.free()

    def available(self, beside: Collection[Completion]) -> Mapping[str, int]:
        """Cells of each group that are free, or could be without these completions: none of them uses them, and they
        are not pinned. Costs the runs of their sequences."""
        capacity, pinned = self.memory.storage.capacity(), self.prefixes.pinned_cells()
        used = self.memory.used([one.seq for one in beside if one.seq is not None and self.memory.has(one.seq)])
        return {name: cells - used[name] - pinned.get(name, 0) for name, cells in capacity.items()}

    def reserve(self, tokens: int, sequences: int) -> None:
        """Keep the cells and state rows of so many tokens and sequences for the next step, in place of what was kept
        before."""
        self.memory.reserve(tokens, sequences)

    def evict(self, group: str | None, cells: int, *, restores: bool = True) -> bool:
        """Free memory that no sequence uses (see `PrefixCache.evict`). At last, with `restores`, what is restored for
        waiting completions, the youngest first: these compute it instead. False if there is nothing."""
        return self.cache.evict(group, cells) or (restores and self.cache.stop_restore())

    def unpin(self) -> bool:
        """Unpin what was pinned first: a request that runs alone needs its memory. False if nothing is pinned."""
        if not self.prefixes.tree.pins.release_oldest():
            return False
        self.pins_released += 1
        log.warning("a pin was released: a request that runs alone needs its memory")
        return True

    def _pin(self, completion: Completion) -> None:
        """Pin the prompt of a completion, as far as it is in memory."""
        request = completion.request
        namespace, key, tree = request.space, request.key, self.prefixes.tree
        request.pinned = bool(tree.pin(tree.peek(namespace), key))
        if not request.pinned and self.prefixes.restorable(namespace, key):
            self.pins_refused += 1
            log.warning("a prompt of %d tokens was not pinned: too much is pinned already", len(request.prompt))

    # -- completions --------------------------------------------------------------------------------------------------

    def arrived(self, completion: Completion) -> None:
        """A completion waits from now on: what tiers have of its tokens is read meanwhile."""
        waiting = self._waiting[completion] = _Waiting(completion.text_key)
        if completion.reusable:
            self.cache.prefetch(completion.key, completion.request.space, lambda: waiting.key)
            self.drafting.expect(completion)

    def forget(self, completion: Completion) -> None:
        """A completion is over, whether it has run or not."""
        self._waiting.pop(completion, None)
        self.cache.cancel(completion.key)

    def shares(self, completion: Completion, prompts: Sequence[Completion]) -> bool:
        """Whether one of the running `prompts` is about to compute tokens that a waiting completion needs, too: then it
        waits for them. The running one leaves a checkpoint where they diverge, so this is called before it goes on. It
        waits for older requests only: else younger ones could overtake it without end, and not for a prompt that has to
        be computed whole. Costs the tokens that they share once, and then the number of prompts."""
        if completion.request.images is not None and completion.request.images.digest:
            return False
        waiting, space = self._of(completion), completion.request.space
        for other in prompts:
            found = self._running.get(other.seq or 0)
            if found is None or other.key > completion.key or other.request.space != space:
                continue
            _, prefix = found
            if (alike := waiting.shared.get(prefix.seq)) is None:
                alike = self.cache.shared_soon(prefix, space, waiting.key, completion.reusable)
                waiting.shared[prefix.seq] = alike
            if alike > other.computed:
                return True
        return False

    def reads_back(self, completion: Completion, *, enters: bool) -> bool:
        """Whether tokens of a waiting completion are being read back. They enter memory when it `enters`: when it could
        be admitted."""
        waiting = self._of(completion)
        return self.cache.reads_back(completion.key, lambda: waiting.key, enters=enters)

    def describe(self, completion: Completion) -> str:
        """What a waiting completion waits for, for the log."""
        if (fetch := self.cache.fetches.get(completion.key)) is None:
            return "reads nothing back"
        return f"{'read back' if fetch.done else 'reading'}, {len(fetch.reads)} read and {len(fetch.chain)} to read"

    def _of(self, completion: Completion) -> _Waiting:
        if completion not in self._waiting:  # it was preempted
            self.arrived(completion)
        return self._waiting[completion]

    def reuse(self, completion: Completion) -> Reuse:
        """What memory has of a waiting completion. Changes nothing."""
        return self.prefixes.reuse(completion.request.space, self._of(completion).key, completion.reusable)

    def admit(self, completion: Completion) -> None:
        """Assign a sequence to `completion`, with the prefix of its tokens that is in memory. At least one token is
        left to compute."""
        request, waiting = completion.request, self._waiting.get(completion)
        key = waiting.key if waiting is not None else completion.text_key
        self._publish_needed(request.space, key)
        marks, most = request.submission.checkpoint_positions, completion.reusable
        prefix = self.cache.restore(request.space, key, marks, request.retention, most=most)
        self._running[prefix.seq] = completion, prefix
        completion.seq, completion.computed = prefix.seq, prefix.restored

    def drop_features(self, which: Callable[[StoredImage], bool], running: Sequence[Completion]) -> None:
        """Free the features of these images, as far as no completion needs them."""
        if self.seeing is not None:
            self.seeing.drop(which, running)

    def _publish_needed(self, namespace: str, key: bytes) -> None:
        """Publish what running completions have drawn, as far as a key goes on with it."""
        for other, prefix in self._running.values():
            at = prefix.published
            if prefix.root.namespace == namespace and at < other.computed and len(key) > at * TOKEN:
                drawn = key_of(other.tokens[at : at + 1])
                if key.startswith(drawn, at * TOKEN) and key.startswith(prefix.key[: at * TOKEN]):
                    self._publish(other, prefix, at=(other.computed,))

    def start(self, completion: Completion) -> None:
        """The completion, which was admitted, begins to run."""
        assert completion.seq is not None
        request, (_, prefix) = completion.request, self._running[completion.seq]
        self.prefixes.use(prefix)
        self._waiting.pop(completion, None)
        read = self.cache.was_read(completion.key)
        if request.admitted is None:  # not counted again after a preemption
            request.admitted = time.perf_counter()
            last = len(request.prompt) - 1  # in a request that goes on, there is more behind the prompt
            of_prompt = replace(
                prefix, key=request.key, matched=min(prefix.matched, last), restored=min(prefix.restored, last)
            )
            request.cached = of_prompt.restored
            images = request.images
            recall = self.prefixes.explain(
                of_prompt,
                read=read,
                owner=request.retention.owner,
                most=min(last, reading.known) if (reading := request.prompt_reading) is not None else None,
                whole=COMPUTED_WHOLE if images is not None and images.digest and not completion.reusable else "",
                images=images.named(request.submission.image_places) if images is not None else (),
            )
            if (rewrite := request.submission.rewrite) is not None:
                recall = replace(recall, detail=f"{recall.detail}; {rewrite}", rewrite=rewrite)
            request.recall = recall
            request.emit(Admitted())

    def next_end(self, completion: Completion) -> int:
        """The most tokens of a running completion that may be in memory after the next step: it ends at a checkpoint
        where the model cannot leave one inside a step."""
        end, found = len(completion.tokens), self._running.get(completion.seq or 0)
        if self.seeing is not None:
            end = self.seeing.end(completion, end)
        return end if found is None else self.cache.step_end(found[1], completion.computed, end)

    def feeds(self, scheduled: Sequence[Scheduled]) -> tuple[Feed, ...]:
        """The feeds of a step (see `PrefixCache.with_rows`)."""
        places = {seq: prefix for seq, (_, prefix) in self._running.items()}
        return self.cache.with_rows(list(map(self._feed, scheduled)), self.evict, places)

    def _feed(self, scheduled: Scheduled) -> Feed:
        completion, seq = scheduled.completion, scheduled.completion.seq
        assert seq is not None, "a completion without a sequence was scheduled"
        new, found = Span(completion.computed, completion.computed + scheduled.rows), self._running.get(seq)
        positions = self.cache.checkpoints(found[1], new) if found is not None else ()
        if (images := completion.request.images) is not None:
            positions = tuple(pos for pos in positions if not images.inside(pos))
        claimed = found is not None and self.prefixes.claimed(found[1], new)
        adapter = use.number if (use := completion.request.adapter) is not None else 0
        revertible = scheduled.drafts > 0
        return Feed(seq, new, checkpoints=positions, revertible=revertible, adapter=adapter, claimed=claimed)

    def keep(self, completion: Completion, tokens: int, claim: int | None, drafts: Sequence[int] = ()) -> None:
        """A step has computed so many tokens of the completion, of which `drafts` are not in its text yet: those of its
        prompt are published at once, others when a request needs them, or at its end. `claim` is what the step has
        left."""
        completion.computed += tokens
        found = self._running.get(completion.seq or 0)
        if found is not None and (claim is not None or completion.status is Status.PREFILL):
            self._publish(*found, claim, drafts)

    def _publish(
        self,
        completion: Completion,
        prefix: Prefix,
        claim: int | None = None,
        drafts: Sequence[int] = (),
        *,
        at: Sequence[int] = (),
    ) -> None:
        tokens = [*completion.tokens, *drafts] if drafts else completion.tokens
        self.prefixes.publish(prefix, tokens, completion.computed, claim, at=at)

    def fork(self, completion: Completion, sibling: Completion) -> None:
        """Assign a sequence to `sibling` that shares all cells of `completion`."""
        assert completion.seq is not None
        seq = self.cache.fork(completion.seq)
        sibling.seq, sibling.computed = seq, completion.computed
        if (found := self._running.get(completion.seq)) is not None:
            self._running[seq] = sibling, self.prefixes.fork(found[1], seq)
        self.drafting.fork(completion, sibling)

    def release(self, completion: Completion, *, at: int | None = None) -> None:
        """Free the completion's sequence; what it computed is published before, to be resumed at its end, and at the
        last position up to `at` where that is possible."""
        self.drafting.close(completion)
        seq = completion.seq
        found = self._running.pop(seq, None) if seq is not None else None
        if found is not None:
            keep = self._has(seq, completion.computed)
            self.cache.end(found[1], completion.tokens, keep=keep, cut=at)
            if completion.request.retention.pinned and completion.request.admitted is not None:
                self._pin(completion)
        elif seq is not None and self.memory.has(seq):
            self.memory.drop(seq)
        completion.seq, completion.computed = None, 0

    def shift(self, completion: Completion, span: Span) -> str | None:
        """Context shift: remove `span` of the completion, and move the following tokens down. Returns None, or the
        reason why an exact shift is not possible. Raises `CacheFull` if copying shared keys needs more cells than are
        free. If it returns a reason or raises, no memory has changed.
        """
        assert completion.seq is not None
        if span.end >= completion.computed:  # what stays encodes only tokens that stay
            self._recompute(completion, span)
            return None
        if (found := self._running.pop(completion.seq, None)) is not None:
            self.prefixes.release(found[1])  # its cells can be rotated in place once the tree does not share them
        try:
            self.memory.remove(completion.seq, span)
        except NotSupported as refused:
            self._running[completion.seq] = completion, self._place(completion, completion.seq)
            return refused.reason
        except (RuntimeError, MemoryError) as error:  # not enough scratch memory on the device
            log.warning("a shift of %s failed with %s: %s", span, type(error).__name__, error)
            return f"the device failed with {type(error).__name__}"
        self.drafting.close(completion)
        completion.shift(span)
        self.shifts += 1
        return None

    def movable(self, completion: Completion, span: Span) -> bool:
        """Whether a span of a completion may be dropped, and what follows have its positions: images stay where they
        are, and positions of several axes are those of the prompt."""
        images = completion.request.images
        return images is None or self.seeing is None or (not self.seeing.vision.axes and images.end <= span.start)

    def drop(self, completion: Completion, span: Span, reason: str) -> None:
        """Drop `span` from a completion's text if a shift is not possible, for `reason`. The tokens after it are
        recomputed, and those before it from the nearest position where memory can resume."""
        self._recompute(completion, span)
        self.recomputes[reason] += 1

    def _place(self, completion: Completion, seq: int) -> Prefix:
        """A place in the tree for a completion that has lost its own."""
        request = completion.request
        return self.prefixes.begin(seq, request.space, completion.text_key, request.retention)

    def _recompute(self, completion: Completion, span: Span) -> None:
        self.release(completion, at=span.start)
        completion.drop(span)
        self.admit(completion)

    # -- after errors -------------------------------------------------------------------------------------------

    def recover(self, completions: Iterable[Completion]) -> None:
        """After an error at any point: keep the sequences of `completions` that are consistent, and drop all others,
        and all that the prefix tree has.

        A completion keeps its sequence if memory has exactly its computed tokens, and some tokens are left to compute.
        Otherwise it is computed again from the beginning. (If none is left, the logits for the next draw are lost.)
        """
        if self.memory.step is not None:
            self.memory.abandon()
        self._reset_cache()
        owned: set[int] = set()
        for completion in completions:
            running = completion.status is not Status.WAITING and completion.uncomputed > 0
            seq = completion.seq
            if seq is None or not running or not self._has(seq, completion.computed) or seq in owned:
                completion.seq = None
                self.drafting.close(completion)
                continue
            owned.add(seq)
            if self.memory.derived(seq) is None:
                self._running[seq] = completion, self._place(completion, seq)
        for seq in self.memory.sequences:
            if seq not in owned:
                self.memory.drop(seq)

    def _has(self, seq: int | None, tokens: int) -> bool:
        return seq is not None and self.memory.has(seq) and self.memory.length(seq) == tokens

    def clear_cache(self) -> bool:
        """Evict all that no completion has a place in and is not pinned, which a request that runs alone needs. False
        if there was nothing. Cells that completions share with it are not free then, but are theirs alone."""
        return self.prefixes.clear("a request that runs alone needed its memory")

    def clear_some(self) -> bool:
        """The same for a few pins, which are released first, or checkpoints and leaves."""
        pins = self.prefixes.tree.pins
        released = sum(1 for _ in takewhile(lambda _: pins.release_oldest(), range(SLICE)))
        return bool(released) or self.prefixes.clear("the cache was cleared", SLICE)

    def _reset_cache(self) -> None:
        """The same in whatever state an error has left the tree: running completions have no place in it any more."""
        self._running.clear()
        self._waiting.clear()
        self.cache.reset()
        if self.events is not None:
            self.events.device_cleared()

    def clear(self) -> None:
        """Free all memory."""
        self._reset_cache()
        self.memory.clear()

    def check(self, running: Sequence[Completion]) -> None:
        """Assert the invariants of memory and its owners, given the running completions."""
        self.cache.check(prefix for _, prefix in self._running.values())
        owned = [completion.seq for completion in running]
        assert len(owned) == len(set(owned)), "a sequence has two owners"
        assert set(self.memory.sequences) <= set(owned), "a sequence has no owner"
        assert self._running.keys() <= set(owned), "a completion that does not run has a place in the tree"
        for completion in running:
            assert completion.seq is not None
            assert self.memory.length(completion.seq) == completion.computed
            found = self._running.get(completion.seq)
            begun = self.memory.has(completion.seq)  # else it has a sequence, and no step had its first tokens
            assert (found is None) <= (begun and self.memory.derived(completion.seq) is not None)
            assert found is None or (found[0] is completion and found[1].published <= completion.computed)
            assert found is None or found[1].seq == completion.seq
