"""profile: the time of each part of a step, with memory and network only: no engine thread, no queue."""

import ctypes
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.counts import all_counts
from benchmarks.counts import lines as count_lines
from benchmarks.row import Given, Lines
from kvcellar.bench.compare import QUICK, WORKS, Extent, Work
from kvcellar.bench.kinds import KINDS, write_kind
from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.load import load
from kvcellar.engine.recording.native import native
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.recorded_kernel import WORDS, StepKernel
from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import KvcellarError
from kvcellar.kernels.packed import LINEARS, pack
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.kv.history import Backend, GroupStep, LayerHistory, StepTables
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, GroupPlan
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Scoring
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams

OTHERS = "small operators"
OVERHEAD = "overhead"  # of the clock itself
PARTS = ("linear layers", "attention", "rest of the network", "begin and commit", "draw")
RECORDED = (*PARTS[:2], OTHERS, *PARTS[2:])  # of a recorded step
PART_OF: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("kvcellar_linear", "kvcellar_quantised", "kvcellar_experts"), "linear layers"),
        **dict.fromkeys(("kvcellar_attend", "kvcellar_store"), "attention"),
    }
)  # by the name of a kernel's function
PROMPT = 512  # prompt tokens per step of prefill
PROFILES: Mapping[str, Work] = MappingProxyType(
    {
        **{name: work for name, work in WORKS.items() if not work.reused and not work.sampled},
        **{kind: Work(kind, (512,)) for kind in KINDS},
        **{f"{kind}-8": Work(f"{kind}-8", (512,) * 8) for kind in KINDS},
    }
)  # steps whose parts can be timed: `kind-8` decodes eight sequences


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
        self.name, self.kinds = backend.name, backend.kinds
        self.arrangement: Arrangement = backend.arrangement

    def refuse(self, spec: AttentionSpec) -> str | None:
        return self._backend.refuse(spec)

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Any:
        return self._backend.prepare(plan, tables)

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend(q, history, scoring)

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend_latent(q, history, scoring)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        with self._clock.running("attention"):
            return self._backend.attend_dense(q, k, v, step, scoring)


class _Symbol(ctypes.Structure):
    """`Dl_info` of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class ClockedKernel(StepKernel):
    """The loop, which calls `spend` with a part and seconds. Raises `NotCompiled` as `StepKernel` does."""

    def __init__(self, environment: Mapping[str, str], spend: Callable[[str, float], None]) -> None:
        super().__init__(environment)
        self._spend, self._compiled, self._parts = spend, self.run, dict[int, str]()
        self._find = ctypes.CDLL(None).dladdr
        self._find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
        self.run: Any = self._clocked

    def _clocked(self, first: int, count: int, failed: Any, _: None) -> int:
        took = (ctypes.c_int64 * count)()  # of a span: at its beginning
        error: int = self._compiled(first, count, failed, took)
        done = time.perf_counter()
        words = (ctypes.c_int64 * (count * WORDS)).from_address(first)
        for at, nanoseconds in enumerate(took):
            if nanoseconds:
                run, function = words[at * WORDS : at * WORDS + 2]
                self._spend(self._part(function) if run == self.native else OTHERS, nanoseconds * 1e-9)
        self._spend(OVERHEAD, time.perf_counter() - done)
        return error

    def _part(self, function: int) -> str:
        if function not in self._parts:
            found = _Symbol()
            self._find(function, ctypes.byref(found))
            self._parts[function] = PART_OF.get((found.name or b"").decode(), OTHERS)
        return self._parts[function]


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


def row(given: Given) -> Lines:
    """With the setting `record`, of a recorded step; else by modules."""
    extent = QUICK if given.quick else Extent()
    work, kind = extent.of(PROFILES[given.profile]), given.profile.removesuffix("-8")
    if kind in KINDS:
        write_kind(kind, given.directory, quick=given.quick)
    else:
        write(TINY if given.quick else SMALL, given.directory)
    steps = extent.bursts * extent.burst if work.decoding else extent.repeats
    attention, parts = profile(
        given.directory, work.prompts(0), steps, recorded=given.record == "auto", reading=not work.decoding
    )
    for part, took in parts.items():
        yield f"{part:20} {took:8.2f} ms {took / sum(parts.values()):6.1%}"
    found = all_counts()
    yield from count_lines(found)
    per_layer = {name: {str(n): one._asdict() for n, one in by_n.items()} for name, by_n in found.items()}
    return {"of": given.profile, "attention": attention, "ms": parts, "per_layer": per_layer}
