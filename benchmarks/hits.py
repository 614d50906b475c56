"""hits: what a request costs whose prompt begins with tokens that are in memory, by how many tokens memory has.

The real loop, scheduler, manager, prefix tree and memory serve one request after the other until the engine rests, with
one number per cell and no network: what is left is bookkeeping. It is CPU time of the thread. Trees of several sizes
take turns.
"""

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from benchmarks.interleave import in_rounds
from benchmarks.replay import KINDS, STEP_TOKENS, Replay
from benchmarks.row import Given, Lines, settled
from kvcellar.engine.core.device import DeviceThread, Inbox
from kvcellar.engine.core.loop import Loop
from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.engine.core.scheduler import Scheduler
from kvcellar.engine.messages import Submission
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.memory.prefix.node import key_of
from kvcellar.sampling_params import SamplingParams

SYSTEM = 40  # tokens that all prompts of a family begin with,
FAMILY = 50  # and how many prompts are of one
ASKED = 10  # tokens behind them, which differ
DRAWN = 4  # tokens of an answer
MEASURED = ("full", "sliding", "hybrid")
MAX_GROWTH = 1.3  # from 10^4 to 10^6 tokens


class Device(DeviceThread):
    """The thread of a device, which is the caller's."""

    def add(self, engine: object) -> None:
        """The caller takes the turns."""


class Serving:
    """Serves one request after the other; `cells` are those of every group."""

    def __init__(self, kind: str, *, cells: int, rows: int = 1024) -> None:
        self._replay = Replay(kind, cells=cells, rows=rows)
        self.manager, self.memory = self._replay.manager, self._replay.memory
        layouts, _ = KINDS[kind]
        scheduler = Scheduler(self.manager, layouts, context=1 << 20, max_sequences=1, step_tokens=STEP_TOKENS)
        inbox = Inbox(Device())
        self.loop = Loop(self.manager, scheduler, siblings=lambda *_: (), context=1 << 20, threads=1, inbox=inbox)
        self.loop.start(cast(Any, self))
        self._draw = random.Random(1)
        self.texts: list[list[int]] = []  # of the families

    @property
    def tokens(self) -> int:
        """In the tree."""
        return self.manager.prefixes.tree.total().tokens

    def some(self, tokens: int) -> list[int]:
        return [self._draw.randrange(3, 50_000) for _ in range(tokens)]

    def fill(self, tokens: int) -> None:
        """With entries of some 10 tokens each."""
        while self.tokens < tokens:
            self.texts.append(system := self.some(SYSTEM))
            self.ask(system, 1)
            for _ in range(FAMILY):
                if self.tokens < tokens:
                    self.ask([*system, *self.some(ASKED)], 1)

    def overfill(self) -> None:
        """Until each further request evicts."""
        for _ in range(max(self.manager.free().values()) // ASKED + FAMILY):
            self.ask([*self.texts[-1], *self.some(ASKED)], 1)

    def hit(self) -> int:
        """A request that goes on behind a text of one of the last families; returns the cached tokens."""
        return self.ask([*self._draw.choice(self.texts[-20:]), *self.some(ASKED)])

    def ask(self, prompt: list[int], drawn: int = DRAWN) -> int:
        """Returns how many tokens were cached, when the engine rests."""
        params = SamplingParams(temperature=0.0, max_tokens=drawn, ignore_eos=True)
        submission = Submission(number=self.loop.number(), prompt=key_of(prompt), params=params, seed=0)
        request = Request(submission, lambda event: None)
        sampler = Sampler(params, seed=0, index=0, prompt_ids=(), vocab_size=1, end_ids=frozenset())
        self.loop.submit(request, [Completion(request, sampler, prompt)])
        while self.loop.turn() is not None:
            pass
        assert request.done
        return request.cached

    def step(self, scheduled: Sequence[Scheduled]) -> None:
        """What the runner does with a network."""
        ((completion, tokens, _),) = scheduled
        claims = self._replay.compute(self.manager.feeds(scheduled), tokens)
        last, prefill = tokens == completion.uncomputed, completion.status is Status.PREFILL
        self.manager.keep(completion, tokens, claims.get(completion.seq or 0))
        if last and prefill:
            self.loop.fork(completion, ())
        if last and (reason := completion.accept([(self._draw.randrange(3, 50_000), None)], 1 << 20).reason):
            self.loop.end(completion, reason)


class Hits(NamedTuple):
    """Milliseconds of CPU time of a request, its median."""

    tokens: int  # in the tree
    nodes: int
    room: float
    full: float  # while memory is full, so that each request evicts


def measure(kind: str, sizes: Sequence[int], *, rounds: int, each: int) -> list[Hits]:
    """Of trees of so many tokens, which take turns; first with room, then without."""
    room = 2 * (rounds + 1) * each * (ASKED + DRAWN)
    servings = [Serving(kind, cells=room + tokens + tokens // 3, rows=tokens // 3) for tokens in sizes]
    for serving, tokens in zip(servings, sizes, strict=True):
        serving.fill(tokens)
    with settled():
        with_room = _medians(servings, rounds, each)
    for serving in servings:
        serving.overfill()
    with settled():
        full = _medians(servings, rounds, each)
    nodes = [sum(1 for _ in one.manager.prefixes.tree.nodes()) for one in servings]
    return [Hits(*found) for found in zip([one.tokens for one in servings], nodes, with_room, full, strict=True)]


def _medians(servings: Sequence[Serving], rounds: int, each: int) -> list[float]:
    found = in_rounds(rounds, *(partial(_hits, serving, each) for serving in servings))
    return [1000 * statistics.median(took for of_round in one for took in of_round) for one in found]


def _hits(serving: Serving, times: int) -> list[float]:
    """CPU seconds of each request."""
    took: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        serving.hit()
        took.append(time.thread_time() - began)
    return took


def row(given: Given) -> Lines:
    sizes = (200, 600) if given.quick else (10**4, 10**6)
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in MEASURED:
        hits = measure(kind, sizes, rounds=1 if given.quick else 7, each=1 if given.quick else 20)
        found[kind] = [one._asdict() for one in hits]
        for one in hits:
            least = hits[0]
            yield (
                f"{kind:8} {one.tokens:9,} tokens in {one.nodes:7,} nodes  {one.room:6.3f} ms a hit with room "
                f"({one.room / least.room:4.2f}x), {one.full:6.3f} full and evicting ({one.full / least.full:4.2f}x)"
            )
    yield f"target from 10^4 to 10^6 tokens: at most {MAX_GROWTH}x"
    return found
