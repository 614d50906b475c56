"""cellar: which sequence of memory belongs to whom. The scheduler's view of memory, and where sessions rest.

Always true:
  * every sequence in memory belongs to exactly one running line or one resting session;
  * a resting session's memory may be reclaimed at any time: its tokens are remembered, so it costs reading them again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from kvcellar.cache.memory import Memory
from kvcellar.engine.request import Line
from kvcellar.spans import Span


@dataclass(slots=True)
class Rest:
    """What a session left in memory: the sequence, and its tokens."""

    seq: int
    tokens: list[int]


class Cellar:
    """Owns the sequence numbers. `busy(session)` says whether a request of that session is under way."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._numbers = count(1)
        self._resting: dict[int, Rest] = {}  # by session, the least recently used first

    def free(self) -> Mapping[str, int]:
        return self.memory.free()

    # -- lines --------------------------------------------------------------------------------------------------

    def admit(self, line: Line) -> int:
        """Give `line` a sequence with as much of its beginning as memory knows; at least one token stays unread."""
        line.seq = next(self._numbers)
        line.request.admitted = line.request.admitted or time.perf_counter()
        most = len(line.tokens) - 1
        known = self._of_session(line, most) or self._of_sibling(line, most)
        line.request.cached = max(line.request.cached, min(known, len(line.request.prompt)))
        return known

    def _of_session(self, line: Line, most: int) -> int:
        session = line.request.session
        rest = self._resting.pop(session, None) if session is not None else None
        if rest is None:
            return 0
        line.seq = rest.seq
        kept = self.memory.can_cut(rest.seq, min(most, common_prefix(rest.tokens, line.tokens)))
        return self.memory.remove(rest.seq, Span(kept, max(kept, self.memory.length(rest.seq))))

    def _of_sibling(self, line: Line, most: int) -> int:
        """A preempted answer finds its prompt in the memory of another answer of the same request."""
        for other in line.request.lines:
            if other is not line and other.seq is not None and line.seq is not None:
                upto = min(most, other.read, common_prefix(other.tokens, line.tokens))
                return self.memory.fork(other.seq, line.seq, upto)
        return 0

    def fork(self, line: Line, twin: Line) -> None:
        """`twin` goes on where `line` is, on the same cells."""
        assert line.seq is not None
        twin.seq, twin.read = next(self._numbers), line.read
        kept = self.memory.fork(line.seq, twin.seq, line.read)
        assert kept == line.read, f"only {kept} of {line.read} tokens could be shared"

    def release(self, line: Line) -> None:
        """Forget what the line holds."""
        if line.seq is not None and self.memory.has(line.seq):
            self.memory.drop(line.seq)
        line.seq, line.read = None, 0

    # -- sessions -----------------------------------------------------------------------------------------------

    def rest(self, session: int, line: Line) -> None:
        """The line is over: its memory stays with the session."""
        assert line.seq is not None
        self._resting[session] = Rest(line.seq, line.tokens[: line.read])
        line.seq, line.read = None, 0

    def fork_session(self, session: int, twin: int) -> None:
        """`twin` shares what `session` has in memory, if it still has anything."""
        rest = self._resting.get(session)
        if rest is not None:
            seq = next(self._numbers)
            kept = self.memory.fork(rest.seq, seq, len(rest.tokens))
            self._resting[twin] = Rest(seq, rest.tokens[:kept])

    def forget_session(self, session: int) -> None:
        rest = self._resting.pop(session, None)
        if rest is not None:
            self.memory.drop(rest.seq)

    def reclaim(self) -> bool:
        """Forget the memory of the session that has rested longest."""
        for session in self._resting:
            self.forget_session(session)
            return True
        return False

    def clear(self) -> None:
        """Forget everything there is."""
        self.memory.clear()
        self._resting.clear()

    def check(self, running: Callable[[], list[Line]]) -> None:
        """Assert what is always true, given the lines that run."""
        self.memory.check()
        owned = [line.seq for line in running()] + [rest.seq for rest in self._resting.values()]
        assert len(owned) == len(set(owned)), "a sequence belongs to two"
        assert set(self.memory.sequences) <= set(owned), "a sequence belongs to nobody"
        for rest in self._resting.values():
            assert self.memory.length(rest.seq) == len(rest.tokens)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])
