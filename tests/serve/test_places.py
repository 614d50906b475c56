"""Errors about messages name the place in the body that the client has sent, whatever the API makes messages of; and
input tokens are counted as the response counts them."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.serve.declared import DeclaredClient
from tests.serve.every_api import tiny_engine
from tests.serve.fake_engine import PATIENCE

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hi"}
GOT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "b"}]}
DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"a": DEEP}
TEXT = json.dumps(DEEP)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("tiny")) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with Server(engine, ServeSettings(port=0)) as server, DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def item(arguments: str, number: int = 1) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments}


def used(arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "f", "input": arguments}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


SENT: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"input": [USER, item(TEXT)]}, "input[1].arguments"),
    (RESPONSES, {"input": [USER, item(TEXT)], "instructions": "Be kind."}, "input[1].arguments"),
    (RESPONSES, {"input": [USER, item("{}"), item(TEXT, 2)]}, "input[2].arguments"),
    (
        RESPONSES,
        {"input": [USER, {"type": "reasoning", "summary": []}, {"role": "assistant", "content": "a"}, item(TEXT)]},
        "input[3].arguments",
    ),
    (
        "/v1/messages",
        {"max_tokens": 4, "system": "a", "messages": [USER, {"role": "assistant", "content": [used(DEEP)]}, GOT]},
        "messages[1].content[0].input",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, used(DEEP)]}, GOT]},
        "messages[1].content[1].input",
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [called(TEXT)]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("path", "body", "place"), SENT)
def test_arguments_that_are_nested_too_deep_are_named_where_they_were_sent(
    http: httpx.Client, path: str, body: dict[str, Any], place: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(place)
    assert "is nested more than 32 deep" in error["message"]
    if path == RESPONSES:
        assert error["param"] == place


def test_items_behind_a_response_that_is_continued_have_their_own_numbers(http: httpx.Client) -> None:
    first = http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 1}).json()["id"]
    body = {"input": [USER, item(TEXT)], "previous_response_id": first, "instructions": "Be kind."}
    assert http.post(RESPONSES, json=body).json()["error"]["param"] == "input[1].arguments"


TOOL = {"type": "function", "name": "f", "description": "finds a hill", "parameters": {"type": "object"}}
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"instructions": "You answer questions about hills."},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning": {"effort": "none"}},
    {"truncation": "auto"},
    {"input": [USER, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Who?"}]},
)


@pytest.mark.parametrize("more", MORE)
def test_input_tokens_are_those_that_the_response_counts(http: httpx.Client, engine: Engine, more: Any) -> None:
    """Also those of a response that continues another one, whose reply has the tokens that it was generated with."""
    body = {"input": "Which hill?", "max_output_tokens": 8, "seed": 5, "temperature": 1.5} | more
    first = http.post(RESPONSES, json=body).json()
    for previous in (None, first["id"]):
        asked = body | {"previous_response_id": previous}
        counted = http.post(f"{RESPONSES}/input_tokens", json=asked)
        assert counted.status_code == 200, counted.text
        told = http.post(RESPONSES, json=asked).json()["usage"]["input_tokens"]
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": told}


def test_each_key_counts_the_replies_that_it_has_got(engine: Engine) -> None:
    settings = ServeSettings(port=0, key_digests=(key_digest("one"), key_digest("two")))
    with Server(engine, settings) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for key, seed in itertools.product(("one", "two"), range(4)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                how: Any = {"model": engine.model.name, "input": f"Name {seed} hills."}
                first = client.responses.create(**how, max_output_tokens=24, temperature=1.5, extra_body={"seed": seed})
                counted = client.responses.input_tokens.count(**how, previous_response_id=first.id)
                told = client.responses.create(**how, max_output_tokens=1, previous_response_id=first.id)
                assert told.usage is not None
                assert counted.input_tokens == told.usage.input_tokens
        for path, more in ((RESPONSES, {"max_output_tokens": 1}), (f"{RESPONSES}/input_tokens", {})):
            headers = {"authorization": "Bearer two"}
            long = http.post(path, json={"input": "a b " * 2 * engine.model.context, **more}, headers=headers)
            assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
            gone = http.post(path, json={"input": "a", "previous_response_id": first.id + "0"}, headers=headers)
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "previous_response_not_found")
            other = http.post(
                path,
                json={"input": "a", "previous_response_id": first.id},
                headers={"authorization": "Bearer one"},
            )
            assert other.status_code == 404
