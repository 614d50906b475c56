"""Nemotron and StableLM do not hand on what continuous batching needs.

Their decoder layers are given keywords and call their attention without them. `generate_batch` passes the pages in
that way: every request fails, and the answers come back empty without an exception.
"""

import torch
from transformers import ContinuousBatchingConfig, NemotronConfig, NemotronForCausalLM

config = NemotronConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = NemotronForCausalLM._from_config(config, attn_implementation="eager").eval()
ids = torch.randint(3, 101, (20,)).tolist()
paged = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
(answer,) = model.generate_batch(
    [ids], continuous_batching_config=paged, max_new_tokens=4, eos_token_id=-1, warmup=False, progress_bar=False
).values()
print(answer.generated_tokens, answer.error.partition(".")[0])
