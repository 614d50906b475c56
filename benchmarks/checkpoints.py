"""checkpoints: what it takes of the time of a prompt, and of steps of decoding, that a text can be resumed nearly
everywhere: spare checkpoints of recurrent layers, and tails of windows.

The CPU time with them over that without, in turn on one engine, whose memory is cleared before each: so rows are
written that were written before.
"""

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.decoding import decode
from benchmarks.interleave import in_rounds
from benchmarks.networks import hybrid
from benchmarks.row import Given, Lines, settled
from kvcellar.bench.hf_baseline import network
from kvcellar.bench.kinds import KINDS, SMALLER
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.frontend.engine import Engine

TOKENS, STEPS, ROUNDS = 1000, 256, 9
LAYERS = {"num_hidden_layers": 8, "vocab_size": 8192}
NAMES = ("gemma3-1b", "lfm2-350m", "mamba2", "granite-4-hybrid", "qwen3.5")
SETTINGS: Mapping[str, Any] = {"threads": 1, "cache_bytes": 2 << 30, "context": 2048}


def config_of(name: str, *, quick: bool) -> dict[str, object]:
    if name == "qwen3.5":
        return {**hybrid("qwen3_5_text", hidden=128 if quick else 1024, layers=8, head=64), "linear_conv_kernel_dim": 4}
    config = {**KINDS[name], **(SMALLER if quick else LAYERS if name != "mamba2" else {"vocab_size": 8192})}
    if isinstance(types := config.get("layer_types"), list):
        first = 8 if "granite" in name else 0  # of both types
        config["layer_types"] = types[first : first + int(config["num_hidden_layers"])]
    return config


class Ratios(NamedTuple):
    """Of CPU time with checkpoints to that without, the medians of rounds."""

    seconds: float  # of a prompt without
    prompt: float
    milliseconds: float  # of a step of decoding without
    step: float
    spare: int  # tokens between spare checkpoints


@contextmanager
def cleared(engine: Engine, *, kept: bool) -> Iterator[None]:
    """With an empty memory, and with no spare checkpoints and no tails unless they are kept."""
    prefixes = engine._built.loop.manager.prefixes  # pyright: ignore[reportPrivateUsage]
    before = prefixes._spare, prefixes._part  # pyright: ignore[reportPrivateUsage]
    engine.clear_cache()
    if not kept:
        prefixes._spare = prefixes._part = 0  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        prefixes._spare, prefixes._part = before  # pyright: ignore[reportPrivateUsage]


def measured(model: Path, *, tokens: int, steps: int, rounds: int) -> Ratios:
    """Of a new prompt of so many tokens and one token more, and of so many steps of decoding behind a short prompt."""
    draw = random.Random(0)

    def some(count: int) -> list[int]:
        return [draw.randrange(5, 500) for _ in range(count)]

    with Engine(model, **SETTINGS) as engine, settled():

        def prompt(*, kept: bool) -> float:
            with cleared(engine, kept=kept):
                began = time.process_time()
                engine.generate(some(tokens), max_tokens=1, temperature=0.0)
                return time.process_time() - began

        def step(*, kept: bool) -> float:
            with cleared(engine, kept=kept):
                burst = decode(engine, [some(20)], steps)
                return burst.seconds / burst.steps

        turns = [lambda kept=kept, run=run: run(kept=kept) for run in (prompt, step) for kept in (False, True)]
        prompts, prompts_with, each, each_with = in_rounds(rounds, *turns)
        spare = engine._built.loop.manager.prefixes._spare  # pyright: ignore[reportPrivateUsage]

    def ratio(few: list[float], many: list[float]) -> float:
        return statistics.median(two / one for one, two in zip(few, many, strict=True))

    least, step_least = statistics.median(prompts), 1000 * statistics.median(each)
    return Ratios(least, ratio(prompts, prompts_with), step_least, ratio(each, each_with), spare)


def row(given: Given) -> Lines:
    found = dict[str, dict[str, float]]()
    yield f"{'network':18} {'seconds':>8} {'ratio':>6} {'ms a step':>10} {'ratio':>6} {'spare every':>12}"
    for name in NAMES:
        place = given.directory / name
        with silence_transformers():
            network(config_of(name, quick=given.quick), torch.bfloat16).save_pretrained(place)
        tokens, steps, rounds = (60, 20, 1) if given.quick else (TOKENS, STEPS, ROUNDS)
        one = measured(place, tokens=tokens, steps=steps, rounds=rounds)
        found[name] = one._asdict()
        yield (
            f"{name:18} {one.seconds:8.3f} {one.prompt:6.3f} {one.milliseconds:10.3f} {one.step:6.3f} {one.spare:12}"
        )
    return found
