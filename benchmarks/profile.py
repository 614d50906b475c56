"""profile: the time of each part of a step, with memory and network only: no engine thread, no queue."""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.clocked import OTHERS, OVERHEAD, ClockedKernel
from kvcellar.attention.choose import backends
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend, GroupStep, History, StepTables
from kvcellar.errors import KvcellarError
from kvcellar.kernels.packed import LINEARS, pack
from kvcellar.models.build_guest import build_guest
from kvcellar.models.guest import Guest
from kvcellar.models.load import load
from kvcellar.models.recording.native import native
from kvcellar.models.recording.record import record
from kvcellar.plan import Batch, Feed, GroupPlan
from kvcellar.sample.draw import draw
from kvcellar.sample.params import SamplingParams
from kvcellar.sample.sampler import Sampler
from kvcellar.shapes import Arrangement, AttentionSpec, Scoring
from kvcellar.spans import Span

PARTS = ("linear layers", "attention", "rest of the network", "begin and commit", "draw")
RECORDED = (*PARTS[:2], OTHERS, *PARTS[2:])  # of a recorded step
PROMPT = 512  # prompt tokens per step of prefill


class Clock:
    """Sums the time of each part until `take`."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self._spent[part] += time.perf_counter() - since

    def spend(self, part: str, seconds: float) -> None:
        self._spent[part] += seconds

    def take(self) -> dict[str, float]:
        """Milliseconds by part, since the last call."""
        spent, self._spent = self._spent, defaultdict(float)
        spent["rest of the network"] = spent["forward"] - sum(spent[part] for part in (*RECORDED[:3], OVERHEAD))
        return {part: 1000 * spent[part] for part in RECORDED}

    def watch(self, linear: nn.Module) -> None:
        """Clock every call of a layer."""
        began: list[float] = []
        linear.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))

        def done(*_: Any) -> None:
            self._spent["linear layers"] += time.perf_counter() - began.pop()

        linear.register_forward_hook(done)


class Clocked:
    """A backend whose attention is clocked; its planning belongs to `begin`."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend, self._clock = backend, clock
        self.name = backend.name
        self.arrangement: Arrangement | Mapping[str, Arrangement] = backend.arrangement
        self.padding, self.kinds = backend.padding, backend.kinds

    def refuse(self, spec: AttentionSpec) -> str | None:
        return self._backend.refuse(spec)

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Any:
        return self._backend.prepare(plan, tables)

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend(q, history, scoring)

    def attend_latent(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend_latent(q, history, scoring)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend_dense(q, k, v, step, scoring)


def profile(
    directory: Path, prompts: Sequence[Sequence[int]], steps: int, *, recorded: bool = False, reading: bool = False
) -> tuple[str, dict[str, float]]:
    """Of a step that gives every prompt a token, or with `reading` of one that reads all prompts: the backends that
    attend, and median milliseconds by part. Raises `KvcellarError` if steps cannot be recorded."""
    clock, parts = Clock(), RECORDED if recorded else PARTS
    network = load(directory, device="cpu").model
    pack(network)
    guest = _recorded(network, clock) if recorded else _by_modules(network, clock)
    cells = sum(map(len, prompts)) + len(prompts) * (steps + 1)
    memory = guest.memory({group.name: cells for group in guest.shape.groups}, rows=2 * len(prompts) + 2)
    work = _read if reading else _decode
    of_steps = work(guest, memory, prompts, steps, clock)
    names = {backend.name for backend in guest.backends.values()}
    return ", ".join(sorted(names)), {part: statistics.median(s[part] for s in of_steps[1:]) for part in parts}


def _read(
    guest: Guest, memory: Memory, prompts: Sequence[Sequence[int]], steps: int, clock: Clock
) -> list[dict[str, float]]:
    """What each step took that reads all prompts, with the draw of the tokens behind them."""
    of_steps: list[dict[str, float]] = []
    for _ in range(steps + 1):
        logits = _forward(guest, memory, dict(enumerate(prompts)), clock)
        _drawn(guest, memory, logits, _samplers(guest, prompts), clock)
        of_steps.append(clock.take())
        memory.clear()
    return of_steps


def _decode(
    guest: Guest, memory: Memory, prompts: Sequence[Sequence[int]], steps: int, clock: Clock
) -> list[dict[str, float]]:
    """What each step took that gives every prompt a token."""
    for seq, prompt in enumerate(prompts):
        for start in range(0, len(prompt), PROMPT):
            _forward(guest, memory, {seq: prompt[start : start + PROMPT]}, clock)
    clock.take()  # what reading took
    ids = {seq: [prompt[-1]] for seq, prompt in enumerate(prompts)}
    of_steps: list[dict[str, float]] = []
    choices = _samplers(guest, prompts)
    for _ in range(steps + 1):
        logits = _forward(guest, memory, ids, clock)
        ids = dict(enumerate(_drawn(guest, memory, logits, choices, clock)))
        of_steps.append(clock.take())
    return of_steps


def _samplers(guest: Guest, prompts: Sequence[Sequence[int]]) -> list[Sampler]:
    params, vocabulary = SamplingParams(temperature=0.0), guest.model.config.vocab_size
    return [
        Sampler(params, seed=0, index=0, prompt_ids=prompt, vocab_size=vocabulary, end_ids=frozenset())
        for prompt in prompts
    ]


def _drawn(guest: Guest, memory: Memory, logits: Tensor, choices: Sequence[Sampler], clock: Clock) -> list[list[int]]:
    """The token of each sequence."""
    with clock.running("draw"), torch.inference_mode():
        drawn = draw(logits, choices, [memory.length(seq) for seq in range(len(choices))])
    return [[one.token_id] for one in drawn]


def _by_modules(network: Any, clock: Clock) -> Guest:
    guest = build_guest(network, [Clocked(backend, clock) for backend in backends()])
    for layer in network.modules():
        if isinstance(layer, (*LINEARS, nn.Linear)):
            clock.watch(layer)
    return guest


def _recorded(network: Any, clock: Clock) -> Guest:
    guest = build_guest(network, list(backends()))
    record(guest, native(network, ClockedKernel(os.environ, clock.spend)))
    if guest.recording is None:
        raise KvcellarError(f"its steps are not recorded: {guest.not_recorded}")
    return guest


def _forward(guest: Guest, memory: Memory, new: Mapping[int, Sequence[int]], clock: Clock) -> Tensor:
    """Logits [S,V] of each sequence's last new token."""
    feeds: list[Feed] = []
    ids: list[int] = []
    last: list[int] = []
    for seq, tokens in new.items():
        length = memory.length(seq) if memory.has(seq) else 0
        feeds.append(Feed(seq, Span(length, length + len(tokens))))
        ids += tokens
        last.append(len(ids) - 1)
    with clock.running("begin and commit"):
        plan = memory.begin(Batch(tuple(feeds)))
    with clock.running("forward"):
        logits = guest.forward(memory, plan, ids, last)
    with clock.running("begin and commit"):
        memory.commit()
    return logits
