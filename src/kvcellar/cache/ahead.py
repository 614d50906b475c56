"""ahead: which spans of a text were read with their queries looking ahead. None of them is parted afterwards. No torch.

Spans of a text are in order, do not overlap, and are not empty.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kvcellar.spans import Span

Spans = tuple[Span, ...]


def around(spans: Sequence[Span], pos: int) -> Span | None:
    """The span that a cut at `pos` would part."""
    at = bisect_right(spans, pos, key=lambda span: span.start) - 1
    return spans[at] if at >= 0 and spans[at].start < pos < spans[at].end else None


def deepest(spans: Sequence[Span], pos: int) -> int:
    """`pos`, or where the span begins that a cut at `pos` would part."""
    span = around(spans, pos)
    return pos if span is None else span.start


def until(spans: Sequence[Span], end: int) -> Spans:
    """Those of a text that is cut at `end`."""
    return tuple(span for span in spans if span.end <= end)


def closed_over(spans: Sequence[Span], gone: Span) -> Spans:
    """Those of a text from which `gone` was removed, which parts none of them."""
    moved = (Span(span.start - len(gone), span.end - len(gone)) for span in spans if span.start >= gone.end)
    return (*until(spans, gone.start), *moved)


def check(spans: Sequence[Span], length: int) -> None:
    """Assert that these are the spans of a text of so many tokens."""
    at = 0
    for span in spans:
        assert len(span), f"{span} is empty"
        assert at <= span.start, f"spans overlap: {[str(span) for span in spans]}"
        at = span.end
    assert at <= length, f"{spans[-1]} reaches beyond {length} tokens"
