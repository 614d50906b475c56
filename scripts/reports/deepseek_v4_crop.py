"""DeepSeek-V4's cache says that it is croppable, and is not.

Its layers inherit `is_croppable` and `crop` from sliding ones. What was compressed stays as it was, and the next
forward raises. (`generate` refuses, because the model says that it is stateful.)
"""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

torch.manual_seed(0)
config = DeepseekV4Config(
    vocab_size=101, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    q_lora_rank=24, o_lora_rank=16, o_groups=2, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=2,
    index_head_dim=16, index_topk=4, sliding_window=8, layer_types=["heavily_compressed_attention"] * 2,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
)  # fmt: skip
model = DeepseekV4ForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    memory = model(ids[:, :10], use_cache=True).past_key_values
    memory.activate_past_recording()
    model(ids[:, 10:17], use_cache=True, past_key_values=memory)
    print("croppable:", memory.is_croppable)
    memory.crop(-3)
    try:
        model(ids[:, 14:], use_cache=True, past_key_values=memory)
    except RuntimeError as error:
        print("RuntimeError:", error)
