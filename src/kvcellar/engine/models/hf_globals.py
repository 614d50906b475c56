"""hf_globals: what transformers has once per process, changed for a block: its log and bars, and what it builds.

Log records, warnings and progress bars are kept off the user's terminal: what matters of them is in our results, notes
and errors. And one network is built at a time: while transformers builds one of a given dtype, that is torch's default
dtype of the whole process, so a network that another thread builds beside it would have buffers of that dtype.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from kvcellar.progress import report


class ReportedBar(transformers_logging.EmptyTqdm):
    """Replaces a progress bar: shows nothing, and reports its progress to `kvcellar.progress`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stage = str(kwargs.get("desc") or "loading").lower()

    def __iter__(self) -> Iterator[Any]:
        items: Any = () if self._iterator is None else self._iterator
        total = len(items) if isinstance(items, Collection) else 0
        for done, item in enumerate(items):
            report(self._stage, done, total)
            yield item


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Within the block and on this thread, transformers logs only errors, and its progress bars are reported instead.

    Log records of other threads and libraries pass, and all settings are restored afterwards. Before Python 3.14
    warnings cannot be filtered by thread, so they are silenced in the whole process while the block runs.
    """
    this_thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        silenced = record.thread == this_thread and record.name.partition(".")[0] == "transformers"
        return not silenced or record.levelno >= logging.ERROR

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() == this_thread:
            return ReportedBar(*args, **kwargs)
        return before(factory, args, kwargs) if before is not None else factory(*args, **kwargs)

    library = logging.getLogger("transformers")
    handlers = [*library.handlers, *(logging.getLogger().handlers if library.propagate else ())]
    before = transformers_logging.set_tqdm_hook(bar)
    for handler in handlers:
        handler.addFilter(passes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)
        transformers_logging.set_tqdm_hook(before)


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
