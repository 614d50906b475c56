"""source: what the inspector needs of the server that it is mounted on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.requests import Request

from kvcellar.engine.served_engine import ServedEngine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whose requests are shown. `tenant`: the owner of those; None: all of them. `texts`: with the texts of entries
    that the owner `author` has computed; None: of all."""

    tenant: str | None
    texts: bool
    author: str | None

    def sees(self, owner: str) -> bool:
        """Whether the requests and entries of an owner are shown one by one."""
        return self.tenant is None or owner == self.tenant

    def reads(self, owner: str) -> bool:
        """Whether the texts of an owner are shown."""
        return self.texts and (self.author is None or owner == self.author)


class Source(Protocol):
    """Used on the event loop."""

    def viewer(self, request: Request) -> Viewer:
        """Raises an error of the server for a request that may not look."""
        ...

    def models(self) -> Sequence[str]:
        """Of the models that stay loaded, the default first."""
        ...

    async def look(self, model: str | None, work: Callable[[ServedEngine], T]) -> T:
        """The result of `work`, in a thread, with the engine of a loaded model; None: the default. Raises an error of
        the server."""
        ...

    async def pause(self, seconds: float) -> bool:
        """Wait so long. False, at once, when the server begins to shut down."""
        ...
