"""Arguments that JSON does not have are no arguments, in each of the ways in which models write calls."""

import json
import sys

import pytest

from kvcellar.text.replies.bodies import ArgumentsBody, BodyReader, Given, ObjectBody, TagsBody, loose_body, python_body
from kvcellar.text.replies.form import Tags
from kvcellar.text.replies.values import MOST_DEPTH, Status

PROPERTIES = {"a": {"type": "array"}, "b": {"type": "number"}}
KINDS = Tags("<k>", ("<text>", "<json>"), "</k>", kinds=True)
DEEP = "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1)


def tagged(name: str, value: str, *, kinds: bool = False) -> tuple[BodyReader, str]:
    if kinds:
        return TagsBody("f", None, KINDS, ["</call>"], {}), f"<k>{name}<json>{value}</k></call>"
    tags = Tags("<k>", ("<v>",), "</k>")
    return TagsBody("f", None, tags, ["</call>"], PROPERTIES), f"<k>{name}<v>{value}</k></call>"


def arguments(body: BodyReader, text: str) -> str | None:
    """Those of a call that is complete; None if there is none."""
    _, events = body.feed(text)
    if body.status is not Status.DONE:
        return None
    return "".join(event.text for event in events if isinstance(event, Given))


def strict(text: str) -> object:
    def refused(word: str) -> object:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", DEEP])
def test_what_is_no_json_ends_a_call_or_is_text(value):
    inner = json.dumps(f'{{"a": {value}}}')
    for body, text in (
        (ArgumentsBody("f", None), f'{{"a": {value}}}'),
        (ObjectBody(), f'{{"name": "f", "arguments": {inner}}}'),
        tagged("a", value, kinds=True),
        (python_body(None), f"[f(a={value})]"),
        (loose_body("f", None, "|"), f"{{a: {value}}}"),
    ):
        assert arguments(body, text) is None, text
    found = arguments(*tagged("a", value))
    assert found is not None
    assert strict(found) == {"a": value}


def test_values_between_tags_that_are_nested_to_the_limit_of_the_interpreter_raise_nothing():
    most = sys.getrecursionlimit()
    for depth in range(most - 120, most + 20):
        found = arguments(*tagged("a", "[" * depth + "]" * depth))
        assert found is not None
        assert strict(found) == {"a": "[" * depth + "]" * depth}
