"""GIT makes room in the mask for an image that is not there.

When it decodes with a cache, `GitModel.forward` puts ones for the image's tokens before the attention mask, also when
the cache holds text alone. The mask is then too wide by an image, and padding on the left is looked at.
"""

import torch
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
config = GitConfig(
    vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, eos_token_id=2,
    vision_config=vision, initializer_range=0.2,
)  # fmt: skip
model = GitForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
padded, mask = torch.nn.functional.pad(ids, (9, 0)), torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
options = {"max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits
moved = model.generate(padded, attention_mask=mask, **options).logits
for step in (0, 1):
    gap = (moved[step] - alone[step]).abs().max() / alone[step].abs().max()
    print(f"token {step}: off by {gap:.0%} of the largest logit")
