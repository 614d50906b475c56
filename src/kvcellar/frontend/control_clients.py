"""control_clients: what is asked of an engine beside requests, wherever it runs: what its prefix cache and its store
have, pictures of it, its adapters.

All methods may be called from any thread but the engine's, may take long, and raise what those of `EngineClient`
raise beside what they say.
"""

from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import chain
from operator import index
from typing import Any

from kvcellar.engine import messages
from kvcellar.engine.arguments import Places, adapter_directories, adapter_name
from kvcellar.engine.control_replies import AdapterInfo, NamespaceContents, Picture, Removed, StoreDisk, TreeEntry, Way
from kvcellar.frontend.client import EngineClient
from kvcellar.memory.tiers.upkeep import Imported, Readable, Verified, check_named


class CacheClient:
    """Of one engine. Methods that need a store raise `BadRequest` without one."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def picture(self, replica: str = "") -> Picture:
        """What runs and has ended, entries of the prefix tree, and the cells as runs: bounded, for a page that shows
        it (`survey.py`). `replica`: one of several that are used as one engine; "": any."""
        return self._client.ask(messages.TakePicture(replica))

    def entry(self, name: str, most: int, replica: str = "") -> tuple[TreeEntry, tuple[int, ...]]:
        """The entry of this name, and up to `most` of its tokens. Raises `BadRequest` if it is not among those that a
        picture would show."""
        return self._client.ask(messages.ShowEntry(name, most, replica))

    def way(self, number: int, replica: str = "") -> Way:
        """Of a live request or one of the last ones, as far as its text is in the tree now. Raises `BadRequest` if the
        number is not known, or the text not kept."""
        return self._client.ask(messages.ShowWay(number, replica))

    def listed(self, tier: str, namespace: str | None = None) -> Iterator[dict[str, Any]]:
        """The entries of a tier, "device" or "disk", as JSON, each after the one that it continues."""
        for some in self._client.parts(messages.ListEntries(tier, namespace)):
            yield from some

    def hot(self, tier: str, most: int) -> list[dict[str, Any]]:
        """The entries of a tier that are kept longest, the most valuable first."""
        return nlargest(most, self.listed(tier), key=lambda one: one["value"])

    def namespaces(self) -> list[NamespaceContents]:
        """What each namespace has in memory, the largest first."""
        return self._client.ask(messages.ListNamespaces())

    @property
    def disk(self) -> StoreDisk | None:
        """The store on disk, as it is now; None without one."""
        return self._client.ask(messages.DescribeDisk())

    def verify(self) -> Verified:
        """Read all entries of the store; those that are damaged are removed."""
        return self._client.ask(messages.VerifyStore())

    def collect(self) -> int:
        """Remove entries of the store that are of no use, and files that processes have left there; returns how many
        entries."""
        return self._client.ask(messages.CollectStore())

    def export(self) -> Iterator[bytes]:
        """An archive of the entries that this engine can read, in parts. Raises `BadRequest` without a store before
        anything is iterated."""
        parts = self._client.parts(messages.ExportStore())
        return chain([next(parts)], parts)

    def import_from(self, source: Readable) -> Imported:
        """Store the entries of an archive; this engine uses them from now on. Raises `KvcellarError` for what is no
        archive, or was cut off; what was stored before stays."""
        return self._client.ask(messages.ImportStore(), source)

    def remove(
        self, *, namespace: str | None = None, entry: str | None = None, prefix: Sequence[int] | None = None
    ) -> Removed:
        """Remove from memory and from the store: what a namespace has; the entry of this name, with all that continue
        it; what begins with these tokens. Of the store, only what this engine can read. Raises `BadRequest` if
        nothing is named, or too little."""
        check_named(namespace, entry, prefix)
        tokens = tuple(map(index, prefix)) if prefix is not None else None
        return self._client.ask(messages.RemoveEntries(namespace, entry, tokens))

    def clear(self, *, all_models: bool = False) -> Removed:
        """Remove all that no running request uses, from memory and from the store: what this model has stored; or, of
        a directory that several models use, all."""
        return self._client.ask(messages.ClearCacheAndStore(all_models))


class AdaptersClient:
    """The adapters of one engine, by name: added, replaced and removed while requests run."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def add(self, name: str, path: Places) -> AdapterInfo:
        """Load the LoRA adapter of a directory, or the sum of several, under a name. If there is one of that name,
        requests that run keep it, and later ones have the new one. Blocks while it is read and tested.

        Raises `AdapterRefused` with the reason, and `BadRequest`; then nothing has changed.
        """
        name, directories = adapter_name(name), adapter_directories(path)
        return self._client.ask(messages.AddAdapter(name, tuple(str(one.absolute()) for one in directories)))

    def remove(self, name: str, *, wait: bool = False) -> None:
        """Let no later request have the adapter of this name. It is freed when those that run with it have ended; with
        `wait`, that, or the end of the engine, is waited for. Raises `BadRequest` if there is none."""
        self._client.ask(messages.RemoveAdapter(adapter_name(name), wait))

    def list(self) -> list[AdapterInfo]:
        """Those that requests can name, by name."""
        return self._client.ask(messages.ListAdapters())
