"""json_text: encodes responses as JSON, whole or in chunks, and makes text from clients safe to print."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as json_string
from uuid import uuid4

CHUNK_ITEMS = 64  # values of a list, those of lists in it counted one by one


def to_json(value: object) -> bytes:
    """ASCII only, on one line: some clients treat U+2028 and U+0085 as the end of a line of a stream."""
    return _ENCODER.encode(value).encode("ascii")


class JsonTemplate:
    """What `write` returns, which contains the JSON of strings that vary: what is constant is encoded once.

    `write` is called once, with a mark for each of `holes`, which it encodes as the string that it is: it must return
    the same for the same arguments. `fill` returns what it would return, and takes whole numbers, too.
    """

    def __init__(self, write: Callable[..., bytes], *holes: str) -> None:
        marks = {name: uuid4().hex for name in holes}
        names = {f'"{mark}"'.encode(): name for name, mark in marks.items()}
        parts = re.split(b"(" + b"|".join(names) + b")", write(**marks))
        self._parts = [names.get(part, part) for part in parts]  # of a hole its name, and the bytes between

    def fill(self, **values: str | int) -> bytes:
        return b"".join([part if isinstance(part, bytes) else _json_scalar(values[part]) for part in self._parts])


def _json_scalar(value: str | int) -> bytes:
    return (json_string(value) if isinstance(value, str) else repr(value)).encode()


class EncodedList:
    """A list of values that are encoded when they are added, once, however often it is written by `json_chunks`."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[bytes] = ()) -> None:
        """`items`: each the JSON of a value."""
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def extend(self, items: Sequence[bytes]) -> None:
        self._items += items

    def copy(self) -> "EncodedList":
        """It does not change when more is added here."""
        return EncodedList(self._items)

    def json(self) -> bytes:
        return b"[" + b",".join(self._items) + b"]"


def json_chunks(value: object) -> Iterator[bytes]:
    """The bytes of `to_json(value)` in chunks. An iterator is written as a list, of up to `CHUNK_ITEMS` values per
    chunk. An `EncodedList` may be in dictionaries, and in lists of these."""
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
    elif isinstance(value, EncodedList):
        yield value.json()
    elif isinstance(value, Iterator):
        yield from _list_chunks(value)
    else:
        yield to_json(value)


def json_size(value: object) -> int:
    """Bytes of `to_json(value)`."""
    return sum(map(len, json_chunks(value)))


def _list_chunks(items: Iterator[object]) -> Iterator[bytes]:
    yield b"["
    separator = b""
    while some := list(_few(items)):
        yield separator + to_json(some)[1:-1]
        separator = b","
    yield b"]"


def _few(items: Iterator[object]) -> Iterator[object]:
    """The next items: `CHUNK_ITEMS` values of them, or up to one that has more, such as a vector. An item that a long
    response has for each token may take long to make, too: its likeliest other tokens are decoded."""
    left = CHUNK_ITEMS
    for item in items:
        yield item
        values = item.values() if isinstance(item, dict) else (item,)
        left -= max(1, sum(len(value) if isinstance(value, list | tuple) else 1 for value in values))
        if left <= 0:
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
