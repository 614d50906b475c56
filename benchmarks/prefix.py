"""prefix: what the prefix tree costs: lookups, evictions, a cached prompt, and its share in a decoding step.

Trees of lookups and evictions are real, their claims are spans without memory. The cached prompt and the decoding step
are of a real engine. Everything is CPU time, which other load on the machine changes less.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from threading import Semaphore
from typing import Any

from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import load
from kvcellar.events import Delta, Event
from kvcellar.frontend.engine import Engine
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import Losses
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams

CACHE_BYTES = 1 << 30
STEP_TOKENS = 512
NODE = 32  # tokens of a node of the trees whose leaves are evicted
BRANCHES = 9  # leaves below each of the nodes that has children

MAX_LOOKUP = 1.0  # milliseconds, of the 99th percentile
MAX_GROWTH = 2.0  # of an eviction, from the smallest tree to the largest: a heap costs the logarithm
MAX_CACHED = 1.05  # CPU time of a prompt whose beginning is cached, over the forward of the rest
MAX_TREE = 0.01  # of a decoding step


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size
    tree: int = 1_000_000  # tokens of the tree of the lookups
    lookups: int = 2000
    nodes: tuple[int, ...] = (1_000, 10_000, 100_000)
    evictions: int = 256
    prefix: int = 4096
    new: int = 32
    rounds: int = 7
    sequences: int = 32
    steps: int = 24


SMALLEST = Extent(
    TINY, tree=5000, lookups=100, nodes=(100, 1000), evictions=20, prefix=128, new=8, rounds=1, sequences=4, steps=4
)  # to test the bench


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds of CPU time."""

    tokens: int  # of the tree of the lookups
    lookup_p50: float
    lookup_p99: float
    eviction: Mapping[str, float]  # by number of nodes
    cached: float  # of a request whose beginning is cached
    forward: float  # of the forward of its other tokens over the same K/V, without prefix cache
    step: float  # of a decoding step
    tree: float  # of that step, inside the tree

    @property
    def growth(self) -> float:
        of = list(self.eviction.values())
        return of[-1] / of[0]

    @property
    def cached_ratio(self) -> float:
        return self.cached / self.forward

    @property
    def share(self) -> float:
        return self.tree / self.step

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "growth": self.growth, "cached_ratio": self.cached_ratio, "share": self.share}


def prefix(extent: Extent, directory: Path) -> Found:
    tree, texts = grown(extent.tree)
    lookups = sorted(lookup_seconds(tree, texts, extent.lookups))
    evictions = {str(nodes): statistics.median(eviction_seconds(nodes, extent.evictions)) for nodes in extent.nodes}
    write(extent.size, directory)
    cached, forward = cached_prompt(extent, directory)
    step, inside = decoding(extent, directory)
    tokens = sum(node.end - node.start for node in tree.nodes())
    return Found(
        tokens,
        1000 * statistics.median(lookups),
        1000 * lookups[int(0.99 * len(lookups))],
        {nodes: 1000 * took for nodes, took in evictions.items()},
        1000 * cached,
        1000 * forward,
        1000 * step,
        1000 * inside,
    )


# -- trees --------------------------------------------------------------------------------------------------------


class Spans:
    """Claims that hold nothing."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._last = 0

    def make(self, span: Span) -> int:
        self._last += 1
        self._spans[self._last] = span
        return self._last

    def split(self, claim: int, pos: int) -> int:
        span = self._spans[claim]
        self._spans[claim] = Span(span.start, pos)
        return self.make(Span(pos, span.end))

    def join(self, claim: int, following: int) -> None:
        self._spans[claim] = Span(self._spans[claim].start, self._spans.pop(following).end)

    def drop(self, claim: int) -> None:
        del self._spans[claim]

    def forget(self, claim: int, tokens: int) -> None:
        raise AssertionError("these claims have no tails")

    def drop_checkpoint(self, claim: int, pos: int) -> None:
        raise AssertionError("these claims have no checkpoints")

    def move_checkpoint(self, claim: int, pos: int, to: int) -> None:
        raise AssertionError("these claims have no checkpoints")

    def of(self, claim: int) -> "Spans":
        return self

    @property
    def tail(self) -> int:
        return 1 << 60

    @property
    def positions(self) -> Sequence[int]:
        return ()

    def whole(self, pos: int) -> int:
        return pos


def _insert(tree: Tree, claims: Spans, text: Sequence[int]) -> None:
    """A sequence of these tokens that has come and gone."""
    root, key = tree.root(""), key_of(text)
    match = tree.match(root, key, len(text) - 1)
    own = tree.lock(root, match)
    node, _ = tree.insert(root, key, claims.make(Span(match.resume, len(text))), match.resume, own)
    tree.unlock(node)


def grown(tokens: int) -> tuple[Tree, list[list[int]]]:
    """A tree of so many tokens, and the texts in it: each goes on from one of the last, at one of its last tokens."""
    draw, claims = random.Random(0), Spans()
    tree, texts, count = Tree(claims, anywhere=True), list[list[int]](), 0
    while count < tokens:
        before = draw.choice(texts[-64:]) if texts else []
        new = [draw.randrange(50_000) for _ in range(min(draw.randrange(100, 400), tokens - count))]
        text = [*before[: max(0, len(before) - draw.randrange(400))], *new]
        _insert(tree, claims, text)
        texts.append(text)
        count += len(new)
    return tree, texts


def lookup_seconds(tree: Tree, texts: Sequence[list[int]], times: int) -> Iterator[float]:
    """Of prompts that leave a text of the tree somewhere, from their token ids on."""
    draw = random.Random(1)
    for _ in range(times):
        text = draw.choice(texts)
        prompt = [*text[: draw.randrange(len(text) + 1)], *(draw.randrange(50_000) for _ in range(32))]
        began = time.thread_time()
        tree.match(tree.root(""), key_of(prompt), len(prompt) - 1)
        yield time.thread_time() - began


def bushy(nodes: int) -> Tree:
    """A tree of so many nodes on two levels, each of the same length."""
    draw, claims, losses = random.Random(0), Spans(), Losses(time.monotonic)
    tree = Tree(claims, anywhere=True, evicted=losses.evicted)
    for _ in range(nodes // (BRANCHES + 1)):
        shared = [draw.randrange(1 << 40) for _ in range(NODE)]
        for branch in range(BRANCHES):
            _insert(tree, claims, [*shared, branch, *(draw.randrange(50_000) for _ in range(NODE - 1))])
    return tree


def eviction_seconds(nodes: int, times: int) -> Iterator[float]:
    tree = bushy(nodes)
    for _ in range(min(times, nodes // 2)):
        began = time.thread_time()
        tree.evict_leaf(NODE)
        yield time.thread_time() - began


# -- engines ------------------------------------------------------------------------------------------------------


def cached_prompt(extent: Extent, directory: Path) -> tuple[float, float]:
    """CPU seconds of a request whose prompt but for `new` tokens is cached; and of the forward of such tokens alone."""
    draw = random.Random(0)

    def some(tokens: int) -> list[int]:
        return [draw.randrange(1, 500) for _ in range(tokens)]

    shared = some(extent.prefix)
    forward = _forward(directory, shared, extent.new)
    with Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=1) as engine:
        engine.generate(shared, temperature=0.0, max_tokens=1)

        def request() -> float:
            prompt = [*shared, *some(extent.new)]
            began = time.process_time()
            usage = engine.generate(prompt, temperature=0.0, max_tokens=1).usage
            took = time.process_time() - began
            assert usage.cached_tokens >= extent.prefix, "the beginning of the prompt was not in memory"
            return took

        ours, alone = in_rounds(extent.rounds, request, lambda: forward(some(extent.new)))
    return statistics.median(ours), statistics.median(alone)


def _forward(directory: Path, shared: Sequence[int], new: int) -> Callable[[Sequence[int]], float]:
    """Computes tokens that follow `shared`, and returns the CPU seconds; memory is then as it was."""
    network = load(directory, device="cpu").model
    pack(network)
    guest = build_guest(network, backends())
    memory = guest.memory({group.name: len(shared) + new for group in guest.shape.groups})

    def step(start: int, tokens: Sequence[int]) -> None:
        plan = memory.begin(Batch((Feed(0, Span(start, start + len(tokens))),)))
        guest.forward(memory, plan, list(tokens), [len(tokens) - 1])
        memory.commit()

    for start in range(0, len(shared), STEP_TOKENS):
        step(start, shared[start : start + STEP_TOKENS])

    def run(tokens: Sequence[int]) -> float:
        began = time.process_time()
        step(len(shared), tokens)
        took = time.process_time() - began
        memory.remove(0, Span(len(shared), len(shared) + len(tokens)))
        return took

    return run


class Clock:
    """CPU seconds of one thread inside the public methods of objects, counted once where they call each other."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._inside = False

    def watch(self, thing: object) -> None:
        for name, method in list(vars(type(thing)).items()):
            if callable(method) and not name.startswith("_"):
                setattr(thing, name, self._clocked(getattr(thing, name)))

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside, began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside, self.spent = False, self.spent + time.thread_time() - began

        return run


def decoding(extent: Extent, directory: Path) -> tuple[float, float]:
    """CPU seconds of a step that gives every sequence a token, and those of it inside the tree."""
    clock, marks, done = Clock(), list[tuple[float, float]](), Semaphore(0)

    def ended(event: Event) -> None:  # on the engine's thread
        if isinstance(event, Delta):
            marks.append((time.thread_time(), clock.spent))
            if len(marks) > extent.steps:
                done.release()

    params = SamplingParams(temperature=0.0, ignore_eos=True)
    with Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=1) as engine:
        prefixes = engine._loop.manager.prefixes  # pyright: ignore[reportPrivateUsage]
        clock.watch(prefixes)
        clock.watch(prefixes.tree)
        listeners: list[Callable[[Event], None]] = [lambda event: None] * (extent.sequences - 1)
        tickets = [
            engine.submit(_prompt(number, extent.prefix // 64 * (1 + number % 16)), params, deliver=deliver)
            for number, deliver in enumerate([*listeners, ended])
        ]
        done.acquire()
        for ticket in tickets:
            ticket.cancel()
    (began, before), (end, spent) = marks[0], marks[extent.steps]
    return (end - began) / extent.steps, (spent - before) / extent.steps


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 500) for _ in range(max(2, tokens))]


# -- the row ------------------------------------------------------------------------------------------------------


def row(given: Given) -> Lines:
    extent = SMALLEST if given.quick else Extent(SMALL)
    found = prefix(extent, given.directory)
    sizes = list(found.eviction)
    costs = ", ".join(f"{1000 * took:.1f} us of {int(nodes):,} nodes" for nodes, took in found.eviction.items())
    yield (
        f"lookup        {found.lookup_p99:7.3f} ms  99th percentile, {found.lookup_p50:.3f} ms median, in a tree of "
        f"{found.tokens:,} tokens; target below {MAX_LOOKUP} ms"
    )
    yield (
        f"eviction      {found.growth:7.2f}x  from {int(sizes[0]):,} to {int(sizes[-1]):,} nodes ({costs}); target "
        f"below {MAX_GROWTH}"
    )
    yield (
        f"cached        {found.cached_ratio:7.3f}x  {found.cached:.1f} ms for {extent.new} tokens behind "
        f"{extent.prefix} cached ones, {found.forward:.1f} ms for their forward; target below {MAX_CACHED}"
    )
    yield (
        f"tree          {found.share:7.2%}   {found.tree:.3f} of {found.step:.1f} ms of a decoding step of "
        f"{extent.sequences} sequences; target below {MAX_TREE:.0%}"
    )
    return found.as_json()
