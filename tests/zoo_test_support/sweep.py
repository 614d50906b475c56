"""The sweep: a tiny config for every causal model type of transformers, or the reason why there is none."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo_test_support.initialise import initialise
from tests.zoo_test_support.tiny import tiny

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What a type needs beside small sizes: lists with a value per layer, and sizes that depend on each other.
OWN: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 101,
        **{part: {"hidden_size_global": 64} for part in ("encoder_config", "decoder_config")},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [4, 2, 2]}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
        "swa_num_attention_heads": 4,
    },
    "gemma4_unified": {"vision_config": {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "minimax_m3_vl_text": {"index_n_heads": 2, "index_block_size": 4, "index_topk_blocks": 3},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False, "num_buckets": 4},
    "roc_bert": {"shape_vocab_size": 101, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
OWN["dots3_note"] = {
    "text_config": OWN["dots3_note_text"],
    "vision_config": {"per_layer_config": {}, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
}
OWN["qwen4_exp"] = {"text_config": OWN["qwen4_exp_text"]}


# Types without a small config that runs, with transformers 5.23.
NO_MODEL = {
    "gemma3n": "its vision tower needs timm; gemma3n_text does not",
    "gemma4_assistant": "its layers read another model's keys and values, and its config requires one that stores them",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "musicgen": "its causal head needs the decoder's config and gets the whole one",
    "musicgen_melody": "as musicgen",
}


def auto_config(model_type: str) -> PreTrainedConfig:
    """A tiny config of this type, or a ValueError with the reason why there is none."""
    if model_type in NO_MODEL:
        raise ValueError(f"{model_type} has no tiny model: {NO_MODEL[model_type]}")
    return tiny(model_type, **OWN.get(model_type, {}))


def of_type(model_type: str) -> PreTrainedModel:
    """A new model of this type with a fixed seed, on the CPU in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            auto_config(model_type), attn_implementation="eager", dtype=torch.float32
        )
    initialise(model, 0)
    return model.eval()


def sweep() -> dict[str, PreTrainedConfig | str]:
    """Every causal model type, with its tiny config or the reason why it has none.

    A type of a newer transformers is tried with small sizes alone, so its reason may be the first error of its config
    class.
    """
    found: dict[str, PreTrainedConfig | str] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found[model_type] = auto_config(model_type)
        except (ValueError, TypeError, AttributeError, LookupError, ImportError, StrictDataclassError) as reason:
            found[model_type] = f"{type(reason).__name__}: {reason}"
    return found
