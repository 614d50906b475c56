"""index: which snapshots a tier has, and which go next, in SQLite: in a file that all processes of a store share, or in
memory.

Always true, between transactions:
  * the bytes of all entries, those reserved, and those that the file of the index may take are at most `cap`, but for
    entries of others that were found elsewhere (`enter` without `reserve`): the next reservation evicts;
  * each content (a file, an object) is that of an entry, or bytes were reserved for it by a process that is writing it,
    or deleting it;
  * what is evicted is neither pinned nor continued by another entry;
  * an entry whose content is missing or damaged is only a miss: the content is what counts;
  * that an entry was made or removed is reported in the order of the transactions.

An index in a file takes its own pages, and once more as many in the rollback journal while it is changed: SQLite is not
given more pages than the cap allows. A transaction is durable when it has returned (`synchronous=EXTRA`). One
connection, used under one lock.
"""

import os
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from kvcellar.memory.policy import value
from kvcellar.memory.retention import Retention, stronger
from kvcellar.memory.snapshot import Snapshot

VERSION = 5
PAGE = 1024
SETTINGS = (
    f"page_size={PAGE}",
    "auto_vacuum=INCREMENTAL",
    "journal_mode=DELETE",
    "synchronous=EXTRA",
    "cell_size_check=ON",
    "temp_store=MEMORY",
    "cache_spill=OFF",  # else the journal is written in several parts, each with a header
)
TABLES = (
    # An id is never used again: entries that were made later have larger ones. `children` are those that continue it.
    "CREATE TABLE entries("
    " id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, parent BLOB, identity BLOB NOT NULL,"
    " name TEXT NOT NULL, seal BLOB NOT NULL, size INTEGER NOT NULL, value REAL NOT NULL, hits INTEGER NOT NULL,"
    " worth INTEGER NOT NULL, priority INTEGER NOT NULL, pinned INTEGER NOT NULL, expires REAL,"
    " owner TEXT NOT NULL, children INTEGER NOT NULL, meta BLOB NOT NULL)",
    "CREATE INDEX of_parent ON entries(parent)",
    "CREATE INDEX leaves ON entries(value) WHERE pinned=0 AND children=0",
    "CREATE INDEX leaves_of ON entries(owner, value) WHERE pinned=0 AND children=0",
    "CREATE INDEX by_name ON entries(name)",
    "CREATE INDEX by_expiry ON entries(expires) WHERE expires IS NOT NULL",
    "CREATE TABLE reserved(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, process TEXT NOT NULL,"
    " owner TEXT, size INTEGER NOT NULL)",  # damaged files are no owner's
    "CREATE TABLE facts(name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    "INSERT INTO facts VALUES ('clock', 0.0), ('bytes', 0.0)",
    "CREATE TABLE owners(owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    *(
        f"CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN"
        f" UPDATE facts SET value=value{sign}{row}.size WHERE name='bytes';"
        f" INSERT INTO owners SELECT {row}.owner, {sign}{row}.size WHERE {row}.owner IS NOT NULL"
        f" ON CONFLICT(owner) DO UPDATE SET bytes=bytes+excluded.bytes;"
        f" DELETE FROM owners WHERE owner={row}.owner AND bytes=0; END"
        for table in ("entries", "reserved")
        for event, sign, row in (("INSERT", "+", "NEW"), ("DELETE", "-", "OLD"))
    ),
    *(
        f"CREATE TRIGGER children_{event} AFTER {event} ON entries BEGIN"
        f" UPDATE entries SET children=children{sign}1 WHERE key={row}.parent; END"
        for event, sign, row in (("INSERT", "+", "NEW"), ("DELETE", "-", "OLD"))
    ),
)
COLUMNS = "key, parent, identity, name, seal, size, value, hits, worth, priority, pinned, expires, owner, meta, id"
LEAVES = "SELECT key, size, value FROM entries WHERE pinned=0 AND children=0 {} ORDER BY value LIMIT 64"
Do = Callable[..., sqlite3.Cursor]
Why = Literal["evicted", "expired", "removed", "damaged", "gone"]

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
SPARE = 8  # pages that are left for changes that store nothing
DAMAGED = "damaged"  # in place of a process: bytes of files that were found damaged


class IndexDamaged(Exception):
    """The index cannot be read. The files have all that it had, but for how often they were used."""


class TooLittle(Exception):
    """The cap is too small."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry. `meta` is its sealed description (see `codec`), if its content is a file; `name` is that of its
    content, `worth` the tokens that need not be computed where it is found."""

    key: bytes
    parent: bytes | None
    identity: bytes
    name: str
    seal: bytes
    size: int
    meta: bytes
    worth: int
    retention: Retention
    value: float = 0.0
    hits: int = 1
    id: int = 0

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        retention: Retention,
        name: str,
        size: int,
        *,
        identity: bytes = b"",
        seal: bytes = b"",
        meta: bytes = b"",
    ) -> "Row":
        span = snapshot.span
        return cls(snapshot.key, snapshot.parent, identity, name, seal, size, meta, len(span), retention)


class Dropped(NamedTuple):
    """Content that is going to be deleted: its bytes are reserved until then. `key`: that of its entry, if any."""

    name: str
    size: int
    owner: str | None
    key: bytes | None = None


def parents_first(rows: Iterable[Row]) -> list[Row]:
    """Each row after the one that it continues, if that is there."""
    found = list(rows)
    keys, after = {row.key for row in found}, defaultdict[bytes, list[Row]](list)
    order: list[Row] = []
    for row in found:
        (after[row.parent] if row.parent in keys else order).append(row)
    for row in order:  # which grows while it is read
        order += after.pop(row.key, [])
    return order


def growth(meta: int) -> int:
    """Bytes that an entry with a description of so many adds to the file of an index and its journal, at most."""
    return _taken(meta // (PAGE - 16) + 8)


def _taken(pages: int) -> int:
    return 2 * pages * (PAGE + 8)


class Contents(Protocol):
    """What an index needs of its tier (see `tier.Tier`)."""

    def delete(self, names: list[str]) -> Iterable[str]: ...
    def made(self, snapshot: Snapshot, retention: Retention) -> None: ...
    def gone(self, key: bytes, why: Why) -> None: ...


class Index:
    """The index of one tier, in the file `path`, which is created if it is not there; None: in memory."""

    def __init__(
        self,
        path: Path | None,
        cap: int,
        tier: Contents,
        *,
        process: str = "",
        quota: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all. `process`: the name of this one among
        those that share the file.

        Raises `IndexDamaged`, `TooLittle`, and `OSError` and `sqlite3.Error` where it can be neither read nor made.
        """
        self.cap, self._quota = cap, None if quota is None or quota >= cap else quota
        self._tier, self._process, self._clock = tier, process, clock
        self._in_file, self._lock = path is not None, threading.RLock()
        if path is not None:
            if cap < JOURNAL + _taken(18 + SPARE):
                raise TooLittle(f"{cap} bytes are too few: the index alone takes {JOURNAL + _taken(18 + SPARE)}")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        where = ":memory:" if path is None else path
        self._connection = sqlite3.connect(where, timeout=WAIT, isolation_level=None, check_same_thread=False)
        self._close = weakref.finalize(self, self._connection.close)
        self._close.atexit = False
        try:
            self._open()
        except BaseException:
            self._close()
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

    @contextmanager
    def _removing(self, why: Why) -> Generator[tuple[Do, list[Dropped]]]:
        """A transaction, and a list for what it drops, which is reported, and then deleted. What could not be deleted
        is left in the list: its bytes stay reserved."""
        dropped: list[Dropped] = []
        with self._lock:
            with self.transaction() as do:
                self._limit(do)
                yield do, dropped
            for one in dropped:
                if one.key is not None:
                    self._tier.gone(one.key, why)
        gone = self.erase(one.name for one in dropped)
        dropped[:] = [one for one in dropped if one.name not in gone]

    # -- looking ------------------------------------------------------------------------------------------------

    def rows(self, identity: bytes | None = None, *, after: int = 0) -> list[Row]:
        """The entries of one identity, or of all, that have not expired, in the order in which they were made, after
        the one with an id."""
        which, values = ("", ()) if identity is None else (" AND identity=?", (identity,))
        return self._rows(f"id>?{which} ORDER BY id", after, *values)

    def beginnings(self, other_than: bytes, most: int) -> list[Row]:
        """Up to so many entries of other identities that begin a sequence."""
        return self._rows("identity<>? AND parent IS NULL LIMIT ?", other_than, most)

    def find(self, key: bytes) -> Row | None:
        """An entry that has not expired."""
        return next(iter(self._rows("key=?", key)), None)

    def _rows(self, which: str, *values: Any) -> list[Row]:
        now = self._clock()
        found = map(_row_of, self._read(f"SELECT {COLUMNS} FROM entries WHERE {which}", *values))
        return [row for row in found if not row.retention.expired(now)]

    @property
    def complete(self) -> bool:
        """Whether all files have rows: False until `adopt` of a new index."""
        return bool(self._read("SELECT 1 FROM facts WHERE name='complete'"))

    def has(self, name: str) -> bool:
        """Whether an entry has the content of this name."""
        return bool(self._read("SELECT 1 FROM entries WHERE name=?", name))

    def names(self) -> set[str]:
        """The names of the contents of all entries."""
        return {name for (name,) in self._read("SELECT name FROM entries")}

    def reserved(self) -> list[tuple[str, str]]:
        """The name and process of all that was reserved."""
        return [(name, process) for name, process in self._read("SELECT name, process FROM reserved")]

    def size(self) -> int:
        """Bytes of all entries, reserved, and those that the index takes at most."""
        with self._lock:
            return _bytes(self._connection.execute) + self._own(self._connection.execute)

    def _read(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    # -- bytes --------------------------------------------------------------------------------------------------

    def reserve(self, name: str, n: int, owner: str, parent: bytes | None = None) -> bool:
        """Reserve `n` bytes for content that is going to be written; without a name, only make them free.

        Where too few are free, damaged files and entries of the lowest values that no other one continues are dropped,
        but for `parent`, without which the new one would be of no use.
        False if too few can be made free, and nothing has changed; or where content could not be deleted.
        """
        while True:
            with self._removing("evicted") as (do, dropped):
                do("SAVEPOINT dropped")
                found = self._make_room(do, n, owner, parent)
                if found is None:
                    do("ROLLBACK TO dropped")
                    return False
                if not found:
                    if name:
                        self._limit(do, n)
                        _reserve(do, self._process, Dropped(name, n, owner))
                    return True
                dropped += found
            if dropped:
                return False

    def _make_room(self, do: Do, n: int, owner: str, parent: bytes | None) -> list[Dropped] | None:
        dropped: list[Dropped] = []
        while True:
            over = _bytes(do) + n - sum(one.size for one in dropped) + self._own(do, SPARE) - self.cap
            of_owner = self._over_quota(do, n - sum(one.size for one in dropped if one.owner == owner), owner)
            if over <= 0 and of_owner <= 0:
                return dropped
            evicted = self._damaged(do, over) if over > 0 else []
            evicted = evicted or self._evict(do, max(of_owner, 0) or over, owner if of_owner > 0 else None, parent)
            if not evicted and not _vacuum(do):
                return None
            dropped += evicted

    def _over_quota(self, do: Do, n: int, owner: str) -> int:
        """Bytes that an owner would have over its quota if `n` more were reserved."""
        return 0 if self._quota is None or n <= 0 else _bytes_of(do, owner) + n - self._quota

    def _own(self, do: Do, spare: int = 0) -> int:
        """Bytes that the index and its journal take at most, with its present pages and so many more."""
        return _taken(_pages(do) + spare) + JOURNAL if self._in_file else 0

    def _damaged(self, do: Do, n: int) -> list[Dropped]:
        """Drop damaged files, the oldest first, until `n` bytes are free or none is left."""
        dropped: list[Dropped] = []
        for found in do("SELECT name, size, owner FROM reserved WHERE process=? ORDER BY id", (DAMAGED,)).fetchall():
            if n <= 0:
                break
            dropped.append(Dropped(*found))
            do("UPDATE reserved SET process=? WHERE name=?", (self._process, dropped[-1].name))
            n -= dropped[-1].size
        return dropped

    def _evict(self, do: Do, n: int, owner: str | None, parent: bytes | None) -> list[Dropped]:
        """Drop entries that nothing continues, of one owner or of all, the lowest values first, until `n` bytes are
        free or 64 are dropped."""
        evicted: list[Dropped] = []
        leaves = do(LEAVES.format("" if owner is None else "AND owner=?"), () if owner is None else (owner,))
        for key, size, worth in leaves.fetchall():
            if n <= 0:
                break
            if key == parent:
                continue
            evicted += _drop(do, self._process, "key=?", key)
            do("UPDATE facts SET value=max(value,?) WHERE name='clock'", (worth,))
            n -= size
        return evicted

    def erase(self, names: Iterable[str]) -> set[str]:
        """Delete contents, and give back their bytes; returns what is gone. The bytes of others stay reserved until
        this process has ended, or erases them."""
        names = list(names)
        gone = set(self._tier.delete(names)) if names else set[str]()
        if gone:
            self.release(gone)
        return gone

    def release(self, names: Iterable[str]) -> None:
        """Give back what was reserved for contents that are not there any more."""
        with self.transaction() as do:
            for name in names:
                do("DELETE FROM reserved WHERE name=?", (name,))

    def _limit(self, do: Do, n: int = 0) -> None:
        """Give SQLite no more pages than leave `n` bytes."""
        if self._in_file:
            left = self.cap - _bytes(do) - n - JOURNAL
            do(f"PRAGMA max_page_count={max(left // _taken(1), _pages(do))}")

    # -- entries ------------------------------------------------------------------------------------------------

    def enter(self, row: Row, snapshot: Snapshot) -> bool:
        """Make an entry of content whose bytes were reserved. False if there is one of its key: nothing has changed but
        its retention then."""
        with self._lock:
            with self.transaction() as do:
                if self._renew(do, row.key, row.retention):
                    return False
                do("DELETE FROM reserved WHERE name=?", (row.name,))
                self._limit(do, row.size)
                _insert(do, row)
            self._tier.made(snapshot, row.retention)
            return True

    def adopt(self, rows: Iterable[Row], drop: Callable[[Row], object]) -> None:
        """Make entries of the files that there are, as long as they and the index are within the cap, and `drop` the
        others. The index is written when all have been dropped."""
        with self.transaction() as do:
            used, keys = _bytes(do), set[bytes]()
            for row in rows:
                if row.key in keys or used + row.size + self._own(do, SPARE) + growth(len(row.meta)) > self.cap:
                    drop(row)
                    continue
                _insert(do, row)
                used += row.size
                keys.add(row.key)
            do("INSERT OR REPLACE INTO facts VALUES ('complete', 1.0)")

    def forget(self, names: Iterable[str]) -> int:
        """Remove entries whose contents are gone; returns how many there were."""
        with self._lock:
            with self.transaction() as do:
                gone = [
                    key for name in names for (key,) in do("DELETE FROM entries WHERE name=? RETURNING key", (name,))
                ]
            for key in gone:
                self._tier.gone(key, "gone")
        return len(gone)

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
        if found is None:
            return False
        row = _row_of(found)
        kept = stronger(row.retention, retention)
        self._limit(do)
        worth = row.value
        if kept.priority != row.retention.priority:
            worth = _worth(do, row.hits, row.worth, row.size, kept.priority)
        do(
            "UPDATE entries SET priority=?, pinned=?, expires=?, value=? WHERE key=?",
            (kept.priority, kept.pinned, kept.expires, worth, key),
        )
        return True

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were read: their values rise."""
        with self.transaction() as do:
            self._limit(do)
            for key in keys:
                found = do("SELECT hits, worth, size, priority FROM entries WHERE key=?", (key,)).fetchone()
                if found is not None:
                    hits = found[0] + 1
                    do("UPDATE entries SET hits=?, value=? WHERE key=?", (hits, _worth(do, hits, *found[1:]), key))

    def remove(self, keys: Iterable[bytes], why: Why = "removed") -> None:
        """Remove entries, pinned ones too, and delete their contents."""
        with self._removing(why) as (do, dropped):
            dropped += [one for key in keys for one in _drop(do, self._process, "key=?", key)]

    def expire(self) -> None:
        """Remove what has expired."""
        now = self._clock()
        if self._read("SELECT 1 FROM entries WHERE expires<=? LIMIT 1", now):
            with self._removing("expired") as (do, dropped):
                dropped += _drop(do, self._process, "expires<=?", now)

    def quarantine(self, name: str, most: int, share: int) -> list[str]:
        """Remove an entry whose file is damaged, and count its bytes as those of a damaged file. Of these `most` are
        kept, up to 1/`share` of the cap: the others are returned, to be erased."""
        with self.transaction() as do:
            self._limit(do)
            _drop(do, DAMAGED, "name=?", name)
            found = do("SELECT name, size FROM reserved WHERE process=? ORDER BY id DESC", (DAMAGED,)).fetchall()
            sizes = [size for _, size in found]
            old = [name for i, (name, _) in enumerate(found) if i >= most or sum(sizes[: i + 1]) > self.cap // share]
            for one in old:
                do("UPDATE reserved SET process=? WHERE name=?", (self._process, one))
            return old

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            self._close()


def _row_of(found: Sequence[Any]) -> Row:
    key, parent, identity, name, seal, size, value, hits, worth, priority, pinned, expires, owner, meta, id = found
    retention = Retention(priority, bool(pinned), expires, owner)
    return Row(key, parent, identity, name, seal, size, meta, worth, retention, value, hits, id)


def _insert(do: Do, row: Row) -> None:
    kept = row.retention
    worth = _worth(do, row.hits, row.worth, row.size, kept.priority)
    do(
        f"INSERT INTO entries({COLUMNS}, children) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,NULL,"
        " (SELECT count(*) FROM entries WHERE parent=?))",
        (row.key, row.parent, row.identity, row.name, row.seal, row.size, worth, row.hits, row.worth,
         kept.priority, kept.pinned, kept.expires, kept.owner, row.meta, row.key),
    )  # fmt: skip


def _worth(do: Do, hits: int, saves: int, costs: int, priority: int) -> float:
    (clock,) = do("SELECT value FROM facts WHERE name='clock'").fetchone()
    return value(clock, hits=hits, saves=saves, costs=costs, priority=priority)


def _reserve(do: Do, process: str, one: Dropped) -> None:
    values = (one.name, process, None if process == DAMAGED else one.owner, one.size)
    do("INSERT INTO reserved(name, process, owner, size) VALUES (?,?,?,?)", values)


def _drop(do: Do, process: str, which: str, what: Any) -> list[Dropped]:
    """Remove entries, and reserve their bytes for a process, which deletes their contents."""
    found = do(f"DELETE FROM entries WHERE {which} RETURNING name, size, owner, key", (what,)).fetchall()
    gone = [Dropped(*one) for one in found]
    for one in gone:
        _reserve(do, process, one)
    return gone


def _vacuum(do: Do) -> bool:
    """Return unused pages to the file system; False if there are none."""
    (unused,) = do("PRAGMA freelist_count").fetchone()
    do("PRAGMA incremental_vacuum").fetchall()
    return unused > 0


def _pages(do: Do) -> int:
    return do("PRAGMA page_count").fetchone()[0]


def _bytes(do: Do) -> int:
    """Of all entries, and reserved: triggers keep the sum."""
    return int(do("SELECT value FROM facts WHERE name='bytes'").fetchone()[0])


def _bytes_of(do: Do, owner: str) -> int:
    found = do("SELECT bytes FROM owners WHERE owner=?", (owner,)).fetchone()
    return 0 if found is None else found[0]
