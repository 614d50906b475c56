"""`generate` cannot go on from the caches of xLSTM and Reformer.

It asks whatever cache it is given whether it `is_compileable`, and these two classes are no `Cache`.
"""

import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

config = xLSTMConfig(vocab_size=101, hidden_size=128, num_heads=2, num_hidden_layers=2, num_blocks=2)
model = xLSTMForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    memory = model(ids[:, :12], use_cache=True).cache_params
try:
    model.generate(ids, cache_params=memory, max_new_tokens=2, pad_token_id=0)
except AttributeError as error:
    print("AttributeError:", error)
