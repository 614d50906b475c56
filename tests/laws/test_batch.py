"""A batch: which sequences get new tokens. Written as feeds, or token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span

FEEDS = st.lists(
    st.builds(lambda seq, start, n: Feed(seq, Span(start, start + n)), st.integers(0, 9), st.integers(0, 99), st.integers(1, 5)),
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
@given(FEEDS, st.randoms())
def test_tokens_in_another_order_are_refused(feeds: list[Feed], random) -> None:
    rows = [(feed.seq, pos) for feed in feeds for pos in range(feed.pos.start, feed.pos.end)]
    mixed = random.sample(rows, len(rows))
    by_feed = sorted(range(len(mixed)), key=lambda i: [seq for seq, _ in mixed].index(mixed[i][0]))
    in_order = [mixed[i] for i in by_feed] == mixed and all(
        b[1] == a[1] + 1 for a, b in zip(mixed, mixed[1:], strict=False) if a[0] == b[0]
    )
    seqs, positions = zip(*mixed, strict=True)
    if in_order:
        assert Batch.of(seqs, positions).tokens == len(rows)
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
