"""RecurrentGemma keeps its state in its modules, and forgets half of it when more than one token follows.

Its forward returns no cache. With one passed in, keys and values go on, and so does the recurrence, but
`RecurrentGemmaRecurrentBlock` starts its convolution from zeros whenever more than one token comes. The state belongs
to the model, not to the cache: two conversations in turn read each other's. Padding on the left goes into the
convolution.
"""

import torch
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, head_dim=16, lru_width=64,
)  # fmt: skip
model = RecurrentGemmaForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids, use_cache=False).logits[:, 12:]
    first = model(ids[:, :12], use_cache=True, past_key_values=(memory := DynamicCache(config=config)))
    rest = model(ids[:, 12:], use_cache=True, past_key_values=memory).logits
print("a cache is returned:", "past_key_values" in first)
print(f"off by {(rest - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
