"""known: the rows of a store's index that this process has seen, so that reading an entry waits for no transaction.

It may be out of date where other processes share the store: a row says where to look. That a file is the one of its
row, and whole, is known from the file; entries are only kept longer than a row says, never shorter; and what is not
found where a row says is looked up in the index.

Always true:
  * a row is here under its key, without its description, which the file has, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvcellar.retention import Retention, stronger
from kvcellar.tiers.rows import Row


class Known:
    """May be used by any thread: each change is one operation of a dict."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rows: dict[bytes, Row] = {}

    def find(self, key: bytes) -> Row | None:
        """A row without its description. None where it is not known, or has expired unless it is kept longer."""
        row = self._rows.get(key)
        return None if row is None or row.expired(self._clock()) else row

    def add(self, row: Row) -> None:
        self._rows[row.key] = replace(row, meta=b"")

    def keys(self) -> set[bytes]:
        return set(self._rows)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """These entries are kept at least as long as `retention` says."""
        for key in keys:
            if (row := self._rows.get(key)) is not None:
                self._rows[key] = replace(row, retention=stronger(row.retention, retention))

    def forget(self, key: bytes) -> None:
        self._rows.pop(key, None)

    def check(self) -> None:
        """Assert what is always true."""
        assert all(row.key == key and not row.meta for key, row in self._rows.items())
