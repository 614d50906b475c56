"""models: the library of the user, and how subcommands print what is in it."""

import os
from datetime import datetime

from kvcellar import places
from kvcellar.library.library import Library


def library() -> Library:
    """`$KVCELLAR_MODELS`, or the directory of the user."""
    return Library(places.models(os.environ))


def size(n: int) -> str:
    """A number of bytes, in three digits."""
    value, unit = float(n), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def date(seconds: float) -> str:
    """Local time, with its offset, as ISO 8601."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their longest cell; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
