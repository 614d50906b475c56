"""record: the description of what was read out of a claim, and as bytes (JSON).

What is read may be from an untrusted file: `from_bytes` checks types, and `claims.write_back` checks what they mean
before it allocates anything.
"""

from dataclasses import dataclass

import msgspec

from kvcellar.errors import BadRequest
from kvcellar.memory.spans import Span


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions of a group whose cells are exported together; in an input group, indices into the input."""

    group: str
    span: Span


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint: per bounded group its window, as (index of a stretch, span in it) in order of position."""

    pos: int
    windows: tuple[tuple[str, tuple[tuple[int, Span], ...]], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Description of a claim's chunks. `shape` is the digest of the memory's groups (`readout.shape_of`)."""

    shape: str
    span: Span
    stretches: tuple[Stretch, ...]
    checkpoints: tuple[Mark, ...]
    ahead: tuple[Span, ...] = ()
    derived: int | None = None
    digest: str | None = None


def to_bytes(record: Record) -> bytes:
    return msgspec.json.encode(record)


def from_bytes(content: bytes) -> Record:
    """Raises `BadRequest` for what is no record."""
    try:
        return msgspec.json.decode(content, type=Record)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"a record that was stored cannot be read: {type(error).__name__}") from error


def positions(content: bytes) -> tuple[int, ...]:
    """Of the checkpoints of a record. Raises `BadRequest`."""
    return tuple(mark.pos for mark in from_bytes(content).checkpoints)
