"""Moshi's mask knows nothing of its window, and its cache drops what is behind it.

`MoshiModel.forward` makes a causal mask; `DynamicCache(config=...)` makes sliding layers, because the config has a
`sliding_window`. A forward without a cache looks back further than one with it, once there are more tokens than that
(3000 by default).
"""

import torch
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
config = MoshiConfig(
    vocab_size=101, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    sliding_window=8, initializer_range=0.2, audio_vocab_size=8,
    depth_decoder_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 16},
)  # fmt: skip
model = MoshiForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids, use_cache=False).logits[:, -1]
    memory = model(ids[:, :-1], use_cache=True).past_key_values
    last = model(ids[:, -1:], use_cache=True, past_key_values=memory).logits[:, -1]
print(f"off by {(last - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
