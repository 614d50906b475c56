"""engines: what `stats()` of the engines of a server has, as samples for a scrape.

`stats()` waits for the running step, so it runs on threads of its own, and a scrape waits for it at most `PATIENCE`:
the samples of an engine that has not returned by then are those of an earlier scrape, and its model is `stale`.

Always true:
  * at most one call of `stats()` of an engine is under way, so earlier numbers never replace later ones;
  * counters of a model never fall: what an engine has counted is added to `_ended` when it is unloaded, and from then
    on nothing else of it is; what one had counted that has died, up to the last scrape, is in `died` of its successor.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from weakref import WeakSet

from kvcellar.engine.stats import EngineStats
from kvcellar.errors import KvcellarError
from kvcellar.serve.host import Host
from kvcellar.serve.metrics.samples import COUNTERS, GAUGES, Key, add
from kvcellar.serve.resident import Resident

log = logging.getLogger("kvcellar.serve")

PATIENCE = 1.0  # seconds
THREADS = 4  # engines that are waited for at once


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all engines together. `values` by model and key."""

    values: Mapping[str, Mapping[Key, float]]
    stale: Mapping[str, bool]  # by model that is loaded


@dataclass(eq=False, slots=True)
class _Live:
    """The last statistics of one engine. `died` has the counters of those that it has replaced after they died."""

    model: str
    stats: EngineStats | None = None
    reading: Future[EngineStats] | None = None
    died: Counter[Key] = field(default_factory=Counter[Key])

    def settle(self) -> bool:
        """Take what the reading has returned. False if it has not, or the engine has failed."""
        if self.reading is None or not self.reading.done():
            return False
        try:
            found = self.reading.result()
        except KvcellarError:
            return False
        self.take(found)
        return True

    def take(self, found: EngineStats) -> None:
        if self.stats is not None and self.stats.started != found.started:
            add(self.died, self.stats, COUNTERS)
        self.stats = found


class EngineCounts:
    """Close it after the last scrape. All methods may be called from any thread."""

    def __init__(self, host: Host, patience: float = PATIENCE) -> None:
        self._host, self._patience = host, patience
        self._threads = ThreadPoolExecutor(THREADS, "kvcellar-stats")
        self._lock = threading.Lock()  # held for all that follows
        self._live: dict[Resident, _Live] = {}
        self._ended: dict[str, Counter[Key]] = {}  # counters of engines that were unloaded, by model
        self._unloaded: WeakSet[Resident] = WeakSet()
        host.unloading = self._unload

    def read(self) -> Totals:
        """Waits for the running steps of all engines, at most for `patience`."""
        readings = [self._reading(one) for one in self._host.residents.all()]
        done, _ = wait([one for one in readings if one is not None], self._patience)
        with self._lock:
            stale: dict[str, bool] = {}
            for one in self._live.values():
                new = one.settle() and one.reading in done
                stale[one.model] = stale.get(one.model, False) or not new
            values: dict[str, Counter[Key]] = {model: Counter(counters) for model, counters in self._ended.items()}
            for one in self._live.values():
                if one.stats is not None:
                    into = values.setdefault(one.model, Counter())
                    into.update(one.died)
                    add(into, one.stats, GAUGES + COUNTERS)
            return Totals(values, stale)

    def _reading(self, resident: Resident) -> "Future[EngineStats] | None":
        """The call of `stats()` that is under way, or a new one; None for an engine that is not there."""
        engine = resident.engine
        with self._lock:
            if engine is None or resident in self._unloaded:
                return None
            live = self._live.setdefault(resident, _Live(resident.servable.name))
            if live.reading is None or live.reading.done():
                live.settle()
                live.reading = self._threads.submit(engine.stats)
            return live.reading

    def _unload(self, resident: Resident) -> None:
        """An engine is about to be closed: its counters are kept."""
        engine, stats = resident.engine, None
        try:
            stats = engine.stats() if engine is not None else None
        except Exception as error:  # noqa: BLE001 - it is closed in any case; what the last scrape has read is kept
            log.warning("the statistics of %s could not be read: %s", resident.servable.name, type(error).__name__)
        with self._lock:
            live = self._live.pop(resident, None) or _Live(resident.servable.name)
            self._unloaded.add(resident)
            if stats is not None:
                live.take(stats)
            if live.stats is not None:
                into = self._ended.setdefault(live.model, Counter())
                into.update(live.died)
                add(into, live.stats, COUNTERS)

    def close(self) -> None:
        self._host.unloading = lambda resident: None  # no scrape follows
        self._threads.shutdown(wait=False, cancel_futures=True)
