"""A `DynamicCache` is refused, or is not what the model looks for.

Indexers want layers with a place for their keys and say so; MiniMax-01 wants its own class and says so; RWKV, XLNet
and xLSTM read their own kind of memory out of whatever they are given.
"""

import torch
from transformers import DynamicCache, RwkvConfig, RwkvForCausalLM

config = RwkvConfig(vocab_size=101, hidden_size=64, attention_hidden_size=64, num_hidden_layers=2)
model = RwkvForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model(ids, use_cache=True, state=DynamicCache())
except TypeError as error:
    print("TypeError:", error)
