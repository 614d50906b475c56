"""checkpoints: what it takes of the time of a prompt that it can be resumed nearly everywhere: spare checkpoints of
recurrent layers, and tails of windows.

The CPU time of a prompt's prefill with them over that without, in turn on one engine, whose memory is cleared before
each: so rows are written that were written before.
"""

import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleave import in_rounds
from benchmarks.networks import hybrid
from benchmarks.row import Given, Lines, settled
from kvcellar.bench.hf_baseline import network
from kvcellar.bench.kinds import KINDS, SMALLER
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.frontend.engine import Engine

TOKENS, ROUNDS = 1000, 9
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


def seconds(engine: Engine, prompt: list[int], *, kept: bool) -> float:
    """CPU time of a prompt that is new, and of one token more."""
    prefixes = engine._built.loop.manager.prefixes  # pyright: ignore[reportPrivateUsage]
    before = prefixes._spare, prefixes._part  # pyright: ignore[reportPrivateUsage]
    engine.clear_cache()
    began = time.process_time()
    if not kept:
        prefixes._spare = prefixes._part = 0  # pyright: ignore[reportPrivateUsage]
    try:
        engine.generate(prompt, max_tokens=1, temperature=0.0)
        return time.process_time() - began
    finally:
        prefixes._spare, prefixes._part = before  # pyright: ignore[reportPrivateUsage]


def measured(model: Path, *, tokens: int, rounds: int) -> tuple[float, float, int]:
    """Seconds without, the ratio with them, round by round, and the tokens between spare checkpoints."""
    draw = random.Random(0)
    with Engine(model, **SETTINGS) as engine, settled():

        def run(*, kept: bool) -> float:
            return seconds(engine, [draw.randrange(5, 500) for _ in range(tokens)], kept=kept)

        without, with_them = in_rounds(rounds, lambda: run(kept=False), lambda: run(kept=True))
        spare = engine._built.loop.manager.prefixes._spare  # pyright: ignore[reportPrivateUsage]
    ratios = [many / few for few, many in zip(without, with_them, strict=True)]
    return statistics.median(without), statistics.median(ratios), spare


def row(given: Given) -> Lines:
    found = dict[str, dict[str, float]]()
    yield f"{'network':18} {'seconds':>8} {'ratio':>6} {'spare every':>12}"
    for name in NAMES:
        place = given.directory / name
        with silence_transformers():
            network(config_of(name, quick=given.quick), torch.bfloat16).save_pretrained(place)
        tokens, rounds = (60, 1) if given.quick else (TOKENS, ROUNDS)
        without, ratio, spare = measured(place, tokens=tokens, rounds=rounds)
        found[name] = {"seconds": without, "ratio": ratio, "spare": spare}
        yield f"{name:18} {without:8.3f} {ratio:6.3f} {spare:12}"
    return found
