"""What describes stored memory survives as bytes, and bytes that are not such a description are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.memory.kv.record import Mark, Record, Stretch, from_bytes, positions, to_bytes
from kvcellar.memory.spans import Span

SPANS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: Span(min(ends), max(ends)))
MARKS = st.builds(
    Mark,
    st.integers(0, 9),
    st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.tuples(st.integers(0, 3), SPANS), max_size=2).map(tuple)), max_size=2
    ).map(tuple),
)
RECORDS = st.builds(
    Record,
    st.text(max_size=4),
    SPANS,
    st.lists(st.builds(Stretch, st.text(max_size=3), SPANS), max_size=3).map(tuple),
    st.lists(MARKS, max_size=3).map(tuple),
    st.lists(SPANS, max_size=2).map(tuple),
    st.none() | st.integers(0, 9),
    st.none() | st.text(max_size=3),
)


@given(RECORDS)
def test_a_record_is_the_same_after_it_was_bytes(record) -> None:
    assert from_bytes(to_bytes(record)) == record
    assert positions(to_bytes(record)) == tuple(mark.pos for mark in record.checkpoints)


WHOLE = json.loads(
    to_bytes(Record("s", Span(0, 4), (Stretch("g", Span(0, 4)),), (Mark(4, (("w", ((0, Span(1, 4)),)),)),)))
)


@pytest.mark.parametrize(
    "content",
    [
        *(
            json.dumps({name: value for name, value in WHOLE.items() if name != left_out}).encode()
            for left_out in ("shape", "span", "stretches", "checkpoints")
        ),
        *(json.dumps(WHOLE | {name: wrong}).encode() for name in WHOLE for wrong in (1.5, True, [[1]], {"a": 1})),
        *(b"", b"null", b"[]", b"{", b"\xff", b"[" * 100_000),
    ],
)
def test_what_is_no_record_is_refused(content) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        from_bytes(content)
