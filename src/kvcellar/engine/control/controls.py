"""controls: what is asked of an engine beside requests, done on the thread of the caller.

That is any thread but the engine's. What needs the engine's thread is done in slices between steps, so that no request
waits for more than one slice.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvcellar.engine import messages
from kvcellar.engine.control.contents import Contents
from kvcellar.engine.control.count_stats import stats
from kvcellar.engine.control.survey import Survey
from kvcellar.engine.control_replies import StoreDisk, VariantText
from kvcellar.engine.load.open_model import as_created
from kvcellar.errors import BadRequest
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefixes import SLICE
from kvcellar.memory.snapshot import with_adapter
from kvcellar.memory.tiers.upkeep import Readable

if TYPE_CHECKING:
    from kvcellar.engine.load.build import Built


POLL = 0.1  # seconds between two looks at an engine that may have failed, and frees nothing then


class Controls:
    """Of one engine."""

    def __init__(self, built: "Built") -> None:
        self._built, self._contents, self._survey = built, Contents(built), Survey(built)

    def run(self, control: messages.ControlWithReply, source: Readable | None = None) -> Any:
        """The reply, of the type that `REPLIES` has. `source` is what an import reads. Raises what the operation
        raises."""
        if isinstance(control, messages.CacheControl):
            return self._of_cache(control, source)
        if isinstance(control, messages.SurveyControl):
            return self._of_survey(control)
        return self._of_engine(control)

    def parts(self, control: messages.ControlInParts) -> Iterator[Any]:
        """The replies, each of the type that `REPLIES` has. Raises what the operation raises, also while the replies
        are iterated; closing the iterator ends the operation."""
        match control:
            case messages.ListEntries(tier, namespace):
                return _in_parts(self._contents.listed(tier, namespace))
            case messages.ExportStore():
                return self._contents.export()

    def _of_cache(self, control: messages.CacheControl, source: Readable | None) -> Any:
        contents = self._contents
        match control:
            case messages.ListNamespaces():
                return contents.namespaces()
            case messages.ListMostValuable(tier, most):
                return contents.hot(tier, most)
            case messages.ListStoredTotals():
                return contents.stored_totals()
            case messages.DescribeDisk():
                disk = contents.disk
                return StoreDisk(str(disk.directory), disk.cap, disk.size()) if disk is not None else None
            case messages.RemoveEntries(namespace, entry, prefix):
                return contents.remove(namespace=namespace, entry=entry, prefix=prefix)
            case messages.ClearCacheAndStore(all_models):
                return contents.clear(all_models=all_models)
            case messages.CollectStore():
                return contents.collect()
            case messages.VerifyStore():
                return contents.verify()
            case messages.ImportStore():
                assert source is not None, "an import without an archive"
                return contents.import_from(source)

    def _of_survey(self, control: messages.SurveyControl) -> Any:
        match control:
            case messages.TakePicture():
                return self._survey.picture()
            case messages.ShowEntry(name, most):
                return self._survey.entry(name, most)
            case messages.ShowWay(number):
                return self._survey.way(number)

    def _of_engine(self, control: messages.EngineControl) -> Any:
        built, adapters = self._built, self._built.adapters
        match control:
            case messages.AddAdapter(name, directories):
                return adapters.add(name, directories, built.loop.call)
            case messages.RemoveAdapter(name, wait):
                return self._remove_adapter(name, wait=wait)
            case messages.ListAdapters():
                return adapters.list()
            case messages.DescribeVariant():
                return self._variant(control)
            case messages.ReadStats():
                return built.loop.call(lambda: stats(built))
            case messages.DescribeCapacity():
                return str(built.capacity) + adapters.sized
            case messages.ClearCache():
                return self._clear_cache()
            case messages.CheckPinned():
                return self._check_pinned(control)
            case messages.CheckInvariants():
                built.loop.call(built.loop.check)
                return built.loop.call(adapters.check)

    def _remove_adapter(self, name: str, *, wait: bool) -> None:
        freed = self._built.adapters.remove(name)
        while wait and self._built.loop.alive and not freed.wait(POLL):
            pass

    def _variant(self, control: messages.DescribeVariant) -> VariantText:
        loaded = as_created(self._built.base, control.name, control.parameters, control.template)
        templates = (loaded.text.chat_template, loaded.text.response_template) if loaded.text else (None, None)
        return VariantText(dict(loaded.defaults), *templates)

    def _clear_cache(self) -> None:
        loop, changes = self._built.loop, "clearing the cache"
        loop.call(lambda: loop.manager.drafting.forget(None), changes=changes)
        while loop.call(loop.manager.clear_some, changes=changes):
            pass  # between two steps, each time

    def _check_pinned(self, control: messages.CheckPinned) -> None:
        loop, space = self._built.loop, with_adapter(control.namespace, self._built.adapters.digest(control.adapter))
        loop.call(lambda: _check_pinned(loop.manager.prefixes.tree, space, control.prompt))


def _in_parts(entries: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while some := list(islice(entries, SLICE)):
        yield some


def _check_pinned(tree: Tree, namespace: str, ids: Sequence[int]) -> None:
    """Raise `BadRequest` if a prompt that was just computed is not pinned. To be called on the engine's thread."""
    if not any(node.retention.pinned for node in tree.match(tree.peek(namespace), key_of(ids), len(ids)).path):
        raise BadRequest(
            f"a prompt of {len(ids)} tokens cannot be pinned beside {tree.pins.tokens} tokens that are; "
            f"shorten it, pin fewer, or raise pin_share or cache_bytes",
            "prompt",
        )
