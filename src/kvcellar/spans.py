"""spans: half-open ranges of positions, printed as `[a,b)`, and the whole numbers that they are made of."""

import operator
from dataclasses import dataclass

from kvcellar.errors import BadRequest, shown

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
