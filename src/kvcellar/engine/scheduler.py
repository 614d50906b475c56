"""scheduler: who gets how many tokens in the next step. No torch: it sees memory as counts of free cells.

Every step, the lines that write go first, one token each; then those that read, oldest first, share what is left of the
token budget; then waiting lines are admitted in order of arrival. When cells run out, the youngest running line is sent
back to wait (preempted): it keeps its tokens, and reads them again later. The oldest is never sent back, so it comes to
its end, and then the next one is the oldest: nobody starves.

Always true:
  * `waiting` is in order of arrival, and so is `running`; a line is in at most one of them;
  * a running line has a sequence in memory, a waiting one has none;
  * what a step is given fits the free cells of every group.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcellar.contracts import Layout
from kvcellar.engine.request import Line, Stage


class Cellar(Protocol):
    """What the scheduler needs of memory."""

    def free(self) -> Mapping[str, int]:
        """Free cells of each group."""
        ...

    def admit(self, line: Line) -> int:
        """Give a line its sequence; answers how many of its tokens are in memory already."""
        ...

    def release(self, line: Line) -> None:
        """Forget the line's sequence."""
        ...

    def reclaim(self) -> bool:
        """Forget something that nobody is using now (an idle session's memory). False if there is no such thing."""
        ...


class Share(NamedTuple):
    """`tokens` more tokens of a line are read in the next step."""

    line: Line
    tokens: int


class Scheduler:
    """Decides; does not run. `build` is called between steps."""

    def __init__(
        self, cellar: Cellar, layouts: Mapping[str, Layout], *, context: int, max_sequences: int, step_tokens: int
    ) -> None:
        self._cellar, self._layouts = cellar, dict(layouts)
        self._context, self._max_sequences, self._step_tokens = context, max_sequences, step_tokens
        self.waiting: list[Line] = []
        self.running: list[Line] = []
        self.preemptions = 0

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, line: Line) -> None:
        insort(self.waiting, line, key=lambda other: other.key)

    def join(self, line: Line) -> None:
        """A fork of a running line: it runs from its first moment."""
        insort(self.running, line, key=lambda other: other.key)

    def leave(self, line: Line) -> None:
        """The line is over; its memory has been given back by whoever ended it."""
        (self.running if line in self.running else self.waiting).remove(line)

    # -- a step -------------------------------------------------------------------------------------------------

    def build(self) -> tuple[list[Share], list[Line]]:
        """The next step, and lines that cannot go on although they are alone: they end with `length`."""
        shares: list[Share] = []
        stuck: list[Line] = []
        for line in list(self.running):
            if line.stage is Stage.WRITING and not self._give(line, 1, shares):
                stuck.append(line)
        for line in list(self.running):
            if line.stage is not Stage.READING:
                continue
            left = self._step_tokens - _total(shares)
            if left > 0 and not self._give(line, min(line.unread, left), shares):
                stuck.append(line)
        while self._admit_next(shares):
            pass
        return shares, stuck

    def _give(self, line: Line, count: int, shares: list[Share]) -> bool:
        """Let `line` have up to `count` tokens. False if it is alone, and even so there is no cell for it."""
        while line in self.running:
            room = self._free() - _total(shares)
            if room >= 1:
                shares.append(Share(line, min(count, room)))
                return True
            if self._cellar.reclaim():
                continue
            victim = self.running[-1]
            if victim is line and self.running[0] is line:
                return False
            if any(share.line is victim for share in shares):
                return True  # everyone younger goes on in this step: this line takes its turn in the next
            self._preempt(victim)
        return True

    def _preempt(self, line: Line) -> None:
        self.running.remove(line)
        self._cellar.release(line)
        line.become(Stage.WAITING)
        self.preemptions += 1
        self.add(line)

    def _admit_next(self, shares: list[Share]) -> bool:
        """Admit the oldest waiting line if there is room for what it will certainly need."""
        if not self.waiting:
            return False
        line = self.waiting[0]
        left = self._step_tokens - _total(shares)
        taken = sum(map(_slots, self.running))
        if left <= 0 or (self.running and taken + _slots(line) > self._max_sequences):
            return False
        while not self._fits(line, shares) and not self._cellar.reclaim():
            if self.running:
                return False
            break  # alone with all the memory there is: it goes as far as that carries it
        self.waiting.pop(0)
        line.read = self._cellar.admit(line)
        line.become(Stage.READING)
        insort(self.running, line, key=lambda other: other.key)
        return self._give(line, min(line.unread, left), shares)

    def _fits(self, line: Line, shares: list[Share]) -> bool:
        """Are there cells, in every group, for all its tokens and one more beside what the running lines still read?

        A bounded layout is asked for what it holds between steps and one token: smaller steps are always possible.
        """
        free = self._cellar.free()
        for name, layout in self._layouts.items():
            ahead = _total(shares) + sum(self._still(other, layout, shares) for other in self.running)
            if layout.most_cells(len(line.tokens) + 1, 1) + ahead > free[name]:
                return False
        return True

    def _still(self, line: Line, layout: Layout, shares: Sequence[Share]) -> int:
        """Cells that a line which reads will still take in a group, after this step."""
        if line.stage is not Stage.READING:
            return 0
        given = sum(share.tokens for share in shares if share.line is line)
        read = line.read + given
        return layout.most_cells(len(line.tokens), 0) - layout.most_cells(read, 0) if read < len(line.tokens) else 0

    def _free(self) -> int:
        """Free cells of the group that has the fewest: every token of a step takes one in each."""
        return min(self._cellar.free().values())

    def check(self) -> None:
        """Assert what is always true between steps."""
        for lines in (self.waiting, self.running):
            assert lines == sorted(lines, key=lambda line: line.key), "out of order of arrival"
        assert not set(map(id, self.waiting)) & set(map(id, self.running)), "a line waits and runs"
        assert all(line.seq is None and line.stage is Stage.WAITING and line.read == 0 for line in self.waiting)
        assert all(line.seq is not None and line.stage in (Stage.READING, Stage.WRITING) for line in self.running)


def _slots(line: Line) -> int:
    """Sequences that a line is or will become: a prompt that is still read is forked into all its answers."""
    return line.request.params.n if len(line.request.lines) == 1 else 1


def _total(shares: Sequence[Share]) -> int:
    return sum(share.tokens for share in shares)
