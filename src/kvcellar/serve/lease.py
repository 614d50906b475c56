"""lease: the use of a model by one request."""

import threading
from collections.abc import Callable
from types import TracebackType

from kvcellar.serve.named_engine import NamedEngine
from kvcellar.serve.resident import Member


class Lease:
    """While it is held, the model stays loaded."""

    def __init__(self, member: Member, engine: NamedEngine, release: Callable[[Member], None]) -> None:
        self.engine = engine
        self._member, self._release = member, release
        self._lock, self._held = threading.Lock(), True

    def release(self) -> None:
        """May be called from any thread, and again."""
        with self._lock:
            held, self._held = self._held, False
        if held:
            self._release(self._member)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
