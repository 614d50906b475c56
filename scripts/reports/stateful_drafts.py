"""Drafts are not checked for models with a state.

Assistants and looking up the prompt need to take back what was not accepted. Every class that says `_is_stateful` is
refused, and a few whose cache is of an older kind.
"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

config = Mamba2Config(
    vocab_size=101, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=8, n_groups=1
)
model = Mamba2ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3, pad_token_id=0)
except ValueError as error:
    print("ValueError:", error)
