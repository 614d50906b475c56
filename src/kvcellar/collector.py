"""collector: collections of garbage are short while requests are served, however much the process holds.

A collection holds the interpreter while it looks at objects, about 1 µs for each: 0.3 s for those that torch and
transformers make when they are imported, 0.15 s for a prefix tree of 50 000 entries.

Always true after `settle`:
  * a collection looks at no object that has outlived one of the oldest generation. Those come after some 77 000 objects
    (CPython's thresholds). But every `whole`-th of them looks at all objects, and so does `collect`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

RARE = 100


def settle(whole: int | None = RARE) -> None:
    """To be called when what stays is loaded. `whole`: None where nothing that lives long ends in a cycle, so that no
    collection has to look at all objects."""
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_Settled(whole))


def collect() -> None:
    """Free all garbage."""
    gc.unfreeze()
    gc.collect()


class _Settled:
    """A callback of the collector."""

    def __init__(self, whole: int | None) -> None:
        self._whole, self._turns = whole, count(1)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != 2:
            return
        if phase == "stop":
            gc.freeze()
        elif self._whole is not None and next(self._turns) % self._whole == 0:
            gc.unfreeze()


@contextmanager
def settled() -> Iterator[None]:
    """As after `settle`, until the end of the block."""
    settle()
    try:
        yield
    finally:
        gc.callbacks[:] = [one for one in gc.callbacks if not isinstance(one, _Settled)]
        gc.unfreeze()
