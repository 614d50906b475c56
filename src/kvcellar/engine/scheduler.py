"""scheduler: which completions take part in the next step, with how many tokens. No torch: memory is seen as counts of
free cells.

In every step, completions in decode are scheduled first, one token each, and drafts of their next tokens, up to a part
of the token budget; then those in prefill, in order of arrival, with what is left of it (chunked prefill); then waiting
completions are admitted in order of arrival, but for those that wait for what a running prompt is about to compute.
When cells run short, what no sequence uses is evicted, then there are no drafts in this step, then what is restored for
waiting completions is given up, and then the youngest running completion is preempted: it keeps its tokens, and
computes those again later that are evicted meanwhile. The oldest is never preempted, so every completion ends
eventually.

Always true:
  * `waiting` and `running` are in order of arrival; a completion is in at most one of them;
  * a running completion has a sequence in memory, a waiting one has none;
  * the tokens of a step fit the token budget, and the free cells of every group;
  * `current` is the completion that is being changed, or None: an error concerns its request only.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcellar.engine.request import Completion, Status
from kvcellar.layout import Layout

ROUND = 128  # rows, at most, of a step with drafts that those in decode have
MASK_SECONDS = 0.01  # of waiting for a mask where there is nothing else to compute
SCORED = 128  # rows of prompts, at most, of which a step has the logits

Draft = Callable[[Sequence[Completion], int], Sequence[int]]


def no_drafts(completions: Sequence[Completion], most: int) -> Sequence[int]:
    """The `draft` of an engine without speculation."""
    return [0] * len(completions)


class Manager(Protocol):
    """What the scheduler needs of the sequence manager."""

    def free(self) -> Mapping[str, int]:
        """Free cells of each group."""
        ...

    def available(self) -> Mapping[str, int]:
        """Cells of each group that are free or could be evicted."""
        ...

    def evict(self, group: str, cells: int, *, restores: bool = True) -> bool:
        """Free some cells of a group that no sequence uses, about as many as given; with `restores` also what is
        restored for waiting completions. False if there are none."""
        ...

    def unpin(self) -> bool:
        """Let something that is pinned be evicted. False if nothing is pinned."""
        ...

    def waits(self, completion: Completion, *, next_in: bool) -> bool:
        """Whether a running prompt is about to compute tokens that a waiting completion needs, too, or whether these
        are being read back. To be called before the prompt goes on, so that it leaves a checkpoint where they diverge.
        What is read back enters memory when the completion is `next_in`: when all before it were admitted, or wait.
        """
        ...

    def admit(self, completion: Completion) -> None:
        """Assign a sequence to a completion, with the prefix of its tokens that is in memory."""
        ...

    def start(self, completion: Completion) -> None:
        """A completion that was admitted begins to run."""
        ...

    def next_end(self, completion: Completion) -> int:
        """The most tokens of a running completion that may be in memory after the next step."""
        ...

    def release(self, completion: Completion) -> None:
        """Free the completion's sequence."""
        ...


class Scheduled(NamedTuple):
    """The next `tokens` tokens of a completion are computed in the step, and behind them its first `drafts` drafts."""

    completion: Completion
    tokens: int
    drafts: int = 0

    @property
    def rows(self) -> int:
        return self.tokens + self.drafts


class _Step:
    """A step that is being filled. `rows` are its tokens and drafts, `left` is what is left of its token budget."""

    def __init__(self, budget: int) -> None:
        self._scheduled: dict[int, Scheduled] = {}  # by identity of the completion
        self.rows, self.drafts, self.left = 0, 0, budget

    @property
    def scheduled(self) -> list[Scheduled]:
        return list(self._scheduled.values())

    def add(self, completion: Completion, tokens: int) -> None:
        self._put(Scheduled(completion, tokens))

    def remove(self, completion: Completion) -> None:
        if (found := self._scheduled.pop(id(completion), None)) is not None:
            self._count(found, -1)

    def draft(self, completion: Completion, drafts: int) -> None:
        """Give a completion that takes part so many drafts."""
        found = self._scheduled[id(completion)]
        self._count(found, -1)
        self._put(found._replace(drafts=drafts))

    def _put(self, scheduled: Scheduled) -> None:
        self._scheduled[id(scheduled.completion)] = scheduled
        self._count(scheduled, 1)

    def _count(self, scheduled: Scheduled, sign: int) -> None:
        self.rows += sign * scheduled.rows
        self.drafts += sign * scheduled.drafts
        self.left -= sign * scheduled.rows

    def tokens_of(self, completion: Completion) -> int:
        found = self._scheduled.get(id(completion))
        return found.tokens if found is not None else 0


class Scheduler:
    """Decides; does not run. `schedule` is called between steps."""

    def __init__(
        self,
        manager: Manager,
        layouts: Mapping[str, Layout],
        *,
        context: int,
        max_sequences: int,
        step_tokens: int,
        draft: Draft = no_drafts,
        scored: int = SCORED,
    ) -> None:
        """`draft` makes drafts for completions in decode, up to so many for each, and returns how many each has.
        `scored`: the most rows of prompts of which a step has the logits."""
        self._manager, self._layouts, self._draft, self._scored = manager, dict(layouts), draft, scored
        self._context, self._max_sequences, self._step_tokens = context, max_sequences, step_tokens
        self.waiting: list[Completion] = []
        self.running: list[Completion] = []
        self.preemptions = 0
        self.current: Completion | None = None

    # -- arrival and end ----------------------------------------------------------------------------------------

    def enqueue(self, completion: Completion) -> None:
        insort(self.waiting, completion, key=lambda other: other.key)

    def add_running(self, completion: Completion) -> None:
        """Add a completion that has a sequence already: a fork of a running one."""
        insort(self.running, completion, key=lambda other: other.key)

    def remove(self, completion: Completion) -> None:
        """Remove a completion that is over. The caller frees its memory."""
        (self.running if completion in self.running else self.waiting).remove(completion)

    def reset(self, completions: Iterable[Completion]) -> None:
        """Start over with these completions, after an error at any point. Those with a sequence run; the others wait,
        to be computed again."""
        self.running.clear()
        self.waiting.clear()
        for completion in completions:
            if completion.seq is not None:
                self.add_running(completion)
                continue
            completion.undo_shifts()
            completion.computed = 0
            if completion.status is not Status.WAITING:
                completion.become(Status.WAITING)
            self.enqueue(completion)

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Scheduled], list[Completion]]:
        """The next step, and completions that find no free cell although they run alone: these end with `length`."""
        step = _Step(self._step_tokens)
        stuck: list[Completion] = []
        for status in (Status.DECODE, Status.PREFILL):
            for completion in [one for one in self.running if one.status is status]:
                self.current = completion
                if step.left and not self._add(completion, step):
                    stuck.append(completion)
            if status is Status.DECODE:
                self._add_drafts(step)
        admits = True
        for completion in self.waiting[: self._max_sequences]:
            self.current = completion
            if not self._manager.waits(completion, next_in=admits) and admits:
                admits = step.left > 0 and self._admit(completion, step)
        if not (step.scheduled or stuck):  # what was just admitted alone may already fill memory
            late = [one for one in self.running if one.late]
            stuck += [one for one in self.running if one not in late]
            if late and not stuck:
                late[0].await_mask(MASK_SECONDS)  # there is nothing else to compute
        return [self._shortened(one) for one in step.scheduled], stuck

    def _shortened(self, one: Scheduled) -> Scheduled:
        """Where a waiting completion diverges was not known when the prompt that it waits for was scheduled."""
        self.current = one.completion
        most = self._manager.next_end(one.completion) - one.completion.computed
        return one if one.drafts or one.tokens <= most else one._replace(tokens=most)

    def _add_drafts(self, step: _Step) -> None:
        """Let the completions in decode have drafts, within a part of the token budget and what can be made free."""
        decoding = [one.completion for one in step.scheduled]
        others = len(self.running) > len(decoding) or bool(self.waiting)
        spare = min(step.left // (2 if others else 1), ROUND - len(decoding))
        self.current = None
        counts = self._draft(decoding, max(0, spare // max(1, len(decoding))))
        for completion, count in zip(decoding, counts, strict=True):
            if count:
                step.draft(completion, max(0, min(count, self._make_free(step.rows + count, drafts=True) - step.rows)))

    def _add(self, completion: Completion, step: _Step) -> bool:
        """Schedule as many tokens of `completion` as fit, unless it is late or preempted. False if it runs alone and no
        cell is free."""
        while completion in self.running and not completion.late:
            self.current = completion
            end = min(self._manager.next_end(completion), self._context)
            wanted = self._scorable(completion, min(step.left, end - completion.computed), step)
            if not wanted:
                return True  # in a later step
            room = self._make_free(step.rows + wanted, drafts=step.drafts > 0) - step.rows
            self.current = completion
            if step.drafts and room < wanted:  # drafts take nothing that others need
                for one in step.scheduled:
                    step.draft(one.completion, 0)
                continue
            if room >= 1:
                step.add(completion, min(room, wanted))
                return True
            youngest = self.running[-1]
            if self.preempt_youngest(completion):
                step.remove(youngest)
            elif not self._manager.unpin():
                return False
        return True

    def _scorable(self, completion: Completion, tokens: int, step: _Step) -> int:
        """How many of its next tokens a step can compute, where their logits are read."""
        if not (rows := completion.scored(tokens)):
            return tokens
        left = self._scored - sum(len(one.completion.scored(one.tokens)) for one in step.scheduled)
        return tokens if len(rows) <= left else rows.start + max(0, left)

    def preempt_youngest(self, completion: Completion) -> bool:
        """Preempt the youngest running completion, which may be `completion`. False if `completion` runs alone."""
        if self.running == [completion]:
            return False
        self._preempt(self.running[-1])
        self.preemptions += 1
        return True

    def _preempt(self, completion: Completion) -> None:
        self.current = completion
        self.running.remove(completion)
        self._manager.release(completion)
        completion.undo_shifts()
        completion.become(Status.WAITING)
        self.enqueue(completion)

    def _admit(self, completion: Completion, step: _Step) -> bool:
        """Admit a waiting completion if what it will certainly need is free, or can be. False if not: then none behind
        it may be admitted in this step."""
        if sum(map(_sequences, self.running)) + _sequences(completion) > self._max_sequences:
            return False
        self._manager.admit(completion)
        if self.running and not self._fits(completion, step):
            self._manager.release(completion)
            return False  # one that runs alone goes on until memory is full
        self._manager.start(completion)
        self.waiting.remove(completion)
        completion.become(Status.PREFILL)
        self.add_running(completion)
        return self._add(completion, step)

    def _make_free(self, cells: int, *, drafts: bool = False) -> int:
        """Evict until so many cells of every group are free, or nothing is left to evict. Returns the free cells of the
        group that has the fewest: every token of a step takes one in each. An error belongs to no completion. For
        `drafts`, nothing that is being restored is given up."""
        self.current = None
        while free := self._manager.free():
            group = min(free, key=lambda name: free[name])
            short = cells - free[group]
            if short <= 0 or not self._manager.evict(group, short, restores=not drafts):
                return free[group]
        return cells  # a purely recurrent model takes none

    def _fits(self, completion: Completion, step: _Step) -> bool:
        """Are there cells, in every group, for all its tokens and one more, beside what running completions still need
        for their prefill? What no sequence uses counts as free.

        A bounded layout needs what it holds between steps and one token: smaller steps are always possible. A context
        shift needs no more, as keys can be rotated in place.
        """
        tokens = min(len(completion.tokens) + 1, self._context)
        need = {
            name: min(tokens - completion.computed, layout.most_cells(tokens, 1))
            + step.rows
            - step.drafts
            + sum(self._missing(other, layout, step) for other in self.running)
            for name, layout in self._layouts.items()
        }
        free = self._manager.free()
        if all(need[name] <= free[name] for name in need):
            return True
        available = self._manager.available()
        return all(need[name] <= available[name] for name in need)

    def _missing(self, completion: Completion, layout: Layout, step: _Step) -> int:
        """Cells of a group that a completion in prefill still needs after this step."""
        computed = completion.computed + step.tokens_of(completion)
        tokens = min(len(completion.tokens), self._context)
        if completion.status is not Status.PREFILL or computed >= tokens:
            return 0
        return layout.most_cells(tokens, 0) - layout.most_cells(computed, 0)

    def check(self) -> None:
        """Assert what is always true between steps."""
        for completions in (self.waiting, self.running):
            assert completions == sorted(completions, key=lambda completion: completion.key), "not in order of arrival"
        assert not set(map(id, self.waiting)) & set(map(id, self.running)), "a completion is waiting and running"
        for completion in self.waiting:
            assert (completion.seq, completion.computed) == (None, 0)
            assert completion.status is Status.WAITING
        for completion in self.running:
            assert completion.seq is not None
            assert completion.status in (Status.PREFILL, Status.DECODE)


def _sequences(completion: Completion) -> int:
    """Sequences that a completion has or will have: a prompt in prefill will be forked into all of its completions."""
    return completion.request.params.n if len(completion.request.completions) == 1 else 1
