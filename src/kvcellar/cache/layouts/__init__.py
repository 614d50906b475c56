"""layouts: the rules of each layer kind, in integers: what a query sees, what is kept, where a sequence can resume."""

from kvcellar.cache.layouts.causal import Causal
from kvcellar.cache.layouts.chunked import Chunked
from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.layouts.sliding import Sliding

__all__ = ["Causal", "Chunked", "Input", "Sliding"]
