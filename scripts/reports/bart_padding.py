"""Decoders that take no positions count padding on the left.

Their forward has no `position_ids` and gives the first column of a batch position 0, whatever the attention mask
says. `generate` pads on the left, so a shorter text is answered otherwise in company than alone, and nothing warns.
Bart's documentation advises to pad on the right, where `generate` writes.
"""

import torch
from transformers import BartConfig, BartForCausalLM

torch.manual_seed(0)
config = BartConfig(
    vocab_size=101, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, init_std=0.2,
    is_decoder=True, is_encoder_decoder=False,
)  # fmt: skip
model = BartForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
padded, mask = torch.nn.functional.pad(ids, (9, 0), value=1), torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0]
moved = model.generate(padded, attention_mask=mask, **options).logits[0]
print(f"off by {(moved - alone).abs().max() / alone.abs().max():.0%} of the largest logit")
