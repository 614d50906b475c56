"""`generate` goes on from `past_key_values` only; what is passed as `cache_params` or `state` reads its text again.

`GenerationMixin._prefill` cuts the tokens that a cache already holds off the prompt for `past_key_values` alone. With
Mamba's cache or RWKV's state the whole prompt is read on top of the state that it left before.
"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

torch.manual_seed(0)
config = Mamba2Config(
    vocab_size=101, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=8, n_groups=1,
    initializer_range=0.5,
)  # fmt: skip
model = Mamba2ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
with torch.no_grad():
    memory = model(ids[:, :12], use_cache=True).cache_params
cold = model.generate(ids, **options).logits[0]
warm = model.generate(ids, cache_params=memory, **options).logits[0]
print(f"off by {(warm - cold).abs().max() / cold.abs().max():.0%} of the largest logit")
