"""Blocks of keys are counted from where the batch begins, and compared with positions of the text.

MiniMax-M3 selects blocks of keys and DeepSeek-V4 compresses them. Padding on the left moves their borders, and hides
from each query as many of the newest keys as there is padding. A comment in `MiniMaxM3VLIndexer` knows of the
borders; `generate` pads all the same.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
config = AutoConfig.for_model(
    "minimax_m3_vl_text", vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=32, dense_intermediate_size=96, num_local_experts=2,
    shared_intermediate_size=32, num_experts_per_tok=1, rotary_dim=8, layer_types=["minimax_m3_sparse"] * 2,
    index_head_dim=16, index_n_heads=2, index_block_size=4, index_topk_blocks=2, initializer_range=0.2,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(3, 101, (1, 20))
padded, mask = torch.nn.functional.pad(ids, (9, 0)), torch.nn.functional.pad(torch.ones_like(ids), (9, 0))
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0]
moved = model.generate(padded, attention_mask=mask, **options).logits[0]
print(f"off by {(moved - alone).abs().max() / alone.abs().max():.0%} of the largest logit")
