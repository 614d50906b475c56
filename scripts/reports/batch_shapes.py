"""Continuous batching gives all keys and values of a model the same shape.

Its pages are as wide as `head_dim`, for as many heads as the config names. Latent attention, values that are narrower
than keys, and heads that differ from layer to layer (Gemma 4) do not fit; RWKV and xLSTM name no heads at all. Every
request fails, and `generate_batch` answers with empty texts or with nothing, without an exception.
"""

import torch
from transformers import ContinuousBatchingConfig, DeepseekV3Config, DeepseekV3ForCausalLM

config = DeepseekV3Config(
    vocab_size=101, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1,
)  # fmt: skip
model = DeepseekV3ForCausalLM(config).eval()
ids = torch.randint(3, 101, (20,)).tolist()
paged = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
(answer,) = model.generate_batch(
    [ids], continuous_batching_config=paged, max_new_tokens=4, eos_token_id=-1, warmup=False, progress_bar=False
).values()
print(answer.generated_tokens, answer.error)
