"""Continuous batching knows full and sliding layers only.

Chunked attention, convolutions, states, indexers and layers of more than one kind are refused by `generate_batch`.
"""

import torch
from transformers import ContinuousBatchingConfig, Lfm2Config, Lfm2ForCausalLM

config = Lfm2Config(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, layer_types=["conv", "full_attention"],
)  # fmt: skip
model = Lfm2ForCausalLM(config).eval()
ids = torch.randint(3, 101, (20,)).tolist()
paged = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
try:
    model.generate_batch([ids], continuous_batching_config=paged, max_new_tokens=4, warmup=False, progress_bar=False)
except ValueError as error:
    print("ValueError:", error)
