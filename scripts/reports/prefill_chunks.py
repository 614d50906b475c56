"""`prefill_chunk_size` is refused where the cache has another name, or is the model's own.

`GenerationMixin._prefill` looks for `past_key_values`. Mamba, Mamba 2 and Falcon Mamba keep theirs in `cache_params`;
MiniMax-01, Reformer, RWKV, XLNet and xLSTM make one of their own in the first forward.
"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

config = Mamba2Config(
    vocab_size=101, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=8, n_groups=1
)
model = Mamba2ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model.generate(ids, max_new_tokens=4, prefill_chunk_size=8, pad_token_id=0)
except ValueError as error:
    print("ValueError:", error)
