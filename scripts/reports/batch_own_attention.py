"""Continuous batching runs models that attend by themselves, and their attention knows nothing of it.

`generate_batch` sets the attention to `paged|...` and packs all requests in one row. Models that do not go through
the attention interface take neither the paged cache nor its mask: from the second token on they see that token alone,
and nothing asks `_can_set_attn_implementation`.
"""

import torch
from transformers import BloomConfig, BloomForCausalLM, ContinuousBatchingConfig

torch.manual_seed(0)
config = BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2)
model = BloomForCausalLM(config).eval()
ids = torch.randint(3, 101, (20,)).tolist()
paged = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64, return_logprobs=True)
(answer,) = model.generate_batch(
    [ids], continuous_batching_config=paged, max_new_tokens=4, eos_token_id=-1, warmup=False, progress_bar=False
).values()
text = torch.tensor([[*ids, *answer.generated_tokens]])
with torch.no_grad():
    right = model(text).logits[0, 19:-1].log_softmax(-1).gather(1, text[0, 20:, None])[:, 0]
gap = (torch.tensor(answer.logprobs) - right).abs()
print("log probabilities of what it said, off by", " ".join(f"{off:.1f}" for off in gap))
