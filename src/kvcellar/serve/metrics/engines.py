"""engines: what the engines of a server have told of themselves last, as samples for a scrape.

No scrape waits for an engine. The model of one that is at work and has told nothing for `LATE` seconds, as its step
takes long or it is started again, is `stale`.

Always true: counters of a model never fall. What an engine has counted is added to `_ended` when it is unloaded, and
from then on nothing else of it is; what one had counted that has died, up to the last scrape, is in `died` of its
successor.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

from kvcellar.engine.stats import EngineStats, samples
from kvcellar.serve.models.loaded_model import LoadedEngine
from kvcellar.serve.models.model_manager import ModelManager

log = logging.getLogger("kvcellar.serve")

LATE = 1.0  # seconds
Key = tuple[str, tuple[str, ...]]  # name of a metric, values of its labels but the model


def add(sums: Counter[Key], stats: EngineStats, *, gauges: bool = False) -> None:
    """Add the counters of an engine, and its gauges, too: several engines may have one name."""
    for metric, labels, value in samples(stats):
        if gauges or metric.kind == "counter":
            sums[metric.name, labels] += value
    found = stats.prefixes
    sums["kvcellar_tokens_by_source", ("computed",)] += found.asked - found.restored


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
    stale: bool = False
    died: Counter[Key] = field(default_factory=Counter[Key])

    def take(self, found: EngineStats) -> None:
        if self.stats is not None and self.stats.started != found.started:
            add(self.died, self.stats)
        self.stats = found


class EngineCounts:
    """All methods may be called from any thread. `unload` is for `ModelManager.on_unload`."""

    def __init__(self, host: ModelManager) -> None:
        self._host = host
        self._lock = threading.Lock()  # held for all that follows
        self._live: dict[LoadedEngine, _Live] = {}
        self._ended: dict[str, Counter[Key]] = {}  # counters of engines that were unloaded, by model
        self._unloaded: WeakSet[LoadedEngine] = WeakSet()

    def read(self) -> Totals:
        with self._lock:
            for loaded in self._host.engines():
                self._look(loaded)
            stale: dict[str, bool] = {}
            values: dict[str, Counter[Key]] = {model: Counter(counters) for model, counters in self._ended.items()}
            for one in self._live.values():
                stale[one.model] = stale.get(one.model, False) or one.stale
                if one.stats is not None:
                    into = values.setdefault(one.model, Counter())
                    into.update(one.died)
                    add(into, one.stats, gauges=True)
            return Totals(values, stale)

    def _look(self, loaded: LoadedEngine) -> None:
        engine = loaded.engine
        if engine is None or loaded in self._unloaded:
            return
        live = self._live.setdefault(loaded, _Live(loaded.spec.name))
        live.take(stats := engine.last_stats)
        at_work = engine.starting or bool(stats.running or stats.waiting)
        live.stale = not engine.healthy or (at_work and time.time() - stats.at > LATE)

    def unload(self, loaded: LoadedEngine) -> None:
        """An engine is about to be closed: its counters are kept."""
        engine, stats = loaded.engine, None
        try:
            stats = engine.stats() if engine is not None else None
        except Exception as error:  # noqa: BLE001 - it is closed in any case; what the last scrape has read is kept
            log.warning("the statistics of %s could not be read: %s", loaded.spec.name, type(error).__name__)
        with self._lock:
            live = self._live.pop(loaded, None) or _Live(loaded.spec.name)
            self._unloaded.add(loaded)
            if stats is not None:
                live.take(stats)
            if live.stats is not None:
                into = self._ended.setdefault(live.model, Counter())
                into.update(live.died)
                add(into, live.stats)
