"""A batch: which sequences get new tokens. Written as feeds, or token by token."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

FEEDS = st.lists(
    st.builds(
        lambda seq, start, n: Feed(seq, Span(start, start + n)),
        st.integers(0, 9),
        st.integers(0, 99),
        st.integers(1, 5),
    ),
    unique_by=lambda feed: feed.seq,
    min_size=1,
    max_size=6,
)
law = settings(derandomize=True, deadline=None)


@law
@given(FEEDS)
def test_token_by_token_says_the_same_as_feed_by_feed(feeds: list[Feed]) -> None:
    seqs = [feed.seq for feed in feeds for _ in range(len(feed.pos))]
    positions = [pos for feed in feeds for pos in range(feed.pos.start, feed.pos.end)]
    batch = Batch.of(seqs, positions)
    assert batch == Batch(tuple(feeds))
    assert batch.tokens == len(positions)


@law
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=6))
def test_rows_are_a_batch_if_each_sequence_is_one_stretch_of_positions(rows: list[tuple[int, int]]) -> None:
    seqs, positions = [seq for seq, _ in rows], [pos for _, pos in rows]
    stretches = [list(group) for _, group in groupby(rows, key=lambda row: row[0])]
    once = len({stretch[0][0] for stretch in stretches}) == len(stretches)
    if once and all(b[1] == a[1] + 1 for stretch in stretches for a, b in pairwise(stretch)):
        assert [len(feed.pos) for feed in Batch.of(seqs, positions).feeds] == [len(stretch) for stretch in stretches]
    else:
        with pytest.raises(BadRequest):
            Batch.of(seqs, positions)


@pytest.mark.parametrize(
    ("seqs", "positions", "says"),
    [
        ([0, 0], [3], "2 sequences for 1 positions"),
        ([0, 1, 0], [0, 0, 1], "only once"),
        ([0, 0], [3, 5], r"sequence 0 are not consecutive: \[3, 5\]"),
        ([0, 0], [3, 3], "not consecutive"),
        ([0, 0], [3, 2], "not consecutive"),
    ],
)
def test_what_is_no_batch_is_refused(seqs: list[int], positions: list[int], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        Batch.of(seqs, positions)


def test_every_sequence_of_a_batch_has_new_tokens_and_is_there_once() -> None:
    with pytest.raises(BadRequest, match="at least one new token"):
        Batch((Feed(0, Span(3, 3)),))
    with pytest.raises(BadRequest, match="only once"):
        Batch((Feed(0, Span(0, 1)), Feed(0, Span(1, 2))))
