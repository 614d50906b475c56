"""record: the description of what was read out of a claim, as bytes (JSON).

What is read may be from an untrusted file: `from_bytes` checks types here, and `claims.write_back` checks what they
mean before it allocates anything.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from kvcellar.errors import BadRequest
from kvcellar.memory.kv.readout import Mark, Record, Stretch
from kvcellar.memory.spans import Span

T = TypeVar("T")


def to_bytes(record: Record) -> bytes:
    return json.dumps(
        {
            "shape": record.shape,
            "span": _pair(record.span),
            "stretches": [[one.group, *_pair(one.span)] for one in record.stretches],
            "checkpoints": [
                [mark.pos, [[name, [[at, *_pair(span)] for at, span in pieces]] for name, pieces in mark.windows]]
                for mark in record.checkpoints
            ],
            "ahead": [_pair(span) for span in record.ahead],
            "derived": record.derived,
            "digest": record.digest,
        }
    ).encode()


def from_bytes(content: bytes) -> Record:
    """Raises `BadRequest` for what `to_bytes` did not return."""
    try:
        found = json.loads(content)
        return Record(
            _checked(found["shape"], str),
            _span(*found["span"]),
            tuple(Stretch(_checked(group, str), _span(*ends)) for group, *ends in found["stretches"]),
            tuple(_mark(*mark) for mark in found["checkpoints"]),
            tuple(_span(*ends) for ends in found["ahead"]),
            None if found["derived"] is None else _checked(found["derived"], int),
            None if found["digest"] is None else _checked(found["digest"], str),
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise BadRequest(f"a record that was stored cannot be read: {type(error).__name__}") from error


def positions(content: bytes) -> tuple[int, ...]:
    """Of the checkpoints of a record. Raises `BadRequest`."""
    return tuple(mark.pos for mark in from_bytes(content).checkpoints)


def _pair(span: Span) -> tuple[int, int]:
    return span.start, span.end


def _mark(pos: Any, windows: Any) -> Mark:
    found = tuple(
        (_checked(name, str), tuple((_checked(at, int), _span(*ends)) for at, *ends in pieces))
        for name, pieces in windows
    )
    return Mark(_checked(pos, int), found)


def _span(start: Any, end: Any) -> Span:
    return Span(_checked(start, int), _checked(end, int))


def _checked(value: Any, kind: Callable[..., T]) -> T:
    if type(value) is not kind:
        raise TypeError
    return value
