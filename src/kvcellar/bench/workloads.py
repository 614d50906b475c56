"""workloads: what both sides are asked to do, and how long they take for it.

Ours is a whole `Engine`, theirs is `generate` of the same network with its dynamic cache; both take the most likely
token, on the same number of threads. Decoding is measured in turns of a few steps, everything else in turns of whole
runs; what is reported is the median. The ratio of CPU time stands beside it: it says more where other work is done.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcellar.bench import hf_baseline
from kvcellar.bench.layouts import layouts
from kvcellar.bench.network import SMALL, TINY
from kvcellar.bench.turns import Side, sides
from kvcellar.engine.engine import Engine
from kvcellar.events import Delta, Event, Failed
from kvcellar.sample.params import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Rivals:
    """The same weights three times: our engine, and two networks, as continuous batching changes the one it gets."""

    ours: Engine
    theirs: Any  # a transformers network
    batching: Any  # another


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report, in milliseconds. `target` is what `theirs / ours` should reach, if somebody said."""

    name: str
    what: str
    ours: float
    theirs: float
    target: float | None
    cpu_ratio: float | None = None  # theirs over ours in CPU time
    also: dict[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


@dataclass(frozen=True, slots=True)
class Workload:
    """`run` measures it at a scale: 1 for the real thing, less to see that it works."""

    name: str
    run: Callable[[Rivals, "Scale"], Row]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it: prompts have `1/shorter` of their lengths."""

    shorter: int = 1
    bursts: int = 12
    burst: int = 4  # steps in a row on one side
    repeats: int = 5  # of whole runs

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Token ids, the same for the same seed."""
        drawn = random.Random(seed)
        return [drawn.randrange(1, 500) for _ in range(max(2, length // self.shorter))]

    def ragged(self, count: int, shortest: int, longest: int) -> Prompts:
        """`count` prompts with lengths spread evenly from the shortest to the longest."""
        lengths = [shortest + round(i * (longest - shortest) / (count - 1)) for i in range(count)]
        return [self.prompt(length, seed) for seed, length in enumerate(lengths)]


DECODED: Mapping[str, Callable[[Scale], Prompts]] = {
    "decode-512": lambda scale: [scale.prompt(512)],
    "decode-4096": lambda scale: [scale.prompt(4096)],
    "ragged-8": lambda scale: scale.ragged(8, 128, 4096),
    "ragged-32": lambda scale: scale.ragged(32, 64, 1024),
}  # what is decoded behind


def workloads() -> Iterator[Workload]:
    yield Workload("decode-512", lambda rivals, scale: _single("decode-512", rivals, scale, target=1.5))
    yield Workload("decode-4096", lambda rivals, scale: _single("decode-4096", rivals, scale, target=2.0))
    yield Workload("ragged-8", lambda rivals, scale: _ragged("ragged-8", rivals, scale, target=3.0))
    yield Workload("ragged-32", lambda rivals, scale: _ragged("ragged-32", rivals, scale, target=None))
    yield Workload("prefill-2048", _prefill)
    yield Workload("shared-1500", _shared)
    yield Workload("layouts", _layouts)


# -- decoding ---------------------------------------------------------------------------------------------------------


def _single(name: str, rivals: Rivals, scale: Scale, target: float) -> Row:
    prompts = DECODED[name](scale)
    what = f"a step of 1 sequence at {len(prompts[0])} tokens"
    return Row(name, what, *_decode(rivals, scale, prompts).row(target))


def _ragged(name: str, rivals: Rivals, scale: Scale, target: float | None) -> Row:
    """Theirs pads all prompts to the longest, which is the only way it has to decode them together."""
    prompts = DECODED[name](scale)
    measured = _decode(rivals, scale, prompts)
    what = f"a step of {len(prompts)} sequences of {len(prompts[0])} to {len(prompts[-1])} tokens"
    also: dict[str, float | str] = {}
    # Its first sequences write while it still reads the last: only then do all of them write together.
    reading = sum(map(len, prompts)) // hf_baseline.STEP_TOKENS + len(prompts)
    try:
        seconds = hf_baseline.generate_batch(rivals.batching, prompts, reading + 3 * scale.burst)
        also["generate_batch_ms"] = _milliseconds(seconds)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        also["generate_batch_ms"] = f"does not run: {error}"
    return Row(name, what, *measured.row(target), also)


def _decode(rivals: Rivals, scale: Scale, prompts: Prompts) -> "_Measured":
    """Decoding steps of all prompts together."""
    steps = scale.burst * (scale.bursts + 1)
    our_side, their_side = sides(scale.burst)
    # A step ends with the piece of the request that came last: the first one it gets says that all prompts are read.
    listeners = [_Listener(None) for _ in prompts[:-1]] + [_Listener(our_side)]
    params = SamplingParams(temperature=0.0, ignore_eos=True)  # they are cancelled when theirs is done
    tickets = [
        rivals.ours.submit(prompt, params, deliver=listener.hear)
        for prompt, listener in zip(prompts, listeners, strict=True)
    ]
    try:
        our_side.ready()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(hf_baseline.generate, rivals.theirs, prompts, steps + 1, their_side.step)
            answer.add_done_callback(lambda _: their_side.end())
            their_side.ready()
            our_side.go()
            answer.result()
    finally:
        our_side.end()
        for ticket in tickets:
            ticket.cancel()
    for listener in listeners:
        listener.check()
    warm = scale.burst  # the first turn of each
    return _Measured(our_side.seconds[warm:], their_side.seconds[warm:], our_side.cpu[warm:], their_side.cpu[warm:])


class _Listener:
    """Hears a request's events on the engine's thread."""

    def __init__(self, side: Side | None) -> None:
        self._side = side
        self._error: Exception | None = None

    def hear(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._error = event.error
            if self._side is not None:
                self._side.end()
        if self._side is not None and isinstance(event, Delta):
            self._side.step()

    def check(self) -> None:
        if self._error is not None:
            raise self._error


# -- whole runs -------------------------------------------------------------------------------------------------------


def _prefill(rivals: Rivals, scale: Scale) -> Row:
    prompt = scale.prompt(2048)
    measured = _in_turn(
        scale.repeats,
        lambda: rivals.ours.generate(prompt, temperature=0.0, max_tokens=1, ignore_eos=True),
        lambda: hf_baseline.generate(rivals.theirs, [prompt], 1),
    )
    return Row("prefill-2048", f"{len(prompt)} tokens to the first new one", *measured.row(1.1))


def _shared(rivals: Rivals, scale: Scale) -> Row:
    """16 answers to one prompt, against one answer to each of 16 prompts. `theirs` is ours without sharing."""
    prompt, new, count = scale.prompt(1500), 16, 16
    prompts = [scale.prompt(1500, seed) for seed in range(count)]
    measured = _in_turn(
        max(1, scale.repeats // 2),
        lambda: rivals.ours.generate(prompt, temperature=0.0, max_tokens=new, n=count, ignore_eos=True),
        lambda: rivals.ours.generate(prompts, temperature=0.0, max_tokens=new, ignore_eos=True),
    )
    start = time.perf_counter()
    hf_baseline.generate(rivals.theirs, [prompt] * count, new)
    also: dict[str, float | str] = {"generate_ms": _milliseconds([time.perf_counter() - start])}
    what = f"{count} answers of {new} tokens to one prompt of {len(prompt)}, against {count} such prompts, both ours"
    return Row("shared-1500", what, *measured.row(6.0), also)


def _layouts(rivals: Rivals, scale: Scale) -> Row:
    """Attention alone, of all layers. `theirs` is ours over plain planes that are made contiguous in each step."""
    size = TINY if scale.shorter > 1 else SMALL
    lengths = [len(prompt) for prompt in scale.ragged(8, 128, 4096)]
    agreed, rearranged = layouts(size, lengths, torch.bfloat16, 4 * scale.repeats)
    wide = layouts(size, lengths, torch.float32, 4 * scale.repeats)
    what = f"attention of 8 sequences of {lengths[0]} to {lengths[-1]} tokens, against the same rearranged, both ours"
    also: dict[str, float | str] = {"float32": f"{wide[1] / wide[0]:.2f}x"}
    return Row("layouts", what, agreed, rearranged, 1.2, also=also)


def _in_turn(repeats: int, ours: Callable[[], object], others: Callable[[], object]) -> "_Measured":
    """Each run in turn, after one run of each that does not count."""
    measured = _Measured([], [], [], [])
    for turn in range(repeats + 1):
        for run, seconds, cpu in (
            (ours, measured.ours, measured.our_cpu),
            (others, measured.theirs, measured.their_cpu),
        ):
            start = time.perf_counter(), time.process_time()
            run()
            if turn:
                seconds.append(time.perf_counter() - start[0])
                cpu.append(time.process_time() - start[1])
    return measured


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds of every step or run."""

    ours: list[float]
    theirs: list[float]
    our_cpu: list[float]
    their_cpu: list[float]

    def row(self, target: float | None) -> tuple[float, float, float | None, float]:
        """The numbers of a `Row`."""
        cpu_ratio = statistics.median(self.their_cpu) / statistics.median(self.our_cpu)
        return _milliseconds(self.ours), _milliseconds(self.theirs), target, cpu_ratio


def _milliseconds(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1000 * statistics.median(seconds)
