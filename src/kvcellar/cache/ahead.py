"""ahead: which spans of a sequence were read with their queries looking ahead. Nobody parts one afterwards.

Always true:
  * the spans of a sequence are in order, do not overlap, are not empty, and end no later than the sequence;
  * a sequence without such spans is not here.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from kvcellar.cache.parts import Part
from kvcellar.plan import Batch
from kvcellar.spans import Span


class Ahead(Part):
    """The spans of every sequence."""

    def __init__(self) -> None:
        self._of: dict[int, list[Span]] = {}

    def of(self, seq: int) -> tuple[Span, ...]:
        return tuple(self._of.get(seq, ()))

    def deepest(self, seq: int, pos: int) -> int:
        """`pos`, or where the span begins that a cut at `pos` would part."""
        spans = self._of.get(seq)
        if spans is None:
            return pos
        at = bisect_right(spans, pos, key=lambda span: span.start) - 1
        return spans[at].start if at >= 0 and pos < spans[at].end else pos

    def can_close_over(self, seq: int, gone: Span) -> bool:
        """Not if it would leave a part of a span."""
        return self.deepest(seq, gone.start) == gone.start and self.deepest(seq, gone.end) == gone.end

    def add(self, seq: int, spans: Iterable[Span]) -> None:
        """Spans behind all that are known."""
        if new := list(spans):
            self._of.setdefault(seq, []).extend(new)

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        """Spans that are not kept are nobody's."""
        for feed, count in zip(batch.feeds, counts, strict=True):
            end = feed.pos.start + count
            self.add(feed.seq, [span for span in batch.ahead(feed.seq) if span.end <= end])

    def fork(self, src: int, dst: int, kept: int) -> None:
        self._set(dst, [span for span in self._of.get(src, ()) if span.end <= kept])

    def cut(self, seq: int, kept: int) -> None:
        self._set(seq, [span for span in self._of.get(seq, ()) if span.end <= kept])

    def close_over(self, seq: int, gone: Span) -> None:
        kept = [span for span in self._of.get(seq, ()) if span.end <= gone.start]
        for span in self._of.get(seq, ()):
            if span.start >= gone.end:
                kept.append(Span(span.start - len(gone), span.end - len(gone)))
        self._set(seq, kept)

    def drop(self, seq: int) -> None:
        self._of.pop(seq, None)

    def _set(self, seq: int, spans: list[Span]) -> None:
        self._of.pop(seq, None)
        if spans:
            self._of[seq] = spans

    def check(self, length: Callable[[int], int]) -> None:
        """Assert everything that is always true, where `length(seq)` is how many tokens a sequence has."""
        for seq, spans in self._of.items():
            assert spans, f"sequence {seq} is here without a span"
            at = 0
            for span in spans:
                assert len(span) and at <= span.start, f"spans of sequence {seq} overlap: {[str(s) for s in spans]}"
                at = span.end
            assert at <= length(seq), f"{spans[-1]} reaches beyond the {length(seq)} tokens of sequence {seq}"
