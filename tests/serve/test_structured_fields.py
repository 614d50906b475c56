"""The fields for structured output, by the names of three servers, become one constraint, or are refused by name; a
server answers with what matches."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from kvcellar import BadRequest, Constraint, Engine
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.generation.structured_fields import constraint_of
from tests.serve.fake_engine import PATIENCE

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
BARE = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
OPTIONS = {"disable_any_whitespace": True, "disable_additional_properties": True}
NAMED = {"name": "answer", "description": "of a test", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "disable_any_whitespace": True}}, None),
        ({"grammar": ""}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Constraint.json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Constraint.json_schema(CLOSED)),
        ({"response_format": BARE}, Constraint.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": None}}},
            Constraint.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint.json_schema(SCHEMA)),
        (
            {"structured_outputs": {"json": SCHEMA, **OPTIONS}},
            Constraint.json_schema(CLOSED, compact=True),
        ),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Constraint.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, Constraint.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint.grammar('root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, Constraint.grammar('root ::= "a"')),
        ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
    ],
)  # fmt: skip
def test_fields_become_a_constraint(fields, expected) -> None:
    assert constraint_of(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {}}, "response_format.type", "must be one of text, json_object, json_schema *$"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "an unknown key"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {**BARE, "json_schema": 5}}, "response_format.json_schema", "an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": 1}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "name": 1}}},
            "response_format.json_schema.name",
            "a string",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "lenient": True}}},
            "response_format.json_schema",
            "an unknown key",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": {}}}}},
            "response_format.json_schema.schema",
            "cannot have x-guidance",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object or as JSON text"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "made of JSON"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "is text, not 5"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "a list of 1 to"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "a list of 1 to"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"structured_outputs": {"pattern": "x"}}, "structured_outputs", "an unknown key"),
        ({"structured_outputs": {"choice": 0.0}}, "structured_outputs.choice", "list of 1 to 10000 strings, not 0.0"),
        ({"structured_outputs": {"grammar": 0}}, "structured_outputs.grammar", "is text, not 0"),
        ({"structured_outputs": {"disable_any_whitespace": 1}}, "structured_outputs.disable_any_whitespace", "true or"),
        ({"grammar": "x", "json_schema": SCHEMA}, "json_schema", "grammar and json_schema both say"),
    ],
)  # fmt: skip
def test_what_is_no_constraint_is_refused_with_the_field(fields, param, says) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        constraint_of(**fields)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        Engine(threads=1, cache_bytes=64_000_000, max_sequences=8) as engine,
        Server(engine, ServeSettings(port=0)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"extra_body": {"structured_outputs": {"json": CLOSED}}},
        {"extra_body": {"json_schema": CLOSED}},
    ],
)
def test_completions_and_chats_answer_with_what_matches(client: openai.OpenAI, more: dict[str, Any]) -> None:
    how: dict[str, Any] = {"model": "", "max_tokens": 60, "temperature": 1, "seed": 4, **more}
    if "response_format" in how:  # the package does not send it to completions
        how["extra_body"] = {"response_format": how.pop("response_format")}
    how["model"] = next(iter(client.models.list())).id
    messages: Any = [{"role": "user", "content": "Write a number."}]
    said = client.chat.completions.create(messages=messages, n=2, **how)
    texts = [choice.message.content for choice in said.choices]
    texts.append(client.completions.create(prompt="x = ", **how).choices[0].text)
    for text in texts:
        assert text is not None
        jsonschema.validate(json.loads(text), CLOSED)


def test_parse_of_the_package_returns_a_record(client: openai.OpenAI) -> None:
    class Digit(BaseModel):
        a: int
        even: bool

    found = client.chat.completions.parse(
        model=next(iter(client.models.list())).id,
        messages=[{"role": "user", "content": "Write a number."}],
        response_format=Digit,
        max_tokens=100,
        seed=1,
        temperature=0,
    )
    assert isinstance(found.choices[0].message.parsed, Digit)


def test_a_schema_that_cannot_be_honoured_is_400_with_the_keyword_and_the_field(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(
            model=next(iter(client.models.list())).id,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert refused.value.param == "response_format.json_schema.schema"


def test_a_grammar_that_reaches_a_limit_is_an_error_of_the_request(client: openai.OpenAI) -> None:
    nested = {"regex": "(([a-z]{1,500}){1,500}){1,500}"}
    with pytest.raises(openai.BadRequestError, match="cannot be followed further") as refused:
        client.completions.create(
            model=next(iter(client.models.list())).id,
            prompt="x",
            max_tokens=60,
            extra_body={"structured_outputs": nested},
        )
    assert refused.value.code == "constraint_failed"


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_fields_of_older_servers_are_refused_by_name(client: openai.OpenAI, name: str) -> None:
    """They would otherwise be ignored, and the answer not constrained."""
    model = next(iter(client.models.list())).id
    with pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(model=model, prompt="x", max_tokens=1, extra_body={name: "a"})
