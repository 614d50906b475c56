"""speculate: what rounds of speculation cost, end to end, against what they may cost on paper.

The drafter is an oracle: it knows the text to come, is wrong at a set rate, and costs nothing, so that what is
measured is what verification costs. On paper, a round costs what a forward over its rows costs, measured in the same
run: memory and the logits of all rows included; no draw, no scheduler, no requests. With fixed depths, its tokens are
those that the rounds gave; with the depth controller, those of the best depth for the error rate.

Everything is CPU time, measured in turn. The network repeats the last token of a text by a wide margin, so that a
forward over more rows, which rounds differently, changes no token.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from benchmarks.decoding import Burst, decode, together
from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import load
from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.frontend.engine import Engine
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

CACHE_BYTES = 1 << 29
ERRORS = (0.0, 0.2, 0.5)
USELESS = 1.0
DEEPEST = 7
WIDEST = DEEPEST + 1  # rows of a sequence

MIN_OF_PAPER = 0.8
MIN_USELESS = 0.97  # tokens per second with a useless drafter, over plain decoding

Prompts = Sequence[Sequence[int]]
Forward = Callable[[int], float]  # seconds, by rows of each sequence


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size = SMALL
    sequences: tuple[int, ...] = (1, 8)
    depths: tuple[int, ...] = (1, 3, DEEPEST)
    prompt: int = 64
    steps: int = 12  # of a burst
    rounds: int = 7  # of bursts of everything
    warm: int = 240  # steps from which the controller learns before it is measured


SMALLEST = Extent(TINY, sequences=(2,), depths=(1, 3), prompt=16, steps=3, rounds=1, warm=8)  # to test the bench


class Oracle:
    """Drafts for texts that repeat their last token. Each draft is wrong with probability `error`; up to `most` for
    each completion."""

    name = "oracle"
    deepest = DEEPEST
    catches_up = False
    reads_hidden = False

    def __init__(self, *, error: float = 0.0, most: int = DEEPEST) -> None:
        self.error, self.most = error, most
        self._random = random.Random(0)

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            token = chain.text[-1]
            for _ in range(min(self.most, chain.left)):
                chain.add(token if self._random.random() >= self.error else token + 1)

    def committed(self, news: Sequence[Committed]) -> None:
        """Nothing depends on hidden states."""

    def fork(self, key: Key, other: Key) -> None:
        """Nothing is kept."""

    def close(self, key: Key, *, keep: bool) -> None:
        """Nothing is kept."""

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Nothing is kept."""


class Fixed(NamedTuple):
    """Rounds of one depth. `ms` is the median CPU time of one, ratios are medians of those of each turn."""

    ms: float
    tokens: float  # of a sequence in a round
    of_plain: float  # tokens per second, over those of plain decoding
    of_paper: float  # tokens per second, over those on paper


class Chosen(NamedTuple):
    """Rounds of depths that the controller chose after it had learnt. Ratios are of all of them together."""

    tokens: float
    best: int  # the depth with the most tokens per second on paper
    of_plain: float
    of_paper: float


class Found(NamedTuple):
    """Rounds of some sequences."""

    plain_ms: float  # a step of the engine without drafts, CPU time
    forward_ms: Mapping[int, float]  # by rows of each sequence
    fixed: Mapping[float, Mapping[int, Fixed]]  # by error rate and depth
    chosen: Mapping[float, Chosen]  # by error rate; the last one is that of useless drafts


class _Turn(NamedTuple):
    """Measured one after the other."""

    forward: Sequence[float]  # seconds, by rows of each sequence, from 1
    plain: Burst
    rounds: Sequence[Burst]


def speculate(extent: Extent, directory: Path) -> dict[int, Found]:
    """By number of sequences."""
    write(extent.size, directory, repeats=True)
    return {sequences: _found(extent, directory, sequences) for sequences in extent.sequences}


def _found(extent: Extent, directory: Path, sequences: int) -> Found:
    drawn = random.Random(0)
    prompts = [[1 + seq, *(drawn.randrange(1, 500) for _ in range(extent.prompt - 1))] for seq in range(sequences)]
    forward = _forward(directory, sequences, extent.prompt + extent.steps)
    with _engine(directory) as plain:
        turns, fixed = _fixed(extent, directory, prompts, plain, forward)
        by_rows = {rows: statistics.median(turn.forward[rows - 1] for turn in turns) for rows in range(1, WIDEST + 1)}
        chosen = {
            error: _chosen(extent, directory, prompts, plain, forward, error, _best_depth(error, by_rows))
            for error in (*ERRORS, USELESS)
        }
    step = statistics.median(turn.plain.seconds / turn.plain.steps for turn in turns)
    return Found(1000 * step, {rows: 1000 * took for rows, took in by_rows.items()}, fixed, chosen)


def _engine(directory: Path, oracle: Oracle | None = None) -> Engine:
    draft = None if oracle is None else lambda _: oracle
    return Engine(directory, device="cpu", cache_bytes=CACHE_BYTES, threads=1, draft=draft)


def _forward(directory: Path, sequences: int, length: int) -> Forward:
    """Computes some rows of each of the sequences, which have `length` tokens, and returns the CPU seconds. Memory is
    then as it was."""
    network = load(directory, device="cpu").model
    pack(network)
    guest = build_guest(network, backends())
    memory = guest.memory({group.name: sequences * (length + WIDEST) for group in guest.shape.groups})

    def step(start: int, rows: int) -> None:
        plan = memory.begin(Batch(tuple(Feed(seq, Span(start, start + rows)) for seq in range(sequences))))
        guest.forward(memory, plan, [1] * (sequences * rows), range(sequences * rows))
        memory.commit()

    step(0, length)

    def run(rows: int) -> float:
        began = time.thread_time()
        step(length, rows)
        took = time.thread_time() - began
        for seq in range(sequences):
            memory.remove(seq, Span(length, length + rows))
        return took

    return run


def _fixed(
    extent: Extent, directory: Path, prompts: Prompts, plain: Engine, forward: Forward
) -> tuple[Sequence[_Turn], dict[float, dict[int, Fixed]]]:
    """All turns, and rounds by error rate and depth."""
    oracle = Oracle()
    kinds = [(error, depth) for error in ERRORS for depth in extent.depths]
    with _engine(directory, oracle) as engine:
        drafting = engine._loop.manager.drafting  # pyright: ignore[reportPrivateUsage]
        drafting.speculator = Speculator(oracle, fixed=DEEPEST)

        def rounds(error: float, depth: int) -> Burst:
            oracle.error, oracle.most = error, depth
            return decode(engine, prompts, extent.steps)

        def turn() -> _Turn:
            costs = [forward(rows) for rows in range(1, WIDEST + 1)]
            return _Turn(costs, decode(plain, prompts, extent.steps), [rounds(*kind) for kind in kinds])

        (turns,) = in_rounds(extent.rounds, turn)
    found: dict[float, dict[int, Fixed]] = {error: {} for error in ERRORS}
    for at, (error, depth) in enumerate(kinds):
        bursts = [turn.rounds[at] for turn in turns]
        found[error][depth] = Fixed(
            1000 * statistics.median(one.seconds / one.steps for one in bursts),
            statistics.fmean(one.tokens / one.steps / len(prompts) for one in bursts),
            statistics.median(turn.plain.per_token / turn.rounds[at].per_token for turn in turns),
            statistics.median(turn.forward[depth] / turn.rounds[at].seconds * extent.steps for turn in turns),
        )
    return turns, found


def _expected(error: float, depth: int) -> float:
    """Tokens of a sequence in a round: each draft is one with those before it, and one follows them."""
    return sum((1 - error) ** drafts for drafts in range(depth + 1))


def _best_depth(error: float, by_rows: Mapping[int, float]) -> int:
    """More rows that were faster, by chance, count as slow as fewer."""
    costs = [*accumulate((by_rows[rows] for rows in sorted(by_rows)), max)]
    return max(range(DEEPEST + 1), key=lambda depth: _expected(error, depth) / costs[depth])


def _chosen(
    extent: Extent, directory: Path, prompts: Prompts, plain: Engine, forward: Forward, error: float, best: int
) -> Chosen:
    with _engine(directory, Oracle(error=error)) as engine:
        decode(engine, prompts, extent.warm)

        def turn() -> tuple[Burst, Burst, float]:
            ours, base = decode(engine, prompts, 2 * extent.steps), decode(plain, prompts, extent.steps)
            return ours, base, statistics.fmean(forward(best + 1) for _ in range(extent.steps // 3))

        (turns,) = in_rounds(extent.rounds, turn)
    ours, base = together([one for one, _, _ in turns]), together([one for _, one, _ in turns])
    paper = statistics.fmean(cost for _, _, cost in turns) / (_expected(error, best) * len(prompts))
    return Chosen(
        ours.tokens / ours.steps / len(prompts), best, base.per_token / ours.per_token, paper / ours.per_token
    )


# -- the row ------------------------------------------------------------------------------------------------------


def _lines(sequences: int, found: Found) -> list[str]:
    alone = found.forward_ms[1]
    costs = ", ".join(f"{rows}: {took / alone:.2f}" for rows, took in found.forward_ms.items())
    return [
        f"plain         {found.plain_ms:7.1f} ms  a step of {sequences} sequence(s); {alone:.1f} ms is the forward. "
        f"Forwards by rows of each sequence: {costs}",
        *(
            f"fixed         {one.of_paper:7.2f}x  of paper, {one.of_plain:.2f}x of plain: {sequences} sequence(s), "
            f"{depth} drafts, {error:.0%} wrong, {one.tokens:.2f} tokens a round; target {MIN_OF_PAPER} of paper"
            for error, by_depth in found.fixed.items()
            for depth, one in by_depth.items()
        ),
        *(
            f"chosen        {one.of_paper:7.2f}x  of paper, {one.of_plain:.2f}x of plain: {sequences} sequence(s), "
            f"depths chosen, {error:.0%} wrong, {one.tokens:.2f} tokens a round, best depth {one.best}; target "
            + (f"{MIN_USELESS} of plain" if error == USELESS else f"{MIN_OF_PAPER} of paper")
            for error, one in found.chosen.items()
        ),
    ]


def row(given: Given) -> Lines:
    found = speculate(SMALLEST if given.quick else Extent(), given.directory)
    for sequences, one in found.items():
        yield from _lines(sequences, one)
    return {
        str(sequences): {
            "plain_ms": one.plain_ms,
            "forward_ms": {str(rows): took for rows, took in one.forward_ms.items()},
            "fixed": {
                str(error): {str(depth): of._asdict() for depth, of in by_depth.items()}
                for error, by_depth in one.fixed.items()
            },
            "chosen": {str(error): of._asdict() for error, of in one.chosen.items()},
        }
        for sequences, one in found.items()
    }
