"""A world without a network and without threads: the real loop, scheduler, manager, store and memory, requests that
come and go, and reads of the store that end when the game says so.

What the runner does with a network is done here in integers: tokens are numbers, an answer goes on until its
`max_tokens`. With drafts, some of them are accepted. Time is virtual, and everything is deterministic.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Any, cast

import pytest
import torch

from kvcellar.engine.core.device import Inbox
from kvcellar.engine.core.drafting import Drafting
from kvcellar.engine.core.loop import Loop
from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.engine.core.scheduler import PASSED, ROUND, Chunks, Scheduler
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.engine.messages import Drawn, Ended, EngineEvent, Submission
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import CacheFull
from kvcellar.events import Done, Failed, FinishReason
from kvcellar.images.image import ImageInput
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.record import positions
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Ahead, Batch
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restores import Evict
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.lanes import Lane
from kvcellar.memory.tiers.tier import Tier
from kvcellar.sampling_params import SamplingParams

VOCABULARY = 1000


def memory_of(layouts: Mapping[str, Layout], cells: Mapping[str, int]) -> Memory:
    """A memory whose cells hold one number, so that a step costs next to nothing."""
    groups = [
        Group(name, layout, (Plane("k", 1, 1),), (layer,)) for layer, (name, layout) in enumerate(layouts.items())
    ]
    return Memory(groups, cells=cells, dtype=torch.float32, device="cpu", backend=Sdpa())


@dataclass(frozen=True)
class Ask:
    """A request to come: at turn `at`, with that prompt. Cancelled in turn `cancel`, if that is before its end."""

    at: int
    prompt: int
    max_tokens: int
    n: int = 1
    cancel: int | None = None
    family: int | None = None  # prompts of a family begin alike; others differ from their first token on
    owner: str = ""
    weight: float = 1.0
    images: tuple[tuple[int, int], ...] = ()  # where each begins, and its tokens, which see each other
    whole: bool = False  # all tokens of the prompt see each other
    logprobs: bool = False  # of its prompt
    crossed: bool = False  # an image has one token, and those behind it see it by cross-attention

    def pictured(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], PromptImages | None]:
        """The prompt with the rows of its images. What begins at the same place and is as long is the same image."""
        if not (self.images or self.whole):
            return tuple(prompt), None
        digests = [hashlib.sha256(f"{at} {rows}".encode()).digest() for at, rows in self.images]
        made, inputs = (
            list(prompt),
            [ImageInput(digest, rows, ()) for digest, (_, rows) in zip(digests, self.images, strict=True)],
        )
        for image, (at, rows) in zip(inputs, self.images, strict=True):
            made[at : at + rows] = image.row_ids()
        how = {"ahead": not self.crossed, "whole_prompt": self.whole, "crossed": self.crossed}
        return tuple(made), PromptImages(made, inputs, **how)


class Device:
    """The thread of a device, as the loop sees it. The engine sleeps until `until` if it is not `awake`."""

    awake, until, current = False, inf, False

    def add(self, engine: object) -> None:
        self.awake = True

    def wake(self) -> None:
        self.awake = True

    def runs(self, engine: object) -> bool:
        return True


class NoThread:
    """A thread that does nothing."""

    def __init__(self, **how: object) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


@dataclass
class Heard:
    """What one request was told. Asserts the order of events as they come."""

    events: list[EngineEvent] = field(default_factory=list)

    def __call__(self, event: EngineEvent) -> None:
        assert not self.over, f"{event} came after the end"
        if isinstance(event, Drawn | Ended):
            assert event.choice not in self.reasons, f"{event} came after its choice had finished"
        self.events.append(event)

    @property
    def over(self) -> bool:
        return any(isinstance(event, Done | Failed) for event in self.events)

    @property
    def error(self) -> Exception | None:
        return next((event.error for event in self.events if isinstance(event, Failed)), None)

    @property
    def reasons(self) -> dict[int, str]:
        return {event.choice: event.reason for event in self.events if isinstance(event, Ended)}

    def tokens(self, choice: int) -> int:
        return sum(len(e.token_ids) for e in self.events if isinstance(e, Drawn) and e.choice == choice)


class World:
    """Plays requests against the real scheduler and manager, and asserts the scheduler's laws in every turn."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        cells: Mapping[str, int],
        *,
        context: int = 10_000,
        max_sequences: int = 4,
        step_tokens: int = 8,
        drafts: Random | None = None,
        tier: Tier | None = None,
        gap: float | None = None,
        drawn: float = 0.0,
    ) -> None:
        """`drafts` says how many there are of each completion, and how many of these are accepted; None: none. `tier`:
        of a store. `gap`: seconds between tokens of running streams. A step takes a millisecond for each row, and
        `drawn` seconds for each output of which it draws a token."""
        self.layouts, self.capacity = dict(layouts), dict(cells)
        self.context, self.max_sequences, self.step_tokens = context, max_sequences, step_tokens
        self.now = 0.0
        self.memory, self.device = memory_of(layouts, cells), Device()
        self.inbox = Inbox(cast(Any, self.device))
        self.manager = SequenceManager(
            self.memory,
            Drafting(None, context=context),
            open_store=None if tier is None else partial(self._opened, tier),
        )
        self._drafts = drafts
        self.scheduler = Scheduler(
            self.manager,
            layouts,
            context=context,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            draft=self._draft,
            chunks=None if gap is None else Chunks(gap),
        )
        self._gap, self._drawn = gap, drawn
        self.loop = Loop(
            self.manager,
            self.scheduler,
            siblings=self._siblings,
            context=context,
            threads=1,
            inbox=self.inbox,
            clock=self.clock,
        )
        self.loop.start(cast(Any, self))
        self.store = self.manager.store
        self._watch_drafts()
        self._watch_schedule()
        self.heard: dict[int, Heard] = {}
        self.requests: dict[int, Request] = {}
        self.turns = 0
        self.fed = 0
        self._first: tuple[Completion, int] | None = None  # before this step: the first prompt, and its `_together`
        self._left_out = set[int]()  # of the last step: streams, by identity
        self._waited: tuple[int, int] | None = None  # for that step: the first prompt, and how far it was computed
        self.drafted = self.accepted = 0

    def clock(self) -> float:
        return self.now

    def _opened(self, tier: Tier, memory: Memory, prefixes: Prefixes, evict: Evict) -> Store:
        """A store whose threads do nothing: `read` does one of their jobs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Thread", NoThread)
            store = Store(
                [tier],
                memory,
                prefixes,
                identity=b"i" * 32,
                secret=b"s" * 32,
                staging=1 << 20,
                catalogue=Catalogue(anywhere=prefixes.anywhere, positions=positions),
                post=self.inbox.post,
                evict=evict,
                clock=self.clock,
            )
        store.load()
        return store

    # -- what happens -------------------------------------------------------------------------------------------

    def play(self, asks: Sequence[Ask], meanwhile: Callable[[], None] = lambda: None) -> None:
        """All of them, to the end. `meanwhile` is called before each turn."""
        coming = dict(enumerate(asks))
        limit = sum(a.at + 2 * a.n * (a.prompt + a.max_tokens + 2) for a in asks) * 2 + 50
        while coming or self.scheduler.running or self.scheduler.waiting:
            for number, ask in list(coming.items()):
                if ask.at <= self.turns:
                    self.submit(number, ask)
                    del coming[number]
            for number, request in self.requests.items():
                if asks[number].cancel == self.turns:
                    self.loop.cancel(request.number)
            meanwhile()
            self.now += 0.001
            self.turns += 1
            self.wake()
            assert self.turns < limit, "it does not come to an end"

    def submit(self, number: int, ask: Ask) -> None:
        heard = self.heard[number] = Heard()
        told = 0 if ask.logprobs else None
        params = SamplingParams(max_tokens=ask.max_tokens, n=ask.n, temperature=0.0, prompt_logprobs=told)
        first = 2 * ask.family if ask.family is not None else 2 * number + 1
        prompt, images = ask.pictured((first, *range(1, ask.prompt)))
        retention = RetentionOptions(owner=ask.owner, weight=ask.weight)
        submission = Submission(
            number=self.loop.number(), prompt=key_of(prompt), params=params, seed=0, retention=retention
        )
        request = self.requests[number] = Request(submission, heard, images=images)
        self.loop.submit(request, [self._completion(request, list(prompt), 0)])

    def jobs(self) -> list[Lane]:
        """The lanes of the store that have a job, each once."""
        if self.store is None:
            return []
        transfers = self.store.transfers
        return [lane for lane in (transfers._events, *transfers._lanes) if lane._waiting or lane._to_note]

    def read(self, lane: Lane) -> None:
        """Do the next job of a lane."""
        with lane._changed:
            job = lane._take_notes() if lane._to_note or not lane._waiting else lane._take_job()
            lane.moved = self.now
        job()

    def wake(self) -> bool:
        """A turn of the engine, unless it sleeps. False if it does: then something will wake it, or nothing is left."""
        if not (self.device.awake or self.now >= self.device.until):
            assert not self.scheduler.running, "it sleeps while completions run"
            if self.scheduler.waiting:
                assert self.device.until < inf, "it sleeps without a timer while completions wait"
                assert self.jobs() or self._short(), "it sleeps, and only the timer will wake it"
            return False
        self.turn()
        return True

    def _short(self) -> bool:
        """Whether a read waits for staging memory, which a time ends."""
        return self.store is not None and any(one.short is not None for one in self.store.restores._fetches)

    def turn(self) -> None:
        self.device.awake = False
        pause = self.loop.turn()
        self.device.until = inf if pause is None else self.now + pause
        if self.broken is not None:
            raise self.broken
        assert self.loop.silences == 0, "completions waited for nothing"
        self.check()

    def _completion(self, request: Request, tokens: list[int], choice: int) -> Completion:
        state = Sampler(request.params, seed=0, index=choice, prompt_ids=(), vocab_size=VOCABULARY, end_ids=frozenset())
        return Completion(request, state, tokens)

    def step(self, shares: Sequence[Scheduled]) -> None:
        """What the runner does: begin, put, commit, fork, write, end."""
        self.now += 0.001 * sum(share.rows for share in shares)
        self.fed += sum(share.tokens for share in shares)
        rows = sum(share.rows for share in shares)
        try:
            self.memory.begin(Batch(self.manager.feeds(shares), ahead_of(shares)))
        except CacheFull as full:
            self.broken = AssertionError(f"a step lacks what it was promised: {full}")
            raise
        for layer in range(len(self.layouts)):
            self.memory.put(layer, k=torch.zeros(rows, 1, 1))
        kept = {id(share.completion): share.tokens + self._right(share.drafts) for share in shares}
        claims = self.memory.commit({share.completion.seq: kept[id(share.completion)] for share in shares})  # type: ignore[misc]
        ended: list[tuple[Completion, FinishReason]] = []
        made: dict[int, Sequence[Completion]] = {}
        for completion, tokens, _ in shares:
            if tokens == completion.uncomputed and completion.status is Status.PREFILL:
                made[id(completion)] = self.loop.siblings(completion, sum(map(len, made.values())))
        drawn = sum(share.tokens == share.completion.uncomputed for share in shares) + sum(map(len, made.values()))
        self.now += self._drawn * drawn
        for share in shares:
            completion, tokens = share.completion, kept[id(share.completion)]
            assert completion.seq is not None
            decoding, complete = completion.status is Status.DECODE, share.tokens == completion.uncomputed
            if decoding:
                self._write(completion, tokens, ended)
            self.manager.keep(completion, tokens, claims.get(completion.seq))
            if complete and not decoding:
                self.loop.fork(completion, made[id(completion)])
                for writer in (completion, *made[id(completion)]):
                    self._write(writer, 1, ended)
        for completion, reason in ended:
            self.loop.end(completion, reason)

    def _write(self, completion: Completion, count: int, ended: list[tuple[Completion, FinishReason]]) -> None:
        tokens = [((len(completion.tokens) + place) % VOCABULARY, None) for place in range(count)]
        found = completion.accept(tokens, self.context)
        assert found.tokens == count, "more drafts than the text has room for"
        if found.reason:
            ended.append((completion, found.reason))

    # -- drafts -------------------------------------------------------------------------------------------------

    def _draft(self, completions: Sequence[Completion], most: int) -> list[int]:
        """As many as a speculator might have."""
        assert all(completion.status is Status.DECODE for completion in completions)
        if self._drafts is None:
            return [0] * len(completions)
        rooms = [
            min(
                most,
                self.context - len(completion.tokens),
                (completion.request.params.max_tokens or 0) - completion.sampler.produced - 1,
            )
            for completion in completions
        ]
        return [self._drafts.randint(0, max(0, room)) for room in rooms]

    def _right(self, drafts: int) -> int:
        right = self._drafts.randint(0, drafts) if self._drafts is not None else 0
        self.drafted += drafts
        self.accepted += right
        return right

    def _watch_drafts(self) -> None:
        """Assert that a step has no drafts any more when it takes memory that others use, or wait for."""
        steps: list[Any] = []
        scheduler, manager = self.scheduler, self.manager

        def inside(act: Callable[..., Any]) -> Callable[..., Any]:
            def entered(completion: Completion, step: Any, most: int) -> Any:
                steps.append(step)
                try:
                    return act(completion, step, most)
                finally:
                    steps.pop()

            return entered

        def without(act: Callable[..., Any], what: str) -> Callable[..., Any]:
            def called(*args: Any, **named: Any) -> Any:
                gives_up = named.get("restores", True)
                assert not (steps and gives_up and steps[-1].drafts), f"{what} while the step has drafts"
                return act(*args, **named)

            return called

        scheduler._add = inside(scheduler._add)  # type: ignore[method-assign]
        scheduler._preempt = without(scheduler._preempt, "preempted")  # type: ignore[method-assign]
        manager.unpin = without(manager.unpin, "unpinned")  # type: ignore[method-assign]
        manager.evict = without(manager.evict, "a restore was given up")  # type: ignore[method-assign]

    def _siblings(self, completion: Completion, most: int) -> list[Completion]:
        request = completion.request
        first = len(request.completions)
        missing = range(first, min(request.params.n, first + most)) if not completion.sampler.produced else ()
        return [self._completion(request, list(completion.tokens), choice) for choice in missing]

    def _watch_schedule(self) -> None:
        """Assert the laws of each step. What fails would end a request only, so it is kept for `turn`."""
        schedule, self.broken = self.scheduler.schedule, cast(AssertionError | None, None)

        def watched() -> tuple[list[Scheduled], list[Completion]]:
            waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
            prompts = [one for one in running if one.status is Status.PREFILL and not self._encodes(one)]
            first = next(iter(ranked(prompts)), None)
            self._first = None if first is None else (first, self._together(first))
            try:
                shares, stuck = schedule()
                self.check_laws(shares, stuck, waiting, running)
            except AssertionError as error:
                self.broken = error
                raise
            return shares, stuck

        self.scheduler.schedule = watched  # type: ignore[method-assign]

    # -- laws ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.loop.check()
        for heard in self.heard.values():
            assert heard.error is None, f"a request failed: {heard.error}"

    def check_laws(
        self, shares: list[Scheduled], stuck: list[Completion], waiting: list[Completion], running: list[Completion]
    ) -> None:
        given = {id(share.completion): share.rows for share in shares}
        total = sum(given.values())
        assert len(given) == len(shares), "a completion was given two shares"
        assert all(share.tokens > 0 <= share.drafts for share in shares)
        assert total <= self.step_tokens, "more than the budget"
        for name, free in self.memory.free().items():
            assert total <= free, f"{total} tokens for {free} free cells of {name}"
        for share in shares:
            assert not share.drafts or share.completion.status is Status.DECODE, "drafts inside of a prompt"
        if drafts := sum(share.drafts for share in shares):
            decoding = [share for share in shares if share.completion.status is Status.DECODE]
            assert drafts + len(decoding) <= ROUND
            if len(decoding) < len(running) or waiting:
                assert 2 * drafts <= self.step_tokens - len(decoding), "drafts take what others need"
        for share in shares:
            assert share.tokens <= share.completion.uncomputed
            assert share.completion in self.scheduler.running

        self.check_together(shares, running)
        now = self.scheduler.running
        order = ranked([*now, *self.scheduler.waiting])
        if order and order[0] in running:
            first = order[0]
            assert first in now, "the one that ranks first was preempted"
            decoding = sum(completion.status is Status.DECODE for completion in now)
            waits = decoding >= self.step_tokens or self._encodes(first) or self._together(first) > 1
            waits |= id(first) in self._left_out
            assert (id(first) in given) != (first in stuck) or waits, "the first has to wait"
        assert all(completion is now[0] and len(now) == 1 for completion in stuck), (
            "ended although others could be sent back"
        )
        assert len(now) <= self.max_sequences
        limited = self._gap is not None and any(one.status is Status.DECODE for one in now)
        if total < self.step_tokens and not limited:
            self.check_bound(order)
        encoding = any(map(self._encodes, now))
        assert shares or stuck or not (waiting or running) or self._restoring() or encoding, "nothing happens"

    def check_together(self, shares: Sequence[Scheduled], running: Sequence[Completion]) -> None:
        """Tokens that see each other are in one step. For those of the first prompt, streams wait for one step, and
        they for one; others wait until there is room beside all streams."""
        now, given = self.scheduler.running, {id(share.completion) for share in shares}
        for share in shares:
            if (images := share.completion.request.images) is not None:
                start = share.completion.computed
                cuts = [pos for pos in (start, start + share.tokens) if images.inside(pos)]
                assert not cuts, "a step has a part of them"
        first, together = self._first or (None, 0)
        unserved = {id(one) for one in now if one in running and one.status is Status.DECODE and id(one) not in given}
        room = self.step_tokens - sum(one.status is Status.DECODE for one in running)
        if any(share.completion.status is Status.PREFILL for share in shares):
            assert not unserved or together > room, "a completion that reads was served before one that writes"
        assert not unserved & self._left_out or room < 0, "a stream waits for two steps"
        self._left_out = unserved
        waited: tuple[int, int] | None = None
        if first is not None and first in now and id(first) not in given and not self._encodes(first):
            waited = (id(first), first.computed) if together > 1 else None
        assert waited is None or waited != self._waited, "tokens that see each other wait for two steps"
        self._waited = waited

    def _together(self, completion: Completion) -> int:
        """How many of its next tokens a step has to have all of."""
        images, start = completion.request.images, completion.computed
        if images is None or completion.status is not Status.PREFILL:
            return 0
        return images.whole(start, start + 1) - start

    def _encodes(self, completion: Completion) -> bool:
        """Whether it waits for an image."""
        return self.manager.next_end(completion) <= completion.computed

    def _restoring(self) -> bool:
        return self.store is not None and self.store.restores.awaited

    def check_bound(self, order: Sequence[Completion]) -> None:
        """While a completion waits that could go on, those that rank before it leave it no sequence or no cells."""
        ahead: list[Completion] = []
        refused = 0
        for completion in order:
            if completion in self.scheduler.running:
                ahead.append(completion)
            elif not (self._shares(completion) or self._restores(completion)):
                full = len(ahead) >= self.max_sequences
                assert full or refused >= PASSED or not self._surely_fits(completion, ahead), "it waits for others"
                refused += 1

    def _shares(self, completion: Completion) -> bool:
        """Whether it may wait for the prompt of an older request."""
        prompts = [one for one in self.scheduler.running if one.status is Status.PREFILL and one.key < completion.key]
        return any(one.tokens[0] == completion.tokens[0] for one in prompts)

    def _restores(self, completion: Completion) -> bool:
        """Whether it may wait for what is read back."""
        fetch = self.manager.cache.fetches.get(completion.key)
        return fetch is not None and not fetch.done

    def _surely_fits(self, completion: Completion, ahead: Sequence[Completion]) -> bool:
        """Whether it fits beside others if nothing is shared, and each holds all that it ever does."""

        def most(one: Completion, layout: Layout) -> int:
            tokens = min(len(one.tokens) + 1, self.context)
            return layout.most_cells(tokens, self.step_tokens) + layout.most_cells(tokens, 1)

        return all(
            sum(most(one, layout) for one in (*ahead, completion)) <= self.capacity[name]
            for name, layout in self.layouts.items()
        )


def ahead_of(shares: Sequence[Scheduled]) -> tuple[Ahead, ...]:
    """The spans of a step whose tokens see each other."""
    found = list[Ahead]()
    for completion, tokens, _ in shares:
        if (images := completion.request.images) is not None and completion.seq is not None:
            new = Span(completion.computed, completion.computed + tokens)
            found += ((completion.seq, span) for span in images.ahead_in(new))
    return tuple(found)


def ranked(completions: Sequence[Completion]) -> list[Completion]:
    """In order of rank, as the scheduler's docstring defines it."""

    def depth(one: Completion) -> int:
        return sum(
            other.status is not Status.DONE
            for other in one.request.completions
            if other.sampler.index < one.sampler.index
        )

    def rank(one: Completion) -> tuple[float, tuple[int, int]]:
        mine = [other for other in completions if other.request.retention.owner == one.request.retention.owner]
        before = sum((depth(other), other.key) < (depth(one), one.key) for other in mine)
        return before / one.request.retention.weight, one.key

    return sorted(completions, key=rank)
