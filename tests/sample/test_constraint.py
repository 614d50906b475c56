"""Constraints: what is no source of its kind, or over a bound, is refused before any grammar is compiled."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvcellar import BadRequest, SamplingParams
from kvcellar.constraint import MAX_DEPTH, MAX_PROPERTIES, MAX_SOURCE_BYTES, MAX_VALUES, Constraint
from kvcellar.sampling_params import merged

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "anyOf", "allOf", "$ref", "x-guidance", "$defs", "a"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=20,
)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constraint("xml", "a"), "is one of json_schema, json_object, regex, choice, grammar, not 'xml'"),  # type: ignore[arg-type]
        (lambda: Constraint(["regex"], "a"), "is one of"),  # type: ignore[arg-type]
        (lambda: Constraint("regex", 5), "the regex of a constraint is text, not 5"),  # type: ignore[arg-type]
        (lambda: Constraint("regex"), "a source that is not empty"),
        (lambda: Constraint("json_object", "{}"), "has no source"),
        (lambda: Constraint("regex", "a", 1), "compact is True or False, not 1"),  # type: ignore[arg-type]
        (lambda: Constraint.regex("\ud800"), "half a surrogate pair"),
        (lambda: Constraint.regex("a" * (MAX_SOURCE_BYTES + 1)), f"{MAX_SOURCE_BYTES} are allowed"),
        (lambda: Constraint.regex("é" * (MAX_SOURCE_BYTES // 2 + 1)), f"{MAX_SOURCE_BYTES} are allowed"),
        (lambda: Constraint.json_schema("{"), "made of JSON"),
        (lambda: Constraint.json_schema("[1]"), r"a schema is a JSON object, not \[1\]"),
        (lambda: Constraint.json_schema('{"const": NaN}'), "NaN is no number of JSON"),
        (lambda: Constraint.json_schema('{"const": 1e999}'), "made of JSON"),
        (lambda: Constraint.json_schema('{"const": "\\ud800"}'), "half a surrogate pair"),
        (lambda: Constraint.json_schema({"const": {1, 2}}), "made of JSON"),
        (lambda: Constraint.json_schema(int), "made of JSON"),
        (lambda: Constraint.json_schema({}, strict="yes"), "strict is True or False"),  # type: ignore[arg-type]
        (lambda: Constraint.json_schema(nested(MAX_DEPTH + 1)), f"more than {MAX_DEPTH} deep"),
        (lambda: Constraint.json_schema('{"items":' * 20_000 + "{}" + "}" * 20_000), f"more than {MAX_DEPTH} deep"),
        (lambda: Constraint.json_schema({"enum": list(range(MAX_VALUES + 1))}), f"{MAX_VALUES} are allowed"),
        (
            lambda: Constraint.json_schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}),
            f"{MAX_PROPERTIES} are allowed",
        ),
        (lambda: Constraint.json_schema({"x-guidance": {"lenient": True}}), "cannot have x-guidance"),
        (lambda: Constraint.json_schema({"items": [{"anyOf": [{"x-guidance": 1}]}]}), "cannot have x-guidance"),
        (lambda: Constraint.choice([]), "a list of 1 to"),
        (lambda: Constraint.choice(["a", ""]), "each choice is a string that is not empty, not ''"),
        (lambda: Constraint.choice(["a", 5]), "each choice is a string"),  # type: ignore[list-item]
        (lambda: Constraint.choice(["\ud800"]), "half a surrogate pair"),
        (lambda: Constraint.choice([str(i) for i in range(MAX_VALUES + 1)]), "a list of 1 to"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_constraint_is_refused_with_its_reason(make, says) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        make()
    assert caught.value.param == "constraint"


def test_the_bounds_themselves_are_allowed() -> None:
    Constraint.json_schema(nested(MAX_DEPTH))
    Constraint.json_schema({"enum": list(range(MAX_VALUES))})
    Constraint.json_schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES)}})
    Constraint.regex("a" * MAX_SOURCE_BYTES)


def test_a_name_of_a_property_and_data_are_no_keywords() -> None:
    schema = {"properties": {"x-guidance": {"enum": [{"x-guidance": 1, "enum": [1] * 20_000}]}}}
    assert json.loads(Constraint.json_schema(schema).source) == schema
    closed = {"properties": {"properties": {"const": {"properties": {}}}}}
    made = Constraint.json_schema(closed, strict=True)
    assert json.loads(made.source) == {**closed, "additionalProperties": False}


def test_strict_closes_objects_wherever_they_are_and_leaves_those_that_say_themselves() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    open_one = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": inner},
            "c": open_one,
            "d": {"anyOf": [inner, {"type": "null"}]},
        },
        "$defs": {"e": inner},
    }
    shut = {**inner, "additionalProperties": False}
    assert json.loads(Constraint.json_schema(schema, strict=True).source) == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": shut}, "c": open_one, "d": {"anyOf": [shut, {"type": "null"}]}},
        "$defs": {"e": shut},
        "additionalProperties": False,
    }
    assert json.loads(Constraint.json_schema(schema).source) == schema


def test_strict_leaves_objects_open_that_several_schemas_describe() -> None:
    one, other = {"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}
    for schema in ({"allOf": [one, other]}, {**one, "anyOf": [other, one]}, {**one, "$ref": "#/$defs/x"}):
        assert json.loads(Constraint.json_schema(schema, strict=True).source) == schema


def test_equal_schemas_are_equal_constraints_whatever_their_whitespace() -> None:
    one, other = Constraint.json_schema('{ "type" :\n"object" }'), Constraint.json_schema({"type": "object"})
    assert one == other
    assert len({one, other}) == 1
    assert Constraint.choice(["b", "a", "b"]).source == '["b","a"]'


def test_a_class_of_pydantic_is_its_schema() -> None:
    class Person(BaseModel):
        name: str

    assert json.loads(Constraint.json_schema(Person).source) == Person.model_json_schema()


@given(JSON, st.booleans(), st.booleans())
def test_any_json_is_refused_or_a_schema_that_can_be_made_again(value, strict, compact) -> None:
    try:
        made = Constraint.json_schema(value if not isinstance(value, str) else json.dumps(value), strict=strict)
    except BadRequest:
        return
    assert Constraint.json_schema(made.source, strict=strict) == made
    assert replace(made, compact=compact).source == made.source
    assert strict or json.loads(made.source) == value


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 2}, {"min_length": 2}])
def test_what_lengthens_an_answer_is_refused_beside_a_constraint(more) -> None:
    with pytest.raises(BadRequest, match="cannot be combined with a constraint") as caught:
        SamplingParams(constraint=Constraint.json_object(), **more)
    assert caught.value.param == next(iter(more))


def test_defaults_that_lengthen_answers_do_not_count_beside_a_constraint() -> None:
    defaults = SamplingParams(min_tokens=5, min_length=9, ignore_eos=True, temperature=0.5)
    made = merged(defaults, {"constraint": Constraint.json_object()})
    assert (made.min_tokens, made.min_length, made.ignore_eos, made.temperature) == (0, 0, False, 0.5)
    with pytest.raises(BadRequest, match="min_tokens cannot be combined"):
        merged(defaults, {"constraint": Constraint.json_object(), "min_tokens": 1})


def test_parameters_take_a_constraint_and_nothing_else() -> None:
    made = Constraint.regex("a+")
    assert SamplingParams(constraint=made).constraint == made
    with pytest.raises(BadRequest, match=r"constraint is Constraint\(...\)"):
        SamplingParams(constraint={"type": "object"})  # type: ignore[arg-type]
    object.__setattr__(made, "source", 5)
    with pytest.raises(BadRequest, match="the regex of a constraint is text"):
        SamplingParams(constraint=made)
