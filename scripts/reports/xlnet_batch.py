"""XLNet that looks back only cannot read a batch.

With `attn_type="uni"`, `XLNetModel.forward` adds the mask of each row in place to one that has no room for rows.
"""

import torch
from transformers import XLNetConfig, XLNetLMHeadModel

config = XLNetConfig(vocab_size=101, d_model=64, n_layer=2, n_head=4, d_inner=96, attn_type="uni")
model = XLNetLMHeadModel(config).eval()
ids = torch.randint(3, 101, (2, 8))
try:
    model(ids, attention_mask=torch.ones(2, 8))
except RuntimeError as error:
    print("RuntimeError:", error)
