"""Beams are refused where the memory cannot be reordered: RWKV and xLSTM."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

config = RwkvConfig(vocab_size=101, hidden_size=64, attention_hidden_size=64, num_hidden_layers=2)
model = RwkvForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model.generate(ids, num_beams=3, max_new_tokens=4, pad_token_id=0)
except ValueError as error:
    print("ValueError:", error)
