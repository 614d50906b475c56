"""disk: snapshots in a directory, for the next process. Whatever is wrong with an entry is a miss, and is counted.

    store/index.sqlite    which entries there are (see `index`)
    store/data/           a file for each entry (see `codec`)
    store/temporary/      files that are being written
    store/processes/      a locked file for each process that uses the store
    store/damaged/        the last files that were not what was written

Always true:
  * the bytes of all files of the store are at most `cap`: they are reserved before they are written, and given back
    after the file was deleted;
  * an entry is in the index only after its file is complete and durable under its final name;
  * a file of a process that has ended is deleted, unless it is an entry's, when the store is next opened; no file of a
    process that has the store open ever is;
  * a chunk is returned only after its digest was verified;
  * to read an entry that this process knows of, no lock is taken and no transaction is waited for;
  * the rows in `_known` are those of the index that this process has seen, without their descriptions.

These rows may be out of date where other processes share the store: a row says where to look. That a file is the one of
its row, and whole, is known from the file; entries are only kept longer than a row says, never shorter; and what is not
found where a row says is looked up in the index.
"""

import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from kvcellar.errors import KvcellarError
from kvcellar.files import Files
from kvcellar.memory.retention import DEFAULT, Retention, stronger
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.codec import (
    Cipher,
    Damaged,
    Foreign,
    OpenFile,
    Plain,
    Reader,
    Replaced,
    TooLarge,
    encoded,
    file_size,
    head_of,
    sealed_meta,
    unsealed_meta,
    write,
)
from kvcellar.memory.tiers.folder import DATA, QUARANTINE, TEMPORARY, Folder
from kvcellar.memory.tiers.index import DAMAGED, Index, IndexDamaged, Row, TooLittle, Why, growth, parents_first
from kvcellar.memory.tiers.tier import Breaker, Chunk, Entry, Loaded, Take, Tier, fresh
from kvcellar.places import NoPlace

T = TypeVar("T")
log = logging.getLogger("kvcellar.memory.tiers")

KEPT_DAMAGED = 8  # damaged files that are kept to be looked at,
DAMAGED_SHARE = 16  # of at most this part of the cap


class StoreUnusable(KvcellarError):
    """The directory cannot be a store. The message has the reason."""


class DiskTier(Tier):
    """The snapshots of one identity in a directory that may have others. `shared`: other processes may use it now."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        *,
        identity: bytes,
        max_bytes: int,
        share_of_free: float = 0.1,
        quota: int | None = None,
        cipher: Cipher | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """The store may have `max_bytes`, and no more than this share of what is free on the disk and its own files;
        `quota` is for the entries of one owner. Raises `StoreUnusable`."""
        super().__init__(Breaker(after=3))
        self._identity, self._max, self._share, self._quota = identity, max_bytes, share_of_free, quota
        self.directory, self.cipher, self._files, self._clock = directory, cipher or Plain(), files or Files(), clock
        self._process, self._numbers = secrets.token_hex(8), count()
        self._folder = Folder(self._files, directory, self._process)
        self._known: dict[bytes, Row] = {}  # each change is one operation of the dict: any thread may make it
        self._last = 0  # id of the last entry that was looked at
        with ExitStack() as opened:
            try:
                with self._folder.locked():
                    opened.callback(self._folder.leave)
                    self._folder.enter()
                    self._index = self._opened_index(opened)
                    self._recover()
                    self.shared = self._folder.shared()
            except (OSError, sqlite3.Error, NoPlace, IndexDamaged, TooLittle) as error:
                raise StoreUnusable(f"{directory} cannot be a store: {error}") from error
            self._opened = opened.pop_all()

    # -- entries ------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        return self._try("listing entries", self._entries) or []

    def _entries(self) -> list[Entry]:
        self._index.expire()
        return self._readable(self._rows())

    def look(
        self, namespace: str, key: bytes, known: Sequence[Snapshot], *, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Report what other processes have stored since this, or `entries`, was called last. It costs one small read of
        the index where no other process has changed it."""
        self._try("looking for new entries", self._look)

    def _look(self) -> None:
        self._readable(row for row in self._rows(self._last) if row.key not in self._known)

    def _rows(self, after: int = 0) -> list[Row]:
        rows = self._index.rows(self._identity, after=after)
        self._last = rows[-1].id if rows else after
        return rows

    def _readable(self, rows: Iterable[Row]) -> list[Entry]:
        """Those that this cipher can read."""
        found: list[Entry] = []
        for row in rows:
            self._know(row)
            try:
                entry = Entry(unsealed_meta(row.key, row.parent, row.meta, self.cipher), row.retention)
            except (Damaged, Foreign) as error:
                self._miss(row, error)
                continue
            self.made(*entry)
            found.append(entry)
        return found

    def contains(self, key: bytes) -> bool:
        return self._try("looking for a snapshot", lambda: self._found(key)) is not None

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        return bool(self._try("storing a snapshot", lambda: self._put(snapshot, chunks, retention)))

    def _put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention) -> bool:
        self.shared = self._folder.shared()
        self._index.expire()
        if (row := self._index.find(snapshot.key)) is not None:
            if self.described(row) is not None and self._renew([snapshot.key], retention):
                self.made(snapshot, retention)  # another process may have stored it
                return True
            self._index.remove([snapshot.key])
        try:
            meta = sealed_meta(snapshot, self.cipher)
        except TooLarge:
            self.failures["too large"] += 1
            return False
        head = head_of(self._identity, snapshot, retention, meta, self.cipher)
        size, name = file_size(head, snapshot, self.cipher), f"{self._process}-{next(self._numbers)}"
        if not self._index.reserve(name, size + growth(len(meta)), retention.owner, snapshot.parent):
            self.failures["too large"] += 1
            return False
        try:
            seal = write(self._files, self._folder.path(TEMPORARY, name), encoded(head, snapshot, chunks, self.cipher))
            self._folder.move(name, TEMPORARY, DATA)
            self._folder.sync(DATA)
            row = Row.of(snapshot, retention, name, size, identity=self._identity, seal=seal, meta=meta)
            if self._index.enter(row, snapshot):
                self._know(row)
            else:
                self._index.erase([name])
        except BaseException:
            with suppress(sqlite3.Error):  # a transaction that has failed may still be durable
                if not self._index.has(name):
                    self._index.erase([name])
            raise
        return True

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        row, found = self._known.get(key), None
        try:
            if row is not None and not row.retention.expired(self._clock()):
                with suppress(FileNotFoundError):  # another process has evicted it, and may have stored it again
                    found = self._read(row, take)
            if found is None:
                if (row := self._found(key)) is None:
                    return None
                found = self._read(row, take)
        except (OSError, sqlite3.Error, Damaged, Foreign, Replaced) as error:
            self._miss(row, error)
            return None
        self._breaker.succeeded()
        return found

    def _found(self, key: bytes) -> Row | None:
        """What the index has of an entry."""
        row = self._index.find(key)
        if row is None or row.identity != self._identity:
            self._known.pop(key, None)
            return None
        self._know(row)
        return row

    def _know(self, row: Row) -> None:
        self._known[row.key] = replace(row, meta=b"")

    def _read(self, row: Row, take: Take) -> Loaded:
        with OpenFile(self._files, self._folder.path(DATA, row.name)) as file:
            reader = self._reader(file, row)
            snapshot = reader.header.snapshot(self.cipher)
            return Loaded(snapshot, row.retention, tuple(reader.chunks(snapshot, self.cipher, take)))

    def _reader(self, file: OpenFile, row: Row) -> Reader:
        if file.size != row.size:
            raise Damaged(f"it has {file.size} bytes, not {row.size}")
        reader = Reader(file)
        header = reader.header
        if (reader.seal, header.key, header.identity) != (row.seal, row.key, row.identity):
            raise Damaged("it is another file than the one that was stored")
        return reader

    def used(self, keys: Iterable[bytes]) -> None:
        self._try("counting uses", lambda: self._index.used(keys))

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        self._try("renewing", lambda: self._renew(list(keys), retention))

    def _renew(self, keys: list[bytes], retention: Retention) -> int:
        """Returns how many there are."""
        found = self._index.renew(keys, retention)
        for key in keys:
            if (row := self._known.get(key)) is not None:
                self._known[key] = replace(row, retention=stronger(row.retention, retention))
        return found

    def remove(self, keys: Iterable[bytes]) -> None:
        self._try("removing", lambda: self._index.remove(keys))

    def rows(self) -> list[Row]:
        """All entries, of every identity, without those that have expired."""
        self._try("expiring entries", self._index.expire)
        return self._try("listing entries", self._index.rows) or []

    def others(self, most: int) -> list[tuple[bytes, Snapshot]]:
        """Up to `most` readable snapshots that begin sequences, of other identities, with these."""
        rows = self._try("listing others", lambda: self._index.beginnings(self._identity, most)) or []
        return [(row.identity, snapshot) for row in rows if (snapshot := self.described(row)) is not None]

    def described(self, row: Row) -> Snapshot | None:
        """What is known of an entry without reading its file; None if it was sealed with another key."""
        try:
            return unsealed_meta(row.key, row.parent, row.meta, self.cipher)
        except (Damaged, Foreign):
            return None

    @contextmanager
    def verified(self, row: Row) -> Generator[OpenFile | None]:
        """The file of an entry, of any identity, all of which was verified, one chunk after the other; None on a miss.
        What is damaged is removed; what was sealed with another key is not."""
        file = None
        with ExitStack() as opened:
            try:
                unsealed_meta(row.key, row.parent, row.meta, self.cipher)
                file = opened.enter_context(OpenFile(self._files, self._folder.path(DATA, row.name)))
                reader = self._reader(file, row)
                for _ in reader.chunks(reader.header.snapshot(self.cipher), self.cipher):
                    pass
            except (OSError, Damaged, Foreign) as error:
                self._miss(row, error)
                file = None
            yield file

    def close(self) -> None:
        """What is being read may be read to its end. May be called again."""
        self._opened.close()

    # -- opening ------------------------------------------------------------------------------------------------

    def _opened_index(self, opened: ExitStack) -> Index:
        """`opened` closes it."""
        path, alone = self._folder.index, self._folder.alive() == {self._process}
        cap = min(self._max, self._folder.bytes() + int(self._share * self._folder.free()))
        made = partial(Index, path, cap, self, process=self._process, quota=self._quota, clock=self._clock)
        try:
            index = opened.enter_context(closing(made()))
        except IndexDamaged as error:
            if not alone:
                raise
            log.warning("the index in %s is damaged (%s); it is made again from the files", path.parent, error)
            self.failures["index damaged"] += 1
            self._folder.remove_index()
            index = opened.enter_context(closing(made()))
        if not index.complete:
            if not alone:  # what they are writing would not be in a new one
                raise IndexDamaged("its index was lost while other processes use it")
            self._rebuild(index)
        return index

    def _rebuild(self, index: Index) -> None:
        """Make entries of all files that are whole, parents first. How often they were used is lost."""
        for folder in (TEMPORARY, QUARANTINE):
            self._folder.clear(folder)
        found: list[Row] = []
        for name in self._folder.names(DATA):
            try:
                with OpenFile(self._files, self._folder.path(DATA, name)) as file:
                    reader = Reader(file)
                    found.append(_row_of_file(name, reader))
            except (OSError, Damaged, Foreign) as error:
                self._failed(f"reading {name}", error)
                self._folder.unlink(DATA, name)
        index.adopt(parents_first(found), lambda row: self._folder.unlink(DATA, row.name))

    def _recover(self) -> None:
        """Delete what processes that have ended left unfinished, and entries whose files are gone."""
        alive, kept = self._folder.alive(), self._index.names()
        self._index.erase(name for name, of in self._index.reserved() if of not in alive and of != DAMAGED)
        there = {folder: set(self._folder.names(folder)) for folder in (DATA, TEMPORARY, QUARANTINE)}
        self._index.forget(kept - there[DATA])
        reserved = dict(self._index.reserved())
        known = self._index.names() | reserved.keys()
        for folder, names in there.items():
            for name in names - known:
                if name.partition("-")[0] not in alive:
                    self._folder.unlink(folder, name)
        self._index.erase({name for name, process in reserved.items() if process == DAMAGED} - there[QUARANTINE])
        self._folder.leave_dead(alive)
        if not self._index.reserve("", 0, ""):
            raise TooLittle(f"{self.cap} bytes are too few for the entries that are pinned, and the index")

    # -- inside -------------------------------------------------------------------------------------------------

    def gone(self, key: bytes, why: Why) -> None:
        self._known.pop(key, None)
        super().gone(key, why)

    def delete(self, names: list[str]) -> list[str]:
        return [name for name in names if self._folder.erase(name)]

    def _miss(self, row: Row | None, error: Exception) -> None:
        """Count why a snapshot could not be read. Damaged ones, and those whose files are gone, are removed."""
        if isinstance(error, Foreign):
            self.failures["foreign"] += 1
            return
        if isinstance(error, Replaced):
            self.failures["replaced"] += 1
            if row is not None:
                super().gone(row.key, "gone")
            return
        with suppress(sqlite3.Error):
            if row is not None and isinstance(error, FileNotFoundError) and not self._index.has(row.name):
                return  # it was evicted since the index was read
        self._failed("reading a snapshot", error)
        if row is not None and isinstance(error, Damaged | FileNotFoundError):
            self.gone(row.key, "damaged")
            with suppress(sqlite3.Error):
                self._quarantine(row.name)

    def _quarantine(self, name: str) -> None:
        old = self._index.quarantine(name, KEPT_DAMAGED, DAMAGED_SHARE)
        try:
            self._folder.move(name, DATA, QUARANTINE)
        except OSError:
            old.append(name)
        self._index.erase(old)

    def _try(self, what: str, act: Callable[[], T]) -> T | None:
        try:
            found = act()
        except (OSError, sqlite3.Error) as error:
            self._failed(what, error)
            return None
        self._breaker.succeeded()
        return found

    def _failed(self, what: str, error: Exception) -> None:
        damaged = isinstance(error, Damaged)
        self.failures["damaged" if damaged else type(error).__name__] += 1
        if not damaged and not isinstance(error, FileNotFoundError):
            self._breaker.failed()
        log.warning("%s failed: %s", what, error)


def _row_of_file(name: str, reader: Reader) -> Row:
    header = reader.header
    worth = len(header.meta) // 8  # its tokens are part of its description, 8 bytes each
    return Row(
        header.key, header.parent, header.identity, name, reader.seal, header.end, header.meta, worth, header.retention
    )
