"""MiniMax-01 takes its past for empty when its first layer is a linear one.

`MiniMaxCache.get_seq_length()` and `get_mask_sizes` ask layer 0, and a layer of linear attention stores no keys
there. Positions then count from 0 and the mask covers the new tokens alone: a second piece raises, single tokens and
padded batches in `generate` are wrong. In MiniMax-Text-01 seven such layers come before the first with keys.
"""

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

torch.manual_seed(0)
config = MiniMaxConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=2, layer_types=["linear_attention", "full_attention"],
    initializer_range=0.2,
)  # fmt: skip
model = MiniMaxForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids).logits[:, -1]
    memory = model(ids[:, :-1], use_cache=True).past_key_values
    last = model(ids[:, -1:], use_cache=True, past_key_values=memory).logits[:, -1]
print(f"the cache says that it holds {memory.get_seq_length()} tokens")
print(f"off by {(last - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
