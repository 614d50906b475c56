"""GPT-Neo with a static cache looks at the wrong keys, and nobody is told.

`GPTNeoSelfAttention` cuts its mask from a table by the number of keys, which in a static cache counts the empty
places too. The class says `_can_compile_fullgraph = False`; `generate(cache_implementation="static")` does not ask
it.
"""

import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

torch.manual_seed(0)
config = GPTNeoConfig(
    vocab_size=101, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
    max_position_embeddings=64, window_size=8, initializer_range=0.2,
)  # fmt: skip
model = GPTNeoForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
dynamic, static = (model.generate(ids, cache_implementation=kind, **options).logits[0] for kind in (None, "static"))
print(f"off by {(static - dynamic).abs().max() / dynamic.abs().max():.0%} of the largest logit")
