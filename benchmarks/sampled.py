"""sampled: what a decode step with sampled tokens costs over a greedy one, in one run.

The network is that of the others here. Peaked logits are its own: the nucleus of 0.95 has about a hundred tokens, as
that of trained networks. With flat ones, those of random weights, it has most of the vocabulary. All settings take
turns; CPU time is that of the engine's thread.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.decoding import decode
from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SHARP, SMALL, TINY, Size, write
from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import SamplingParams

CACHE_BYTES = 1 << 30
SETTINGS: Mapping[str, SamplingParams] = {
    name: SamplingParams(ignore_eos=True, seed=1, **fields)
    for name, fields in {
        "greedy": {"temperature": 0.0},
        "T=1": {"temperature": 1.0},
        "T=0.8 top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
        "T=0.8 top_k 40 top_p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
        "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    }.items()
}


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size = SMALL
    sequences: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    steps: int = 12  # of a burst
    rounds: int = 7


SMALLEST = Extent(TINY, sequences=(2,), prompt=16, steps=3, rounds=1)  # to test the bench


class Found(NamedTuple):
    """Medians: of CPU ms of a step, and of its ratio to the greedy one of the same round."""

    ms: float
    over_greedy: float


def sampled(extent: Extent, directory: Path) -> Iterator[tuple[str, int, str, Found]]:
    """Logits, sequences in a step, the setting, and what it costs."""
    for logits, sharp in {"peaked": SHARP, "flat": 1.0}.items():
        at = directory / logits
        at.mkdir()
        write(extent.size, at, sharp=sharp)
        with Engine(at, cache_bytes=CACHE_BYTES, threads=1, draft="none", context=1024) as engine:
            for sequences in extent.sequences:
                prompts = [[(7 * seq + 13 * at) % 256 for at in range(extent.prompt)] for seq in range(sequences)]
                runs = [
                    lambda params=params, prompts=prompts: decode(engine, prompts, extent.steps, params)
                    for params in SETTINGS.values()
                ]
                rounds = [[one.seconds / one.steps for one in bursts] for bursts in in_rounds(extent.rounds, *runs)]
                for name, seconds in zip(SETTINGS, rounds, strict=True):
                    ratios = [one / greedy for one, greedy in zip(seconds, rounds[0], strict=True)]
                    yield logits, sequences, name, Found(1e3 * statistics.median(seconds), statistics.median(ratios))


def row(given: Given) -> Lines:
    found: dict[str, dict[str, float]] = {}
    for logits, sequences, name, one in sampled(SMALLEST if given.quick else Extent(), given.directory):
        yield f"{logits:6} {sequences:2} sequences  {name:26} {one.ms:8.2f} ms  {one.over_greedy:.3f} x greedy"
        found[f"{logits} {sequences} {name}"] = one._asdict()
    return found
