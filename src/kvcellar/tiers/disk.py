"""disk: snapshots in a directory, for the next process. Whatever is wrong with an entry is a miss, and is counted.

    store/index.sqlite    which entries there are (see `index`)
    store/data/           a file for each entry (see `codec`)
    store/temporary/      files that are being written
    store/owners/         a locked file for each process that uses the store
    store/damaged/        the last files that were not what was written

Always true:
  * an entry is in the index only after its file is complete and durable under its final name;
  * a file that no entry names belongs to a process that is writing it, or is deleted when the store is next opened;
  * a chunk is handed out only after its digest was verified.
"""

import fcntl
import logging
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from kvcellar.errors import KvcellarError
from kvcellar.places import NoPlace, make_private
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.codec import Cipher, Damaged, Foreign, Plain, Reader, file_size, sealed_meta, unsealed_meta, write
from kvcellar.tiers.files import Files
from kvcellar.tiers.index import Index, IndexDamaged, Row

log = logging.getLogger("kvcellar.tiers")

KEPT_DAMAGED = 8  # files of which the last ones are kept to be looked at
FOLDERS = ("data", "temporary", "owners", "damaged")


class StoreUnusable(KvcellarError):
    """The directory cannot be a store. Says why."""


class Stored(NamedTuple):
    """An entry, as it is known without reading its file."""

    snapshot: Snapshot
    pinned: bool
    expires: float | None


class DiskStore:
    """A store of the snapshots of one identity, in a directory that may have those of others, too.

    All methods may be called from any thread. `put` and `read` never raise for what a disk does: they return False, or
    nothing, and count why in `failures`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        identity: bytes,
        max_bytes: int,
        share_of_free: float = 0.1,
        cipher: Cipher | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """The store may have `max_bytes`, and no more than this share of what is free on the disk, its own files
        included. Raises `StoreUnusable`."""
        self._directory, self._identity = directory, identity
        self._cipher, self._files, self._clock = cipher or Plain(), files or Files(), clock
        self._numbers, self._owner = count(), secrets.token_hex(8)
        self.failures: Counter[str] = Counter()
        with ExitStack() as opened:
            try:
                for folder in (directory, *(directory / name for name in FOLDERS)):
                    make_private(folder)
                self._own(opened)
                self._index = self._opened_index()
                opened.callback(self._index.close)
                self._recover()
                used = self._index.size()
                self.cap = min(max_bytes, used + int(share_of_free * self._files.free(directory)))
            except (OSError, sqlite3.Error, NoPlace, IndexDamaged) as error:
                raise StoreUnusable(f"{directory} cannot be a store: {error}") from error
            self._opened = opened.pop_all()

    # -- entries ------------------------------------------------------------------------------------------------

    def entries(self) -> list[Stored]:
        """All that this identity and cipher can read, parents before the snapshots that continue them; entries that
        continue nothing are left out."""
        self._remove(self._index.expire(self._clock()))
        found: dict[bytes, Stored] = {}
        for row in self._index.rows(self._identity):
            try:
                snapshot = unsealed_meta(row.key, row.parent, row.meta, self._cipher)
            except (Damaged, Foreign) as error:
                self._miss(row, error)
            else:
                found[row.key] = Stored(snapshot, row.pinned, row.expires)
        return sorted(
            (stored for stored in found.values() if _complete(stored.snapshot, found)),
            key=lambda stored: stored.snapshot.span.start,
        )

    def put(
        self,
        snapshot: Snapshot,
        chunks: Iterable[bytes],
        *,
        saves: int | None = None,
        expires: float | None = None,
        pinned: bool = False,
    ) -> bool:
        """Keep a snapshot; False if that is not possible. `saves` are the tokens that need not be computed with it, in
        place of its own."""
        name = f"{self._owner}-{next(self._numbers)}"
        meta = sealed_meta(snapshot, self._cipher)
        size = file_size(meta, snapshot.sizes, self._cipher) + self._index.overhead(len(meta))
        temporary, final = self._directory / "temporary" / name, self._directory / "data" / name
        try:
            evicted = self._index.reserve(self._owner, name, size, self.cap)
            if evicted is None:
                self.failures["too large"] += 1
                return False
            try:
                self._remove(evicted)
                seal = write(self._files, temporary, self._identity, snapshot, meta, chunks, self._cipher)
                self._files.rename(temporary, final)
                self._files.sync_directory(final.parent)
                row = Row(
                    snapshot.key, snapshot.parent, self._identity, name, seal, size, meta,
                    saves=len(snapshot.span) if saves is None else saves, expires=expires, pinned=pinned,
                )  # fmt: skip
                if not self._index.enter(row):
                    self._remove([name])
            except BaseException:
                with suppress(OSError):
                    self._files.unlink(temporary)
                with suppress(sqlite3.Error):
                    self._index.release(name)
                    if name not in self._index.names():
                        self._remove([name])
                raise
        except (OSError, sqlite3.Error) as error:
            self._failed("storing a snapshot", error)
            return False
        return True

    @contextmanager
    def read(self, key: bytes) -> Iterator[tuple[Snapshot, Iterator[bytes]] | None]:
        """The snapshot of a key, and its chunks as they are read; None on a miss. Where a chunk turns out to be
        damaged, `Damaged` is raised there, and the entry is deleted."""
        row, opened = None, ExitStack()
        with opened:
            try:
                row = self._index.find(key)
                found = None if row is None or row.identity != self._identity else self._read(row, opened)
            except (OSError, sqlite3.Error, Damaged, Foreign) as error:
                self._miss(row, error)
                found = None
            try:
                yield found
            except (OSError, Damaged, Foreign) as error:
                self._miss(row, error)
                raise Damaged(str(error)) from error

    def _read(self, row: Row, opened: ExitStack) -> tuple[Snapshot, Iterator[bytes]]:
        reader = opened.enter_context(Reader(self._files, self._directory / "data" / row.name))
        if (reader.seal, reader.key, reader.identity) != (row.seal, row.key, row.identity):
            raise Damaged("it is another file than the one that was stored")
        snapshot = reader.snapshot(self._cipher)
        return snapshot, reader.chunks(snapshot, self._cipher)

    def used(self, keys: Iterable[bytes]) -> None:
        """These were restored: they are worth more."""
        self._try("counting uses", lambda: self._index.used(keys))

    def pin(self, keys: Iterable[bytes], pinned: bool = True) -> None:
        self._try("pinning", lambda: self._index.pin(keys, pinned))

    def delete(self, keys: Iterable[bytes]) -> None:
        self._try("deleting", lambda: self._remove(self._index.delete(keys)))

    def size(self) -> int:
        """Of all entries of all identities, the index and what is being written."""
        return self._index.size()

    def verify(self) -> int:
        """Read every entry of this identity; returns how many were damaged, and are deleted now."""
        before = self.failures["damaged"]
        for row in self._index.rows(self._identity):
            with suppress(Damaged), self.read(row.key) as found:
                for _ in found[1] if found else ():
                    pass
        return self.failures["damaged"] - before

    def close(self) -> None:
        """What is being read may be read to its end. May be called again."""
        self._opened.close()

    # -- recovery -----------------------------------------------------------------------------------------------

    def _own(self, opened: ExitStack) -> None:
        """Make the file that this store has locked for as long as it is open."""
        path = self._directory / "owners" / self._owner
        file = self._files.create(path)
        opened.callback(lambda: _unless_gone(lambda: self._files.unlink(path)))
        opened.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX)

    def _opened_index(self) -> Index:
        path = self._directory / "index.sqlite"
        try:
            index = Index(path)
        except IndexDamaged as error:
            log.warning("the index of %s is damaged (%s); it is made again from the files", self._directory, error)
            self.failures["index damaged"] += 1
            for old in (path, path.with_name("index.sqlite-journal")):
                with suppress(FileNotFoundError):
                    self._files.rename(old, self._directory / "damaged" / f"{old.name}-{self._owner}")
            index = Index(path)
        if index.new:
            self._rebuild(index)
        return index

    def _rebuild(self, index: Index) -> None:
        """Make entries of all files that are whole. How often they were used is lost, and when they expire."""
        for name in self._files.names(self._directory / "data"):
            try:
                with Reader(self._files, self._directory / "data" / name) as found:
                    size = found.size + index.overhead(len(found.meta))
                    index.enter(Row(found.key, found.parent, found.identity, name, found.seal, size, found.meta))
            except (OSError, Damaged, Foreign) as error:
                self._failed(f"reading {name}", error)

    def _recover(self) -> None:
        """Delete what processes that have ended left unfinished, and entries whose files are gone."""
        dead = {name for name in self._files.names(self._directory / "owners") if self._is_dead(name)}
        for owner in dead:
            self._index.release_all(owner)
        for name in list(self._files.names(self._directory / "temporary")):
            if name.partition("-")[0] in dead or self._is_gone(name):
                with suppress(OSError):
                    self._files.unlink(self._directory / "temporary" / name)
        there, known = set(self._files.names(self._directory / "data")), self._index.names()
        for name in there - known:
            if name.partition("-")[0] in dead or self._is_gone(name):
                self._remove([name])
        for owner in dead:
            with suppress(OSError):
                self._files.unlink(self._directory / "owners" / owner)

    def _is_gone(self, name: str) -> bool:
        """Whether the process that a file is named after has left nothing in `owners`, or never was."""
        return not (self._directory / "owners" / name.partition("-")[0]).exists()

    def _is_dead(self, owner: str) -> bool:
        if owner == self._owner:
            return False
        try:
            file = self._files.open(self._directory / "owners" / owner)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            self._files.close(file)

    # -- inside -------------------------------------------------------------------------------------------------

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                self._files.unlink(self._directory / "data" / name)

    def _miss(self, row: Row | None, error: Exception) -> None:
        """Count why a snapshot could not be read. Damaged ones, and those whose files are gone, are deleted."""
        if isinstance(error, Foreign):
            self.failures["foreign"] += 1
            return
        self._failed("reading a snapshot", error)
        if row is None or not isinstance(error, Damaged | FileNotFoundError):
            return
        with suppress(sqlite3.Error):
            self._index.delete([row.key])
        with suppress(OSError):
            self._files.rename(self._directory / "data" / row.name, self._directory / "damaged" / row.name)
            old = sorted(self._files.names(self._directory / "damaged"))[:-KEPT_DAMAGED]
            for name in old:
                self._files.unlink(self._directory / "damaged" / name)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, sqlite3.Error) as error:
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        kind = "damaged" if isinstance(error, Damaged) else type(error).__name__
        self.failures[kind] += 1
        log.warning("%s failed: %s", what, error)


def _unless_gone(act: Callable[[], None]) -> None:
    with suppress(OSError):
        act()


def _complete(snapshot: Snapshot, found: dict[bytes, Stored]) -> bool:
    """Whether all that comes before a snapshot is there, and fits it."""
    while snapshot.parent is not None:
        before = found.get(snapshot.parent)
        if before is None or before.snapshot.span.end != snapshot.span.start:
            return False
        if before.snapshot.namespace != snapshot.namespace:
            return False
        snapshot = before.snapshot
    return snapshot.span.start == 0
