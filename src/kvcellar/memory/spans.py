"""spans: half-open ranges of positions, printed as `[a,b)`, the whole numbers that they are made of, and things that
each have a position.

Several spans of one text, such as those whose queries looked ahead, are in order, do not overlap, and are not empty.
"""

import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvcellar.errors import BadRequest, shown

T = TypeVar("T")
_MOST = 2**63 - 1  # of a whole number: what `len` returns, tensors hold and messages print


def whole(number: object, what: str, param: str | None = None) -> int:
    """`number` as a plain int of 64 bits: callers without a type checker pass other integers, numpy's for one. Raises
    `BadRequest` if it is none."""
    try:
        plain = int.__int__(operator.index(number))  # type: ignore[arg-type]  # an int of a subclass as a plain one, too
    except TypeError:
        raise BadRequest(f"{what} is a whole number, not {shown(number)}", param) from None
    if not -_MOST <= plain <= _MOST:
        raise BadRequest(f"{what} is a whole number of at most 63 bits, not {shown(plain)}", param)
    return plain


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Positions from `start` up to, not including, `end`, as plain ints. Raises `BadRequest` (a `ValueError`) unless
    both are whole numbers and 0 <= start <= end."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.end) is not int:
            object.__setattr__(self, "start", whole(self.start, "a position"))
            object.__setattr__(self, "end", whole(self.end, "a position"))
        if not 0 <= self.start <= self.end <= _MOST:
            raise BadRequest(f"not a span: [{shown(self.start)},{shown(self.end)})")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start},{self.end})"


Spans = tuple[Span, ...]


class ByPosition(MutableMapping[int, T]):
    """Things by position, in order of position: the one before a position is found in a logarithm of steps."""

    __slots__ = ("_places", "_things")

    def __init__(self) -> None:
        self._things: dict[int, T] = {}
        self._places: list[int] = []

    def __getitem__(self, pos: int) -> T:
        return self._things[pos]

    def __setitem__(self, pos: int, thing: T) -> None:
        if pos not in self._things:
            insort(self._places, pos)
        self._things[pos] = thing

    def __delitem__(self, pos: int) -> None:
        del self._things[pos]
        del self._places[bisect_left(self._places, pos)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def last(self, upto: int, default: int = 0) -> int:
        """The last position up to `upto`; `default` if there is none."""
        at = bisect_right(self._places, upto)
        return self._places[at - 1] if at else default

    def next(self, after: int) -> int | None:
        """The first position behind `after`; None if there is none."""
        at = bisect_right(self._places, after)
        return self._places[at] if at < len(self._places) else None

    def cut(self, pos: int) -> "ByPosition[T]":
        """Remove what lies behind `pos`; returns it. Costs what is removed."""
        at, behind = bisect_right(self._places, pos), ByPosition[T]()
        behind._places = self._places[at:]
        behind._things = {place: self._things.pop(place) for place in behind._places}
        del self._places[at:]
        return behind


def around(spans: Sequence[Span], pos: int) -> Span | None:
    """Of spans of a text, in order: the one that `pos` is inside of; None if there is none."""
    at = bisect_right(spans, pos, key=lambda span: span.start) - 1
    return spans[at] if at >= 0 and spans[at].start < pos < spans[at].end else None


def deepest(spans: Sequence[Span], pos: int) -> int:
    """`pos`, or the start of the span that it is inside of."""
    span = around(spans, pos)
    return pos if span is None else span.start


def until(spans: Sequence[Span], end: int) -> Spans:
    """The spans that end at `end` or before."""
    return tuple(span for span in spans if span.end <= end)


def closed_over(spans: Sequence[Span], gone: Span) -> Spans:
    """The spans after the removal of `gone`, which splits none of them."""
    moved = (Span(span.start - len(gone), span.end - len(gone)) for span in spans if span.start >= gone.end)
    return (*until(spans, gone.start), *moved)


def reach_back(low: int, parts: Iterable[tuple[int, int]]) -> bool:
    """Whether consecutive spans of a text have all positions from `low` on, as far as they go. They are given from the
    last to the first, each by its start and the first position that it has."""
    for start, first in parts:
        if first > max(start, low):
            return False
        if start <= low:
            return True
    return True


def check_spans(spans: Sequence[Span], length: int) -> None:
    """Assert that these are spans of a text of `length` tokens."""
    at = 0
    for span in spans:
        assert len(span), f"{span} is empty"
        assert at <= span.start, f"spans overlap: {[str(span) for span in spans]}"
        at = span.end
    assert at <= length, f"{spans[-1]} reaches beyond {length} tokens"
