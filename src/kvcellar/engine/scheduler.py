"""scheduler: who gets how many tokens in the next step. No torch: it sees memory as counts of free cells.

Every step, the lines that write go first, one token each; then those that read, oldest first, share what is left of the
token budget; then waiting lines are admitted in order of arrival. When cells run out, the youngest running line is sent
back to wait (preempted): it keeps its tokens, and reads them again later. The oldest is never sent back, so it comes to
its end, and then the next one is the oldest: nobody starves.

Always true:
  * `waiting` is in order of arrival, and so is `running`; a line is in at most one of them;
  * a running line has a sequence in memory, a waiting one has none;
  * what a step is given fits the token budget, and the free cells of every group;
  * while it works, `at` is the line that it does something to, or None: an error concerns that line's request only.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from kvcellar.engine.request import Line, Stage
from kvcellar.layout import Layout


class Cellar(Protocol):
    """What the scheduler needs of memory."""

    def free(self) -> Mapping[str, int]:
        """Free cells of each group."""
        ...

    def known(self, line: Line) -> int:
        """How many of a waiting line's tokens are in memory already. Changes nothing."""
        ...

    def admit(self, line: Line) -> int:
        """Give a line its sequence; answers how many of its tokens are in memory already."""
        ...

    def border(self, line: Line) -> int:
        """How many of a running line's tokens may be in memory after the next step."""
        ...

    def release(self, line: Line) -> None:
        """Forget the line's sequence."""
        ...

    def reclaim(self, sparing: Line | None = None) -> bool:
        """Forget something that nobody is using now (an idle session's memory), but not what `sparing` goes on from.

        False if there is no such thing.
        """
        ...


class Share(NamedTuple):
    """`tokens` more tokens of a line are read in the next step."""

    line: Line
    tokens: int


class _Step:
    """A step that is being filled. `left` of its token budget is not given away yet."""

    def __init__(self, budget: int) -> None:
        self._shares: dict[int, Share] = {}  # by identity of the line
        self.tokens, self.left = 0, budget

    @property
    def shares(self) -> list[Share]:
        return list(self._shares.values())

    def give(self, line: Line, tokens: int) -> None:
        self._shares[id(line)] = Share(line, tokens)
        self.tokens += tokens
        self.left -= tokens

    def take_back(self, line: Line) -> None:
        share = self._shares.pop(id(line), None)
        if share is not None:
            self.tokens -= share.tokens
            self.left += share.tokens

    def given(self, line: Line) -> int:
        share = self._shares.get(id(line))
        return share.tokens if share is not None else 0


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
        self.at: Line | None = None

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, line: Line) -> None:
        insort(self.waiting, line, key=lambda other: other.key)

    def join(self, line: Line) -> None:
        """A fork of a running line: it runs from its first moment."""
        insort(self.running, line, key=lambda other: other.key)

    def leave(self, line: Line) -> None:
        """The line is over; its memory has been given back by whoever ended it."""
        (self.running if line in self.running else self.waiting).remove(line)

    def restore(self, lines: Iterable[Line]) -> None:
        """Begin again with these lines, after an error in the middle of anything. Those that hold a sequence run;
        the others wait, to read their tokens again."""
        self.running.clear()
        self.waiting.clear()
        for line in lines:
            if line.seq is not None:
                self.join(line)
                continue
            line.recall()
            line.read = 0
            if line.stage is not Stage.WAITING:
                line.become(Stage.WAITING)
            self.add(line)

    # -- a step -------------------------------------------------------------------------------------------------

    def build(self) -> tuple[list[Share], list[Line]]:
        """The next step, and lines that cannot go on although they are alone: they end with `length`."""
        step = _Step(self._step_tokens)
        stuck: list[Line] = []
        writers_first = sorted(self.running, key=lambda line: line.stage is Stage.READING)
        for line in writers_first:
            self.at = line
            if step.left and not self._give(line, step):
                stuck.append(line)
        while self._admit_next(step):
            pass
        return step.shares, stuck

    def _give(self, line: Line, step: _Step) -> bool:
        """Let `line` read what it has, as far as that fits. False if it is alone and there is no cell even so."""
        while line in self.running:
            self.at = line
            room = min(step.left, self._free() - step.tokens)
            if room >= 1:
                step.give(line, min(room, min(self._cellar.border(line), self._context) - line.read))
                return True
            if self._reclaim():
                continue
            youngest = self.running[-1]
            if not self.send_back_youngest(line):
                return False
            step.take_back(youngest)
        return True

    def send_back_youngest(self, line: Line) -> bool:
        """Send back whoever came last, perhaps `line` itself. False if `line` is alone."""
        if self.running == [line]:
            return False
        self.send_back(self.running[-1])
        self.preemptions += 1
        return True

    def send_back(self, line: Line) -> None:
        """A running line gives its memory back, and waits to read its tokens again."""
        self.at = line
        self.running.remove(line)
        self._cellar.release(line)
        line.recall()
        line.become(Stage.WAITING)
        self.add(line)

    def _admit_next(self, step: _Step) -> bool:
        """Admit the oldest waiting line if there is room for what it will certainly need."""
        if not self.waiting or not step.left:
            return False
        line = self.waiting[0]
        if sum(map(_slots, self.running)) + _slots(line) > self._max_sequences:
            return False
        self.at = line
        while not self._fits(line, step):
            if self._reclaim(sparing=line):
                self.at = line
                continue
            if self.running:
                return False
            break  # alone with all the memory there is: it goes as far as that carries it
        self.at = line
        self.waiting.pop(0)
        line.read = self._cellar.admit(line)
        line.become(Stage.READING)
        insort(self.running, line, key=lambda other: other.key)
        return self._give(line, step)

    def _reclaim(self, sparing: Line | None = None) -> bool:
        """As the cellar does. What fails there is an idle session's affair, and no line's."""
        self.at = None
        return self._cellar.reclaim(sparing)

    def _fits(self, line: Line, step: _Step) -> bool:
        """Are there cells, in every group, for all its tokens and one more beside what the running lines still read?

        A bounded layout needs what it holds between steps and one token: smaller steps are always possible. A shift on
        the way, of a text that is longer than the context, needs no more: keys can be turned in the cells they are in.
        """
        free = self._cellar.free()
        tokens = min(len(line.tokens) + 1, self._context)
        unknown = tokens - self._cellar.known(line)
        for name, layout in self._layouts.items():
            ahead = step.tokens + sum(self._still(other, layout, step) for other in self.running)
            if min(unknown, layout.most_cells(tokens, 1)) + ahead > free[name]:
                return False
        return True

    def _still(self, line: Line, layout: Layout, step: _Step) -> int:
        """Cells that a line which reads will still take in a group, after this step."""
        read, tokens = line.read + step.given(line), min(len(line.tokens), self._context)
        if line.stage is not Stage.READING or read >= tokens:
            return 0
        return layout.most_cells(tokens, 0) - layout.most_cells(read, 0)

    def _free(self) -> int:
        """Free cells of the group that has the fewest: every token of a step takes one in each."""
        return min(self._cellar.free().values(), default=self._step_tokens)  # a purely recurrent model takes none

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
