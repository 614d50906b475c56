"""json_text: encodes responses as JSON, whole or in chunks, and makes text from clients safe to print."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from json.encoder import encode_basestring_ascii as json_string

from msgspec import UNSET, Raw, Struct
from msgspec.json import Encoder

CHUNK_ITEMS = 64  # values of a list, those of lists in it counted one by one


def to_json(value: object) -> bytes:
    """Printable ASCII only: some clients treat U+2028 and U+0085 as the end of a line of a stream. An iterator is
    written as a list."""
    try:
        found = _ENCODER.encode(value).replace(b"\x7f", b"\\u007f")
    except UnicodeEncodeError:  # half of a surrogate pair, in a name that a model wrote, or that of a file
        return json.dumps(value, default=_plain, separators=(",", ":")).encode().replace(b"\x7f", b"\\u007f")
    return found if found.isascii() else found.decode().encode("ascii", _ESCAPED)


def json_chunks(value: object) -> Iterator[bytes]:
    """The bytes of `to_json(value)` in chunks. An iterator is written as a list, of up to `CHUNK_ITEMS` values per
    chunk."""
    if isinstance(value, str):
        yield to_json(value) if value.isascii() else json_string(value).encode()
    elif isinstance(value, dict | Struct):
        yield b"{"
        for number, (key, item) in enumerate(_items(value)):
            yield (b"," if number else b"") + to_json(key) + b":"
            yield from json_chunks(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | Struct):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_chunks(item)
        yield b"]"
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
        values = [one for _, one in _items(item)] if isinstance(item, dict | Struct) else [item]
        left -= max(1, sum(len(value) if isinstance(value, list | tuple) else 1 for value in values))
        if left <= 0:
            return


def _items(value: dict[str, object] | Struct) -> list[tuple[str, object]]:
    """What a JSON object has."""
    if isinstance(value, dict):
        return [*value.items()]
    named = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    found = ((name, getattr(value, attribute)) for name, attribute in named)
    return [one for one in found if one[1] is not UNSET]


def _plain(value: object) -> object:
    """What `json` does not know. It is not for iterators: they were read when msgspec failed."""
    if isinstance(value, Struct):
        return dict(_items(value))
    if isinstance(value, Raw):
        return json.loads(bytes(value))
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded again")


def _listed(value: object) -> object:
    """Encodes an iterator as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Up to the next quote: a call for each run of such characters would be slow. Earlier escapes stay as they are."""
    assert isinstance(error, UnicodeEncodeError)
    end = error.object.index('"', error.start)
    return json_string(error.object[error.start : end])[1:-1].replace("\\\\", "\\"), end


_ENCODER = Encoder(enc_hook=_listed)
_ESCAPED = "kvcellar.json"  # an error handler: what is not ASCII is escaped
codecs.register_error(_ESCAPED, _escaped)


def printable(text: str, limit: int = 200) -> str:
    """`text` made safe for logs and messages: control characters escaped, cut to `limit` characters."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
