"""Spans whose queries see all of the span are never split afterwards."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, NotSupported
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=25)
# Of each sequence and step: how many tokens, and where among them spans begin and end.
STEPS = st.lists(
    st.dictionaries(
        st.integers(0, 2), st.tuples(st.integers(1, 9), st.sets(st.integers(0, 9), max_size=4)), min_size=1
    ),
    min_size=1,
    max_size=4,
)


def spans(start: int, n: int, borders: set[int]) -> list[Span]:
    """Non-overlapping, within [start, start + n)."""
    ordered = sorted(border for border in borders if border <= n)
    return [Span(start + a, start + b) for a, b in zip(ordered[::2], ordered[1::2], strict=False)]


@law
@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_no_span_is_ever_parted(steps, a, b) -> None:
    """`can_cut`, `fork` and both ways of `remove` keep a span whole or not at all."""
    tagged = Tagged(Sdpa(), 128, names=["full"])
    known: dict[int, list[Span]] = {}
    for step in steps:
        ahead = {seq: spans(tagged.memory.length(seq), n, borders) for seq, (n, borders) in step.items()}
        tagged.step(
            {seq: n for seq, (n, _) in step.items()}, [(s, span) for s, found in ahead.items() for span in found]
        )
        for seq, found in ahead.items():
            known.setdefault(seq, []).extend(found)
    for seq, found in known.items():
        length = len(tagged.tokens[seq])
        for pos in range(length + 1):
            wanted = next((span.start for span in found if span.start < pos < span.end), pos)
            assert tagged.memory.can_cut(seq, pos) == wanted
            assert (tagged.memory.can_cut(seq, pos) == pos) == (wanted == pos)
        tagged.tokens[99] = tagged.tokens[seq][: tagged.memory.fork(seq, 99, a)]
        assert len(tagged.tokens[99]) == tagged.memory.can_cut(seq, a)
        assert tagged.memory._sequences.record(99).ahead == tuple(
            span for span in found if span.end <= len(tagged.tokens[99])
        )
        tagged.check()
        gone = Span(min(a, b), max(a, b))
        if gone.end < length and len(gone):
            parted = any(span.start < pos < span.end for span in found for pos in (gone.start, gone.end))
            if parted:
                with pytest.raises(NotSupported, match="looked ahead") as refused:
                    tagged.memory.remove(seq, gone)
                assert refused.value.kept == tagged.memory.can_cut(seq, gone.start)
            else:
                assert tagged.memory.remove(seq, gone) == length - len(gone)
                del tagged.tokens[seq][gone.start : gone.end]
                moved = [span for span in found if span.end <= gone.start]
                moved += [Span(s.start - len(gone), s.end - len(gone)) for s in found if s.start >= gone.end]
                assert tagged.memory._sequences.record(seq).ahead == tuple(moved)
            tagged.check()


def test_a_span_that_is_accepted_in_part_is_refused_and_the_step_stays_open() -> None:
    tagged = Tagged(Sdpa(), names=["full", "chunk"])
    _, new = tagged.begin({0: 8, 1: 3}, [(0, Span(2, 5))])
    for count in (3, 4):
        with nothing_changes(tagged.memory), pytest.raises(BadRequest, match=r"\[2,5\)"):
            tagged.memory.commit({0: count})
    tagged.memory.commit({0: 5})
    tagged.tokens = {0: new[0][:5], 1: new[1]}
    tagged.check()
    assert tagged.memory._sequences.record(0).ahead == (Span(2, 5),)
    _, new = tagged.begin({0: 4}, [(0, Span(6, 9))])
    tagged.memory.commit({0: 1})
    assert tagged.memory._sequences.record(0).ahead == (Span(2, 5),)


@pytest.mark.parametrize(
    ("span", "says"),
    [
        ((0, Span(0, 4)), r"\[0,4\) of sequence 0 must be whole"),
        ((0, Span(5, 9)), r"the step gives it \[3,8\)"),
        ((0, Span(4, 4)), "must be whole"),
        ((7, Span(3, 5)), "gives it no new tokens"),
        ((1, Span(0, 1)), "gives it no new tokens"),
    ],
)
def test_a_span_that_is_not_whole_within_the_step_is_refused(span: tuple[int, Span], says: str) -> None:
    feeds = (Feed(0, Span(3, 8)), Feed(1, Span(0, 2), stores=False))
    with pytest.raises(BadRequest, match=says):
        Batch(feeds, (span,))


def test_spans_that_overlap_are_refused() -> None:
    with pytest.raises(BadRequest, match="overlap"):
        Batch((Feed(0, Span(0, 8)),), ((0, Span(3, 6)), (0, Span(1, 4))))
