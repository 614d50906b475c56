"""BLT cannot be run with a cache, so neither can it `generate`.

`BltModel.forward` makes `DynamicCache(config=self.config)`, which counts the layers in `config.num_hidden_layers`;
only the parts of a `BltConfig` have that.
"""

from transformers import BltConfig, DynamicCache

try:
    DynamicCache(config=BltConfig())
except AttributeError as error:
    print("AttributeError:", error)
