"""quiet: what transformers says while we work with a model stays unsaid. What matters, our results and errors say."""

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

from kvcellar.progress import report


class Reported(transformers_logging.EmptyTqdm):
    """In the place of a progress bar: shows nothing, and reports how far the iteration has come."""

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
def quiet() -> Iterator[None]:
    """Within the block and on this thread, transformers logs nothing below an error and shows no progress bar: what a
    bar would show is reported.

    Nobody's settings change: log records of other threads and libraries pass, and all is as it was afterwards. Python's
    warnings know no threads before 3.14, so they are silenced for the whole process for as long as the block runs.
    """
    here = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        ours = record.thread == here and record.name.partition(".")[0] == "transformers"
        return not ours or record.levelno >= logging.ERROR

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() == here:
            return Reported(*args, **kwargs)
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
