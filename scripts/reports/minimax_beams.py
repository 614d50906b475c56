"""Beams of MiniMax-01 go on from each other's states.

`MiniMaxCache` keeps the states of linear attention in `linear_cache` and inherits `reorder_cache`, which reorders
keys and values alone.
"""

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

torch.manual_seed(0)
config = MiniMaxConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=2, initializer_range=0.2,
)  # fmt: skip
model = MiniMaxForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
cached, uncached = (model.generate(ids, use_cache=use, **options) for use in (True, False))
print("the same text with a cache and without:", torch.equal(cached, uncached))
