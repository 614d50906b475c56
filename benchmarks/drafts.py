"""drafts: what drafters are worth on library code that the embedded model was not trained on.

The code is of the modules of this interpreter's standard library that the model's manifest does not list as trained on.
The model continues it, greedily and sampled; texts that end or loop are not counted, because n-grams predict a loop
perfectly. Acceptance is of rounds with `DEPTH` drafts, by position: of the drafts whose predecessors in the
round were accepted. Then the depth controller chooses, and is compared with an engine without a drafter, which decodes
the same texts. Both take turns of `TURN` tokens, since the speed of a shared machine changes within a text, and what is
compared is the CPU time of all texts together, with the standard error over the texts.

The model is so small that its forward takes no longer than the rest of a step: this shows how often drafts are
accepted, and that the controller notices when they do not pay, but not what a real model gains.
"""

import json
import math
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from benchmarks.decoding import PARAMS, Burst, decode, together
from benchmarks.interleave import Side, sides
from benchmarks.row import Given, Lines
from kvcellar.engine.models import embedded
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.events import Delta, Event, Failed, Finished
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.result import Result
from kvcellar.repository import MTP
from kvcellar.sampling_params import SamplingParams

CACHE_BYTES = 64 << 20
TEMPERATURES = (0.0, 0.8)
DEPTH = 4
LOOP = 24  # tokens that occur twice in a text make it a loop
TESTS = {"test", "tests", "idle_test"}
TURN = 4  # tokens of a turn of each engine
MIN_OF_PLAIN = 0.97

Contexts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    texts: int = 48
    context: int = 192  # tokens of code before a continuation
    new: int = 64  # a longer greedy text of so small a model nearly always loops
    texts_compared: int = 32  # with plain decoding
    warm: int = 8  # texts from which the controller learns before that


SMALLEST = Extent(texts=3, context=32, new=8, texts_compared=1, warm=1)  # to test the bench


class Acceptance(NamedTuple):
    """Of the drafts of some texts: how many were tried and accepted, by position."""

    texts: int  # that neither end nor loop
    rounds: int
    tokens: int  # of these rounds
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(kept / tried for kept, tried in zip(self.accepted, self.tried, strict=True))


class Found(NamedTuple):
    """Of one drafter at one temperature."""

    drafter: str
    temperature: float
    fixed: Acceptance
    tokens: float  # in a round of the depth that the controller chose
    of_plain: float  # tokens per second with these, over those of plain decoding
    error: float  # standard error of that


def drafts(extent: Extent) -> list[Found]:
    with _engine(None) as plain:
        contexts = _contexts(plain, extent)
        results = _continued(plain, contexts, extent, 0.0)
        greedy = [context for context, result in zip(contexts, results, strict=True) if _counts(result)]
        texts = {temperature: contexts if temperature else greedy for temperature in TEMPERATURES}
        return [
            _found(plain, drafter, texts[temperature], extent, temperature)
            for drafter in drafters()
            for temperature in TEMPERATURES
            if texts[temperature]
        ]


def drafters() -> list[str]:
    """Those that the embedded model has: `Engine(draft=...)`."""
    return ["ngram", *(["mtp"] if (embedded.path() / MTP).is_file() else [])]


def held_out() -> list[Path]:
    """Modules of the standard library that the embedded model was not trained on; not tests."""
    pools = json.loads((embedded.path() / "manifest.json").read_text())["pools"]
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / path for path in sorted(pools["held_library"]["files"]) if not TESTS & set(Path(path).parts)]
    return [path for path in paths if path.is_file()]


def _engine(draft: str | None) -> Engine:
    return Engine(device="cpu", cache_bytes=CACHE_BYTES, threads=1, draft=draft)


def _contexts(engine: Engine, extent: Extent) -> list[list[int]]:
    """Code before the continuations, evenly spread over the held-out modules."""
    ids = [token for path in held_out() for token in engine.encode(path.read_text(encoding="utf-8"), special=False)]
    last = len(ids) - extent.context
    starts = [at * last // extent.texts for at in range(extent.texts)]
    return [ids[start : start + extent.context] for start in starts]


def _found(plain: Engine, drafter: str, contexts: Contexts, extent: Extent, temperature: float) -> Found:
    with _engine(drafter) as engine:
        drafting = engine._loop.manager.drafting  # pyright: ignore[reportPrivateUsage]
        chooses = drafting.speculator
        assert chooses is not None
        drafting.speculator = Speculator(chooses.drafter, fixed=DEPTH)
        fixed = _acceptance(_continued(engine, contexts, extent, temperature))
        drafting.speculator = chooses
        ours, base = _compared(plain, engine, contexts, extent, replace(PARAMS, temperature=temperature))
    mine, other = together(ours), together(base)
    of_plain = other.per_token / mine.per_token
    error = _error(of_plain, [two.per_token / one.per_token for one, two in zip(ours, base, strict=True)])
    return Found(drafter, temperature, fixed, mine.tokens / mine.steps, of_plain, error)


def _error(mean: float, ratios: Sequence[float]) -> float:
    """The standard error of the mean of so many texts' ratios."""
    if len(ratios) < 2:
        return 0.0
    return math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1) / len(ratios))


def _continued(engine: Engine, contexts: Contexts, extent: Extent, temperature: float) -> list[Result]:
    return engine.generate(contexts, temperature=temperature, max_tokens=extent.new)


def _counts(result: Result) -> bool:
    """Whether a text neither ends nor loops."""
    ids = result.token_ids
    phrases = {ids[at : at + LOOP] for at in range(len(ids) - LOOP + 1)}
    return result.finish_reason == "length" and len(phrases) == max(0, len(ids) - LOOP + 1)


def _acceptance(results: Sequence[Result]) -> Acceptance:
    counted = [result for result in results if _counts(result)]
    reports = [result.speculation for result in counted if result.speculation is not None]
    return Acceptance(
        len(counted),
        sum(report.rounds for report in reports),
        sum(len(result.token_ids) for result in counted),
        tuple(map(sum, zip_longest(*(report.tried_at for report in reports), fillvalue=0))),
        tuple(map(sum, zip_longest(*(report.accepted_at for report in reports), fillvalue=0))),
    )


def _compared(
    plain: Engine, engine: Engine, contexts: Contexts, extent: Extent, params: SamplingParams
) -> tuple[list[Burst], list[Burst]]:
    """Both continue the same texts, in turn, after the controller has learnt."""
    for number in range(1, extent.warm + 1):
        engine.clear_cache()  # n-grams must not find the text itself
        decode(engine, [contexts[-number % len(contexts)]], extent.new, params, tokens=extent.new - 2)
    pairs = [
        _pair(engine, plain, contexts[number % len(contexts)], replace(params, max_tokens=extent.new))
        for number in range(extent.texts_compared)
    ]
    return [ours for ours, _ in pairs], [base for _, base in pairs]


def _pair(ours: Engine, base: Engine, context: Sequence[int], params: SamplingParams) -> tuple[Burst, Burst]:
    """Both continue a text, in turns."""
    listeners = [_Listener(side) for side in sides(TURN)]
    for engine in (ours, base):
        engine.clear_cache()
    tickets = [
        engine.submit(context, params, deliver=listener)
        for engine, listener in zip((ours, base), listeners, strict=True)
    ]
    try:
        for listener in listeners:
            listener.side.wait_ready()
        listeners[0].side.go()
        for listener in listeners:
            listener.over.wait()
    finally:
        for ticket, listener in zip(tickets, listeners, strict=True):
            listener.side.end()
            ticket.cancel()
    for engine, listener in zip((ours, base), listeners, strict=True):
        if listener.error is not None:
            raise listener.error
        engine.stats()  # waits until the engine's thread has done what follows a text
    one, two = (listener.burst() for listener in listeners)
    return one, two


class _Listener:
    """Receives the events of a text on the engine's thread. Each delta is a step of its side."""

    def __init__(self, side: Side) -> None:
        self.side, self.over = side, threading.Event()
        self.error: Exception | None = None
        self._tokens: list[int] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta) and event.token_ids:
            self._tokens.append(len(event.token_ids))
            self.side.step(self._tokens[-1])
        elif isinstance(event, Finished | Failed):
            self.error = event.error if isinstance(event, Failed) else None
            self.side.end()
            self.over.set()

    def burst(self) -> Burst:
        """All steps but the first, which computes the prompt."""
        steps = len(self.side.cpu)
        return Burst(sum(self.side.cpu), steps, sum(self._tokens[1 : steps + 1]))


# -- the row ------------------------------------------------------------------------------------------------------


def row(given: Given) -> Lines:
    found = drafts(SMALLEST if given.quick else Extent())
    for one in found:
        fixed, rates = one.fixed, ", ".join(f"{rate:.2f}" for rate in one.fixed.rates)
        yield (
            f"accepted      {fixed.tokens / max(1, fixed.rounds):6.2f}   tokens a round with {DEPTH} drafts of "
            f"{one.drafter} at temperature {one.temperature}: {rates} by position, {fixed.texts} texts"
        )
    for one in found:
        yield (
            f"chosen        {one.of_plain:6.2f}x  (+-{one.error:.2f}) of plain decoding with drafts of {one.drafter} "
            f"at temperature {one.temperature}, {one.tokens:.2f} tokens a round; target {MIN_OF_PLAIN}. No speed-up is "
            f"claimed: this model is too small"
        )
    return [{**one._asdict(), "fixed": {**one.fixed._asdict(), "rates": one.fixed.rates}} for one in found]
