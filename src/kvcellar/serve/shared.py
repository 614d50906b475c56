"""shared: what the handlers of one server share, and routes of other packages that are mounted on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import Scope

from kvcellar.library.library import Library
from kvcellar.library.tools import Tools
from kvcellar.serve.generation.http_request import Arrivals
from kvcellar.serve.http.body import BodyBudget
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.lifecycle import Drain
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.traces import Traces
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.models.model_manager import ModelManager
from kvcellar.serve.operation import Operation
from kvcellar.serve.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Shared:
    host: ModelManager
    settings: ServeSettings
    threads: ReaderThreads
    bodies: BodyBudget
    drain: Drain
    engines: EngineCounts
    keys: KeyRing
    library: Library | None = None
    traces: Traces | None = None
    tools: Callable[[], Tools] | None = None  # that create models of the library
    arrivals: Arrivals = field(default_factory=Arrivals)


@dataclass(frozen=True, slots=True)
class Mounted:
    """`open`: paths of pages, which need no key, as they have nothing of requests. Below `operated` an admin key counts
    as an API key. `operations`: what the OpenAPI document says of the routes that are in it, by method and path."""

    routes: Sequence[BaseRoute]
    open: frozenset[str] = frozenset()
    operated: tuple[str, ...] = ()
    operations: Mapping[tuple[str, str], Operation] = field(default_factory=dict[tuple[str, str], Operation])

    def is_open(self, scope: Scope) -> bool:
        """Whether a request needs no key: it reads a page, or a file of one."""
        reads = scope["method"] in ("GET", "HEAD") and scope["path"] in self.open
        return reads and (scope["path"] != "/" or from_browser(scope))


Mount = Callable[[Shared], Mounted]


def from_browser(scope: Scope) -> bool:
    """Whether a page is wanted: at `/` Ollama's clients look whether the server runs."""
    return "text/html" in Headers(scope=scope).get("accept", "")


def nothing(shared: Shared) -> Mounted:
    return Mounted(())
