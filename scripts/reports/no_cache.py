"""Models whose forward returns no cache are asked for it.

OpenAI GPT, XLM and RecurrentGemma answer without `past_key_values`. What in `generate` needs a cache finds that out
by an `AttributeError`: `prefill_chunk_size` for all of them, looking up the prompt where it is not refused before.
"""

import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=101, n_embd=64, n_layer=2, n_head=4)).eval()
ids = torch.randint(3, 101, (1, 20))
try:
    model.generate(ids, max_new_tokens=2, prefill_chunk_size=8, pad_token_id=0)
except AttributeError as error:
    print("AttributeError:", error)
