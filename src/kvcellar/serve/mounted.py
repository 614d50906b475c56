"""mounted: routes of another package on a server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.routing import BaseRoute

from kvcellar.serve.operation import Operation
from kvcellar.serve.shared import Shared


@dataclass(frozen=True, slots=True)
class Mounted:
    """`open`: paths that need no key, as they have nothing of requests. Below `operated` an admin key counts as an API
    key. `operations`: what the OpenAPI document says of the routes that are in it, by method and path."""

    routes: Sequence[BaseRoute]
    open: frozenset[str] = frozenset()
    operated: tuple[str, ...] = ()
    operations: Mapping[tuple[str, str], Operation] = field(default_factory=dict[tuple[str, str], Operation])


Mount = Callable[[Shared], Mounted]


def nothing(shared: Shared) -> Mounted:
    return Mounted(())
