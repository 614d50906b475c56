"""A body is parsed as exactly one JSON object, or refused."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.errors import PromptTooLong
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.parsing import Limits, outside_strings, parse_object

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


def strict(text: str) -> Any:
    """The same with `json`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def finite(number: str) -> float:
        assert math.isfinite(float(number))
        return float(number)

    value = json.loads(text, object_pairs_hook=once, parse_constant=finite, parse_float=finite)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def outcome(parse: Callable[[str], Any], text: str) -> str | None:
    try:
        return repr(parse(text))
    except (ApiError, AssertionError, ValueError):
        return None


parts = st.sampled_from(
    [*'[]{},:" \n\t', "1", "-0", "12,", "3 ,\n", "0.5", "1e9", "01", "-", "1.", '"a"', '"a":', "true", "nul", "null"]
)
soup = st.lists(
    parts | st.sampled_from(['"\\ud83c\\udf47"', '"\\ud83c"', "NaN", '"\\x"', '"\t"', "\u00a0", "\u0661"]), max_size=14
).map("".join)


@given(soup | soup.map(lambda text: f"[{text}]") | soup.map(lambda text: f'{{"a":{text}}}'))
@example("[1,2,]")
@example("[1,2,,3]")
@example("[1,2 3]")
@example('{"a":1,}')
@example("[,1]")
@example("[1,2,[3,4,{}],5,6]")
@example("1e912")
@example("9" * 4301)
@example("9" * 4300)
def test_results_equal_those_of_json(text: str) -> None:
    body = f'{{"b":{text}}}'
    assert outcome(lambda given: parsed(given.encode()), body) == outcome(strict, body)


def test_numbers_beyond_those_of_python_are_refused() -> None:
    for number in ("9" * 4301, "-" + "9" * 4301, "1e999", "-1e999"):
        with pytest.raises(ApiError, match="a number is out of range"):
            parsed(f'{{"a":{number}}}'.encode())


def flat(value: Any) -> Iterator[Any]:
    """The value and all in it, without keys."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from flat(inner)


odd_texts = st.text('\\"[]{}:,a\n\u00e9', max_size=6)
odd_values = st.recursive(
    st.none() | st.integers() | st.floats(0, 1) | odd_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
)
MANY = 10**6  # more than any body here has


def refused(raw: bytes, **limits: int) -> bool:
    """Whether `raw` has too many of something, as is found before it is parsed."""
    try:
        outside_strings(raw, Limits(context=MANY, **{"values": MANY, "containers": MANY} | limits))
    except ApiError:
        return True
    return False


@given(st.dictionaries(odd_texts, odd_values, max_size=4), st.booleans())
def test_what_is_counted_in_bytes_is_what_a_parser_makes(value: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    parts = list(flat(value))
    containers = sum(isinstance(part, list | dict) for part in parts)
    keys = sum(len(part) for part in parts if isinstance(part, dict))
    strings = keys + sum(isinstance(part, str) for part in parts)
    assert outside_strings(raw, LIMITS).count(b":") == keys
    assert not refused(raw, containers=containers)
    assert refused(raw, containers=containers - 1)
    assert not refused(raw, values=(strings + 1) // 2)
    assert strings == 0 or refused(raw, values=(strings - 1) // 2)


jumble = st.text('\\"[{:,a', max_size=12).map(str.encode)


@given(jumble, jumble, st.integers(0, 3))
def test_what_was_counted_stays_whatever_follows(start: bytes, rest: bytes, most: int) -> None:
    """So what a parser makes of a text that is not JSON, before it finds the error, is counted."""
    assert outside_strings(start + rest, LIMITS).startswith(outside_strings(start, LIMITS))
    for limit in ("values", "containers"):
        assert refused(start + rest, **{limit: most}) or not refused(start, **{limit: most})


@given(st.dictionaries(odd_texts, odd_values, max_size=4))
def test_all_values_are_counted_except_integers_in_lists(value: dict[str, Any]) -> None:
    raw, parts = json.dumps(value).encode(), list(flat(value))
    in_lists = sum(type(one) is int for part in parts if isinstance(part, list) for one in part)
    values = len(parts) - 1 - in_lists
    assert parsed(raw, Limits(context=1, values=values)) == value
    if values:
        with pytest.raises(ApiError, match="values"):
            parsed(raw, Limits(context=1, values=values - 1))


TOO_MANY = {
    "values": ('{"user":[' + ("[" + '"",' * 99 + '""],') * 11 + "[]]}", "more than 999 values", None),
    "strings": ('{"user":[' + '"",' * 2000, "more than 999 values", None),
    "lists": ('{"user":[' + "[]," * 100, "more than 99 lists and objects", None),
    "items": ('{"stop":["a"' + ',"a"' * 500 + "]}", "more than 500 items", "stop"),
    "numbers": ('{"user":[' + "1," * 10_000 + "1]}", "more than 500 items", "user"),
    "inner": ('{"user":{"a":[' + "1," * 10_000 + "1]}}", "more than 500 items", "user"),
    "keys": ("{" + ",".join(f'"{n}":1' for n in range(501)) + "}", "more than 500 keys", None),
}


@pytest.mark.parametrize(("text", "message", "param"), TOO_MANY.values(), ids=TOO_MANY)
def test_a_body_has_limits(text: str, message: str, param: str | None) -> None:
    with pytest.raises(ApiError, match=message) as error:
        parsed(text.encode(), Limits(context=2000, values=999, containers=99, items=500))
    assert (error.value.status, error.value.param, error.value.code) == (400, param, "too_many_values")


@pytest.mark.parametrize("form", ['{"prompt":[%s]}', '{"n":1,"prompt":[[%s]]}', '{"prompt":[[1],[%s]]}'])
def test_token_ids_beyond_the_context_are_refused(form: str) -> None:
    limits = Limits(context=20_000)
    with pytest.raises(PromptTooLong) as error:
        parsed((form % ("7," * 20_000 + "7")).encode(), limits)
    assert error.value.tokens == 20_001
    assert "prompt" in parsed((form % ("7," * 19_999 + "7")).encode(), limits)


@pytest.mark.parametrize("number", ["7", "1.5", "null"])
@pytest.mark.parametrize("text", ['{"n":1,"prompt":[%s]}', '{"a":[[2],[%s]]}', '{"prompt":[1],"a":{"b":[%s]}}'])
def test_a_list_that_is_too_long_is_refused_before_it_is_parsed(text: str, number: str, monkeypatch) -> None:
    made = list[object]()
    decode = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", lambda raw, **how: made.append(how) or decode(raw, **how))
    raw = (text % ",".join([number] * 501)).encode()
    with pytest.raises((ApiError, PromptTooLong), match=r"501 tokens|a has a list of more than 500 items"):
        parsed(raw, Limits(context=200, items=500))
    assert made == [{"type": dict[str, msgspec.Raw]}]
    with pytest.raises(ApiError, match="twice"):
        parsed(raw[:-1] + b',"a":1,"prompt":1}', Limits(context=200, items=500))
    assert made == [{"type": dict[str, msgspec.Raw]}] * 2
    assert parsed((text % ",".join([number] * 500)).encode(), Limits(context=200, items=500))


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_depth_is_limited(opening: str, closing: str) -> None:
    def nested(depth: int) -> bytes:
        return f'{{"a":{opening * (depth - 1)}1{closing * (depth - 1)}}}'.encode()

    assert "a" in parsed(nested(64))
    for depth in (65, 900, 1000, 5000):
        with pytest.raises(ApiError, match="nested too deeply"):
            parsed(nested(depth))


@given(st.text(max_size=300), st.integers(1, 50))
def test_printable_text_has_no_control_characters_and_a_maximum_length(text, limit):
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= 10 * limit + 3
    if text.isprintable() and len(text) <= limit:
        assert shown == text
