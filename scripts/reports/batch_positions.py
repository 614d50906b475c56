"""Continuous batching reads decoders that take no positions as if each token stood where it lies in the step.

`generate_batch` packs what is new of all requests in one row and hands over `position_ids`. Forwards without that
argument count from 0 in every step, and through all requests.
"""

import torch
from transformers import BartConfig, BartForCausalLM, ContinuousBatchingConfig

torch.manual_seed(0)
config = BartConfig(
    vocab_size=101, d_model=64, decoder_layers=2, decoder_attention_heads=4, encoder_attention_heads=4,
    decoder_ffn_dim=96, init_std=0.2,
    is_decoder=True, is_encoder_decoder=False, forced_eos_token_id=None,
)  # fmt: skip
model = BartForCausalLM._from_config(config, attn_implementation="eager").eval()
ids = torch.randint(3, 101, (20,)).tolist()
paged = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64, return_logprobs=True)
(answer,) = model.generate_batch(
    [ids], continuous_batching_config=paged, max_new_tokens=4, eos_token_id=-1, warmup=False, progress_bar=False
).values()
text = torch.tensor([[*ids, *answer.generated_tokens]])
with torch.no_grad():
    right = model(text).logits[0, 19:-1].log_softmax(-1).gather(1, text[0, 20:, None])[:, 0]
gap = (torch.tensor(answer.logprobs) - right).abs()
print("log probabilities of what it said, off by", " ".join(f"{off:.1f}" for off in gap))
