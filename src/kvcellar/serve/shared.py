"""shared: what the handlers of one server share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcellar.library.library import Library
from kvcellar.library.tools import Tools
from kvcellar.serve.arrivals import Arrivals
from kvcellar.serve.body import BodyBudget
from kvcellar.serve.drain import Drain
from kvcellar.serve.key_ring import KeyRing
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.model_manager import ModelManager
from kvcellar.serve.reader_threads import ReaderThreads
from kvcellar.serve.settings import ServeSettings
from kvcellar.serve.traces import Traces


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
