"""manager: assigns sequences of memory to completions and idle sessions. The scheduler's view of memory.

Always true:
  * every sequence in memory belongs to exactly one running completion or one idle session;
  * the memory of an idle session may be evicted at any time; its tokens are then prefilled again when needed.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvcellar.engine.request import Completion, Status
from kvcellar.errors import NotSupported
from kvcellar.spans import Span

if TYPE_CHECKING:
    from kvcellar.cache.memory import Memory

log = logging.getLogger("kvcellar.engine")

NEAR = 16  # tokens whose prefill takes about as long as the overhead of one more step


@dataclass(slots=True)
class Idle:
    """The memory of an idle session: a sequence, and its tokens."""

    seq: int
    tokens: list[int]


class SequenceManager:
    """Allocates sequence numbers. Sessions are numbers, too; each has at most one running completion."""

    def __init__(self, memory: "Memory", *, max_idle: int | None = None, checkpoint_positions: int = 0) -> None:
        """`max_idle`: the most idle sessions that may have memory; None: limited by cells only. `checkpoint_positions`:
        the most positions of one prompt at which a step ends to leave a checkpoint."""
        self.memory, self._max_idle, self._most_checkpoints = memory, max_idle, checkpoint_positions
        self._numbers = count(1)
        self._idle: dict[int, Idle] = {}  # by session, the least recently used first
        self._sessions: set[int] = set()  # the open ones
        self.shifts = 0  # context shifts that rotated keys
        self.recomputes: Counter[str] = Counter()  # context shifts that recompute text instead, by reason

    def free(self) -> Mapping[str, int]:
        return self.memory.free()

    # -- completions --------------------------------------------------------------------------------------------------

    def cached(self, completion: Completion) -> int:
        """The number of a waiting completion's tokens that are already in memory. Changes nothing."""
        return self._source(completion)[1]

    def admit(self, completion: Completion) -> int:
        """Assign a sequence to `completion`, with the prefix of its tokens that is in memory. At least one token is
        left to compute. Returns the length of the prefix."""
        seq, cached = self._source(completion)
        idle = self._idle.pop(completion.request.session, None) if completion.request.session is not None else None
        if idle is not None:
            completion.seq = idle.seq
            self.memory.remove(idle.seq, Span(cached, self.memory.length(idle.seq)))
            self.memory.keep_state(idle.seq)  # the next prompt may diverge at the same position
        else:
            completion.seq = next(self._numbers)
            if seq is not None:
                self.memory.fork(seq, completion.seq, cached)
        if completion.request.admitted is None:  # not counted again after a preemption
            completion.request.admitted = time.perf_counter()
            completion.request.cached = cached
        return cached

    def next_checkpoint(self, completion: Completion) -> int:
        """The most tokens of a running completion that may be in memory after the next step.

        Recurrent state can be resumed only where a step ended. So in a session, a step ends before the last token of
        the prompt, where the same prompt would resume. A step also ends at the `checkpoint_positions` inside the prompt
        (only the last ones, if there are many), so that a rewound session recomputes few tokens even if its memory was
        evicted before.
        """
        request, end = completion.request, len(completion.tokens)
        if request.session is None or completion.dropped or self.memory.rows.capacity is None:
            return end
        last = len(request.prompt) - 1
        positions = request.checkpoint_positions[max(0, len(request.checkpoint_positions) - self._most_checkpoints) :]
        following = bisect_left(positions, completion.computed + NEAR)
        if following < len(positions) and positions[following] <= last - NEAR:
            return positions[following]
        return last if completion.computed < last else end

    def _source(self, completion: Completion) -> tuple[int | None, int]:
        """The sequence from which `completion` can be forked, and the number of tokens that they share. The sequence is
        its session's, or, after a preemption, that of another completion of the same request."""
        most = len(completion.tokens) - 1
        if completion.request.session is not None:
            idle = self._idle.get(completion.request.session)
            return (idle.seq, self._common(idle.seq, idle.tokens, completion, most)) if idle is not None else (None, 0)
        best: tuple[int | None, int] = (None, 0)
        for other in completion.request.completions:
            if other.seq is not None and other.computed > best[1]:
                cached = self._common(other.seq, other.tokens, completion, min(most, other.computed))
                best = max(best, (other.seq, cached), key=lambda found: found[1])
        return best

    def _common(self, seq: int, tokens: list[int], completion: Completion, most: int) -> int:
        derived = self.memory.derived(seq)  # from this position on, K/V encode removed text and cannot be reused
        cached = min(most, common_prefix(tokens, completion.tokens))
        return self.memory.can_cut(seq, cached if derived is None else min(cached, derived))

    def shift(self, completion: Completion, span: Span) -> str | None:
        """Context shift: remove `span` of the completion, and move the following tokens down. Returns None, or the
        reason why an exact shift is not possible. Raises `CacheFull` if copying shared keys needs more cells than are
        free. If it returns a reason or raises, nothing has changed.
        """
        assert completion.seq is not None
        try:
            self.memory.remove(completion.seq, span)
        except NotSupported as refused:
            return refused.reason
        except (RuntimeError, MemoryError) as error:  # not enough scratch memory on the device
            log.warning("a shift of %s failed with %s: %s", span, type(error).__name__, error)
            return f"the device failed with {type(error).__name__}"
        if span.end < completion.computed:
            completion.shift(span)
            self.shifts += 1
        else:  # no token in memory follows the span, so the K/V that are left encode only tokens that are left
            completion.drop(span, self.memory.length(completion.seq))
        return None

    def drop(self, completion: Completion, span: Span, reason: str) -> None:
        """Drop `span` from a completion's text if a shift is not possible, for `reason`. The tokens after it are
        recomputed, and those before it from the nearest position where memory can resume."""
        assert completion.seq is not None
        kept = self.memory.can_cut(completion.seq, min(self._underived(completion), span.start))
        self.memory.remove(completion.seq, Span(kept, completion.computed))
        completion.drop(span, kept)
        self.recomputes[reason] += 1

    def fork(self, completion: Completion, sibling: Completion) -> None:
        """Assign a sequence to `sibling` that shares all cells of `completion`."""
        assert completion.seq is not None
        sibling.seq, sibling.computed = next(self._numbers), completion.computed
        kept = self.memory.fork(completion.seq, sibling.seq, completion.computed)
        assert kept == completion.computed, f"only {kept} of {completion.computed} tokens could be shared"

    def release(self, completion: Completion) -> None:
        """Free the completion's sequence."""
        if completion.seq is not None and self.memory.has(completion.seq):
            self.memory.drop(completion.seq)
        completion.seq, completion.computed = None, 0

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_session(self, session: int) -> None:
        self._sessions.add(session)

    def close_session(self, session: int) -> None:
        """Free its memory. The sequences of its completions that end later are freed, too."""
        self._sessions.discard(session)
        self.evict_session(session)

    def keep(self, session: int, completion: Completion) -> None:
        """At the end of a completion: its sequence replaces that of the idle session.

        Derived K/V, which a context shift moved, are freed: no later prompt can use them.
        """
        if session not in self._sessions:
            self.release(completion)
            return
        self.evict_session(session)
        if kept := self._underived(completion):
            assert completion.seq is not None
            self.memory.remove(completion.seq, Span(kept, completion.computed))
            self._add_idle(session, Idle(completion.seq, completion.tokens[:kept]))
            completion.seq = None
        self.release(completion)

    def _add_idle(self, session: int, idle: Idle) -> None:
        """Add it as the most recently used one, and evict the least recently used one if there are too many."""
        self._idle[session] = idle
        if self._max_idle is not None and len(self._idle) > self._max_idle:
            self.evict_session(next(iter(self._idle)))

    def _underived(self, completion: Completion) -> int:
        """The length of its prefix in memory without derived K/V; 0 after a failed first step."""
        if completion.seq is None or not self.memory.has(completion.seq):
            return 0
        derived = self.memory.derived(completion.seq)
        return completion.computed if derived is None else self.memory.can_cut(completion.seq, derived)

    def fork_session(self, session: int, fork: int) -> None:
        """Fork the sequence of `session`, if it has one, for session `fork`."""
        idle = self._idle.get(session)
        if idle is not None:
            seq = next(self._numbers)
            kept = self.memory.fork(idle.seq, seq, len(idle.tokens))
            self._add_idle(fork, Idle(seq, idle.tokens[:kept]))

    def evict_session(self, session: int) -> None:
        idle = self._idle.get(session)
        if idle is not None:
            self.memory.drop(idle.seq)
            del self._idle[session]

    def evict_idle(self, keep_for: Completion | None = None) -> bool:
        """Evict the least recently used idle session, except that of `keep_for`. False if there is none."""
        for session in self._idle:
            if keep_for is None or session != keep_for.request.session:
                self.evict_session(session)
                return True
        return False

    # -- after errors -------------------------------------------------------------------------------------------

    def recover(self, completions: Iterable[Completion]) -> None:
        """After an error at any point: keep the sequences of `completions` and idle sessions that are consistent, and
        drop all others.

        A completion keeps its sequence if memory has exactly its computed tokens, and some tokens are left to compute.
        Otherwise it is computed again from the beginning. (If none is left, the logits for the next draw are lost.)
        """
        if self.memory.step is not None:
            self.memory.abandon()
        owned: set[int] = set()
        for completion in completions:
            running = completion.status is not Status.WAITING and completion.uncomputed > 0
            kept = running and self._has(completion.seq, completion.computed) and completion.seq not in owned
            if completion.seq is None or not kept:
                completion.seq = None
            else:
                owned.add(completion.seq)
        for session, idle in list(self._idle.items()):
            if session in self._sessions and idle.seq not in owned and self._has(idle.seq, len(idle.tokens)):
                owned.add(idle.seq)
            else:
                del self._idle[session]
        for seq in self.memory.sequences:
            if seq not in owned:
                self.memory.drop(seq)
        while self._max_idle is not None and len(self._idle) > self._max_idle:
            self.evict_idle()

    def _has(self, seq: int | None, tokens: int) -> bool:
        return seq is not None and self.memory.has(seq) and self.memory.length(seq) == tokens

    def clear(self) -> None:
        """Free all memory."""
        self.memory.clear()
        self._idle.clear()
        self._sessions.clear()

    def check(self, running: Sequence[Completion]) -> None:
        """Assert the invariants of memory and its owners, given the running completions."""
        self.memory.check()
        owned = [completion.seq for completion in running] + [idle.seq for idle in self._idle.values()]
        assert len(owned) == len(set(owned)), "a sequence has two owners"
        assert set(self.memory.sequences) <= set(owned), "a sequence has no owner"
        for completion in running:
            assert completion.seq is not None
            assert self.memory.length(completion.seq) == completion.computed
        assert self._max_idle is None or len(self._idle) <= self._max_idle
        assert self._idle.keys() <= self._sessions, "a closed session has memory"
        for idle in self._idle.values():
            assert self.memory.has(idle.seq)
            assert self.memory.length(idle.seq) == len(idle.tokens)


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the longest common prefix."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])
