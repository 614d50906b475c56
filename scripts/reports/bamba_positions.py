"""Bamba counts from 0 again in every forward that is not given positions.

`BambaModel.forward` makes `position_ids` with `torch.arange(length)` and does not add what the cache holds, as other
models do. With `position_ids`, as `generate` gives them, it is right.
"""

import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, attn_layer_indices=[1],
    num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8,
    initializer_range=0.2,
)  # fmt: skip
model = BambaForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids).logits[:, 12:]
    memory = model(ids[:, :12], use_cache=True).past_key_values
    rest = model(ids[:, 12:], use_cache=True, past_key_values=memory).logits
    memory = model(ids[:, :12], use_cache=True).past_key_values
    told = model(ids[:, 12:], use_cache=True, past_key_values=memory, position_ids=torch.arange(12, 20)[None]).logits
for name, seen in (("without", rest), ("with", told)):
    print(f"{name} positions: off by {(seen - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
