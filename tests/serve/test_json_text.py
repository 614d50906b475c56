"""Answers and other values as JSON, whole and in chunks."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from kvcellar.serve.answers import OTHER, TEXT, Answer, Template
from kvcellar.serve.http.json_text import json_chunks, to_json

ODD = ['"', "\\", "\\u00e9", "\x7f", "\n", "\u2028", "\U0001f600", "\u4f60\u597d", "caf\u00e9", "{}", ""]
TEXTS = st.lists(st.text() | st.sampled_from(ODD), max_size=4).map("".join)
ANY_TEXTS = TEXTS | st.text(st.characters(exclude_categories=()))  # with halves of surrogate pairs, too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


class Fields(Answer):
    constant: object
    texts: object
    maybe: object = UNSET


@dataclass(frozen=True, slots=True)
class Record:
    text: str
    value: object


@given(constant=VALUES, texts=st.lists(TEXTS, max_size=4), more=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_ascii_on_one_line_and_reads_back(constant, texts, more):
    """Of a dictionary, and of an answer with the same fields, whole and in chunks."""
    plain = {"constant": constant, "texts": texts}
    for value, read in (
        (plain | more, plain | more),
        (Fields(constant, texts), plain),
        (Fields(constant, iter(texts), more), plain | {"maybe": more}),
        ([Fields(constant, texts, None)], [plain | {"maybe": None}]),
    ):
        written = to_json(value)
        assert written.decode("ascii").isprintable()
        assert json.loads(written) == read
    assert to_json(plain | more) == by_json(plain | more)
    for value in (Fields(constant, texts), {"around": [Fields(constant, texts, more)], "raw": Raw(to_json(plain))}):
        assert b"".join(json_chunks(value)) == to_json(value)


def by_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@given(constant=VALUES, text=ANY_TEXTS, other=VALUES)
def test_a_filled_template_is_what_encoding_the_answer_makes(constant, text, other):
    for marked, made in ((TEXT, text), ([TEXT, constant, TEXT], [text, constant, text]), ("", "")):
        template = Template(to_json(Fields(constant, marked, OTHER)))
        filled = template.fill(text, to_json(other).decode())
        assert filled == by_json({"constant": constant, "texts": made, "maybe": other})
        assert filled == to_json(Fields(constant, made, other))
        assert filled == b"".join(json_chunks(Fields(constant, made, other)))


@given(name=ANY_TEXTS, value=VALUES)
def test_halves_of_surrogate_pairs_are_written_wherever_they_are(name, value):
    """As `json` writes them: msgspec refuses them, and a model may write one into the name of a call."""
    plain = {name: [name, {"in": (name, value)}]}
    assert json.loads(to_json([Fields(name, plain, Raw(to_json(plain)))])) == [
        {"constant": name, "texts": {name: [name, {"in": [name, value]}]}, "maybe": json.loads(to_json(plain))}
    ]
    assert to_json(plain).isascii()
    assert json.loads(to_json([Record(name, value)])) == [{"text": name, "value": json.loads(to_json(value))}]


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
