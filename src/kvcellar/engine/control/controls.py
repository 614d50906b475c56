"""controls: what is asked of an engine beside requests, done on the thread of the caller.

That is any thread but the engine's. What needs the engine's thread is done in slices between steps, so that no request
waits for more than one slice.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from kvcellar.engine import messages
from kvcellar.engine.control.contents import Contents
from kvcellar.engine.control.count_stats import stats
from kvcellar.engine.control.survey import Survey
from kvcellar.engine.control_replies import StoreDisk, VariantText
from kvcellar.engine.load.open_model import as_created
from kvcellar.memory.prefixes import SLICE
from kvcellar.memory.tiers import upkeep
from kvcellar.memory.tiers.upkeep import Readable

if TYPE_CHECKING:
    from kvcellar.engine.load.build import Built

R = TypeVar("R")
POLL = 0.1  # seconds between two looks at an engine that may have failed, and frees nothing then


class Controls:
    """Of one engine."""

    def __init__(self, built: "Built") -> None:
        self._built, self._contents = built, Contents(built)
        contents, survey, adapters, call = self._contents, Survey(built), built.adapters, built.loop.call
        self._handlers: dict[type[messages.ControlWithReply[Any]], Callable[..., Any]] = {  # called with the fields
            messages.ListNamespaces: contents.namespaces,
            messages.DescribeDisk: self._describe_disk,
            messages.RemoveEntries: contents.remove,
            messages.ClearCacheAndStore: contents.clear,
            messages.CollectStore: contents.collect,
            messages.VerifyStore: contents.verify,
            messages.ImportStore: contents.import_from,
            messages.TakePicture: lambda replica: survey.picture(),
            messages.ShowEntry: lambda name, most, replica: survey.entry(name, most),
            messages.ShowWay: lambda number, replica: survey.way(number),
            messages.AddAdapter: lambda name, directories: adapters.add(name, directories, call),
            messages.RemoveAdapter: self._remove_adapter,
            messages.ListAdapters: adapters.list,
            messages.DescribeVariant: self._variant,
            messages.ReadStats: lambda: call(lambda: stats(built)),
            messages.DescribeCapacity: lambda: str(built.capacity) + adapters.sized,
            messages.ClearCache: self._clear_cache,
            messages.CheckInvariants: self._check,
        }

    def run(self, control: messages.ControlWithReply[R], source: Readable | None = None) -> R:
        """The reply. `source` is what an import reads. Raises what the operation raises."""
        given = {"source": source} if isinstance(control, messages.ImportStore) else structs.asdict(control)
        return self._handlers[type(control)](**given)

    def parts(self, control: messages.ControlInParts[Any]) -> Iterator[Any]:
        """The replies. Raises what the operation raises, also while the replies are iterated; closing the iterator ends
        the operation."""
        if isinstance(control, messages.ListEntries):
            return _in_parts(self._contents.listed(control.tier, control.namespace))
        return self._contents.export()

    def _describe_disk(self) -> StoreDisk | None:
        if (disk := self._contents.disk) is None:
            return None
        return StoreDisk(str(disk.directory), disk.cap, disk.size(), upkeep.totals(upkeep.entries(disk)))

    def _remove_adapter(self, name: str, wait: bool) -> None:
        freed = self._built.adapters.remove(name)
        while wait and self._built.loop.alive and not freed.wait(POLL):
            pass

    def _variant(self, name: str, parameters: dict[str, Any], template: str | None) -> VariantText:
        loaded = as_created(self._built.base, name, parameters, template)
        templates = (loaded.text.chat_template, loaded.text.response_template) if loaded.text else (None, None)
        return VariantText(dict(loaded.defaults), *templates)

    def _clear_cache(self) -> None:
        loop, changes = self._built.loop, "clearing the cache"
        loop.call(lambda: loop.manager.drafting.forget(None), changes=changes)
        loop.call(lambda: loop.manager.drop_features(lambda _: True, loop.scheduler.running), changes=changes)
        while loop.call(loop.manager.clear_some, changes=changes):
            pass  # between two steps, each time

    def _check(self) -> None:
        self._built.loop.call(self._built.loop.check)
        self._built.loop.call(self._built.adapters.check)


def _in_parts(entries: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while some := list(islice(entries, SLICE)):
        yield some
