"""A state cannot be rewound, and a cache that holds one says so only when it is asked.

`is_croppable` is False. `crop` itself does not look at it: once the past is recorded it takes the tokens out of keys,
values and convolutions, and leaves the recurrent states as they are. The answer is then wrong without an error.
"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"], initializer_range=0.2,
)  # fmt: skip
model = Qwen3NextForCausalLM(config).eval()
ids, others = torch.randint(3, 101, (2, 1, 20))
with torch.no_grad():
    whole = model(ids).logits[:, 14:]
    memory = model(ids[:, :14], use_cache=True).past_key_values
    memory.activate_past_recording()
    model(others[:, 14:17], use_cache=True, past_key_values=memory)
    print("croppable:", memory.is_croppable)
    memory.crop(-3)
    rest = model(ids[:, 14:], use_cache=True, past_key_values=memory).logits
print(f"off by {(rest - whole).abs().max() / whole.abs().max():.0%} of the largest logit")
