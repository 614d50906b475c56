"""Models without a mask read the padding.

RWKV and xLSTM have no use for an attention mask, so padding on the left goes into the state. RWKV logs that the mask
is unused; xLSTM takes it without a word.
"""

import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
config = xLSTMConfig(vocab_size=101, hidden_size=128, num_heads=2, num_hidden_layers=2, num_blocks=2)
model = xLSTMForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
padded, mask = torch.nn.functional.pad(ids, (9, 0)), torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0]
moved = model.generate(padded, attention_mask=mask, **options).logits[0]
print(f"off by {(moved - alone).abs().max() / alone.abs().max():.0%} of the largest logit")
