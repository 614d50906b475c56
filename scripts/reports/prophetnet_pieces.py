"""ProphetNet goes on from its cache by one token at a time only, and says so."""

import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM

config = ProphetNetConfig(
    vocab_size=101, hidden_size=64, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=96,
    is_decoder=True, is_encoder_decoder=False, add_cross_attention=False,
)  # fmt: skip
model = ProphetNetForCausalLM(config).eval()
ids = torch.randint(3, 101, (1, 20))
with torch.no_grad():
    memory = model(ids[:, :12], use_cache=True).past_key_values
    try:
        model(ids[:, 12:], use_cache=True, past_key_values=memory)
    except AssertionError as error:
        print("AssertionError:", error)
