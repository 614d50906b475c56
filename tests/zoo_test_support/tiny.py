"""Small sizes for any config of transformers: one table, read by field name.

Config classes of different families mostly use the same field names, so this table is usually enough for a tiny
config of a new family. Other fields are given per family.
"""

from copy import deepcopy
from dataclasses import fields
from typing import Any, cast

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCAB = 101
CONTEXT = 256
WINDOW = 8

SMALL: dict[str, Any] = {
    # the vocabulary and its special tokens
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "cross_attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "n_inner"), 96),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("d_inner", "dff", "dim_ff", "prefix_dense_intermediate_size", "feed_forward_size"), 96),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "adapter_rank": 8,
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_kv_shared_layers", "num_mtp_layers", "num_nextn_predict_layers"), 0),
    # encoders that can be causal
    "is_decoder": True,
    # attention heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "attention_head_size"), 16),
    "rotary_dim": 8,
    # latent attention and its indexer
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 32,
    # how far back
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), CONTEXT),
    **dict.fromkeys(("max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    "local_attention": 2 * WINDOW,  # counts both sides
    "rel_extent": CONTEXT,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    "expert_ffn_hidden_size": 32,
    # linear attention and state spaces; both need more than one of their chunks in a test sequence
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_d_ssm": 128,
    "n_mamba_heads": 2,
}


def tiny(model_type: str, **own: object) -> PreTrainedConfig:
    """A small config of this type: `own` first, then SMALL for the fields the type has, then its defaults.

    A config made of others, such as text and vision, is small in each of its parts. Whatever the type's config class
    raises on sizes that do not fit together is passed on.
    """
    config_class = class_of(model_type)
    # Configs keep and change the lists and dicts passed to them.
    return config_class(**deepcopy(over(small_fields(config_class), own)))


def small_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The part of SMALL that this class has fields for, and the same for each of its sub-configs by name."""
    names = {field.name for field in fields(config_class)}
    small = {name: value for name, value in SMALL.items() if name in names}
    if "kv_lora_rank" in names:  # the latent is expanded to every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name, part in cast(dict[str, Any], config_class.sub_configs).items():
        if part is AutoConfig:  # only the model type of this part is known
            model_type = config_class.sub_configs_defaults[name].model_type
            small[name] = {"model_type": model_type} | small_fields(class_of(model_type))
        else:
            small[name] = small_fields(part)
    return small


def class_of(model_type: str) -> type[PreTrainedConfig]:
    return cast(type[PreTrainedConfig], CONFIG_MAPPING[model_type])


def over(small: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = (name for name, value in own.items() if isinstance(small.get(name), dict) and isinstance(value, dict))
    deep = {name: over(small[name], own[name]) for name in both}
    return small | own | deep
