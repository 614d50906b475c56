"""manager: which sequence of memory belongs to whom. The scheduler's view of memory, and where sessions rest.

Always true:
  * every sequence in memory belongs to exactly one running completion or one resting session;
  * a resting session's memory may be reclaimed at any time: its tokens are remembered, so it costs reading them again.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvcellar.engine.request import Completion, Stage
from kvcellar.errors import NotSupported
from kvcellar.spans import Span

if TYPE_CHECKING:
    from kvcellar.cache.memory import Memory

log = logging.getLogger("kvcellar.engine")

NEAR = 16  # tokens, about as many as are read in the time that one step more takes


@dataclass(slots=True)
class Rest:
    """What a session left in memory: the sequence, and its tokens."""

    seq: int
    tokens: list[int]


class SequenceManager:
    """Owns the sequence numbers. A session is a number, too; at most one completion of it runs at a time."""

    def __init__(self, memory: "Memory", *, resting: int | None = None, checkpoint_positions: int = 0) -> None:
        """`resting` is how many sessions may leave something in memory; None: as long as cells suffice.
        `checkpoint_positions` is at how many places inside a prompt steps may end for the sake of its state: no more
        than could be kept."""
        self.memory, self._most_resting, self._most_checkpoints = memory, resting, checkpoint_positions
        self._numbers = count(1)
        self._resting: dict[int, Rest] = {}  # by session, the least recently used first
        self._sessions: set[int] = set()  # those that are open
        self.shifts = 0  # how often keys were turned so that a completion could go on
        self.rereads: Counter[str] = Counter()  # how often text was read again instead, by reason

    def free(self) -> Mapping[str, int]:
        return self.memory.storage.free()

    # -- completions --------------------------------------------------------------------------------------------------

    def known(self, completion: Completion) -> int:
        """How many of a waiting completion's tokens are in memory already. Changes nothing."""
        return self._source(completion)[1]

    def admit(self, completion: Completion) -> int:
        """Give `completion` a sequence with the prefix of it that memory holds; at least one token stays to be read."""
        seq, known = self._source(completion)
        rest = self._resting.pop(completion.request.session, None) if completion.request.session is not None else None
        if rest is not None:
            completion.seq = rest.seq
            self.memory.remove(rest.seq, Span(known, self.memory.length(rest.seq)))
            self.memory.keep_state(rest.seq)  # where two turns part, the next may be another one
        else:
            completion.seq = next(self._numbers)
            if seq is not None:
                self.memory.fork(seq, completion.seq, known)
        if completion.request.admitted is None:  # what a preempted completion finds again is no news to its request
            completion.request.admitted = time.perf_counter()
            completion.request.cached = known
        return known

    def next_checkpoint(self, completion: Completion) -> int:
        """How much of a running completion may be in memory after the next step.

        A state can be gone back to only where a step ended, so in a session one ends where the same prompt, if it is
        asked again, goes on: before its last token. And it ends at the checkpoint_positions that the prompt has inside,
        the last ones if they are many: a session whose memory was lost can be rewound as before once it is read again.
        """
        last, whole = len(completion.request.prompt) - 1, len(completion.tokens)
        if completion.request.session is None or completion.forgotten or self.memory.rows.capacity is None:
            return whole
        checkpoint_positions = completion.request.checkpoint_positions[
            max(0, len(completion.request.checkpoint_positions) - self._most_checkpoints) :
        ]
        following = bisect_left(checkpoint_positions, completion.read + NEAR)
        if following < len(checkpoint_positions) and checkpoint_positions[following] <= last - NEAR:
            return checkpoint_positions[following]
        return last if completion.read < last else whole

    def _source(self, completion: Completion) -> tuple[int | None, int]:
        """The sequence that `completion` can go on from, and how many tokens it has of it: its session's, or, for an
        answer that was preempted, that of another answer of the same request."""
        most = len(completion.tokens) - 1
        if completion.request.session is not None:
            rest = self._resting.get(completion.request.session)
            return (rest.seq, self._common(rest.seq, rest.tokens, completion, most)) if rest is not None else (None, 0)
        best: tuple[int | None, int] = (None, 0)
        for other in completion.request.completions:
            if other.seq is not None and other.read > best[1]:
                known = self._common(other.seq, other.tokens, completion, min(most, other.read))
                best = max(best, (other.seq, known), key=lambda found: found[1])
        return best

    def _common(self, seq: int, tokens: list[int], completion: Completion, most: int) -> int:
        edited = self.memory.derived(seq)  # from there on its K/V are of a text that nobody can ask for again
        known = min(most, common_prefix(tokens, completion.tokens))
        return self.memory.can_cut(seq, known if edited is None else min(known, edited))

    def shift(self, completion: Completion, span: Span) -> str | None:
        """Forget `span` of the completion; what lies behind moves down (context shift). None if that is done, else why
        it cannot be done exactly. Raises `CacheFull` if keys that others share need more cells than are free. Nothing
        has changed in either case.
        """
        assert completion.seq is not None
        try:
            self.memory.remove(completion.seq, span)
        except NotSupported as refused:
            return refused.reason
        except (RuntimeError, MemoryError) as error:  # the device has no scratch for it; memory is as it was
            log.warning("a shift of %s failed with %s: %s", span, type(error).__name__, error)
            return f"the device failed with {type(error).__name__}"
        if span.end < completion.read:
            completion.shift(span)
            self.shifts += 1
        else:  # nothing was behind it: what is left is the K/V of just these tokens
            completion.forget(span, self.memory.length(completion.seq))
        return None

    def forget(self, completion: Completion, span: Span, reason: str) -> None:
        """Leave `span` out of a completion's text where it could not be shifted, for `reason`. What lies behind it is
        to be read again, and of what lies before it only what memory needs for that."""
        assert completion.seq is not None
        kept = self.memory.can_cut(completion.seq, min(self._plain(completion), span.start))
        self.memory.remove(completion.seq, Span(kept, completion.read))
        completion.forget(span, kept)
        self.rereads[reason] += 1

    def fork(self, completion: Completion, twin: Completion) -> None:
        """`twin` goes on where `completion` is, on the same cells."""
        assert completion.seq is not None
        twin.seq, twin.read = next(self._numbers), completion.read
        kept = self.memory.fork(completion.seq, twin.seq, completion.read)
        assert kept == completion.read, f"only {kept} of {completion.read} tokens could be shared"

    def release(self, completion: Completion) -> None:
        """Forget what the completion holds."""
        if completion.seq is not None and self.memory.has(completion.seq):
            self.memory.drop(completion.seq)
        completion.seq, completion.read = None, 0

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_session(self, session: int) -> None:
        self._sessions.add(session)

    def close_session(self, session: int) -> None:
        """Nothing rests with it from now on, whoever may still come to an end in its name."""
        self._sessions.discard(session)
        self.forget_session(session)

    def rest(self, session: int, completion: Completion) -> None:
        """The completion is over: what it holds stays with the session, in place of what the session left before.

        What a shift has moved does not: nobody will ask for it again.
        """
        if session not in self._sessions:
            self.release(completion)
            return
        self.forget_session(session)
        if kept := self._plain(completion):
            assert completion.seq is not None
            self.memory.remove(completion.seq, Span(kept, completion.read))
            self._keep(session, Rest(completion.seq, completion.tokens[:kept]))
            completion.seq = None
        self.release(completion)

    def _keep(self, session: int, rest: Rest) -> None:
        """The session has rested least long of all; if they are too many now, who has rested longest gives way."""
        self._resting[session] = rest
        if self._most_resting is not None and len(self._resting) > self._most_resting:
            self.forget_session(next(iter(self._resting)))

    def _plain(self, completion: Completion) -> int:
        """How many of its tokens can be gone on from by who knows nothing of shifts; a failed first step leaves 0."""
        if completion.seq is None or not self.memory.has(completion.seq):
            return 0
        edited = self.memory.derived(completion.seq)
        return completion.read if edited is None else self.memory.can_cut(completion.seq, edited)

    def fork_session(self, session: int, twin: int) -> None:
        """`twin` shares what `session` has in memory, if it still has anything."""
        rest = self._resting.get(session)
        if rest is not None:
            seq = next(self._numbers)
            kept = self.memory.fork(rest.seq, seq, len(rest.tokens))
            self._keep(twin, Rest(seq, rest.tokens[:kept]))

    def forget_session(self, session: int) -> None:
        rest = self._resting.get(session)
        if rest is not None:
            self.memory.drop(rest.seq)
            del self._resting[session]

    def reclaim(self, sparing: Completion | None = None) -> bool:
        """Forget the memory of the session that has rested longest, other than the one that `sparing` belongs to."""
        for session in self._resting:
            if sparing is None or session != sparing.request.session:
                self.forget_session(session)
                return True
        return False

    def settle(self, completions: Iterable[Completion]) -> None:
        """After an error in the middle of anything: keep what `completions` and resting sessions hold, and drop all
        else.

        A completion keeps its sequence if memory has as many tokens of it as the completion has read, and some are left
        to read: the logits of a text that has been read to its end are lost. Else it holds nothing afterwards. So an
        error costs reading again, whatever was half done.
        """
        if self.memory.step is not None:
            self.memory.abandon()
        owned: set[int] = set()
        for completion in completions:
            held = (
                completion.stage is not Stage.WAITING
                and completion.unread > 0
                and self._has(completion.seq, completion.read)
            )
            if completion.seq is None or not held or completion.seq in owned:
                completion.seq = None
            else:
                owned.add(completion.seq)
        for session, rest in list(self._resting.items()):
            if session in self._sessions and rest.seq not in owned and self._has(rest.seq, len(rest.tokens)):
                owned.add(rest.seq)
            else:
                del self._resting[session]
        for seq in self.memory.sequences:
            if seq not in owned:
                self.memory.drop(seq)
        while self._most_resting is not None and len(self._resting) > self._most_resting:
            self.reclaim()

    def _has(self, seq: int | None, tokens: int) -> bool:
        return seq is not None and self.memory.has(seq) and self.memory.length(seq) == tokens

    def clear(self) -> None:
        """Forget everything there is."""
        self.memory.clear()
        self._resting.clear()
        self._sessions.clear()

    def check(self, running: Sequence[Completion]) -> None:
        """Assert what is always true, given the completions that run."""
        self.memory.check()
        owned = [completion.seq for completion in running] + [rest.seq for rest in self._resting.values()]
        assert len(owned) == len(set(owned)), "a sequence belongs to two"
        assert set(self.memory.sequences) <= set(owned), "a sequence belongs to nobody"
        for completion in running:
            assert completion.seq is not None
            assert self.memory.length(completion.seq) == completion.read
        assert self._most_resting is None or len(self._resting) <= self._most_resting
        assert self._resting.keys() <= self._sessions, "a session that is closed holds something"
        for rest in self._resting.values():
            assert self.memory.has(rest.seq)
            assert self.memory.length(rest.seq) == len(rest.tokens)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])
