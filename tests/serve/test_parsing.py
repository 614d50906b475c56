"""A body is parsed as exactly one JSON object, or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_reader import Limits
from kvcellar.serve.json_text import printable
from kvcellar.serve.parsing import parse_object

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=4)


LIMITS = Limits(context=300_000, items=300_000, values=300_000, containers=300_000)


def parsed(raw: bytes, limits: Limits = LIMITS) -> dict[str, object]:
    return parse_object(raw, limits)


@given(objects, st.booleans())
def test_parsing_inverts_json_dumps(value, ascii_only):
    assert parsed(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(
    st.binary(max_size=40) | objects.map(lambda value: json.dumps(value).encode()), st.binary(min_size=1, max_size=3)
)
def test_any_bytes_are_parsed_or_refused(start, end):
    for raw in (start, start + end, end + start):
        found = read(raw)
        assert isinstance(found, dict) or (found.status == 400 and found.message.isprintable())


def read(raw: bytes) -> dict[str, object] | ApiError:
    try:
        return parsed(raw)
    except ApiError as error:
        return error


@given(texts, values, values)
def test_duplicate_keys_are_refused(key, first, second):
    pair = f"{json.dumps(key)}:{json.dumps(first)},{json.dumps(key, ensure_ascii=False)}:{json.dumps(second)}"
    with pytest.raises(ApiError, match="twice"):
        parsed(f'{{"a":[{{{pair}}}]}}'.encode())


def test_duplicate_keys_are_found_in_linear_time():
    keys = ",".join(f'"{i}":0' for i in range(200_000))
    with pytest.raises(ApiError, match="twice"):
        parsed(f'{{{keys},"199999":0}}'.encode())


@given(st.text(max_size=300), st.integers(1, 50))
def test_printable_text_has_no_control_characters_and_a_maximum_length(text, limit):
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= 10 * limit + 3
    if text.isprintable() and len(text) <= limit:
        assert shown == text
