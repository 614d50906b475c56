"""progress: reports of the current stage of loading a model, passed to a listener if one is set; and numbers of bytes
as such texts have them.

A listener is set for a block of code in one thread; other threads have listeners of their own, or none.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_listener: ContextVar["Listener | None"] = ContextVar("kvcellar_progress", default=None)


@dataclass(frozen=True, slots=True)
class Progress:
    """The current stage, such as "loading weights"; `done` of `total` items, where `total` 0 means not counted. `unit`
    is "B" where the items are bytes."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""


Listener = Callable[[Progress], None]


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Call the listener of this thread. Its exceptions propagate and so abort the load."""
    if (listener := _listener.get()) is not None:
        listener(Progress(stage, done, total))


@contextmanager
def listening(listener: Listener | None) -> Generator[None, None, None]:
    """Within the block, reports of this thread go to `listener`; None keeps the current listener."""
    if listener is None:
        yield
        return
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def rounded(count: int) -> str:
    """A number of bytes in three digits: 800 MB."""
    if count < 1000:
        return f"{count} bytes"
    shares = [(count / 1000**power, unit) for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)]
    size, unit = next((share for share in shares if share[0] < 999.5), shares[-1])
    return f"{size:.3g} {unit}"
