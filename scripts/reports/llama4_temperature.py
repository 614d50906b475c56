"""Llama 4 scales its queries by the column of a token, not by its position.

`Llama4TextAttention` counts positions for the attention temperature from `get_seq_length`, so padding on the left
counts. It is noticed where padding carries a token over a multiple of `floor_scale` (8192 by default).
"""

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

torch.manual_seed(0)
config = Llama4TextConfig(
    vocab_size=101, hidden_size=64, intermediate_size=32, intermediate_size_mlp=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2, floor_scale=8, attn_scale=0.5,
    initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
model = Llama4ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
padded, mask = torch.nn.functional.pad(ids, (9, 0)), torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0]
moved = model.generate(padded, attention_mask=mask, **options).logits[0]
print(f"off by {(moved - alone).abs().max() / alone.abs().max():.1%} of the largest logit")
