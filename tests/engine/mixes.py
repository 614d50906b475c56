"""Mixes of requests that arrive while others are running, and what each of them came to.

Moments are counted in tokens of a request that is there from the beginning (the clock), so that a mix meets the engine
in the same state every time.
"""

import random
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.load import build
from kvcellar.engine.load.allocate import Needs
from kvcellar.engine.load.capacity import resolve_capacity
from kvcellar.engine.load.reserve import scratch
from kvcellar.engine.load.settings import Settings, step_tokens_of
from kvcellar.errors import CapacityTooSmall
from kvcellar.events import Delta, Done, Event, Failed, Finished, TokenLogprob
from kvcellar.frontend.result import Ticket
from kvcellar.sampling_params import SamplingParams
from tests.zoo import ARCHS, reference_logits

PATIENCE = 120.0  # seconds; only a test that fails waits so long
FIRST, LAST = 3, 100  # tokens of the zoo that are not special


@dataclass(frozen=True)
class Ask:
    """A request to come, when the clock has told so many tokens. It is cancelled when the clock has told `cancel` ones,
    if it has not ended before. `turns` follow in one conversation: each when the answer before it is complete."""

    at: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    namespace: str = ""
    cancel: int | None = None
    turns: tuple[tuple[int, ...], ...] = ()


class Ear:
    """Listens to one request. Asserts the order of what it is told; waits for the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.wrong: list[str] = []
        self._over = threading.Event()

    def __call__(self, event: Event) -> None:
        if self._over.is_set():
            self.wrong.append(f"{event} came after the end")
        if isinstance(event, Delta | Finished) and event.choice in self.reasons:
            self.wrong.append(f"{event} came after its choice had finished")
        self.events.append(event)
        if isinstance(event, Done | Failed):
            self._over.set()

    @property
    def reasons(self) -> dict[int, str]:
        return {event.choice: event.reason for event in self.events if isinstance(event, Finished)}

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> "Ear":
        assert self._over.wait(PATIENCE), "the request does not come to an end"
        assert not self.wrong, self.wrong
        return self

    @property
    def error(self) -> Exception | None:
        last = self.events[-1]
        return last.error if isinstance(last, Failed) else None

    @property
    def done(self) -> Done:
        last = self.events[-1]
        assert isinstance(last, Done), last
        return last

    def pieces(self, choice: int = 0) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta) and event.choice == choice]

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces(choice) for token in piece.token_ids)

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces(choice))

    def logprobs(self, choice: int = 0) -> list[TokenLogprob]:
        return [entry for piece in self.pieces(choice) for entry in piece.logprobs or ()]

    def answers(self) -> list[tuple[tuple[int, ...], str]]:
        """Of each choice: its tokens, and why it ended."""
        return [(self.ids(choice), self.reasons[choice]) for choice in sorted(self.reasons)]


@dataclass
class Clock:
    """A request that submits others while it runs, and cancels them."""

    engine: Engine
    asks: Sequence[Ask]
    ears: list[Ear] = field(default_factory=list)
    followed: list[tuple[Ask, Ear]] = field(default_factory=list)  # later turns of conversations
    _tickets: dict[int, Ticket] = field(default_factory=dict)

    def run(self) -> list[Ear]:
        """Everybody's ear, when all is over."""
        self.ears = [Ear() for _ in self.asks]
        own = Ear()
        told = 0
        most = max(max(ask.at, ask.cancel or 0) for ask in self.asks)

        def tick(event: Event) -> None:
            nonlocal told
            own(event)
            told = (
                most if isinstance(event, Done | Failed) else told + (isinstance(event, Delta) and len(event.token_ids))
            )
            for number, (ask, ear) in enumerate(zip(self.asks, self.ears, strict=True)):
                if ask.at <= told and number not in self._tickets:
                    self._tickets[number] = self._submit(ask, ear)
                if ask.cancel is not None and ask.cancel <= told and not ear.over:
                    self._tickets[number].cancel()

        self.engine.submit([FIRST], SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True), deliver=tick)
        own.wait()
        assert own.error is None, own.error
        assert len(self._tickets) == len(self.asks), "a request was refused"
        for ear in self.ears:
            ear.wait()
        for _, ear in self.followed:  # which grows meanwhile
            ear.wait()
        return self.ears

    def _submit(self, ask: Ask, ear: Ear) -> Ticket:
        def deliver(event: Event) -> None:
            if isinstance(event, Done) and ask.turns and ear.reasons.get(0) != "cancelled":
                following = (*ask.prompt, *ear.ids(), *ask.turns[0])
                self._follow(replace(ask, prompt=following, turns=ask.turns[1:]))
            ear(event)

        params = SamplingParams(**ask.sampling)
        return self.engine.submit(ask.prompt, params, deliver=deliver, namespace=ask.namespace)

    def _follow(self, ask: Ask) -> None:
        self.followed.append((ask, Ear()))
        self._submit(*self.followed[-1])


def tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST, LAST) for _ in range(count))


def mix(which: object, *, longest: int = 40, count: int = 10, **sampling: Any) -> list[Ask]:
    """Requests of all lengths at all moments; `sampling` is the same for all but length, `n` and seed."""
    draw = random.Random(str(which))
    return [
        Ask(
            at=draw.randint(1, 15),
            prompt=tokens(draw, draw.choice([1, 2, 7, 8, 9, longest // 2, longest])),
            sampling={
                "max_tokens": draw.choice([1, 2, 9, 18, 18]),
                "n": draw.choice([1, 1, 1, 2]),
                "ignore_eos": draw.random() < 0.5,
                "temperature": 0.0,
                **sampling,
            },
        )
        for _ in range(count)
    ]


def made(network: PreTrainedModel | None, **settings: Any) -> Engine:
    return Engine(network, **{"threads": 1, **settings})


def small_engine(name: str, **settings: Any) -> Engine:
    return made(ARCHS[name].build(), **{"cache_bytes": 40_000_000, **settings})


def bytes_for(model: str | PreTrainedModel, tokens: int, **settings: Any) -> int:
    """Bytes in which exactly so many tokens of this model fit at once, windows and chunks taken into account.

    `settings` are those of the engine that will be given the bytes: they decide what a step takes.
    """
    network = ARCHS[model].build() if isinstance(model, str) else model
    config = repr(sorted(network.config.to_dict().items()))
    how = build.measures_of, Settings().record, network.dtype, config, tokens, repr(sorted(settings.items()))
    if how not in _BYTES:
        _BYTES[how] = _bytes_for(network, tokens, settings)
    return _BYTES[how]


_BYTES: dict[tuple[object, ...], int] = {}  # by what they depend on


def _bytes_for(network: PreTrainedModel, tokens: int, settings: dict[str, Any]) -> int:
    with made(network, **{"cache_bytes": 2**29, **settings}) as engine:
        built, given = engine._built, engine._built.settings
        limits = {"context": built.intake.context, "step_tokens": step_tokens_of(given, "cpu")}
        deepest = built.drafts.deepest if built.drafts is not None else 0
        measures = build.measures_of(built.guest, None, began=0, limits=limits, environment={})
        step = scratch(built.guest, measures=measures, deepest=deepest, **limits)
        needs = Needs.of(built.guest, built.intake.context, step, shifts=True)

        def of_all(longest: int, most: int, sequences: int) -> int:
            """For any number of tokens what it is for these, which decides whether they fit: few are measured."""
            return step(longest if most == tokens else min(tokens, built.intake.context), tokens, sequences)

        def enough(budget: int) -> bool:
            try:
                found = resolve_capacity(
                    needs.demands(),
                    budget=budget,
                    because="",
                    scratch=of_all if built.guest.shape.groups else step,
                    max_sequences=given.max_sequences,
                    bytes_per_row=needs.bytes_per_row,
                    **limits,
                )
            except CapacityTooSmall:
                return False
            return found.tokens >= tokens

        return bisect_left(range(2**40), True, key=enough)


def assert_at_rest(engine: Engine) -> None:
    """No request is left: what is in memory is the prefix cache's, and everything is free once that is cleared."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.sequences, stats.cells_used, stats.rows_used) == (0, 0, 0, 0, 0)
    engine.check()
    engine.clear_cache()
    engine.check()
    stats, prefixes = engine.stats(), engine._loop.manager.prefixes
    assert (stats.cells_cached, stats.rows_cached) == (0, 0)
    assert not prefixes.tree._roots
    assert not list(engine._built.memory.claims)


@cache
def judge(name: str) -> PreTrainedModel:
    return ARCHS[name].build()


def assert_greedy(name: str, prompt: Sequence[int], answer: Sequence[int], *, ended: bool) -> None:
    """`answer` is what taking the most likely token each time gives in plain forwards, and each was clearly the one.

    `ended`: the model's end-of-text came next.
    """
    told = [*answer, ARCHS[name].config().eos_token_id] if ended else list(answer)
    logits = reference_logits(judge(name), [*prompt, *told][:-1])[len(prompt) - 1 :]  # [L,V], L tokens were drawn
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.abs().amax(-1).clamp(min=1)
    sure = gaps > 2e-4
    assert bool(sure.all()), f"choose other seeds: a gap of {float(gaps.min()):.1e} cannot be judged"
    assert told == logits.argmax(-1).tolist()


def same_numbers(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-4) -> bool:
    return float((a - b).abs().max()) <= bound * max(1.0, float(b.abs().max()))
