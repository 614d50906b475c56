"""index: which snapshots a store has, in SQLite, shared by all processes that use the store.

Always true, between transactions:
  * the bytes of all entries, and those reserved for entries being written, are at most what the store may have;
  * a row whose file is missing or damaged is only a miss: the file is what counts.

A transaction is durable when it has returned (`synchronous=EXTRA`). One connection, used under one lock.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.policy import value

_BUSY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
)  # not the index, but what it stands on
WAIT = 10.0  # seconds that a transaction waits for those of other processes
VERSION = 1
_TABLES = """
CREATE TABLE entries(
  key BLOB PRIMARY KEY, parent BLOB, identity BLOB NOT NULL, name TEXT NOT NULL, seal BLOB NOT NULL,
  size INTEGER NOT NULL, meta BLOB NOT NULL, value REAL NOT NULL, hits INTEGER NOT NULL, saves INTEGER NOT NULL,
  expires REAL, pinned INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX of_parent ON entries(parent);
CREATE INDEX by_value ON entries(pinned, value);
CREATE INDEX by_size ON entries(size);
CREATE TABLE reserved(owner TEXT NOT NULL, name TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE facts(name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT INTO facts VALUES ('clock', 0.0);
"""
_COLUMNS = "key, parent, identity, name, seal, size, meta, value, hits, saves, expires, pinned"


class IndexDamaged(Exception):
    """The index cannot be read. The files have all that it had, but for how often they were used."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry. `meta` is its sealed description (see `codec`), `name` that of its file, `expires` in seconds of the
    clock or None, `saves` the tokens that need not be computed where it is found."""

    key: bytes
    parent: bytes | None
    identity: bytes
    name: str
    seal: bytes
    size: int
    meta: bytes
    value: float = 0.0
    hits: int = 1
    saves: int = 1
    expires: float | None = None
    pinned: bool = False


class Index:
    """The index of one store, in the file `path`, which is created if it is not there."""

    def __init__(self, path: Path) -> None:
        """Raises `IndexDamaged`, and `OSError` and `sqlite3.Error` where it can be neither read nor made."""
        self._lock = threading.Lock()
        self.new = False  # it was made now, without entries
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        try:
            self._connection.execute("PRAGMA journal_mode=DELETE")
            self._connection.execute("PRAGMA synchronous=EXTRA")
            self._connection.execute("PRAGMA cell_size_check=ON")
            with self.transaction() as do:
                (version,) = do("PRAGMA user_version").fetchone()
                if version == 0 and not do("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    self.new = True
                    for statement in _TABLES.split(";"):
                        do(statement)
                    do(f"PRAGMA user_version={VERSION}")
                elif version != VERSION:
                    raise IndexDamaged(f"the index is of version {version}")
                if (found := do("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise IndexDamaged(str(found))
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in _BUSY:
                raise
            raise IndexDamaged(str(error)) from error

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
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

    @staticmethod
    def overhead(meta: int) -> int:
        """Bytes that an entry with a description of so many takes in the index, at most: in the table, in both of its
        indexes, and in the journal while it is made."""
        return 4 * (meta + 512)

    # -- looking ------------------------------------------------------------------------------------------------

    def rows(self, identity: bytes) -> list[Row]:
        """All entries of one identity."""
        with self.transaction() as do:
            return [_row(found) for found in do(f"SELECT {_COLUMNS} FROM entries WHERE identity=?", (identity,))]

    def find(self, key: bytes) -> Row | None:
        with self.transaction() as do:
            found = do(f"SELECT {_COLUMNS} FROM entries WHERE key=?", (key,)).fetchone()
        return None if found is None else _row(found)

    def names(self) -> set[str]:
        """The names of the files of all entries."""
        with self.transaction() as do:
            return {name for (name,) in do("SELECT name FROM entries")}

    def size(self) -> int:
        """Of all entries, and reserved."""
        with self.transaction() as do:
            return _bytes(do)

    # -- changes ------------------------------------------------------------------------------------------------

    def reserve(self, owner: str, name: str, n: int, cap: int) -> list[str] | None:
        """Set `n` bytes aside for a file that is going to be written, of the `cap` that there may be.

        Evicts entries of the lowest values that no other one continues, and returns the names of their files, which the
        caller deletes. None if there would be too little even so; nothing has changed then.
        """
        evicted: list[str] = []
        with suppress(_TooLarge), self.transaction() as do:
            while (over := _bytes(do) + n - cap) > 0:
                if not (some := _evict(do, over)):
                    raise _TooLarge
                evicted += some
            do("INSERT INTO reserved VALUES (?,?,?)", (owner, name, n))
            return evicted
        return None

    def release(self, name: str) -> None:
        """Give back what was reserved for a file."""
        with self.transaction() as do:
            do("DELETE FROM reserved WHERE name=?", (name,))

    def release_all(self, owner: str) -> None:
        """Give back what an owner has reserved, which writes no more."""
        with self.transaction() as do:
            do("DELETE FROM reserved WHERE owner=?", (owner,))

    def enter(self, row: Row) -> bool:
        """Make an entry of a file whose bytes were reserved; False, and nothing changes but that the bytes are given
        back, if there is one of its key."""
        with self.transaction() as do:
            do("DELETE FROM reserved WHERE name=?", (row.name,))
            if do("SELECT 1 FROM entries WHERE key=?", (row.key,)).fetchone():
                return False
            (clock,) = do("SELECT value FROM facts WHERE name='clock'").fetchone()
            worth = value(clock, hits=row.hits, saves=row.saves, costs=row.size)
            do(
                f"INSERT INTO entries({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                (row.key, row.parent, row.identity, row.name, row.seal, row.size, row.meta, worth, row.hits, row.saves,
                 row.expires, row.pinned),
            )  # fmt: skip
            return True

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were read: their values rise."""
        with self.transaction() as do:
            (clock,) = do("SELECT value FROM facts WHERE name='clock'").fetchone()
            for key in keys:
                found = do("SELECT hits, saves, size FROM entries WHERE key=?", (key,)).fetchone()
                if found is not None:
                    hits, saves, n = found
                    worth = value(clock, hits=hits + 1, saves=saves, costs=n)
                    do("UPDATE entries SET hits=?, value=? WHERE key=?", (hits + 1, worth, key))

    def pin(self, keys: Iterable[bytes], pinned: bool) -> None:
        with self.transaction() as do:
            for key in keys:
                do("UPDATE entries SET pinned=? WHERE key=?", (pinned, key))

    def delete(self, keys: Iterable[bytes]) -> list[str]:
        """Returns the names of their files, which the caller deletes."""
        with self.transaction() as do:
            return [name for key in keys for (name,) in do("DELETE FROM entries WHERE key=? RETURNING name", (key,))]

    def expire(self, now: float) -> list[str]:
        """Delete what has expired; returns the names of their files."""
        with self.transaction() as do:
            return [name for (name,) in do("DELETE FROM entries WHERE expires<=? RETURNING name", (now,)).fetchall()]

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class _TooLarge(Exception):
    pass


def _bytes(do: Callable[..., sqlite3.Cursor]) -> int:
    (entries,) = do("SELECT ifnull(sum(size),0) FROM entries").fetchone()
    (reserved,) = do("SELECT ifnull(sum(size),0) FROM reserved").fetchone()
    return entries + reserved


def _evict(do: Callable[..., sqlite3.Cursor], n: int) -> list[str]:
    """Delete entries that nothing continues, the lowest values first, until `n` bytes are free or 64 are deleted."""
    names: list[str] = []
    leaves = do(
        "SELECT key, name, size, value FROM entries AS e WHERE NOT pinned AND NOT EXISTS"
        " (SELECT 1 FROM entries AS c WHERE c.parent=e.key) ORDER BY value LIMIT 64"
    )
    for key, name, size, worth in leaves.fetchall():
        if n <= 0:
            break
        do("DELETE FROM entries WHERE key=?", (key,))
        do("UPDATE facts SET value=max(value,?) WHERE name='clock'", (worth,))
        names.append(name)
        n -= size
    return names


def _row(found: Sequence[Any]) -> Row:
    return Row(*found[:-1], pinned=bool(found[-1]))
