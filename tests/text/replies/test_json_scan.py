"""JSON that arrives in parts is told as it arrives, and refused at the character that cannot be."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.replies.values import MOST_DEPTH, JsonScan, Status, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scanned(text: str, cuts: list[int]) -> tuple[JsonScan, str, int]:
    """The scan of a text in parts, what it told, and how many characters it used."""
    scan, told, used = JsonScan(), list[str](), 0
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        count = scan.feed(text[start:end], 0, told)
        used += count
        if count < end - start:
            break
    return scan, "".join(told), used


@given(VALUES, st.lists(st.integers(0, 300), max_size=5), st.booleans())
def test_a_value_is_told_as_it_is_and_what_follows_is_left(value, cuts, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=2)
    scan, told, used = scanned(text + "\n</tool_call>", cuts)
    assert (scan.status, told, used) == (Status.DONE, text, len(text))


@given(st.text(alphabet='{}[]":,\\ue0123truefalsn -.\n\t', max_size=30))
def test_a_text_is_complete_exactly_where_json_is(text):
    scan, told, used = scanned(text, [])
    scan.end()
    try:
        json.JSONDecoder(strict=False).raw_decode(text.lstrip(" \n\t"))
        valid = True
    except (ValueError, RecursionError):
        valid = False
    if scan.status is Status.DONE:
        assert json.loads(told) == json.loads(text[:used], strict=False)
    elif valid:  # a word that goes on (`1true`, `truen`) is no value here
        assert text[used - 1 : used].isalnum() or text[used - 1 : used] in ".-", text


@given(VALUES, st.data())
def test_the_beginning_of_a_value_never_fails(value, data):
    text = json.dumps(value)
    scan, _, used = scanned(text[: data.draw(st.integers(0, len(text)))], [])
    assert scan.status is not Status.FAILED
    assert scan.copy().status is scan.status
    assert used <= len(text)


def test_line_breaks_within_strings_are_escaped():
    scan, told, _ = scanned('{"a": "one\ntwo\x01"}', [])
    assert scan.status is Status.DONE
    assert json.loads(told) == {"a": "one\ntwo\x01"}


def test_depth_is_bounded():
    assert scanned("[" * MOST_DEPTH, [])[0].status is Status.MORE
    assert scanned("[" * (MOST_DEPTH + 1), [])[0].status is Status.FAILED


def test_numbers_that_no_double_holds_are_no_json():
    for text in ("1e999", "-1e999", '{"a": [2e400]}', "1" * 310):
        assert scanned(text + " ", [])[0].status is Status.FAILED, text
        with pytest.raises(ValueError, match="not one JSON value"):
            read_json(text)
    assert read_json("-1e300") == -1e300


@given(
    st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\u00e9", "\\n", "x", "\n"]), max_size=8),
    st.lists(st.integers(0, 60)),
)
def test_half_of_a_surrogate_pair_is_replaced_wherever_the_text_is_cut(parts, cuts):
    text = json.dumps("")[:1] + "".join(parts) + json.dumps("")[1:]
    scan, told, _ = scanned(text, cuts)
    assert scan.status is Status.DONE
    found = json.loads(text, strict=False)
    assert json.loads(told) == found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_one_value_is_read_and_nothing_else():
    assert read_json(' {"a": [1, "b\nc"]}\n') == {"a": [1, "b\nc"]}
    for text in ("", "NaN", "[Infinity]", "1 2", "[1,]", "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1)):
        with pytest.raises(ValueError, match="not one JSON value"):
            read_json(text)
