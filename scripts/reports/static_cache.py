"""A static cache is made for models that are not built for one.

Their classes say `_can_compile_fullgraph = False`, or have cache layers that `StaticCache` does not know.
`generate(cache_implementation="static")` does not ask, and ends in an error from deep inside.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "zaya", vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
    layer_types=["hybrid_sliding", "hybrid"], sliding_window=8, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
print("says that it can:", model._can_compile_fullgraph)
ids = torch.randint(3, 101, (1, 20))
try:
    model.generate(ids, max_new_tokens=4, cache_implementation="static")
except RuntimeError as error:
    print("RuntimeError:", error)
