"""scheduler: who gets how many tokens in the next step. No torch: it sees memory as counts of free cells.

Every step, the completions that write go first, one token each; then those that read, oldest first, share what is left
of the token budget; then waiting completions are admitted in order of arrival. When cells run out, the youngest running
completion is sent back to wait (preempted): it keeps its tokens, and reads them again later. The oldest is never sent
back, so it comes to its end, and then the next one is the oldest: nobody starves.

Always true:
  * `waiting` is in order of arrival, and so is `running`; a completion is in at most one of them;
  * a running completion has a sequence in memory, a waiting one has none;
  * what a step is given fits the token budget, and the free cells of every group;
  * while it works, `at` is the completion that it does something to, or None: an error concerns that completion's
    request only.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from kvcellar.engine.request import Completion, Stage
from kvcellar.layout import Layout


class SequenceManager(Protocol):
    """What the scheduler needs of memory."""

    def free(self) -> Mapping[str, int]:
        """Free cells of each group."""
        ...

    def known(self, completion: Completion) -> int:
        """How many of a waiting completion's tokens are in memory already. Changes nothing."""
        ...

    def admit(self, completion: Completion) -> int:
        """Give a completion its sequence; answers how many of its tokens are in memory already."""
        ...

    def next_checkpoint(self, completion: Completion) -> int:
        """How many of a running completion's tokens may be in memory after the next step."""
        ...

    def release(self, completion: Completion) -> None:
        """Forget the completion's sequence."""
        ...

    def reclaim(self, sparing: Completion | None = None) -> bool:
        """Forget something that nobody is using now (an idle session's memory), but not what `sparing` goes on from.

        False if there is no such thing.
        """
        ...


class Share(NamedTuple):
    """`tokens` more tokens of a completion are read in the next step."""

    completion: Completion
    tokens: int


class _Step:
    """A step that is being filled. `left` of its token budget is not given away yet."""

    def __init__(self, budget: int) -> None:
        self._shares: dict[int, Share] = {}  # by identity of the completion
        self.tokens, self.left = 0, budget

    @property
    def shares(self) -> list[Share]:
        return list(self._shares.values())

    def give(self, completion: Completion, tokens: int) -> None:
        self._shares[id(completion)] = Share(completion, tokens)
        self.tokens += tokens
        self.left -= tokens

    def take_back(self, completion: Completion) -> None:
        share = self._shares.pop(id(completion), None)
        if share is not None:
            self.tokens -= share.tokens
            self.left += share.tokens

    def given(self, completion: Completion) -> int:
        share = self._shares.get(id(completion))
        return share.tokens if share is not None else 0


class Scheduler:
    """Decides; does not run. `build` is called between steps."""

    def __init__(
        self,
        manager: SequenceManager,
        layouts: Mapping[str, Layout],
        *,
        context: int,
        max_sequences: int,
        step_tokens: int,
    ) -> None:
        self._manager, self._layouts = manager, dict(layouts)
        self._context, self._max_sequences, self._step_tokens = context, max_sequences, step_tokens
        self.waiting: list[Completion] = []
        self.running: list[Completion] = []
        self.preemptions = 0
        self.at: Completion | None = None

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, completion: Completion) -> None:
        insort(self.waiting, completion, key=lambda other: other.key)

    def join(self, completion: Completion) -> None:
        """A fork of a running completion: it runs from its first moment."""
        insort(self.running, completion, key=lambda other: other.key)

    def leave(self, completion: Completion) -> None:
        """The completion is over; its memory has been given back by whoever ended it."""
        (self.running if completion in self.running else self.waiting).remove(completion)

    def restore(self, completions: Iterable[Completion]) -> None:
        """Begin again with these completions, after an error in the middle of anything. Those that hold a sequence run;
        the others wait, to read their tokens again."""
        self.running.clear()
        self.waiting.clear()
        for completion in completions:
            if completion.seq is not None:
                self.join(completion)
                continue
            completion.recall()
            completion.read = 0
            if completion.stage is not Stage.WAITING:
                completion.become(Stage.WAITING)
            self.add(completion)

    # -- a step -------------------------------------------------------------------------------------------------

    def build(self) -> tuple[list[Share], list[Completion]]:
        """The next step, and completions that cannot go on although they are alone: they end with `length`."""
        step = _Step(self._step_tokens)
        stuck: list[Completion] = []
        writers_first = sorted(self.running, key=lambda completion: completion.stage is Stage.PREFILL)
        for completion in writers_first:
            self.at = completion
            if step.left and not self._give(completion, step):
                stuck.append(completion)
        while self._admit_next(step):
            pass
        return step.shares, stuck

    def _give(self, completion: Completion, step: _Step) -> bool:
        """Let `completion` read what it has, as far as that fits. False if it is alone and there is no cell even so."""
        while completion in self.running:
            self.at = completion
            room = min(step.left, self._free() - step.tokens)
            if room >= 1:
                step.give(
                    completion,
                    min(room, min(self._manager.next_checkpoint(completion), self._context) - completion.read),
                )
                return True
            if self._reclaim():
                continue
            youngest = self.running[-1]
            if not self.send_back_youngest(completion):
                return False
            step.take_back(youngest)
        return True

    def send_back_youngest(self, completion: Completion) -> bool:
        """Send back whoever came last, perhaps `completion` itself. False if `completion` is alone."""
        if self.running == [completion]:
            return False
        self.send_back(self.running[-1])
        self.preemptions += 1
        return True

    def send_back(self, completion: Completion) -> None:
        """A running completion gives its memory back, and waits to read its tokens again."""
        self.at = completion
        self.running.remove(completion)
        self._manager.release(completion)
        completion.recall()
        completion.become(Stage.WAITING)
        self.add(completion)

    def _admit_next(self, step: _Step) -> bool:
        """Admit the oldest waiting completion if there is room for what it will certainly need."""
        if not self.waiting or not step.left:
            return False
        completion = self.waiting[0]
        if sum(map(_slots, self.running)) + _slots(completion) > self._max_sequences:
            return False
        self.at = completion
        while not self._fits(completion, step):
            if self._reclaim(sparing=completion):
                self.at = completion
                continue
            if self.running:
                return False
            break  # alone with all the memory there is: it goes as far as that carries it
        self.at = completion
        self.waiting.pop(0)
        completion.read = self._manager.admit(completion)
        completion.become(Stage.PREFILL)
        insort(self.running, completion, key=lambda other: other.key)
        return self._give(completion, step)

    def _reclaim(self, sparing: Completion | None = None) -> bool:
        """As the manager does. What fails there is an idle session's affair, and no completion's."""
        self.at = None
        return self._manager.reclaim(sparing)

    def _fits(self, completion: Completion, step: _Step) -> bool:
        """Are there cells, in every group, for all its tokens and one more beside what the running completions still
        read?

        A bounded layout needs what it holds between steps and one token: smaller steps are always possible. A shift on
        the way, of a text that is longer than the context, needs no more: keys can be turned in the cells they are in.
        """
        free = self._manager.free()
        tokens = min(len(completion.tokens) + 1, self._context)
        unknown = tokens - self._manager.known(completion)
        for name, layout in self._layouts.items():
            ahead = step.tokens + sum(self._still(other, layout, step) for other in self.running)
            if min(unknown, layout.most_cells(tokens, 1)) + ahead > free[name]:
                return False
        return True

    def _still(self, completion: Completion, layout: Layout, step: _Step) -> int:
        """Cells that a completion which reads will still take in a group, after this step."""
        read, tokens = completion.read + step.given(completion), min(len(completion.tokens), self._context)
        if completion.stage is not Stage.PREFILL or read >= tokens:
            return 0
        return layout.most_cells(tokens, 0) - layout.most_cells(read, 0)

    def _free(self) -> int:
        """Free cells of the group that has the fewest: every token of a step takes one in each."""
        return min(self._manager.free().values(), default=self._step_tokens)  # a purely recurrent model takes none

    def check(self) -> None:
        """Assert what is always true between steps."""
        for completions in (self.waiting, self.running):
            assert completions == sorted(completions, key=lambda completion: completion.key), "out of order of arrival"
        assert not set(map(id, self.waiting)) & set(map(id, self.running)), "a completion waits and runs"
        assert all(
            completion.seq is None and completion.stage is Stage.WAITING and completion.read == 0
            for completion in self.waiting
        )
        assert all(
            completion.seq is not None and completion.stage in (Stage.PREFILL, Stage.DECODE)
            for completion in self.running
        )


def _slots(completion: Completion) -> int:
    """Sequences that a completion is or will become: a prompt that is still read is forked into all its answers."""
    return completion.request.params.n if len(completion.request.completions) == 1 else 1
