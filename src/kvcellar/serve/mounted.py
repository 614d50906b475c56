"""mounted: routes of another package on a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute

from kvcellar.serve.shared import Shared


@dataclass(frozen=True, slots=True)
class Mounted:
    """`open`: paths that need no key, as they have nothing of requests. Below `operated` an admin key counts as an API
    key."""

    routes: Sequence[BaseRoute]
    open: frozenset[str] = frozenset()
    operated: tuple[str, ...] = ()


Mount = Callable[[Shared], Mounted]


def nothing(shared: Shared) -> Mounted:
    return Mounted(())
