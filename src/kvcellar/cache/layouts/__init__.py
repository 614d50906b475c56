"""layouts: the rules of a layer kind, in integers. What a query may see, what must stay, where one can resume."""

from kvcellar.cache.layouts.causal import Causal
from kvcellar.cache.layouts.chunked import Chunked
from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.layouts.sliding import Sliding

__all__ = ["Causal", "Chunked", "Input", "Sliding"]
