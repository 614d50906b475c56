"""`generate` gives RoBERTa's kin other positions than its forward does.

Their tables of positions begin behind a row for padding: the forward counts from `padding_idx + 1`. `generate` makes
`position_ids` from the attention mask, which count from 0, and hands them over
(`GenerationMixin._prepare_position_ids_for_generation`). Every token is read `padding_idx + 1` rows too early.
"""

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
config = RobertaConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, is_decoder=True)
model = RobertaForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    forward = model(ids).logits[0, -1]
said = model.generate(ids, max_new_tokens=1, output_logits=True, return_dict_in_generate=True).logits[0][0]
print(f"off by {(said - forward).abs().max() / forward.abs().max():.0%} of the largest logit")
