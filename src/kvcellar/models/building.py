"""building: transformers builds one network at a time.

While it builds one of a given dtype, that is torch's default dtype of the whole process, so a network that another
thread builds beside it would have buffers of that dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_BUILDING = Lock()


@contextmanager
def building() -> Iterator[None]:
    """Within the block no other thread builds a network; after it, torch's default dtype is that from before. Blocks
    are not nested."""
    with _BUILDING:
        before = torch.get_default_dtype()
        try:
            yield
        finally:
            torch.set_default_dtype(before)
