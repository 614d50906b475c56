"""A `DynamicCache()` made without a config has no layers that can hold a state, and does not say so.

Models of attention fill it as they go; recurrent and convolutional ones, and those with cache layers of their own,
end in an `IndexError` or an `AttributeError`. `DynamicCache(config=model.config)` is right.
"""

import torch
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

config = Lfm2Config(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, layer_types=["conv", "full_attention"],
)  # fmt: skip
model = Lfm2ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model(ids, use_cache=True, past_key_values=DynamicCache())
except IndexError as error:
    print("IndexError:", error)
