"""Layouts are rules: how they relate to each other, and each compared with a dense mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zeros import put_zeros
from kvcellar.errors import BadRequest
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.laws.dumb import Cell, Dumb, Kind, Line, causal, chunked, member, sliding

KINDS = st.one_of(
    st.just(causal()),
    st.builds(chunked, st.integers(1, 12)),
    st.builds(lambda window, more: sliding(window, window + more), st.integers(1, 12), st.integers(0, 6)),
)
POS = st.integers(0, 60)
law = settings(derandomize=True, deadline=None, max_examples=200)


@law
@given(KINDS, POS)
def test_a_query_sees_from_lowest_up_to_itself(kind: Kind, pos: int) -> None:
    seen = [k for k in range(80) if kind.sees(pos, k)]
    assert seen == list(range(kind.layout.lowest(pos), pos + 1))


@law
@given(KINDS, POS)
def test_lowest_never_falls_and_keep_stays_below_it(kind: Kind, pos: int) -> None:
    layout = kind.layout
    assert 0 <= layout.lowest(pos) <= layout.lowest(pos + 1) <= pos + 1
    assert 0 <= layout.keep(pos) <= layout.keep(pos + 1)
    assert layout.keep(pos) <= layout.lowest(pos)
    assert list(range(layout.keep(pos), pos)) == [k for k in range(pos) if kind.stays(pos, k)]


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)


@law
@given(KINDS, POS, st.integers(0, 40), st.integers(0, 110), SPANS)
def test_resuming_cutting_and_shifting_are_exact(kind: Kind, first: int, count: int, pos: int, gone: list[int]) -> None:
    """Against trying: may the token at `kept` see all it needs, where exactly [first, end) is held?"""
    end = first + count
    dumb = Dumb([member("only", kind, [0], (1, 1), 16, 16)])
    dumb.lines[0] = Line(list(range(end)), [{k: Cell(k) for k in range(first, end)}])
    assert kind.layout.can_cut(first, end, pos) == dumb.can_cut(0, pos)
    assert kind.layout.can_resume(first, end, pos) == (dumb.can_cut(0, pos) == pos)
    span = Span(*gone)
    if span.end < end and len(span) and dumb.can_cut(0, end) == end:
        assert kind.layout.can_shift(first, end, span) == dumb.can_shift(0, span.start, span.end)


@pytest.mark.parametrize(
    ("gone", "end", "may"),
    [
        (Span(4, 8), 10, True),  # a whole chunk
        (Span(9, 10), 11, True),  # within the last one
        (Span(9, 10), 12, True),  # which is full
        (Span(9, 10), 13, False),  # 12 would come down from the next
        (Span(4, 9), 11, True),  # the last one begins where another did
        (Span(5, 9), 11, False),  # and may not meet the one before
    ],
)
def test_tokens_of_two_chunks_never_meet(gone: Span, end: int, may: bool) -> None:
    assert Chunked(4).can_shift(0, end, gone) == may


@law
@given(KINDS, st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20), st.integers(1, 9))
def test_most_cells_is_never_passed(kind: Kind, steps: list[tuple[int, int]], most: int) -> None:
    """In steps of up to `most` tokens, each accepted as far as it goes, and a step back by one now and then."""
    first = end = peak = 0
    for count, accepted in steps:
        count = min(count, most)
        peak = max(peak, end + count - first)
        end += min(accepted, count)
        first = max(first, kind.layout.keep(end))
        if accepted == 0 and end and kind.layout.can_resume(first, end, end - 1):
            end -= 1
            first = min(first, end)
    context = end + sum(count for count, _ in steps)
    assert peak <= kind.layout.most_cells(context, most)


@law
@given(KINDS, st.integers(1, 60), st.integers(1, 9))
def test_most_cells_is_no_more_than_the_context(kind: Kind, context: int, step: int) -> None:
    assert kind.layout.most_cells(context, step) <= context


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sliding(0), "at least one position, not 0"),
        (lambda: Sliding(-3), "at least one position, not -3"),
        (lambda: Sliding(4, 3), "window of 4 needs a memory of at least that, not 3"),
        (lambda: Chunked(0), "at least one position, not 0"),
    ],
)
def test_impossible_layouts_are_refused(make, says) -> None:
    with pytest.raises(BadRequest, match=says):
        make()


def test_layouts_say_what_they_are() -> None:
    layouts = [Causal(), Sliding(4), Sliding(4, 4), Sliding(4, 9), Chunked(8)]
    assert [str(each) for each in layouts] == [
        "causal",
        "sliding 4",
        "sliding 4",
        "sliding 4, memory 9",
        "chunked 8",
    ]
    assert Sliding(4) == Sliding(4, 4)


def test_a_step_back_by_one_is_always_possible() -> None:
    """A stop token is read and then not part of the next prompt."""
    for layout in (Causal(), Sliding(1), Sliding(4), Sliding(4, 7), Chunked(4)):
        for end in range(1, 40):
            assert layout.can_resume(layout.keep(end), end, end - 1), f"{layout} at {end}"


@law
@given(st.lists(KINDS, min_size=2, max_size=3), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_groups_agree_where_one_can_go_on(kinds: list[Kind], steps: list[int]) -> None:
    """Each group alone may allow more: what one gives up, another may need."""
    members = [member(f"group {i}", kind, [i], (1, 1), 16, 16) for i, kind in enumerate(kinds)]
    memory = Memory(
        [m.group for m in members],
        cells=dict.fromkeys((m.group.name for m in members), 60),
        dtype=torch.float32,
        device="meta",
        backend=Reference(),
    )
    dumb = Dumb(members)
    for number in steps:
        batch = Batch((Feed(0, Span(memory.length(0), memory.length(0) + number)),))
        put_zeros(memory, memory.begin(batch))
        memory.commit()
        dumb.begin(batch)
        dumb.commit({})
    expected = [dumb.can_cut(0, pos) for pos in range(dumb.length(0) + 2)]
    assert [memory.can_cut(0, pos) for pos in range(dumb.length(0) + 2)] == expected
    assert [(memory.can_cut(0, pos) == pos) for pos in range(dumb.length(0) + 2)] == [
        kept == pos for pos, kept in enumerate(expected)
    ]
