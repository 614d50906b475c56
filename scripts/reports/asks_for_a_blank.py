"""XLM and XLNet are asked otherwise by `generate` than by their forward, on purpose.

They were trained to fill blanks. `prepare_inputs_for_generation` adds one behind the text and reads the answer there,
so the logits of `generate` are not those of a plain forward.
"""

import torch
from transformers import XLNetConfig, XLNetLMHeadModel

torch.manual_seed(0)
config = XLNetConfig(
    vocab_size=101, d_model=64, n_layer=2, n_head=4, d_inner=96, attn_type="uni", initializer_range=0.2
)
model = XLNetLMHeadModel(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    forward = model(ids).logits[0, -1]
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
said = model.generate(ids, use_cache=False, **options).logits[0][0]
print(f"off by {(said - forward).abs().max() / forward.abs().max():.0%} of the largest logit")
