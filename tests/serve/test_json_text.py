"""What is encoded once has the bytes of what is encoded each time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.serve.json_text import EncodedList, JsonTemplate, json_chunks, to_json

TEXTS = st.text() | st.sampled_from(["%", "%s", "%(text)s", '"', "\\", "\u2028", "\U0001f600", "{}", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(constant=VALUES, key=TEXTS, texts=st.lists(TEXTS, max_size=4), number=st.integers(0, 10**9))
def test_a_template_returns_what_the_function_returns_that_it_was_made_of(constant, key, texts, number):
    def write(text: object, number: object) -> bytes:
        return b"data: " + to_json({"a": constant, "text": text, key + "_": [text], "number": number}) + b"\n"

    template = JsonTemplate(write, "text", "number")
    for text in texts:
        assert template.fill(text=text, number=number) == write(text, number)


@given(items=st.lists(VALUES, max_size=6), more=st.lists(VALUES, max_size=3), around=VALUES)
def test_a_list_that_was_encoded_is_written_like_one_that_was_not(items, more, around):
    encoded = EncodedList([to_json(item) for item in items])
    before = encoded.copy()
    encoded.extend([to_json(item) for item in more])
    for made, plain in ((before, items), (encoded, items + more)):
        assert len(made) == len(plain)
        written = b"".join(json_chunks({"around": around, "of": [{"logprobs": made}], "at": {"end": made}}))
        assert json.loads(written) == {"around": around, "of": [{"logprobs": plain}], "at": {"end": plain}}


def test_items_with_long_lists_are_made_a_few_at_a_time():
    """The event loop does other work between two chunks."""
    made = 0

    def entries():
        nonlocal made
        for number in range(1000):
            made += 1
            yield {"token": str(number), "top_logprobs": [{"token": str(one)} for one in range(20)]}

    most = before = 0
    chunks = list[bytes]()
    for chunk in json_chunks({"content": entries()}):
        chunks.append(chunk)
        most, before = max(most, made - before), made
    assert made == 1000
    assert most <= 4
    assert len(json.loads(b"".join(chunks))["content"]) == 1000


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_no_item_is_lost_between_chunks(size: int):
    for items in ([*range(size)], [[0.5] * (1 + number % 3) for number in range(size)], [[0.5] * 500] * (size % 7)):
        assert json.loads(b"".join(json_chunks({"data": iter(items)}))) == {"data": items}
