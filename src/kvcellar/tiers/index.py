"""index: which snapshots a store has, in SQLite, shared by all processes that use the store.

Always true, between transactions:
  * the bytes of all entries, those reserved, and those that the index itself may take are at most `cap`;
  * each file of the store has a row: of an entry, or of what was reserved for it by a process, which is writing it, or
    deleting it;
  * a row whose file is missing or damaged is only a miss: the file is what counts.

The index takes its own pages, and once more as many in the rollback journal while it is changed: SQLite is not given
more pages than the cap allows. A transaction is durable when it has returned (`synchronous=EXTRA`). One connection,
used under one lock.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcellar.policy import value
from kvcellar.retention import Retention, stronger
from kvcellar.tiers.rows import COLUMNS, PAGE, SETTINGS, TABLES, VERSION, Do, Dropped, Row, insert, row_of

_BUSY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
)  # not the index, but its file system
WAIT = 10.0  # seconds that a transaction waits for those of other processes
JOURNAL = 8192  # bytes of the journal beside its pages, at most
_DROPPED = "name, size, owner, key"
LEAVES = (
    "SELECT key, size, value FROM entries AS e WHERE pinned=0 {} AND NOT EXISTS"
    " (SELECT 1 FROM entries AS c WHERE c.parent=e.key) ORDER BY value LIMIT 64"
)
SPARE = 8  # pages that are left for changes that store nothing
DAMAGED = "damaged"  # in place of a process: bytes of files that were found damaged


class IndexDamaged(Exception):
    """The index cannot be read. The files have all that it had, but for how often they were used."""


class TooLittle(Exception):
    """The cap is too small."""


def growth(meta: int) -> int:
    """Bytes that an entry with a description of so many adds to the index and its journal, at most."""
    return _taken(meta // (PAGE - 16) + 8)


def _taken(pages: int) -> int:
    return 2 * pages * (PAGE + 8)


class Index:
    """The index of one store, in the file `path`, which is created if it is not there."""

    def __init__(self, path: Path, cap: int, *, quota: int | None = None) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all.

        Raises `IndexDamaged`, `TooLittle`, and `OSError` and `sqlite3.Error` where it can be neither read nor made.
        """
        self.cap, self._quota = cap, quota
        self._version: int | None = None  # what SQLite changes where another connection has changed the index
        self._lock = threading.Lock()
        if cap < JOURNAL + _taken(16 + SPARE):
            raise TooLittle(f"{cap} bytes are too few: the index alone takes {JOURNAL + _taken(16 + SPARE)}")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        try:
            for setting in SETTINGS:
                self._connection.execute(f"PRAGMA {setting}")
            with self.transaction() as do:
                (version,) = do("PRAGMA user_version").fetchone()
                if version == 0 and not do("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in TABLES:
                        do(statement)
                    do(f"PRAGMA user_version={VERSION}")
                elif version != VERSION:
                    raise IndexDamaged(f"the index is of version {version}")
                if do("SELECT value FROM facts WHERE name='bytes'").fetchone() is None:
                    raise IndexDamaged("it does not say how many bytes there are")
                if (found := do("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise IndexDamaged(str(found))
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in _BUSY:
                raise
            raise IndexDamaged(str(error)) from error

    @contextmanager
    def transaction(self) -> Generator[Do]:
        """All statements of the block together, or none of them if it raises."""
        with self._lock:
            do = self._connection.execute
            do("BEGIN IMMEDIATE")
            try:
                yield do
                do("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    do("ROLLBACK")
                raise

    # -- looking ------------------------------------------------------------------------------------------------

    def rows(self, identity: bytes | None, *, others: int | None = None) -> list[Row]:
        """All entries of one identity, or of all; with `others` instead up to so many of other identities that begin a
        sequence."""
        which: tuple[str, tuple[Any, ...]] = ("", ()) if identity is None else (" WHERE identity=?", (identity,))
        if others is not None:
            which = " WHERE identity<>? AND parent IS NULL LIMIT ?", (identity, others)
        return [row_of(found) for found in self._read(f"SELECT {COLUMNS} FROM entries{which[0]}", *which[1])]

    def find(self, key: bytes) -> Row | None:
        found = self._read(f"SELECT {COLUMNS} FROM entries WHERE key=?", key)
        return row_of(found[0]) if found else None

    def changed(self, identity: bytes) -> set[bytes]:
        """The keys of all entries of an identity, if another process has changed the index since the last call."""
        (version,) = self._read("PRAGMA data_version")[0]
        if version == self._version:
            return set()
        self._version = version
        return {key for (key,) in self._read("SELECT key FROM entries WHERE identity=?", identity)}

    @property
    def complete(self) -> bool:
        """Whether all files have rows: False until `adopt` of a new index."""
        return bool(self._read("SELECT 1 FROM facts WHERE name='complete'"))

    def has(self, name: str) -> bool:
        """Whether an entry has the file of this name."""
        return bool(self._read("SELECT 1 FROM entries WHERE name=?", name))

    def names(self) -> set[str]:
        """The names of the files of all entries."""
        return {name for (name,) in self._read("SELECT name FROM entries")}

    def reserved(self) -> list[tuple[str, str]]:
        """The name and process of all that was reserved."""
        return [(name, process) for name, process in self._read("SELECT name, process FROM reserved")]

    def size(self) -> int:
        """Bytes of all entries, reserved, and those that the index takes at most."""
        with self._lock:
            return _bytes(self._connection.execute) + _of_index(self._connection.execute)

    def _read(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    # -- bytes --------------------------------------------------------------------------------------------------

    def reserve(self, process: str, name: str, n: int, owner: str) -> list[Dropped] | None:
        """Reserve `n` bytes for a file that is going to be written, and return an empty list.

        Where too few are free, damaged files and entries of the lowest values that no other one continues are dropped
        instead: their bytes are reserved for `process`, and they are returned. The caller deletes their files, releases
        their names, and calls again. None if too few can be made free; nothing has changed then.
        """
        with self.transaction() as do:
            self._limit(do)
            do("SAVEPOINT dropped")
            dropped = self._make_room(do, process, n, owner)
            if dropped is None:
                do("ROLLBACK TO dropped")
            elif not dropped and name:
                self._limit(do, n)
                do("INSERT INTO reserved(name, process, owner, size) VALUES (?,?,?,?)", (name, process, owner, n))
            return dropped

    def _make_room(self, do: Do, process: str, n: int, owner: str) -> list[Dropped] | None:
        dropped = self._damaged(do, process, n)
        while True:
            over = self._over(do, n - sum(one.size for one in dropped))
            of_owner = self._over_quota(do, n - sum(one.size for one in dropped if one.owner == owner), owner)
            if over <= 0 and of_owner <= 0:
                return dropped
            evicted = _evict(do, process, max(of_owner, 0) or over, owner if of_owner > 0 else None)
            if not evicted and not _vacuum(do):
                return None
            dropped += evicted

    def _over_quota(self, do: Do, n: int, owner: str) -> int:
        """Bytes that an owner would have over its quota if `n` more were reserved."""
        return 0 if self._quota is None or n <= 0 else _bytes_of(do, owner) + n - self._quota

    def _over(self, do: Do, n: int) -> int:
        """Bytes that there are too few if `n` more were reserved."""
        return _bytes(do) + n + _of_index(do) + _taken(SPARE) - self.cap

    def _damaged(self, do: Do, process: str, n: int) -> list[Dropped]:
        """Drop damaged files, the oldest first, as many as need be."""
        dropped: list[Dropped] = []
        for found in do("SELECT name, size, owner FROM reserved WHERE process=? ORDER BY id", (DAMAGED,)).fetchall():
            if self._over(do, n - sum(one.size for one in dropped)) > 0:
                dropped.append(Dropped(*found))
                do("UPDATE reserved SET process=? WHERE name=?", (process, dropped[-1].name))
        return dropped

    def release(self, names: Iterable[str]) -> None:
        """Give back what was reserved for files that are not there any more."""
        with self.transaction() as do:
            for name in names:
                do("DELETE FROM reserved WHERE name=?", (name,))

    def _limit(self, do: Do, n: int = 0) -> None:
        """Give SQLite no more pages than leave `n` bytes."""
        left = self.cap - _bytes(do) - n - JOURNAL
        do(f"PRAGMA max_page_count={max(left // _taken(1), _pages(do))}")

    # -- entries ------------------------------------------------------------------------------------------------

    def enter(self, row: Row) -> bool:
        """Make an entry of a file whose bytes were reserved. False if there is one of its key: nothing has changed but
        its retention then."""
        with self.transaction() as do:
            if self._renew(do, row.key, row.retention):
                return False
            do("DELETE FROM reserved WHERE name=?", (row.name,))
            self._limit(do, row.size)
            insert(do, row)
            return True

    def adopt(self, rows: Iterable[Row], drop: Callable[[Row], object]) -> None:
        """Make entries of the files that there are, as long as they and the index are within the cap, and `drop` the
        others. The index is written when all have been dropped."""
        with self.transaction() as do:
            used, keys = _bytes(do), set[bytes]()
            for row in rows:
                if (
                    row.key in keys
                    or used + row.size + _of_index(do) + _taken(SPARE) + growth(len(row.meta)) > self.cap
                ):
                    drop(row)
                    continue
                insert(do, row)
                used += row.size
                keys.add(row.key)
            do("INSERT OR REPLACE INTO facts VALUES ('complete', 1.0)")

    def forget(self, names: Iterable[str]) -> None:
        """Remove entries whose files are gone."""
        with self.transaction() as do:
            for name in names:
                do("DELETE FROM entries WHERE name=?", (name,))

    def renew(self, keys: Iterable[bytes], retention: Retention) -> int:
        """Keep entries at least as long as `retention` says; returns how many there are."""
        found = [row for row in map(self.find, keys) if row is not None]
        weaker = [row.key for row in found if stronger(row.retention, retention) != row.retention]
        if not weaker:
            return len(found)
        with self.transaction() as do:
            return len(found) - [self._renew(do, key, retention) for key in weaker].count(False)

    def _renew(self, do: Do, key: bytes, retention: Retention) -> bool:
        found = do(f"SELECT {COLUMNS} FROM entries WHERE key=?", (key,)).fetchone()
        if found is not None:
            kept = stronger(row_of(found).retention, retention)
            self._limit(do)
            do("UPDATE entries SET saves=?, priority=?, pinned=?, expires=? WHERE key=?",
               (kept.saves, kept.priority, kept.pinned, kept.expires, key))  # fmt: skip
        return found is not None

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were read: their values rise."""
        with self.transaction() as do:
            self._limit(do)
            (clock,) = do("SELECT value FROM facts WHERE name='clock'").fetchone()
            for key in keys:
                found = do("SELECT hits, worth, size, priority FROM entries WHERE key=?", (key,)).fetchone()
                if found is not None:
                    hits, saves, n, priority = found
                    worth = value(clock, hits=hits + 1, saves=saves, costs=n, priority=priority)
                    do("UPDATE entries SET hits=?, value=? WHERE key=?", (hits + 1, worth, key))

    def remove(self, process: str, keys: Iterable[bytes]) -> list[Dropped]:
        """Remove entries. Their bytes stay reserved for `process`, which deletes their files and releases them."""
        with self.transaction() as do:
            self._limit(do)
            return [dropped for key in keys for dropped in _drop(do, process, "key=?", key)]

    def expire(self, process: str, now: float) -> list[Dropped]:
        """Remove what has expired, as `remove` does."""
        if not self._read("SELECT 1 FROM entries WHERE expires<=? LIMIT 1", now):
            return []
        with self.transaction() as do:
            self._limit(do)
            return _drop(do, process, "expires<=?", now)

    def quarantine(self, process: str, name: str, most: int, share: int) -> list[str]:
        """Remove an entry whose file is damaged, and count its bytes as those of a damaged file. Of these `most` are
        kept, up to 1/`share` of the cap: older ones are dropped, as `remove` does."""
        with self.transaction() as do:
            self._limit(do)
            _drop(do, DAMAGED, "name=?", name)
            found = do("SELECT name, size FROM reserved WHERE process=? ORDER BY id DESC", (DAMAGED,)).fetchall()
            sizes = [size for _, size in found]
            old = [name for i, (name, _) in enumerate(found) if i >= most or sum(sizes[: i + 1]) > self.cap // share]
            for name in old:
                do("UPDATE reserved SET process=? WHERE name=?", (process, name))
            return old

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _vacuum(do: Do) -> bool:
    """Return unused pages to the file system; False if there are none."""
    (unused,) = do("PRAGMA freelist_count").fetchone()
    do("PRAGMA incremental_vacuum").fetchall()
    return unused > 0


def _pages(do: Do) -> int:
    return do("PRAGMA page_count").fetchone()[0]


def _of_index(do: Do) -> int:
    """Bytes that the index and its journal take at most, while it has its present pages."""
    return _taken(_pages(do)) + JOURNAL


def _bytes(do: Do) -> int:
    """Of all entries, and reserved: triggers keep the sum."""
    return int(do("SELECT value FROM facts WHERE name='bytes'").fetchone()[0])


def _bytes_of(do: Do, owner: str) -> int:
    (entries,) = do("SELECT ifnull(sum(size),0) FROM entries WHERE owner=?", (owner,)).fetchone()
    (reserved,) = do(
        "SELECT ifnull(sum(size),0) FROM reserved WHERE owner=? AND process<>?", (owner, DAMAGED)
    ).fetchone()
    return entries + reserved


def _drop(do: Do, process: str, which: str, value: Any) -> list[Dropped]:
    """Remove entries, and reserve their bytes for a process, which deletes their files."""
    gone = [Dropped(*found) for found in do(f"DELETE FROM entries WHERE {which} RETURNING {_DROPPED}", (value,))]
    for name, size, owner, _ in gone:
        do("INSERT INTO reserved(name, process, owner, size) VALUES (?,?,?,?)", (name, process, owner, size))
    return gone


def _evict(do: Do, process: str, n: int, owner: str | None) -> list[Dropped]:
    """Drop entries that nothing continues, of one owner or of all, the lowest values first, until `n` bytes are free
    or 64 are dropped."""
    evicted: list[Dropped] = []
    leaves = do(LEAVES.format("" if owner is None else "AND owner=?"), () if owner is None else (owner,))
    for key, size, worth in leaves.fetchall():
        if n <= 0:
            break
        evicted += _drop(do, process, "key=?", key)
        do("UPDATE facts SET value=max(value,?) WHERE name='clock'", (worth,))
        n -= size
    return evicted
