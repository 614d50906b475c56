"""scheduler: which completions take part in the next step, with how many tokens. No torch: memory is seen as counts of
free cells.

*Rank.* The completions of one owner (a key of a server) are ordered by how many earlier outputs of their request are
not over, then by arrival; the one at place i has rank i / weight of the owner. The completions of all owners are
ordered by rank, then by arrival. So owners share sequences by their weights, the requests of one owner come one after
the other before any of them has a second output, and the oldest request of all ranks first.

*Admission.* A waiting completion is admitted as soon as it fits beside the running ones that rank before it: those that
rank behind it are preempted, the last first, as far as it needs their sequences or cells. One that does not fit yet is
passed by those behind it that do (`PASSED` such are looked at in a step), and so is one whose tokens are being read
back, or are about to be computed by the prompt of an older request. So what arrives later, or ranks later, never makes
a completion wait: the bound is that while one waits and is ready, those that rank before it leave it no room, and the
one that ranks first waits for nothing, but as a stream for one step of tokens that see each other.

*A step.* Completions in decode are scheduled first, one token each, and drafts of their next tokens, up to a part of
the token budget. What is left of it goes to prompts, in chunks that take no longer than running streams may wait: half
of it, if others need it, to the prompt that ranks first, the rest to those with the fewest tokens left; the longest
chunk is shortened so that such steps have few numbers of rows. When cells run short, what no sequence uses is evicted,
then there are no drafts in this step, then what is restored for waiting completions is given up, and then the
completion that ranks last is preempted: it keeps its tokens, and computes those again later that are evicted meanwhile.
The one that ranks first is never preempted, so every completion ends eventually.

*Tokens that see each other*, as those of an image or of a whole prompt, are computed in one step. Where the first
prompt that can go on comes to such tokens, the step has room for them: no drafts, and no streams, that do not fit
beside them. These streams take part in the next step, so they wait for one step, and the prompt for one that has all
streams.

Always true:
  * `waiting` and `running` are in order of arrival; a completion is in at most one of them;
  * a running completion has a sequence in memory, a waiting one has none;
  * the tokens of a step fit the token budget, and their cells and state rows are reserved until it begins;
  * `current` is the completion that is being changed, or None: an error concerns its request only.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.memory.layout import Layout
from kvcellar.memory.prefix.node import Reuse

if TYPE_CHECKING:  # imports torch
    from kvcellar.engine.core.sequence_manager import SequenceManager

ROUND = 128  # rows, at most, of a step with drafts that those in decode have
MASK_SECONDS = 0.01  # of waiting for a mask where there is nothing else to compute
SCORED = 128  # rows of prompts, at most, of which a step has the logits
PASSED = 8  # waiting completions that are ready and do not fit, at most, which others pass in a step
FIRST_CHUNK = 64  # tokens of prompts beside running streams, before any step was measured,
LEAST_CHUNK = 16  # and the fewest, however long they take
LEAST_SHARE = 0.5  # of the time that decoding takes is for prompts, at least
STEP_SHARE = 0.7  # of the seconds between two tokens of a stream: the rest is for what is done between steps
BETWEEN = 2.0  # times what decoding takes that streams wait, at most, for what is no step,
LEAST_BETWEEN = 0.002  # and seconds, at least
FADING = 0.9
EVEN = (
    64  # rows: steps of streams and prompts have a multiple of so many, as a new number takes milliseconds to prepare
)
ROUGHLY = 16  # times that a token of a prompt may take less than the mean of all rows

Draft = Callable[[Sequence[Completion], int], Sequence[int]]


def no_drafts(completions: Sequence[Completion], most: int) -> Sequence[int]:
    """The `draft` of an engine without speculation."""
    return [0] * len(completions)


class Chunks:
    """How many tokens of prompts a step computes beside running streams, so that these have a token every `gap`
    seconds, by what the steps before have taken. Where decoding alone takes nearly as long, prompts have a part of its
    time more: `LEAST_SHARE`. And where it takes longer, streams are late anyway: what it takes longer, prompts have,
    too, as far as they are as many.

    The last token of a prompt counts as a row in decode: the next token is drawn after it, and from then on it is one.
    So what it takes is not that of a token of a prompt, but `last` times as much.

    What a token of a prompt takes is what a step takes longer than the one before it, in which about as many rows
    decode, by the tokens that it has more: the slope of least squares, in which a step counts by `FADING` less than the
    one after it. Chunks are whole and half in turn, so that there is a slope; one of all the seconds would be wrong
    where steps get longer one after the other, as those of a long prompt do. It is never above the mean of all rows, as
    rows in decode draw tokens, too.
    """

    def __init__(self, gap: float) -> None:
        self.seconds = STEP_SHARE * gap
        self._rows = -1  # in decode
        self._last = 0, 0.0  # tokens of prompts and seconds of the last step,
        self._prompts, self._took = 0.0, 0.0  # and their means over the steps in which about so many rows decoded
        self._squares, self._products = 0.0, 0.0  # of how much more each was than before it
        self._each: float | None = None
        self._half = False
        self.last = 1  # tokens of prompts that take as long as a last one, when `tokens` was called
        self.waited = 0.0  # seconds since the last step

    def between(self, rows: int) -> float:
        """Seconds that what is no step may take before the next one, beside so many rows in decode."""
        if not rows:
            return self.seconds
        decoding = max(0.0, self._took - (self._each or 0.0) * self._prompts)
        left = max(self.seconds - decoding, LEAST_SHARE * decoding)
        return max(LEAST_BETWEEN, min(BETWEEN * decoding, left))

    def tokens(self, prompts: int, rows: int) -> int:
        """Beside so many rows in decode, where so many prompts are computed or wait."""
        if self._each is None:
            return FIRST_CHUNK
        decoding = max(0.0, self._took - self._each * self._prompts)
        late = min(1.0, prompts / max(1, rows)) * (decoding - self.seconds)
        chunk = int(max(self.seconds - self.waited - decoding, LEAST_SHARE * decoding, late) / self._each)
        self.last = max(1, int(decoding / max(1, rows) / self._each))
        self._half = not self._half
        return max(LEAST_CHUNK, chunk // 2) if self._half else max(2 * LEAST_CHUNK, chunk)

    def stepped(self, rows: int, prompts: int, seconds: float) -> None:
        """A step of so many rows, `prompts` of which were tokens of prompts that are not their last, has taken so many
        seconds."""
        decoding = rows - prompts
        self.waited = 0.0
        more, longer = 0, 0.0
        if self._rows < 0 or abs(decoding - self._rows) > self._rows / 4:
            self._rows, self._prompts, self._took = decoding, float(prompts), seconds
        else:
            more, longer = prompts - self._last[0], seconds - self._last[1]
            self._prompts += (1 - FADING) * (prompts - self._prompts)
            self._took += (1 - FADING) * (seconds - self._took)
        self._last = prompts, seconds
        mean = max(1e-9, self._took / (self._prompts + decoding))
        if more:  # other steps tell nothing: what is known stays, however many they are
            self._squares = FADING * self._squares + more * more
            self._products = FADING * self._products + more * longer
            self._each = min(max(self._products / self._squares, mean / ROUGHLY), mean)
        elif self._squares == 0 and prompts >= LEAST_CHUNK:
            self._each = mean


class _Step:
    """A step that is being filled. `rows` are its tokens and drafts. `left` is what is left of its token budget. Beside
    streams (`limit`), the last token of a prompt takes `last` of it, and so does each other output that may begin
    behind it: as many as there is room for, or as there are sequences where memory cannot resume before that token. So
    `left` may be less than 0."""

    def __init__(self, budget: int) -> None:
        self._scheduled: dict[int, Scheduled] = {}  # by identity of the completion
        self._starts: dict[int, int] = {}  # likewise: the other outputs of its request that may begin
        self.rows, self.drafts, self.left, self._last, self._sequences = 0, 0, budget, 0, 0

    def limit(self, tokens: int, last: int, sequences: int) -> None:
        """Beside streams there are so many tokens for prompts, and so many sequences are free."""
        self.left, self._last, self._sequences = min(self.left, tokens), last, sequences

    @property
    def starts(self) -> int | None:
        """How many outputs may begin, beside the first of each prompt; None: any number."""
        return sum(self._starts.values()) if self._last else None

    @property
    def scheduled(self) -> list[Scheduled]:
        return list(self._scheduled.values())

    def add(self, completion: Completion, tokens: int) -> None:
        """Schedule so many more tokens of a completion."""
        before = self._scheduled.get(id(completion))
        if before is not None:
            self._count(before, -1)
        made = Scheduled(completion, tokens) if before is None else before._replace(tokens=before.tokens + tokens)
        self._put(made)
        if made.ends and self._last:
            request = completion.request
            missing = 0 if completion.sampler.produced else request.params.n - len(request.completions)
            room = max(0, self._sequences - sum(self._starts.values()))
            if not (request.images is not None and request.images.inside(len(completion.tokens) - 1)):
                room = min(room, max(0, self.left) // self._last)  # else those that begin later would compute it again
            self._starts[id(completion)] = starts = min(missing, room)
            self.left -= starts * self._last

    def remove(self, completion: Completion) -> None:
        if (found := self._scheduled.pop(id(completion), None)) is not None:
            self._count(found, -1)
            self.left += self._starts.pop(id(completion), 0) * self._last

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
        self.left -= sign * (scheduled.rows + (self._last - 1 if scheduled.ends and self._last else 0))

    def tokens_of(self, completion: Completion) -> int:
        found = self._scheduled.get(id(completion))
        return found.tokens if found is not None else 0


class Scheduler:
    """Decides; does not run. `schedule` is called between steps."""

    def __init__(
        self,
        manager: "SequenceManager",
        layouts: Mapping[str, Layout],
        *,
        context: int,
        max_sequences: int,
        step_tokens: int,
        draft: Draft = no_drafts,
        scored: int = SCORED,
        scored_beside: int = SCORED,
        chunks: Chunks | None = None,
    ) -> None:
        """`draft` makes drafts for completions in decode, up to so many for each, and returns how many each has.
        `scored`: the most rows of prompts of which a step has the logits, `scored_beside` those of one in which others
        decode. `chunks`: how many tokens of prompts are computed beside running streams; None: as many as the step
        has."""
        self._manager, self._layouts, self._draft, self._scored = manager, dict(layouts), draft, scored
        self._scored_beside = min(scored, scored_beside)
        self._context, self._max_sequences, self._step_tokens = context, max_sequences, step_tokens
        self._chunks = chunks
        self.waiting: list[Completion] = []
        self.running: list[Completion] = []
        self._ready = 0  # waiting ones that lacked a sequence, or a place in the step, when the last one was scheduled
        self._starts = 0  # outputs that may begin in the last scheduled step beside the first of a prompt
        self._left_out = False  # whether that step had no room for some of those in decode, because of a prompt
        self.preemptions = 0
        self.current: Completion | None = None

    # -- arrival and end ----------------------------------------------------------------------------------------

    def enqueue(self, completion: Completion) -> None:
        insort(self.waiting, completion, key=lambda other: other.key)

    def add_running(self, completion: Completion) -> None:
        """Add a completion that has a sequence already: a fork of a running one."""
        insort(self.running, completion, key=lambda other: other.key)

    @property
    def prefilling(self) -> int:
        """How many of the running ones are not in decode."""
        return sum(one.status is Status.PREFILL for one in self.running)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to be computed before all completions are in decode."""
        prefill = [one for one in self.running if one.status is Status.PREFILL]
        return sum(one.uncomputed for one in (*self.waiting, *prefill))

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

    def spare(self, others: int) -> int:
        """How many more outputs may begin in the step that was scheduled last, for which sequences are left beside
        those for so many `others`, and for waiting completions that lack nothing else."""
        return max(0, min(self._max_sequences - len(self.running) - self._ready - others, self._starts))

    def started(self, outputs: int) -> None:
        """So many outputs begin in the step, beside the first of their prompt."""
        self._starts -= outputs

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Scheduled], list[Completion]]:
        """The next step, and completions that find no free cell although they run alone: these end with `length`."""
        self._manager.reserve(0, 0)
        step, stuck = _Step(self._step_tokens), list[Completion]()
        self._add_decoding(step, stuck)
        beside = self._chunks if step.rows else None
        if beside is not None:
            prompts = len(self.running) - len(step.scheduled) + min(len(self.waiting), self._max_sequences)
            tokens = beside.tokens(prompts, step.rows)
            step.limit(tokens, beside.last, self._max_sequences - len(self.running))
        self._add_prompts(step, stuck)
        if not stuck:
            self._admit_waiting(step)
        for completion in self._ranked(one for one in self.running if one.status is Status.PREFILL):
            self._extend(completion, step)
        if beside is not None:
            self._even(step)
        if not (step.scheduled or stuck):  # what was just admitted alone may already fill memory
            if self._left_out:  # for a prompt that was preempted
                return self.schedule()
            late = [one for one in self.running if one.late]
            full = [one for one in self.running if one.full(self._context)]  # as well: it shifts before the next step
            waits = [one for one in self.running if self._manager.next_end(one) <= one.computed]  # for an image
            stuck += [one for one in self.running if one not in (*late, *full, *waits)]
            if late and not stuck:
                late[0].await_mask(MASK_SECONDS)  # there is nothing else to compute
        self._starts = self._max_sequences if step.starts is None else step.starts
        return [self._shortened(one) for one in step.scheduled], stuck

    def stepped(self, scheduled: Sequence[Scheduled], prompts: int, seconds: float) -> None:
        """A step has taken so many seconds; `prompts` of its tokens were of prompts, and not their last."""
        if self._chunks is not None:
            self._chunks.stepped(sum(one.rows for one in scheduled), prompts, seconds)

    def between(self) -> float:
        """Seconds that what is no step may take before the next one."""
        if self._chunks is None:
            return inf
        return self._chunks.between(sum(one.status is Status.DECODE for one in self.running))

    def waited(self, seconds: float) -> None:
        """Record the seconds that were spent outside of steps since the last one."""
        if self._chunks is not None:
            self._chunks.waited = seconds

    def _shortened(self, one: Scheduled) -> Scheduled:
        """Where a waiting completion diverges was not known when the prompt that it waits for was scheduled."""
        self.current = one.completion
        most = self._manager.next_end(one.completion) - one.completion.computed
        return one if one.drafts or one.tokens <= most else one._replace(tokens=most)

    # -- tokens -------------------------------------------------------------------------------------------------

    def _add_decoding(self, step: _Step, stuck: list[Completion]) -> None:
        """Schedule the next token and drafts of completions in decode, as far as there is room for them beside what a
        prompt has to have together: in a step after one that left some of them out, for all of them."""
        together = 0 if self._left_out else self._together(step)
        self._left_out = False
        for completion in [one for one in self.running if one.status is Status.DECODE]:
            self.current = completion
            if step.left <= together:
                self._left_out = together > 0
            elif not self._add(completion, step, 1):
                stuck.append(completion)
        self._add_drafts(step, together)

    def _together(self, step: _Step) -> int:
        """How many tokens that see each other are the next ones of the first prompt that can go on; 0: none."""
        for first in self._ranked(one for one in self.running if one.status is Status.PREFILL):
            self.current = first
            if first.late or self._manager.next_end(first) <= first.computed:  # for an image
                continue
            tokens = self._wanted(first, step, 1) if first.request.images is not None else 0
            return tokens if tokens > 1 else 0
        return 0

    def _add_drafts(self, step: _Step, together: int) -> None:
        """Let the completions in decode have drafts, within a part of the token budget, beside what a prompt has to
        have together, and within what can be made free."""
        decoding = [one.completion for one in step.scheduled]
        others = len(self.running) > len(decoding) or bool(self.waiting)
        spare = min(step.left // (2 if others else 1), step.left - together, ROUND - len(decoding))
        self.current = None
        counts = self._draft(decoding, max(0, spare // max(1, len(decoding))))
        for completion, count in zip(decoding, counts, strict=True):
            if count:
                step.draft(completion, max(0, min(count, self._make_free(step.rows + count, drafts=True) - step.rows)))
        self._reserve(step)

    def _add_prompts(self, step: _Step, stuck: list[Completion]) -> None:
        """Schedule chunks of running prompts: the one that ranks first has at least half of what is left where others
        need the rest. Of that the other running ones leave half to waiting ones, where these need it; those with few
        tokens left come before those with many."""
        prompts = self._ranked(one for one in self.running if one.status is Status.PREFILL)
        waiting = sum(one.uncomputed for one in self.waiting[:PASSED])
        others = sum(one.uncomputed for one in prompts[1:]) + waiting
        kept = min(others, step.left // 2)
        for completion in (*prompts[:1], *sorted(prompts[1:], key=lambda one: one.uncomputed)):
            self.current = completion
            if step.left > kept and not self._add(completion, step, step.left - kept):
                stuck.append(completion)
            if completion is prompts[0]:
                kept = min(waiting, step.left // 2)

    def _add(self, completion: Completion, step: _Step, most: int) -> bool:
        """Schedule up to `most` tokens of `completion`, as many as fit, unless it is late or preempted. False if it
        runs alone and no cell is free."""
        while completion in self.running and not completion.late:
            self.current = completion
            if not (wanted := self._wanted(completion, step, most)):
                return True  # in a later step
            room = self._make_free(step.rows + wanted, drafts=step.drafts > 0) - step.rows
            room = _whole(completion, min(room, wanted), wanted)
            self.current = completion
            if step.drafts and room < wanted:  # drafts take nothing that others need
                self._drop_drafts(step)
                continue
            if room >= 1:
                step.add(completion, room)
                self._reserve(step)
                return True
            if (victim := self._last(completion)) is not None:
                self._preempt(victim, step)
            elif not self._manager.unpin():
                return False
        return True

    def _extend(self, completion: Completion, step: _Step) -> None:
        """Schedule more tokens of a prompt with what is left of the step, without taking anything from others."""
        self.current = completion
        done = step.tokens_of(completion)
        if completion.late or step.left <= 0:
            return
        if (wanted := self._wanted(completion, step, done + step.left) - done) > 0:
            room = min(wanted, self._make_free(step.rows + wanted, drafts=True) - step.rows)
            if (room := _whole(completion, done + room, done + wanted) - done) >= 1:
                step.add(completion, room)
                self._reserve(step)

    def _even(self, step: _Step) -> None:
        """Leave out as many tokens of a prompt that does not end as there are rows beyond a multiple of `EVEN`."""
        odd = step.rows % EVEN
        going_on = (
            one
            for one in step.scheduled
            if one.completion.status is Status.PREFILL and not one.ends and one.completion.request.images is None
        )
        longest = max(going_on, key=lambda one: one.tokens, default=None)
        if odd and longest is not None and longest.tokens > odd:
            step.add(longest.completion, -odd)
            self._reserve(step)

    def _wanted(self, completion: Completion, step: _Step, most: int) -> int:
        """How many of its next tokens, up to `most`, a step can compute."""
        end = min(self._manager.next_end(completion), self._context)
        tokens = min(most, end - completion.computed)
        if completion.request.images is not None:
            tokens = self._whole_images(completion, step, tokens)
        if not (rows := completion.scored(tokens)):
            return tokens
        others = [one for one in step.scheduled if one.completion is not completion]
        decodes = any(one.completion.status is Status.DECODE for one in others)
        scored = sum(len(one.completion.scored(one.tokens)) for one in others)
        left = max(0, (self._scored_beside if decodes else self._scored) - scored)
        if len(rows) <= left:
            return tokens
        fewer = _whole(completion, rows[left], tokens)
        return fewer if fewer or scored else self._whole_images(completion, step, 1)

    def _whole_images(self, completion: Completion, step: _Step, tokens: int) -> int:
        """As many of its next tokens, up to about `tokens`, as end at no place inside an image that a step has to have
        whole: 0 where the step has no room for one."""
        images, start = completion.request.images, completion.computed
        if images is None or tokens <= 0:
            return tokens
        whole = images.whole(start, start + tokens) - start
        others = step.rows - step.tokens_of(completion)
        return whole if whole <= tokens or others + whole <= self._step_tokens else 0

    def _drop_drafts(self, step: _Step) -> None:
        for one in step.scheduled:
            step.draft(one.completion, 0)
        self._reserve(step)

    def _reserve(self, step: _Step) -> None:
        self._manager.reserve(step.rows, len(step.scheduled))

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

    # -- rank ---------------------------------------------------------------------------------------------------

    def _ranked(self, completions: Iterable[Completion]) -> list[Completion]:
        """Completions in order of rank among each other."""
        depths: dict[Request, dict[int, int]] = {}
        of_owner: dict[str, list[tuple[int, tuple[int, int], Completion]]] = {}
        for one in completions:
            if (request := one.request) not in depths:
                depths[request] = request.depths()
            of_owner.setdefault(request.retention.owner, []).append((depths[request][one.key[1]], one.key, one))
        ranks: list[tuple[float, tuple[int, int], Completion]] = []
        for mine in of_owner.values():
            mine.sort(key=lambda entry: entry[:2])
            ranks += ((at / one.request.retention.weight, key, one) for at, (_, key, one) in enumerate(mine))
        ranks.sort(key=lambda entry: entry[:2])
        return [one for _, _, one in ranks]

    def _last(self, beside: Completion) -> Completion | None:
        """The running completion that ranks last, which may be `beside`; None if `beside` runs alone."""
        return None if self.running == [beside] else self._ranked(self.running)[-1]

    def preempt_last(self, beside: Completion) -> bool:
        """Preempt the running completion that ranks last, which may be `beside`. False if `beside` runs alone."""
        if (victim := self._last(beside)) is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, completion: Completion, step: _Step | None = None) -> None:
        self.current = completion
        if step is not None:
            step.remove(completion)
            self._reserve(step)
        self.running.remove(completion)
        self._manager.release(completion)
        completion.undo_shifts()
        completion.become(Status.WAITING)
        self.enqueue(completion)
        self.preemptions += 1

    # -- admission ----------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Completion]:
        """Waiting completions that may be admitted next: of each owner the first ones, and the first of those whose
        request has an earlier output that is not over."""
        counts: dict[tuple[str, bool], int] = {}
        for one in self.waiting:
            kind = one.request.retention.owner, one.key[1] > 0
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= self._max_sequences:
                yield one

    def _admit_waiting(self, step: _Step) -> None:
        """Admit waiting completions, in order of rank."""
        self._ready = 0
        if not self.waiting:
            return
        ahead: list[Completion] = []  # running ones that rank before
        prompts = [one for one in self.running if one.status is Status.PREFILL]
        refused = 0
        for completion in self._ranked((*self.running, *self._candidates())):
            if completion.status is not Status.WAITING:
                ahead += [completion] if completion in self.running else []
                continue
            self.current = completion
            if self._manager.shares(completion, prompts):
                continue
            looks = len(ahead) < self._max_sequences and refused < PASSED
            fits = looks and self._fits(completion, step, ahead)
            if self._manager.reads_back(completion, enters=fits):
                continue
            if not looks or (fits and step.left <= 0):
                self._ready += refused < PASSED
            elif fits and self._admit(completion, step, ahead):
                ahead.append(completion)
                prompts = [one for one in self.running if one.status is Status.PREFILL]
            else:
                refused += 1

    def _admit(self, completion: Completion, step: _Step, ahead: Sequence[Completion]) -> bool:
        """Admit a waiting completion that fits beside the running ones that rank before it, and preempt others as far
        as it needs what they have. False if it does not fit after all: not all of its prefix is in memory any more."""
        behind = [one for one in self._ranked(self.running) if one not in ahead]
        while behind and (len(self.running) >= self._max_sequences or not self._fits(completion, step, self.running)):
            self._drop_drafts(step)
            self._preempt(behind.pop(), step)
        self.current = completion
        self._manager.admit(completion)
        if self.running and not self._has_room(completion, step):
            self._manager.release(completion)
            return False  # one that runs alone goes on until memory is full
        self._manager.start(completion)
        self.waiting.remove(completion)
        completion.become(Status.PREFILL)
        self.add_running(completion)
        return self._add(completion, step, step.left)

    def _fits(self, completion: Completion, step: _Step, beside: Sequence[Completion]) -> bool:
        """Would there be cells, in every group, for all tokens of a waiting completion and one more, beside what the
        running ones of `beside` have and still need for their prefill? What no other sequence uses counts as free.
        Assigns nothing.

        A bounded layout needs what it holds between steps and one token: smaller steps are always possible. A context
        shift needs no more, as keys can be rotated in place.
        """
        if not beside:
            return True
        return self._enough(completion, self._manager.reuse(completion), step, beside)

    def _has_room(self, completion: Completion, step: _Step) -> bool:
        """The same for one that has its sequence, and the prefix of it that is in memory."""
        reuse = Reuse(completion.computed, completion.computed)
        return self._enough(completion, reuse, step, self.running, completion)

    def _enough(
        self, completion: Completion, reuse: Reuse, step: _Step, beside: Sequence[Completion], *also: Completion
    ) -> bool:
        tokens = min(len(completion.tokens) + 1, self._context)
        rows = sum(step.tokens_of(one) for one in beside)
        need = {
            name: min(tokens - reuse.resume, layout.most_cells(tokens, 1))
            + rows
            + sum(self._missing(other, layout, step) for other in beside)
            for name, layout in self._layouts.items()
        }
        if len(beside) == len(self.running):
            free = self._manager.free()
            if all(need[name] <= free[name] for name in need):
                return True
        available = self._manager.available((*beside, *also))
        idle = {  # what it resumes from and no sequence uses: that is available now, and will not be
            name: layout.most_cells(reuse.resume, 0) - layout.most_cells(reuse.shared, 0)
            for name, layout in self._layouts.items()
        }
        return all(need[name] + idle[name] <= available[name] for name in need)

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
        assert len(self.running) <= self._max_sequences
        for completion in self.waiting:
            assert (completion.seq, completion.computed) == (None, 0)
            assert completion.status is Status.WAITING
        for completion in self.running:
            assert completion.seq is not None
            assert completion.status in (Status.PREFILL, Status.DECODE)


def _whole(completion: Completion, tokens: int, wanted: int) -> int:
    """As many of its next tokens, up to `tokens`, as a step can compute where cells are for no more; of `wanted` ones
    it can."""
    images, start = completion.request.images, completion.computed
    if images is None or tokens <= 0 or tokens == wanted:
        return tokens
    whole = images.whole(start, start + tokens) - start
    return whole if whole <= tokens else 0
