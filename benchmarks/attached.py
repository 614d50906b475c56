"""attached: the CPU time of `generate` of transformers beside a memory (`kvcellar.attach`), over that of `generate`
alone.

Both complete the same prompts, in turn: one of which nothing is known; the next turn of a conversation; and several
completions of one prompt. A call writes to memory what it has computed before it ends.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.networks import hybrid
from benchmarks.row import Given, Lines, settled
from kvcellar.bench import hf_baseline
from kvcellar.bench.network import TINY, Size
from kvcellar.engine.load.attach import attach
from kvcellar.engine.models.attached import Attached

LLAMA = Size(1024, 8, 16, 8, 64, 3072, 4096, 4096)  # 95 million parameters
LENGTHS = (128, 512)  # tokens of a prompt
NEW = 16  # tokens of a completion
MORE = 32  # tokens of the next turn
SAMPLES = 4
MAX_ATTACHED = 1.0


def row(given: Given) -> Lines:
    size = {"hidden": 64, "layers": 4, "head": 16} if given.quick else {"hidden": 1024, "layers": 8, "head": 64}
    networks = {"llama": (TINY if given.quick else LLAMA).config(), "lfm2": hybrid("lfm2", **size)}
    lengths, rounds = ((24,), 1) if given.quick else (LENGTHS, 8)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for kind, config in networks.items():
        model = hf_baseline.network(config, torch.float32)
        with attach(model) as memory, settled():
            for what, measure in CASES.items():
                ratios = {length: _ratio(measure, model, memory, length, rounds) for length in lengths}
                found.setdefault(kind, {})[what] = ratios
                shown = ", ".join(f"{ratio:.2f}x of {length} tokens" for length, ratio in ratios.items())
                yield f"attached      {shown}: {what}, {kind}; target {MAX_ATTACHED}x"
    return found


Case = Callable[[PreTrainedModel, Attached, Tensor], tuple[float, float]]  # seconds beside a memory, and alone


def _ratio(case: Case, model: PreTrainedModel, memory: Attached, length: int, rounds: int) -> float:
    """The median over rounds, of which the first is not counted."""
    draw, found = random.Random(length), list[float]()
    for _ in range(rounds + 1):
        ids = torch.tensor([[draw.randrange(3, 500) for _ in range(length)]])
        beside, alone = case(model, memory, ids)
        found.append(beside / alone)
    return statistics.median(found[1:])


def _first(model: PreTrainedModel, memory: Attached, ids: Tensor) -> tuple[float, float]:
    return _both(model, memory, ids)


def _next(model: PreTrainedModel, memory: Attached, ids: Tensor) -> tuple[float, float]:
    answer = _generate(model, ids, past_key_values=memory.cache())[1]
    return _both(model, memory, torch.cat([answer, ids[:, :MORE]], 1))


def _samples(model: PreTrainedModel, memory: Attached, ids: Tensor) -> tuple[float, float]:
    return _both(model, memory, ids, num_return_sequences=SAMPLES, do_sample=True)


CASES: Mapping[str, Case] = {
    "a new prompt": _first, f"the next turn, with {MORE} tokens": _next, f"{SAMPLES} completions of a prompt": _samples,
}  # fmt: skip


def _both(model: PreTrainedModel, memory: Attached, ids: Tensor, **how: Any) -> tuple[float, float]:
    alone, expected = _generate(model, ids, **how)
    beside, tokens = _generate(model, ids, past_key_values=memory.cache(), **how)
    assert how or torch.equal(tokens, expected)
    return beside, alone


def _generate(model: PreTrainedModel, ids: Tensor, **how: Any) -> tuple[float, Tensor]:
    """CPU seconds, and the tokens."""
    given = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, **how}
    network: Any = model
    began = time.process_time()
    tokens = network.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return time.process_time() - began, tokens
