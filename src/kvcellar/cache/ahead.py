"""ahead: the spans of a text whose queries looked ahead, which are never split afterwards. No torch.

Spans of a text are in order, do not overlap, and are not empty.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kvcellar.spans import Span

Spans = tuple[Span, ...]


def around(spans: Sequence[Span], pos: int) -> Span | None:
    """The span that `pos` is inside of; None if there is none."""
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


def check(spans: Sequence[Span], length: int) -> None:
    """Assert that these are spans of a text of `length` tokens."""
    at = 0
    for span in spans:
        assert len(span), f"{span} is empty"
        assert at <= span.start, f"spans overlap: {[str(span) for span in spans]}"
        at = span.end
    assert at <= length, f"{spans[-1]} reaches beyond {length} tokens"
