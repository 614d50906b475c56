"""collector: the garbage collector of the process looks at all objects rarely while requests are served.

It holds the interpreter while it looks: about 1 µs for each object that was not touched lately, so 0.05 to 0.1 s with
2000 entries of a prefix tree, and 0.3 s with what torch and transformers make when they are imported.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Collections of the middle generation before one of all objects, where CPython has 10. Each moves at most 7 700
# objects, so that what is in cycles, and outlived two collections, is at most 770 000 objects.
RARE = 100


def settle() -> None:
    """Look at no object again that exists now, and at all others rarely. To be called when what stays is loaded."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARE)


@contextmanager
def settled() -> Iterator[None]:
    """As after `settle`, until the end of the block."""
    before = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
