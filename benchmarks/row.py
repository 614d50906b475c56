"""row: what a row of `python -m benchmarks` is given, and what it gives; and what rows do alike."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvcellar.collector import settle

ROOT = Path(__file__).parents[1]  # where processes that rows start are run, so that they find this package


class Given(NamedTuple):
    """How a row is measured."""

    directory: Path  # an empty one, which is removed afterwards
    quick: bool = False  # tiny sizes, to test the row: its numbers mean nothing
    threads: int = 1  # CPU threads, where a row says nothing else
    record: str | None = None  # the setting of engines
    profile: str = "decode-512"  # the step that the row `profile` takes apart


Lines = Generator[str, None, object]  # of the table, as they are known; then what is printed as JSON
Row = Callable[[Given], Lines]


@contextmanager
def settled() -> Iterator[None]:
    """As a server whose models are loaded, until the end of the block."""
    before = gc.get_threshold()
    settle(rarely=True)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
