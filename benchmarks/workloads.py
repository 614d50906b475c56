"""workloads: the workloads that compare an `Engine` with a baseline, and their measurement.

The baseline is `generate` of transformers with its dynamic cache, on the same weights, unless a workload says
otherwise. Both sample greedily, on the same number of threads. Decoding is interleaved by a few steps, everything else
by whole runs. Reported are medians of time, and the ratio of CPU time, which is less sensitive to other load on the
machine.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.interleave import Side, in_rounds, sides
from benchmarks.layouts import layouts
from kvcellar.bench import hf_baseline
from kvcellar.bench.network import SMALL, TINY
from kvcellar.engine.engine import Engine
from kvcellar.events import Delta, Event, Failed
from kvcellar.sample.params import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Engines:
    """The same weights three times. Continuous batching of transformers changes a network, so it has its own."""

    ours: Engine
    hf_baseline: Any  # a transformers network
    hf_batching: Any  # another


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report, in milliseconds. `target` is what `ratio` should reach; None: there is no target."""

    name: str
    what: str
    ours: float
    baseline: float
    target: float | None
    cpu_ratio: float | None = None  # baseline over ours, in CPU time
    also: dict[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.baseline / self.ours


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of workloads. Prompts have `1/shorter` of their full lengths."""

    shorter: int = 1
    bursts: int = 12
    burst: int = 4  # consecutive steps of one side
    repeats: int = 5  # of whole runs

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Token ids, the same for the same seed."""
        drawn = random.Random(seed)
        return [drawn.randrange(1, 500) for _ in range(max(2, length // self.shorter))]

    def ragged(self, count: int, shortest: int, longest: int) -> Prompts:
        """`count` prompts with lengths spread evenly from the shortest to the longest."""
        lengths = [shortest + round(i * (longest - shortest) / (count - 1)) for i in range(count)]
        return [self.prompt(length, seed) for seed, length in enumerate(lengths)]


PROMPTS: Mapping[str, Callable[[Scale], Prompts]] = {
    "decode-512": lambda scale: [scale.prompt(512)],
    "decode-4096": lambda scale: [scale.prompt(4096)],
    "ragged-8": lambda scale: scale.ragged(8, 128, 4096),
    "ragged-32": lambda scale: scale.ragged(32, 64, 1024),
}  # of workloads that measure decoding


# -- decoding ---------------------------------------------------------------------------------------------------------


def _single(name: str, engines: Engines, scale: Scale, target: float) -> Row:
    prompts = PROMPTS[name](scale)
    what = f"a step of 1 sequence at {len(prompts[0])} tokens"
    return Row(name, what, *_decode(engines, scale, prompts).row(target))


def _ragged(name: str, engines: Engines, scale: Scale, target: float | None) -> Row:
    """The baseline pads all prompts to the longest, its only way to decode them in one batch."""
    prompts = PROMPTS[name](scale)
    measured = _decode(engines, scale, prompts)
    what = f"a step of {len(prompts)} sequences of {len(prompts[0])} to {len(prompts[-1])} tokens"
    also: dict[str, float | str] = {}
    # Steps until prefill of the last prompt has ended; before that, not every sequence gets a token in each step.
    prefill = sum(map(len, prompts)) // hf_baseline.STEP_TOKENS + len(prompts)
    try:
        seconds = hf_baseline.generate_batch(engines.hf_batching, prompts, prefill + 3 * scale.burst)
        also["generate_batch_ms"] = _milliseconds(seconds)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        also["generate_batch_ms"] = f"does not run: {error}"
    return Row(name, what, *measured.row(target), also)


def _decode(engines: Engines, scale: Scale, prompts: Prompts) -> "_Measured":
    """Decoding steps of all prompts together."""
    steps = scale.burst * (scale.bursts + 1)
    our_side, baseline_side = sides(scale.burst)
    # A step ends with the delta of the last request. Its first delta arrives when all prompts have been computed.
    listeners = [_Listener(None) for _ in prompts[:-1]] + [_Listener(our_side)]
    params = SamplingParams(temperature=0.0, ignore_eos=True)  # cancelled when the baseline has ended
    tickets = [
        engines.ours.submit(prompt, params, deliver=listener.on_event)
        for prompt, listener in zip(prompts, listeners, strict=True)
    ]
    try:
        our_side.wait_ready()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(
                hf_baseline.generate, engines.hf_baseline, prompts, steps + 1, lambda _: baseline_side.step()
            )
            running.add_done_callback(lambda _: baseline_side.end())
            baseline_side.wait_ready()
            our_side.go()
            running.result()
    finally:
        our_side.end()
        for ticket in tickets:
            ticket.cancel()
    for listener in listeners:
        listener.check()
    warm = scale.burst  # the first turn of each side is not counted
    return _Measured(
        our_side.seconds[warm:], baseline_side.seconds[warm:], our_side.cpu[warm:], baseline_side.cpu[warm:]
    )


class _Listener:
    """Receives the events of a request on the engine's thread. With a `side`, each delta is one of its steps."""

    def __init__(self, side: Side | None) -> None:
        self._side = side
        self._error: Exception | None = None

    def on_event(self, event: Event) -> None:
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


def _prefill(engines: Engines, scale: Scale) -> Row:
    prompt = scale.prompt(2048)
    measured = _interleaved(
        scale.repeats,
        lambda: engines.ours.generate(prompt, temperature=0.0, max_tokens=1, ignore_eos=True),
        lambda: hf_baseline.generate(engines.hf_baseline, [prompt], 1),
    )
    return Row("prefill-2048", f"{len(prompt)} tokens to the first new one", *measured.row(1.1))


def _shared(engines: Engines, scale: Scale) -> Row:
    """16 completions of one prompt. The baseline is our engine with 16 different prompts, which share nothing."""
    prompt, new, count = scale.prompt(1500), 16, 16
    prompts = [scale.prompt(1500, seed) for seed in range(count)]
    measured = _interleaved(
        max(1, scale.repeats // 2),
        lambda: engines.ours.generate(prompt, temperature=0.0, max_tokens=new, n=count, ignore_eos=True),
        lambda: engines.ours.generate(prompts, temperature=0.0, max_tokens=new, ignore_eos=True),
    )
    start = time.perf_counter()
    hf_baseline.generate(engines.hf_baseline, [prompt] * count, new)
    also: dict[str, float | str] = {"generate_ms": _milliseconds([time.perf_counter() - start])}
    what = (
        f"{count} completions of {new} tokens of one prompt of {len(prompt)}; baseline: ours, {count} different prompts"
    )
    return Row("shared-1500", what, *measured.row(6.0), also)


def _layouts(engines: Engines, scale: Scale) -> Row:
    """Attention alone, of all layers. The baseline is our attention with planes that are rearranged in each step."""
    size = TINY if scale.shorter > 1 else SMALL
    lengths = [len(prompt) for prompt in scale.ragged(8, 128, 4096)]
    agreed, rearranged = layouts(size, lengths, torch.bfloat16, 4 * scale.repeats)
    wide = layouts(size, lengths, torch.float32, 4 * scale.repeats)
    what = f"attention of 8 sequences of {lengths[0]} to {lengths[-1]} tokens; baseline: rearranging K/V in each step"
    also: dict[str, float | str] = {"float32": f"{wide[1] / wide[0]:.2f}x"}
    return Row("layouts", what, agreed, rearranged, 1.2, also=also)


def _interleaved(repeats: int, ours: Callable[[], object], baseline: Callable[[], object]) -> "_Measured":
    """Runs of both in turn, after one run of each that is not counted."""

    def timed(run: Callable[[], object]) -> tuple[float, float]:
        start = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    (seconds, cpu), (baseline_seconds, baseline_cpu) = (
        zip(*results, strict=True) for results in in_rounds(repeats, partial(timed, ours), partial(timed, baseline))
    )
    return _Measured(seconds, baseline_seconds, cpu, baseline_cpu)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds of every step or run."""

    ours: Sequence[float]
    baseline: Sequence[float]
    our_cpu: Sequence[float]
    baseline_cpu: Sequence[float]

    def row(self, target: float | None) -> tuple[float, float, float | None, float]:
        """The numbers of a `Row`."""
        cpu_ratio = statistics.median(self.baseline_cpu) / statistics.median(self.our_cpu)
        return _milliseconds(self.ours), _milliseconds(self.baseline), target, cpu_ratio


def _milliseconds(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1000 * statistics.median(seconds)


WORKLOADS: Mapping[str, Callable[[Engines, Scale], Row]] = MappingProxyType(
    {
        "decode-512": partial(_single, "decode-512", target=1.5),
        "decode-4096": partial(_single, "decode-4096", target=2.0),
        "ragged-8": partial(_ragged, "ragged-8", target=3.0),
        "ragged-32": partial(_ragged, "ragged-32", target=None),
        "prefill-2048": _prefill,
        "shared-1500": _shared,
        "layouts": _layouts,
    }
)
