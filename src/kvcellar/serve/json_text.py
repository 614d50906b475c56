"""json_text: encodes responses as JSON, whole or in chunks, and makes text from clients safe to print."""

import json
from collections.abc import Iterator
from itertools import islice

CHUNK_ITEMS = 64  # of a list; fewer if they are lists themselves


def to_json(value: object) -> bytes:
    """ASCII only, on one line: some clients treat U+2028 and U+0085 as the end of a line of a stream."""
    return _ENCODER.encode(value).encode("ascii")


def json_chunks(value: object) -> Iterator[bytes]:
    """The bytes of `to_json(value)` in chunks. An iterator is written as a list, of up to `CHUNK_ITEMS` items per
    chunk."""
    if isinstance(value, dict):
        yield b"{"
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"") + to_json(key) + b":"
            yield from json_chunks(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_chunks(item)
        yield b"]"
    elif isinstance(value, Iterator):
        yield from _list_chunks(value)
    else:
        yield to_json(value)


def _list_chunks(items: Iterator[object]) -> Iterator[bytes]:
    yield b"["
    separator = b""
    while some := list(_few(items)):
        yield separator + to_json(some)[1:-1]
        separator = b","
    yield b"]"


def _few(items: Iterator[object]) -> Iterator[object]:
    """The next items: `CHUNK_ITEMS` of them, or up to one that has a longer list, such as a vector."""
    for item in islice(items, CHUNK_ITEMS):
        yield item
        values = item.values() if isinstance(item, dict) else (item,)
        if any(isinstance(value, list | tuple) and len(value) > CHUNK_ITEMS for value in values):
            return


def _listed(value: object) -> object:
    """Encodes an iterator as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_listed)  # `dumps` would make one each time


def printable(text: str, limit: int = 200) -> str:
    """`text` made safe for logs and messages: control characters escaped, cut to `limit` characters."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
