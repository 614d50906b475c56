"""replay: how many prompt tokens are computed when traces of requests are replayed, counted, with no network.

A real memory with one number per cell, the real manager and the real prefix tree serve the requests of a trace, one
after the other. The same trace is counted for two caches of full attention: one without a limit that can resume at
every token (`ideal`), and, for a limited memory, one that evicts what is used again last (`clairvoyant`; Belady's rule
on leaves, in chunks of 16 tokens). Counts are the same on every machine.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.row import Given, Lines
from kvcellar.engine.core.drafting import Drafting
from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.engine.messages import Submission
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.prefix.node import common_prefix, key_of
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.sampling_params import SamplingParams

STEP_TOKENS = 512
CHUNK = 16  # tokens of a node of the clairvoyant cache
WINDOW = 256
QUICK = 0.05  # of the lengths of all texts, to test the row
STATE = Recurrent({9: (StatePlane("sum", (1,), "float32"),)})
KINDS: dict[str, tuple[dict[str, Layout], bool]] = {
    "full": ({"full": Causal()}, False),
    "sliding": ({"full": Causal(), "window": Sliding(WINDOW)}, False),
    "chunked": ({"full": Causal(), "chunk": Chunked(WINDOW)}, False),
    "hybrid": ({"full": Causal()}, True),
}


class Turn(NamedTuple):
    prompt: list[int]
    answer: list[int]
    conversation: int = 0  # which one it belongs to, as a client knows it


class Counts(NamedTuple):
    """Prompt tokens in all, and those that were computed."""

    tokens: int
    computed: int
    ideal: int
    clairvoyant: int | None  # None without a limit
    share: float  # of the cells that the whole trace takes
    cells: int

    @property
    def ratio(self) -> float:
        return self.computed / (self.ideal if self.clairvoyant is None else self.clairvoyant)


# -- traces ------------------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self, seed: int, scale: float) -> None:
        self.draw, self._scale = random.Random(seed), scale

    def some(self, least: int, most: int | None = None) -> list[int]:
        count = least if most is None else self.draw.randrange(least, most)
        return [self.draw.randrange(3, 50_000) for _ in range(max(1, round(count * self._scale)))]


def agent(writer: Writer) -> Iterator[Turn]:
    """A tool-using agent with a growing context, and sub-agents that branch and return."""
    draw, system, branches = writer.draw, writer.some(2000), 0
    for task in range(4):
        context = [*system, *writer.some(200)]
        for _ in range(20):
            answer = writer.some(30, 150)
            yield Turn(list(context), answer, task)
            context += [*answer, *writer.some(100, 600)]
            if draw.random() < 0.25:
                branch = context[: draw.randrange(len(system), len(context))] if draw.random() < 0.5 else list(context)
                branch += writer.some(150)
                branches += 1
                for _ in range(draw.randrange(2, 5)):
                    answer = writer.some(30, 150)
                    yield Turn(list(branch), answer, -branches)
                    branch += [*answer, *writer.some(100, 500)]
                context += writer.some(200)


def users(writer: Writer) -> Iterator[Turn]:
    """Many users over one long system prompt, some of whom come back."""
    system, before = writer.some(3000), dict[int, list[int]]()
    for _ in range(200):
        user = writer.draw.randrange(40)
        past = before.get(user, []) if writer.draw.random() < 0.6 else []
        turn = Turn([*system, *past, *writer.some(20, 200)], writer.some(20, 200), user)
        yield turn
        before[user] = [*turn.prompt[len(system) :], *turn.answer]


def edits(writer: Writer) -> Iterator[Turn]:
    """Edits in the middle of a document, each with a question."""
    document = writer.some(6000)
    for _ in range(40):
        at = int(len(document) * writer.draw.betavariate(5, 2))
        document = document[:at] + writer.some(1, 60) + document[at + writer.draw.randrange(40) :]
        yield Turn([*document, *writer.some(30)], writer.some(80))


def chats(writer: Writer) -> Iterator[Turn]:
    """Eight chats in turn."""
    texts = [writer.some(300) for _ in range(8)]
    for _ in range(16):
        for chat, text in enumerate(texts):
            text += writer.some(30, 200)
            answer = writer.some(50, 200)
            yield Turn(list(text), answer, chat)
            text += answer


TRACES: dict[str, Callable[[Writer], Iterator[Turn]]] = {
    "agent": agent, "users": users, "edits": edits, "chats": chats,
}  # fmt: skip


# -- ours --------------------------------------------------------------------------------------------------------------


class Replay:
    """Serves a trace. `cells` of every group and `rows` are its limits."""

    def __init__(self, kind: str, *, cells: int, rows: int) -> None:
        layouts, recurrent = KINDS[kind]
        plane = Plane("k", 1, 1)
        self._layers = range(len(layouts))
        self._recurrent = recurrent
        self.memory = Memory(
            [Group(name, layout, (plane,), (layer,)) for layer, (name, layout) in enumerate(layouts.items())],
            cells=dict.fromkeys(layouts, cells),
            dtype=torch.float32,
            device="cpu",
            backend=Sdpa(),
            recurrent=STATE if recurrent else None,
            rows=rows if recurrent else 0,
        )
        self.manager = SequenceManager(self.memory, Drafting(None, context=0))
        self.computed = 0  # prompt tokens
        self.checkpoints = 0  # the most that were kept at once

    def serve(self, turn: Turn) -> None:
        completion = _completion(turn.prompt)
        self.manager.admit(completion)
        self.manager.start(completion)
        completion.become(Status.PREFILL)
        self.computed += completion.uncomputed
        while completion.uncomputed:
            self._step(completion, min(STEP_TOKENS, completion.uncomputed))
        completion.become(Status.DECODE)
        for token in turn.answer[:-1]:  # the last one is drawn, and not computed
            completion.tokens.append(token)
            self._step(completion, 1)
        self.manager.release(completion)
        kept = sum(len(node.checkpoints) for node in self.manager.prefixes.tree.nodes())
        self.checkpoints = max(self.checkpoints, kept)

    def _step(self, completion: Completion, tokens: int) -> None:
        for group, free in self.manager.free().items():
            while free < tokens and self.manager.evict(group, tokens - free):
                free = self.manager.free()[group]
        claims = self.compute(self.manager.feeds([Scheduled(completion, tokens)]), tokens)
        assert completion.seq is not None
        self.manager.keep(completion, tokens, claims.get(completion.seq))

    def compute(self, feeds: tuple[Feed, ...], tokens: int) -> dict[int, int]:
        """A step of so many tokens of one sequence; returns its claims."""
        plan = self.memory.begin(Batch(feeds))
        for layer in self._layers:
            self.memory.put(layer, k=torch.zeros(tokens, 1, 1))
        if self._recurrent:
            self._write_states(plan, tokens)
        return self.memory.commit()

    def _write_states(self, plan: Plan, tokens: int) -> None:
        def at(indices: Sequence[int], counts: Sequence[int]) -> dict[str, torch.Tensor]:
            return {"sum": torch.zeros(len(indices), 1)}

        self.memory.states.write(9, plan.states, at([0], [tokens]), at=at)


def _completion(prompt: Sequence[int]) -> Completion:
    params = SamplingParams(temperature=0.0)
    request = Request(Submission(number=0, prompt=key_of(prompt), params=params, seed=0), lambda event: None)
    sampler = Sampler(request.params, seed=0, index=0, prompt_ids=(), vocab_size=1, end_ids=frozenset())
    return Completion(request, sampler, list(prompt))


# -- others ------------------------------------------------------------------------------------------------------------


def ideal(turns: Sequence[Turn]) -> int:
    """Prompt tokens that an unlimited cache computes, which can resume at every token."""
    computed, known = 0, list[list[int]]()
    for turn in turns:
        longest = max((common_prefix(one, turn.prompt) for one in known), default=0)
        computed += len(turn.prompt) - min(len(turn.prompt) - 1, longest)
        known.append([*turn.prompt, *turn.answer[:-1]])
    return computed


class _Chunks:
    """The chunks of all texts of a trace as a tree: `parent` of each, and the requests that need it."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self.texts: list[list[int]] = []
        self.uses: dict[int, list[int]] = {}
        for at, turn in enumerate(turns):
            text, above, chunks = [*turn.prompt, *turn.answer[:-1]], 0, list[int]()
            for start in range(0, len(text) - CHUNK + 1, CHUNK):
                above = numbers.setdefault((above, tuple(text[start : start + CHUNK])), len(numbers) + 1)
                chunks.append(above)
            self.texts.append(chunks)
            for chunk in chunks[: (len(turn.prompt) - 1) // CHUNK]:
                self.uses.setdefault(chunk, []).append(at)
        self.parent = {number: above for (above, _), number in numbers.items()}
        self.cells = len(numbers) * CHUNK

    def next_use(self, chunk: int, after: int) -> float:
        uses = self.uses.get(chunk, [])
        at = bisect_right(uses, after)
        return uses[at] if at < len(uses) else float("inf")


def clairvoyant(turns: Sequence[Turn], cells: int) -> int:
    """Prompt tokens that a cache of `cells` computes which evicts the leaf that is needed again last."""
    chunks = _Chunks(turns)
    there, children, computed = set[int](), dict[int, int](), 0
    heap: list[tuple[float, int]] = []
    for at, turn in enumerate(turns):
        text = chunks.texts[at]
        most = (len(turn.prompt) - 1) // CHUNK
        found = next((n for n, chunk in enumerate(text[:most]) if chunk not in there), min(most, len(text)))
        computed += len(turn.prompt) - found * CHUNK
        for chunk in text:
            if chunk not in there:
                there.add(chunk)
                children[chunks.parent[chunk]] = children.get(chunks.parent[chunk], 0) + 1
            heapq.heappush(heap, (-chunks.next_use(chunk, at), chunk))
        passed: list[tuple[float, int]] = []
        while len(there) * CHUNK > cells and heap:
            value, chunk = heapq.heappop(heap)
            if chunk not in there or -value != chunks.next_use(chunk, at):
                continue
            if children.get(chunk, 0):
                passed.append((value, chunk))
                continue
            there.remove(chunk)
            above = chunks.parent[chunk]
            children[above] -= 1
            if above in there:
                heapq.heappush(heap, (-chunks.next_use(above, at), above))
        for entry in passed:
            heapq.heappush(heap, entry)
    return computed


def replay(name: str, kind: str, *, share: float = 1.0, scale: float = 1.0, seed: int = 1) -> Counts:
    """Replay a trace with cells for this share of all its tokens, and rows for this share of the checkpoints that it
    leaves without a limit."""
    turns = list(TRACES[name](Writer(seed, scale)))
    cells = _Chunks(turns).cells + len(turns) * CHUNK + STEP_TOKENS
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    free = Replay(kind, cells=2 * cells, rows=1 << 16)
    for turn in turns:
        free.serve(turn)
    tokens, best = sum(len(turn.prompt) for turn in turns), ideal(turns)
    if share == 1.0:
        return Counts(tokens, free.computed, best, None, share, cells)
    limited = max(int(share * cells), longest + STEP_TOKENS)
    ours = Replay(kind, cells=limited, rows=2 + max(2, int(share * free.checkpoints)))
    for turn in turns:
        ours.serve(turn)
    return Counts(tokens, ours.computed, best, clairvoyant(turns, limited), limited / cells, limited)


# -- on a server that draws the answers itself -------------------------------------------------------------------------


class Served(NamedTuple):
    """What a server drew after a prompt, and how many tokens of the prompt it did not compute."""

    answer: Sequence[int]
    cached: int


class Computed(NamedTuple):
    """Prompt tokens in all, those that were computed, and those that an ideal cache computes on the same texts."""

    tokens: int
    computed: int
    ideal: int


def computed(name: str, serve: Callable[[list[int], int], Served], *, scale: float = 1.0, seed: int = 1) -> Computed:
    """Replay a trace: `serve` is called with each prompt and the number of tokens to draw."""
    turns, count = list[Turn](), 0
    for turn in TRACES[name](Writer(seed, scale)):
        drawn, cached = serve(turn.prompt, len(turn.answer))
        turn.answer[:] = drawn  # which the trace goes on from
        turns.append(turn._replace(answer=list(drawn)))
        count += len(turn.prompt) - cached
    return Computed(sum(len(turn.prompt) for turn in turns), count, ideal(turns))


# -- the row -----------------------------------------------------------------------------------------------------------


def row(given: Given) -> Lines:
    """With all cells, as a ratio to the ideal cache, and with a tenth of them, to the clairvoyant one."""
    found = dict[str, list[dict[str, object]]]()
    names = ("trace", "kind", "tokens", "computed", "ideal", "ratio", "in a", "computed", "best", "ratio")
    yield "{:8} {:8} {:>9} {:>9} {:>9} {:>6}   {:>5} {:>9} {:>9} {:>6}".format(*names)
    for trace, kind in product(TRACES, KINDS):
        whole, part = (replay(trace, kind, share=share, scale=QUICK if given.quick else 1.0) for share in (1.0, 0.1))
        found[f"{trace} {kind}"] = [whole._asdict(), part._asdict()]
        yield (
            f"{trace:8} {kind:8} {whole.tokens:9} {whole.computed:9} {whole.ideal:9} {whole.ratio:6.3f}   "
            f"{part.share:5.0%} {part.computed:9} {part.clairvoyant:9} {part.ratio:6.3f}"
        )
    return found
