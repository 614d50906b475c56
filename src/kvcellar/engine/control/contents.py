"""contents: what the prefix cache of an engine and its store on disk have: listed, removed, exported and imported.

All methods may be called from any thread but the engine's, and may take long. What they do with the tree is done in
slices between steps, so that no request waits for more than one slice; the store is read and written on the caller's
thread.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

from kvcellar.engine.arguments import tokens
from kvcellar.engine.control.count_stats import stats
from kvcellar.engine.control_replies import NamespaceContents, Removed
from kvcellar.errors import BadRequest
from kvcellar.images.image import is_row
from kvcellar.memory.kv.record import positions
from kvcellar.memory.prefix.listing import Listed, Walk
from kvcellar.memory.prefix.node import TOKEN, Node, key_of, path_key, root_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefixes import SLICE
from kvcellar.memory.snapshot import IMAGE, Snapshot, StoredImage, requested
from kvcellar.memory.store import Store
from kvcellar.memory.tiers import upkeep
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.upkeep import Imported, Readable, Verified

if TYPE_CHECKING:
    from kvcellar.engine.load.build import Built


class Contents:
    """Of one engine. `CacheClient` describes what these methods do."""

    def __init__(self, built: "Built") -> None:
        self._built, self._loop = built, built.loop

    # -- in memory ----------------------------------------------------------------------------------------------

    def listed(self, tier: str, namespace: str | None = None) -> Iterator[dict[str, Any]]:
        if tier == "device":
            yield from (_fields(listed) for listed, _ in self._walked(namespace))
        else:
            for one in upkeep.entries(self._needed()):
                if namespace is None or (one.snapshot is not None and requested(one.snapshot.namespace) == namespace):
                    yield upkeep.fields(one)

    @property
    def _tree(self) -> Tree:
        """On the engine's thread. After an error it is another one, and nodes of this one are of no use."""
        return self._loop.manager.prefixes.tree

    def _walked(self, namespace: str | None) -> Iterator[tuple[Listed, Node]]:
        walk = self._loop.call(lambda: Walk(self._tree, namespace))
        while not walk.over:
            yield from self._loop.call(lambda: walk.next(SLICE) if walk.tree is self._tree else walk.end())

    def namespaces(self) -> list[NamespaceContents]:
        now = self._loop.call(lambda: stats(self._built))
        bounded = {group.name for group in self._built.memory.storage.groups if group.bounded}
        a_token = sum(group.bytes / (group.cells or 1) for group in now.groups if group.name not in bounded)
        a_row = now.state_bytes / (now.rows or 1)
        found: dict[str, NamespaceContents] = {}
        for one, _ in self._walked(None):
            into = found.setdefault(one.namespace, NamespaceContents(one.namespace))
            length, checkpoints = one.end - one.start, len(one.checkpoints)
            into.entries += 1
            into.tokens += length
            into.checkpoints += checkpoints
            into.bytes += int(length * a_token + checkpoints * a_row)
            into.in_use += length if one.users else 0
        return sorted(found.values(), key=lambda one: -one.tokens)

    # -- the store ----------------------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        """Raises `BadRequest` without a store."""
        if (store := self._loop.manager.store) is None:
            raise BadRequest("this engine has no store", "store")
        return store

    @property
    def disk(self) -> DiskTier | None:
        return self._store.disk if self._loop.manager.store is not None else None

    def verify(self) -> Verified:
        return upkeep.verified(self._needed())

    def collect(self) -> int:
        disk = self._needed()
        upkeep.opened(disk.directory, disk.cipher).close()
        return upkeep.collected(disk)

    def export(self) -> Iterator[bytes]:
        return upkeep.exported(self._needed(), self._store.identity)

    def import_from(self, source: Readable) -> Imported:
        disk, store = self._needed(), self._store
        own = store.identity
        return upkeep.imported(source, lambda identity: disk if identity == own else None, disk.cipher, self._check)

    def _check(self, snapshot: Snapshot) -> None:
        """Raises `BadRequest` for tokens that the model does not have, and for another record."""
        text = filterfalse(is_row, memoryview(snapshot.tokens).cast("q").tolist())
        tokens([0, *text], self._built.intake.vocab_size, "tokens")
        if not snapshot.namespace.startswith(IMAGE):  # what is stored of an image is checked when it is read
            positions(snapshot.record)

    def _needed(self) -> DiskTier:
        if (disk := self.disk) is None:
            raise BadRequest("this engine has no store on disk", "store")
        return disk

    # -- removal ------------------------------------------------------------------------------------------------

    def remove(
        self, *, namespace: str | None = None, entry: str | None = None, prefix: Sequence[int] | None = None
    ) -> Removed:
        key, removed = key_of(prefix or ()), 0
        texts = [(namespace, key)] if entry is None else []
        if (store := self._loop.manager.store) is not None:
            texts += upkeep.beginnings(self._on_disk(store), entry) if entry is not None else []
            stored = self._stored(store, namespace, entry, key)
            spaces = {one.namespace for one in store.catalogue if one.key in stored}
            removed = store.remove_all(stored)
        else:
            spaces = set[str]()
        whole = entry is None and not key
        self._drop_features(lambda one: one.space in spaces or (whole and namespace in (None, one.namespace)))
        tree = self._loop.call(lambda: self._tree)
        nodes = list(self._selected(namespace, entry, key))
        if entry is not None:
            texts += self._loop.call(
                lambda: [(requested(root_of(node).namespace), path_key(node, node.start + 1)) for node in nodes]
            )
        removed += self._remove_drafts(texts, entry)
        return Removed(self._discard(tree, nodes, "removed by `cache rm`"), removed)

    def clear(self, *, all_models: bool = False) -> Removed:
        removed = 0
        if (store := self._loop.manager.store) is not None:
            removed = store.remove_all()
            if all_models and (disk := store.disk) is not None:
                keys = [row.key for row in disk.rows()]
                disk.remove(keys)
                removed += len(keys)
        self._remove_drafts([(None, b"")])
        self._drop_features(lambda _: True)
        tree = self._loop.call(lambda: self._tree)
        return Removed(self._discard(tree, self._loop.call(tree.roots), "removed by `cache clear`"), removed)

    def _drop_features(self, which: Callable[[StoredImage], bool]) -> None:
        self._loop.call(lambda: self._loop.manager.drop_features(which, self._loop.scheduler.running))

    def _on_disk(self, store: Store) -> list[upkeep.Stored]:
        """The entries on disk that a store can read; none without a disk."""
        disk = store.disk
        return [one for one in upkeep.entries(disk) if one.row.identity == store.identity] if disk is not None else []

    def _stored(self, store: Store, namespace: str | None, entry: str | None, key: bytes) -> set[bytes]:
        """The entries of a store that are to be removed: those in shared tiers, where others may have stored more, and
        those that it knows of, in any tier."""
        for tier in store.transfers.tiers:
            if tier.shared:
                tier.entries()
        found = set(upkeep.selected(self._on_disk(store), namespace=namespace, entry=entry, prefix=key))
        for begins in upkeep.beginnings_of(key) if entry is None else ():
            found.update(store.catalogue.beginning(namespace, begins))
        return found

    def _remove_drafts(self, texts: Sequence[tuple[str | None, bytes]], entry: str | None = None) -> int:
        """Remove what drafts are made of: of these texts, by namespace, or in all, and the tokens that they begin with;
        and the entry of this name, whose number is returned with all that continue it."""
        drafting, removed = self._loop.manager.drafting, 0
        begin = [(namespace, memoryview(key).cast("q").tolist()) for namespace, key in texts]
        if (memory := drafting.memory) is not None and (store := memory.store) is not None:
            if entry is not None:
                found = upkeep.beginnings(self._on_disk(store), entry)
                begin += [(of, [] if memory.ahead else memoryview(key).cast("q").tolist()) for of, key in found]
                removed = store.remove_all(self._stored(store, None, entry, b""))
            for namespace, key in texts:
                known = key if len(key) > memory.ahead * TOKEN else b""  # of fewer tokens, an entry tells nothing
                store.remove_all(self._stored(store, namespace, None, known))

        def forget() -> None:
            for namespace, first in begin:
                drafting.forget(namespace, first)

        self._loop.call(forget, changes="forgetting what drafts are made of")
        return removed

    def _selected(self, namespace: str | None, entry: str | None, key: bytes) -> Iterator[Node]:
        """The entry of this name, or what begins with a key."""
        if entry is not None:
            yield from (node for listed, node in self._walked(namespace) if listed.name == entry)
            return
        roots = self._loop.call(lambda: self._tree.roots())
        named = [root.namespace for root in roots if namespace in (None, requested(root.namespace))]
        most = max(1, SLICE * TOKEN // (len(key) + TOKEN))
        for some in (named[at : at + most] for at in range(0, len(named), most)):
            reached = self._loop.call(lambda some=some: [self._tree.reached(one, key) for one in some])
            yield from (node for node, offset in reached if node.start + offset == len(key) // TOKEN)

    def _discard(self, tree: Tree, nodes: Sequence[Node], cause: str) -> int:
        """Remove nodes of a tree and all below them that no sequence uses; returns how many tokens they had. `cause`
        says why."""
        tokens = 0
        while more := self._discard_once(tree, nodes, cause):  # removing some may leave others idle
            tokens += more
        return tokens

    def _discard_once(self, tree: Tree, nodes: Sequence[Node], cause: str) -> int:
        removal, tokens = tree.discarding(nodes), 0

        def some() -> list[int]:
            prefixes = self._loop.manager.prefixes
            return prefixes.discard(removal, SLICE, cause) if prefixes.tree is tree else []

        while went := self._loop.call(some, changes="removing entries"):
            tokens += sum(went)
        return tokens


def _fields(one: Listed) -> dict[str, Any]:
    return {"tier": "device"} | one._asdict() | {"tokens": list(one.tokens), "checkpoints": list(one.checkpoints)}
