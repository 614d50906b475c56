"""replay-engines: how many prompt tokens whole engines compute on traces of `replay`, with default settings.

The networks are tiny and random, of real architectures; the answers are what they draw. As a ratio to an ideal cache
of full attention on the same texts, which can resume at every token.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.replay import QUICK, WINDOW, Computed, Served, computed
from benchmarks.row import Given, Lines
from kvcellar.bench.hf_baseline import network
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.frontend.engine import Engine

SCALE = 0.25  # of the lengths of all texts: of windows, too
TRACED = ("agent", "users", "edits", "chats")
FEW = ("llama", "mistral", "lfm2")  # to test the row
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 50_016,
    "max_position_embeddings": 1 << 15,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {"sliding_window": round(WINDOW * SCALE)}
CHUNKED = {"attention_chunk_size": round(WINDOW * SCALE)}
DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
CONVOLVED = {"block_ff_dim": 32, "block_auto_adjust_ff_dim": False}


def _layers(*types: str) -> dict[str, list[str]]:
    return {"layer_types": list(types)}


FULL, LINEAR = "full_attention", "linear_attention"
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "qwen3": {},
        "gemma3_text": {**SLIDING, **_layers("sliding_attention", "sliding_attention", "sliding_attention", FULL)},
        "mistral": SLIDING,
        "llama4_text": {
            **CHUNKED,
            **_layers(*3 * ["chunked_attention"], FULL),
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
        },
        "lfm2": {**CONVOLVED, **_layers("conv", "conv", FULL, "conv")},
        "qwen3_next": {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            **_layers(*3 * [LINEAR], FULL),
        },
        "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
        "falcon_h1": MAMBA,
    }
)


def counted(model: Path, trace: str, *, scale: float) -> Computed:
    """By an engine of its own. A text ends when the engine has drawn as many tokens as the trace says."""
    with Engine(model, threads=1, context=1 << 15) as engine:

        def serve(prompt: list[int], new: int) -> Served:
            result = engine.generate(prompt, max_tokens=new, temperature=0.0, ignore_eos=True)
            return Served(result.choices[0].token_ids, result.usage.cached_tokens or 0)

        return computed(trace, serve, scale=scale)


def row(given: Given) -> Lines:
    found = dict[str, dict[str, Any]]()
    scale, traces = (QUICK / 5, TRACED[2:]) if given.quick else (SCALE, TRACED)
    yield f"{'network':12} {'trace':8} {'tokens':>9} {'computed':>9} {'ideal':>9} {'ratio':>6}"
    for name, own in ARCHITECTURES.items():
        if given.quick and name not in FEW:
            continue
        with silence_transformers():
            network({"model_type": name, **SIZES, **own}, torch.float32).save_pretrained(given.directory / name)
        for trace in traces:
            one = counted(given.directory / name, trace, scale=scale)
            found[f"{name} {trace}"] = one._asdict()
            ratio = one.computed / one.ideal
            yield f"{name:12} {trace:8} {one.tokens:9} {one.computed:9} {one.ideal:9} {ratio:6.3f}"
    return found
