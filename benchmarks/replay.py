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
from itertools import islice, product
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
from kvcellar.memory.prefixes import EVERY
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.sampling_params import SamplingParams

STEP_TOKENS = 512
WINDOW = 256
QUICK = 0.05  # of the lengths of all texts, to test the row
STATE = Recurrent({9: (StatePlane("sum", (1,), "float32"),)})
KINDS: dict[str, tuple[dict[str, Layout], bool]] = {
    "full": ({"full": Causal()}, False),
    "sliding": ({"full": Causal(), "window": Sliding(WINDOW)}, False),
    "chunked": ({"full": Causal(), "chunk": Chunked(WINDOW)}, False),
    "hybrid": ({"full": Causal()}, True),
}
RECURRENT: tuple[dict[str, Layout], bool] = ({}, True)  # the kind `recurrent`, for `replay-peers`


class Turn(NamedTuple):
    prompt: list[int]
    answer: list[int]
    conversation: int = 0  # which one it belongs to, as a client knows it


class Counts(NamedTuple):
    """Prompt tokens in all, and those that were computed."""

    tokens: int
    computed: int
    ideal: int
    clairvoyant: int | None  # None without a limit, as the next one
    last_use: int | None
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


def documents(writer: Writer) -> Iterator[Turn]:
    """Questions on some of eight documents behind instructions, in an order that changes."""
    draw, instructions = writer.draw, writer.some(300)
    texts = [writer.some(400, 1500) for _ in range(8)]
    for _ in range(60):
        some = draw.sample(texts, draw.randrange(2, 5))
        yield Turn([*instructions, *(token for text in some for token in text), *writer.some(20, 60)], writer.some(60))


def questions(writer: Writer) -> Iterator[Turn]:
    """Several on each of ten long documents, in turn, one after the other by draw."""
    texts = [writer.some(2000, 6000) for _ in range(10)]
    for _ in range(80):
        yield Turn([*writer.draw.choice(texts), *writer.some(15, 60)], writer.some(30, 120))


def popular(writer: Writer) -> Iterator[Turn]:
    """Prompts of which few are asked for often (Zipf), and between them scans of texts that come once."""
    draw = writer.draw
    texts = [writer.some(300, 1500) for _ in range(60)]
    weights = [1 / rank for rank in range(1, len(texts) + 1)]
    for _ in range(250):
        text = writer.some(800, 2000) if draw.random() < 0.25 else draw.choices(texts, weights)[0]
        yield Turn([*text, *writer.some(10, 40)], writer.some(20, 80))


def reasoning(writer: Writer) -> Iterator[Turn]:
    """Chats whose template leaves the reasoning of earlier answers out."""
    system = writer.some(400)
    for chat in range(6):
        text = list(system)
        for _ in range(8):
            text += writer.some(30, 150)
            answer, said = writer.some(300, 1000), len(writer.some(40, 200))
            yield Turn(list(text), answer, chat)
            text += answer[-said:]


def examples(writer: Writer) -> Iterator[Turn]:
    """A task with the same examples, of which those behind the first ones are chosen anew each time."""
    draw, task = writer.draw, writer.some(200)
    shots = [writer.some(80, 300) for _ in range(20)]
    for _ in range(120):
        chosen = [*shots[:4], *draw.sample(shots[4:], 4)]
        yield Turn([*task, *(token for shot in chosen for token in shot), *writer.some(30, 120)], writer.some(10, 40))


def completion(writer: Writer) -> Iterator[Turn]:
    """At the end of three files that grow: what was completed is taken, changed or thrown away."""
    draw, head = writer.draw, writer.some(60)
    files = [writer.some(600) for _ in range(3)]
    for _ in range(180):
        file = draw.choice(files)
        answer = writer.some(10, 60)
        yield Turn([*head, *file], answer)
        file += answer[: draw.randrange(len(answer) + 1)] if draw.random() < 0.7 else []
        file += writer.some(1, 40)


def again(writer: Writer) -> Iterator[Turn]:
    """Chats whose answers are drawn again at times, or whose messages are written anew."""
    draw, system = writer.draw, writer.some(500)
    for chat in range(6):
        text = list(system)
        for _ in range(10):
            message = writer.some(30, 200)
            while True:
                answer = writer.some(50, 250)
                yield Turn([*text, *message], answer, chat)
                if (drawn := draw.random()) > 0.4:
                    break
                message = writer.some(30, 200) if drawn < 0.15 else message
            text += [*message, *answer]


def compacting(writer: Writer) -> Iterator[Turn]:
    """Two agents whose context is replaced by a summary where it is long."""
    system = writer.some(1500)
    for task in range(2):
        context = [*system, *writer.some(300)]
        for _ in range(60):
            answer = writer.some(40, 200)
            yield Turn(list(context), answer, task)
            context += [*answer, *writer.some(100, 700)]
            if len(context) > 4 * len(system):
                context = [*system, *writer.some(400)]


def mixed(writer: Writer) -> Iterator[Turn]:
    """The beginnings of three of the others at once, in an order and with texts that the seed draws."""
    draw = writer.draw
    some = [(at, islice(TRACES[name](writer), 60)) for at, name in enumerate(draw.sample([*TRACES][:-1], 3))]
    while some:
        at, turns = draw.choice(some)
        for _ in range(draw.randrange(1, 5)):
            if (turn := next(turns, None)) is None:
                some.remove((at, turns))
                break
            yield turn._replace(conversation=10_000 * at + turn.conversation)


TRACES: dict[str, Callable[[Writer], Iterator[Turn]]] = {
    "agent": agent, "users": users, "edits": edits, "chats": chats, "documents": documents, "questions": questions,
    "popular": popular, "reasoning": reasoning, "examples": examples, "completion": completion, "again": again,
    "compacting": compacting, "mixed": mixed,
}  # fmt: skip
FIRST = ("agent", "users", "edits", "chats")  # for what takes long
ANEW = ("edits", "documents", "questions", "popular", "examples")  # whose prompts do not go on from answers


# -- ours --------------------------------------------------------------------------------------------------------------


class Replay:
    """Serves a trace. `cells` of every group and `rows` are its limits."""

    def __init__(self, kind: str, *, cells: int, rows: int, spare: int = EVERY) -> None:
        layouts, recurrent = {**KINDS, "recurrent": RECURRENT}[kind]
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
        self.manager = SequenceManager(self.memory, Drafting(None, context=0), spare=spare)
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


class _Tokens:
    """The tokens of all texts of a trace as a tree: the `parent` of each, and the requests that need it."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        self.texts: list[list[int]] = []
        self.uses: dict[int, list[int]] = {}
        self.parent = [0]
        for at, turn in enumerate(turns):
            above, path = 0, list[int]()
            for token in (*turn.prompt, *turn.answer[:-1]):
                before, above = above, numbers.setdefault((above, token), len(numbers) + 1)
                if above == len(self.parent):
                    self.parent.append(before)
                path.append(above)
            self.texts.append(path)
            for one in path[: len(turn.prompt) - 1]:
                self.uses.setdefault(one, []).append(at)
        self.count = len(numbers)

    def next_use(self, token: int, after: int) -> float:
        uses = self.uses.get(token, [])
        at = bisect_right(uses, after)
        return uses[at] if at < len(uses) else float("inf")


def _limited(turns: Sequence[Turn], cells: int, worth: Callable[["_Tokens", int, int], float]) -> int:
    """Prompt tokens that a cache of `cells` computes which evicts the leaf that was worth least when it was used last.
    `worth`: that of a token at a turn."""
    tokens = _Tokens(turns)
    children, values = [0] * (tokens.count + 1), [0.0] * (tokens.count + 1)
    there, computed, count = bytearray(tokens.count + 1), 0, 0
    heap: list[tuple[float, int]] = []
    for at, turn in enumerate(turns):
        text = tokens.texts[at]
        most = len(turn.prompt) - 1
        computed += len(turn.prompt) - next((n for n, one in enumerate(text[:most]) if not there[one]), most)
        for one in text:
            if not there[one]:
                there[one] = True
                count += 1
                children[tokens.parent[one]] += 1
            values[one] = worth(tokens, one, at)
        heapq.heappush(heap, (values[text[-1]], text[-1]))
        while count > cells:
            value, one = heapq.heappop(heap)
            if not there[one] or children[one] or value != values[one]:
                continue
            there[one], above = False, tokens.parent[one]
            count -= 1
            children[above] -= 1
            if not children[above]:
                heapq.heappush(heap, (values[above], above))
    return computed


def clairvoyant(turns: Sequence[Turn], cells: int) -> int:
    """By what is needed again last."""
    return _limited(turns, cells, lambda tokens, one, at: -tokens.next_use(one, at))


def last_use(turns: Sequence[Turn], cells: int) -> int:
    """By what was used last longest ago."""
    return _limited(turns, cells, lambda tokens, one, at: at)


def limits(turns: Sequence[Turn], *, share: float, checkpoints: int) -> tuple[int, int]:
    """The cells and rows of a memory for this share of all tokens of a trace, and of so many checkpoints."""
    cells = _Tokens(turns).count + STEP_TOKENS
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    return max(int(share * cells), longest + STEP_TOKENS), 2 + max(2, int(share * checkpoints))


def replay(
    name: str, kind: str, *, share: float = 1.0, scale: float = 1.0, seed: int = 1, spare: int = EVERY
) -> Counts:
    """Replay a trace with cells for this share of all its tokens, and rows for this share of the checkpoints that it
    leaves without a limit."""
    turns = list(TRACES[name](Writer(seed, scale)))
    cells, _ = limits(turns, share=1.0, checkpoints=0)
    free = Replay(kind, cells=2 * cells, rows=1 << 18, spare=spare)
    for turn in turns:
        free.serve(turn)
    tokens, best = sum(len(turn.prompt) for turn in turns), ideal(turns)
    if share == 1.0:
        return Counts(tokens, free.computed, best, None, None, share, cells)
    limited, rows = limits(turns, share=share, checkpoints=free.checkpoints)
    ours = Replay(kind, cells=limited, rows=rows, spare=spare)
    for turn in turns:
        ours.serve(turn)
    others = clairvoyant(turns, limited), last_use(turns, limited)
    return Counts(tokens, ours.computed, best, *others, limited / cells, limited)


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
    """With all cells, as a ratio to the ideal cache, and with a tenth of them, to those that evict by other rules."""
    found = dict[str, list[dict[str, object]]]()
    names = ("trace", "kind", "tokens", "computed", "ideal", "ratio", "in a", "computed", "best", "ratio", "last use")
    yield "{:10} {:8} {:>9} {:>9} {:>9} {:>6}   {:>5} {:>9} {:>9} {:>6} {:>9}".format(*names)
    for trace, kind in product(TRACES, KINDS):
        whole, part = (replay(trace, kind, share=share, scale=QUICK if given.quick else 1.0) for share in (1.0, 0.1))
        found[f"{trace} {kind}"] = [whole._asdict(), part._asdict()]
        yield (
            f"{trace:10} {kind:8} {whole.tokens:9} {whole.computed:9} {whole.ideal:9} {whole.ratio:6.3f}   "
            f"{part.share:5.0%} {part.computed:9} {part.clairvoyant:9} {part.ratio:6.3f} {part.last_use:9}"
        )
    return found
