"""progress: what is being done while a model is loaded, reported to a listener that shows it, if there is one.

A listener is set for a block of code and the thread that runs it; other threads report to their own, or to none.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_listener: ContextVar["Listener | None"] = ContextVar("kvcellar_progress", default=None)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done now, like "loading weights": `done` of `total` things, or of none that are counted (0)."""

    stage: str
    done: int = 0
    total: int = 0


Listener = Callable[[Progress], None]


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Call the listener of this thread. What it raises is raised here, and so ends the load."""
    if (listener := _listener.get()) is not None:
        listener(Progress(stage, done, total))


@contextmanager
def listening(listener: Listener | None) -> Generator[None, None, None]:
    """Within the block, reports of this thread go to `listener`; with None, to the one that was set before."""
    if listener is None:
        yield
        return
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
