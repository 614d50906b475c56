"""CPM-Ant and ProphetNet read the beginning of a text otherwise when more of it follows.

The last token moves the logits of all before it in CPM-Ant, and the length of the text does so in ProphetNet. What a
cache holds was read before the rest was there, so going on from it cannot equal a forward over everything; nor are
they steady in a batch or behind padding. CPM-Ant wants the whole text again with its cache.
"""

import torch
from transformers import CpmAntConfig, CpmAntForCausalLM

torch.manual_seed(0)
config = CpmAntConfig(
    vocab_size=101, hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96, num_hidden_layers=2, prompt_length=4
)
model = CpmAntForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    whole = model(ids).logits[:, :12]
    beginning = model(ids[:, :12]).logits
print(f"off by {(beginning - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
