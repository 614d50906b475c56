"""The first kind of Mamba forgets its state when more than one token follows.

`mamba_selective_scan` takes no initial state: a forward over several tokens with a cache starts its scan from zeros,
and then stores the state of that. The convolution goes on rightly, and so does a single token. So a prompt in two
pieces (for Jamba and Zamba also by `generate(prefill_chunk_size=...)`, and in a second turn) is answered from its
last piece.
"""

import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, initializer_range=0.5)
model = MambaForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids).logits[:, 12:]
    memory = model(ids[:, :12], use_cache=True).cache_params
    rest = model(ids[:, 12:], use_cache=True, cache_params=memory).logits
print(f"off by {(rest - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
