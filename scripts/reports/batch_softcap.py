"""Continuous batching with eager attention forgets the soft cap of Gemma 2.

`eager_paged_attention_forward` takes `softcap` among its other keywords and does not look at it.
"""

import torch
from transformers import ContinuousBatchingConfig, Gemma2Config, Gemma2ForCausalLM

torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=1, attn_logit_softcapping=0.5, initializer_range=0.1,
)  # fmt: skip
model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
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
