"""rows: the tables of the index of a store, and their rows."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcellar.policy import value
from kvcellar.retention import Retention
from kvcellar.tiers.codec import Reader

VERSION = 3
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
_COUNTED = "UPDATE facts SET value=value{} WHERE name='bytes'"
TABLES = (
    "CREATE TABLE entries("
    " id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB, identity BLOB NOT NULL, name TEXT NOT NULL,"
    " seal BLOB NOT NULL, size INTEGER NOT NULL, value REAL NOT NULL, hits INTEGER NOT NULL, worth INTEGER NOT NULL,"
    " saves INTEGER, priority INTEGER NOT NULL, pinned INTEGER NOT NULL, expires REAL, owner TEXT NOT NULL,"
    " meta BLOB NOT NULL)",
    "CREATE INDEX of_parent ON entries(parent)",
    "CREATE INDEX by_value ON entries(pinned, value)",
    "CREATE INDEX by_owner ON entries(owner, size)",
    "CREATE INDEX by_name ON entries(name)",
    "CREATE INDEX by_expiry ON entries(expires) WHERE expires IS NOT NULL",
    "CREATE TABLE reserved(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, process TEXT NOT NULL,"
    " owner TEXT NOT NULL, size INTEGER NOT NULL)",
    "CREATE TABLE facts(name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    "INSERT INTO facts VALUES ('clock', 0.0), ('bytes', 0.0)",
    *(
        f"CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN {_COUNTED.format(change)}; END"
        for table in ("entries", "reserved")
        for event, change in (("INSERT", "+NEW.size"), ("DELETE", "-OLD.size"))
    ),
)
COLUMNS = "key, parent, identity, name, seal, size, value, hits, worth, saves, priority, pinned, expires, owner, meta"
Do = Callable[..., sqlite3.Cursor]


@dataclass(frozen=True, slots=True)
class Row:
    """An entry. `meta` is its sealed description (see `codec`), `name` that of its file, `worth` the tokens that need
    not be computed where it is found."""

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

    def expired(self, now: float) -> bool:
        return self.retention.expires is not None and self.retention.expires <= now


class Dropped(NamedTuple):
    """A file that is going to be deleted: its bytes are reserved until then. `key`: that of its entry, if any."""

    name: str
    size: int
    owner: str
    key: bytes | None = None


def insert(do: Do, row: Row) -> None:
    (clock,) = do("SELECT value FROM facts WHERE name='clock'").fetchone()
    kept = row.retention
    worth = value(clock, hits=row.hits, saves=row.worth, costs=row.size, priority=kept.priority)
    do(
        f"INSERT INTO entries({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (row.key, row.parent, row.identity, row.name, row.seal, row.size, worth, row.hits, row.worth, kept.saves,
         kept.priority, kept.pinned, kept.expires, kept.owner, row.meta),
    )  # fmt: skip


def row_of_file(name: str, reader: Reader) -> Row:
    header = reader.header
    worth = header.retention.saves or len(header.meta) // 8  # its tokens are part of its description, 8 bytes each
    return Row(
        header.key, header.parent, header.identity, name, reader.seal, header.end, header.meta, worth, header.retention
    )


def row_of(found: Sequence[Any]) -> Row:
    key, parent, identity, name, seal, size, value, hits, worth, saves, priority, pinned, expires, owner, meta = found
    retention = Retention(saves, priority, bool(pinned), expires, owner)
    return Row(key, parent, identity, name, seal, size, meta, worth, retention, value, hits)


def parents_first(rows: Iterable[Row]) -> list[Row]:
    """Each row after the one that it continues."""
    found = list(rows)
    keys, after = {row.key for row in found}, defaultdict[bytes, list[Row]](list)
    order: list[Row] = []
    for row in found:
        (after[row.parent] if row.parent in keys else order).append(row)
    for row in order:  # which grows while it is read
        order += after.pop(row.key, [])
    return order
