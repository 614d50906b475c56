"""Doge makes a mask of its own in continuous batching, and GIT is given one for keys that it does not have.

Doge makes its mask from the values of the step, while its keys come from all pages; GIT attends to the step alone,
with the mask of all pages. With several requests sizes do not fit: all fail, and the answers come back short, without
an exception. With one, Doge spreads the mask of the newest token over all keys.
"""

import torch
from transformers import ContinuousBatchingConfig, DogeConfig, DogeForCausalLM

torch.manual_seed(0)
config = DogeConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
)  # fmt: skip
model = DogeForCausalLM._from_config(config, attn_implementation="eager").eval()
torch.nn.init.normal_(model.model.layers[0].self_attn.A)  # a fresh model does not mask dynamically
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
