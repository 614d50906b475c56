"""kinds: decoding of random networks of other kinds than Llama, of about 125 million parameters, against `generate`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kvcellar.bench import hf_baseline
from kvcellar.bench.compare import Extent, Work
from kvcellar.engine.models.hf_globals import silence_transformers

WORKS = (Work("decode-1", (512,)), Work("decode-8", (512,) * 8))
EXTENT = Extent(bursts=6)
CACHE_BYTES = 4 << 30  # a step of Mamba 2 computes with hundreds of megabytes
COMMON: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: Mapping[str, Any] = {
    **COMMON,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_experts_per_tok": 4,
}
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma3": {
            **COMMON,
            "model_type": "gemma3_text",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "intermediate_size": 2304,
            "sliding_window": 256,
        },
        "qwen3-moe": {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 512},
        "gpt-oss": {**EXPERTS, "model_type": "gpt_oss", "num_local_experts": 16, "sliding_window": 128},
        "mla": {
            **COMMON,
            "model_type": "deepseek_v3",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "first_k_dense_replace": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "q_lora_rank": None,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "intermediate_size": 2816,
        },
        "lfm2": {
            **COMMON,
            "model_type": "lfm2",
            "hidden_size": 768,
            "num_hidden_layers": 14,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "block_ff_dim": 2304,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention" if layer % 4 == 2 else "conv" for layer in range(14)],
        },
        "mamba2": {
            **COMMON,
            "model_type": "mamba2",
            "hidden_size": 1024,
            "num_hidden_layers": 14,
            "num_heads": 32,
            "rescale_prenorm_residual": True,  # else the rounding of random layers is as large as what they compute
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "chunk_size": 16,  # transformers computes prompts with tensors of gigabytes in larger ones
        },
    }
)
SMALLER: Mapping[str, Any] = {  # to test the bench
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "first_k_dense_replace": 4,
    "kv_lora_rank": 32,
    "num_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "block_ff_dim": 128,
}


def write_kind(name: str, place: Path, *, quick: bool = False) -> int:
    """Write the random network of a kind; returns how many parameters it has."""
    config = {**KINDS[name], **(SMALLER if quick else {})}
    if quick and "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    with silence_transformers():
        return hf_baseline.write_network(config, torch.bfloat16, place)
