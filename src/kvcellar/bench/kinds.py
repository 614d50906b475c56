"""kinds: everyday models, and kinds of layers that these have not, with random weights.

`kinds.json` has their configs. The first six have the shapes and vocabularies that Qwen3 0.6B, Llama 3.2 1B, Gemma 3
1B, LFM2 350M, Granite 4.0 H 350M and Qwen3 30B A3B were published with, the last one with 3 of its 48 layers; others
have about 125 million parameters. transformers computes prompts of Mamba 2 with tensors of gigabytes where chunks are
longer than 16, and random layers of `mamba2` round as much as they compute unless their residuals are rescaled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kvcellar.bench import hf_baseline
from kvcellar.bench.compare import Extent, Work
from kvcellar.bench.gguf import ARCHITECTURES, write_gguf
from kvcellar.engine.models.hf_globals import silence_transformers

WORKS = (
    Work("decode-1", (512,), sampled=True),
    Work("decode-8", (512,) * 8, sampled=True),
    Work("prefill-512", (512,), decoding=False),
)
EXTENT = Extent(bursts=6, repeats=3)
CACHE_BYTES = 4 << 30  # a step of Mamba 2 computes with hundreds of megabytes
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads((Path(__file__).parent / "kinds.json").read_text())
)
IN_LLAMA_CPP = frozenset(name for name, config in KINDS.items() if config["model_type"] in ARCHITECTURES)
SMALLER: Mapping[str, Any] = {  # to test the bench
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 4,
    "kv_lora_rank": 32,
    "num_heads": 4,
    "intermediate_size": 128,
    "shared_intermediate_size": 128,
    "moe_intermediate_size": 128,
    "mamba_n_heads": 8,
}


def write_kind(name: str, place: Path, *, quick: bool = False) -> int:
    """Write the random network of a kind, with a GGUF file if llama.cpp reads one; returns how many parameters it
    has."""
    config = {**KINDS[name], **(SMALLER if quick else {})}
    if quick and "layer_types" in config:
        config["layer_types"] = config["layer_types"][10:14]  # of both types
    with silence_transformers():
        network = hf_baseline.network(config, torch.bfloat16)
        network.save_pretrained(place)
    if name in IN_LLAMA_CPP:
        write_gguf(place)
    return network.num_parameters()
