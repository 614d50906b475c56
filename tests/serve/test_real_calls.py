"""OpenAI's package, the server and the real engine with a template that has tools: required calls fit their schema,
also beside a format of the content."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvcellar import Engine
from kvcellar.engine.models import embedded
from kvcellar.serve import Server, ServeSettings
from tests.engine.test_replies import TOOLS
from tests.serve.fake_engine import PATIENCE
from tests.text.templates import THINKER

ASKED = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
# Reasoning is free in front of a required call, and this model would not end it.
THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(THINKER)
    with (
        Engine(path, threads=1) as engine,
        Server(engine, ServeSettings(port=0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def fits(arguments: str) -> bool:
    given = json.loads(arguments)
    return set(given) == {"days", "unit"} and 0 <= given["days"] <= 9 and given["unit"] in ("C", "F")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_fits_its_schema(client, choice):
    model = client.models.list().data[0].id
    body = {"model": model, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    body |= {"max_tokens": 400, "temperature": 0, "extra_body": THOUGHTLESS}
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert fits(whole.message.tool_calls[0].function.arguments)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_responses_api_requires_the_same_call(client):
    model = client.models.list().data[0].id
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = {"model": model, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_output_tokens": 400, "temperature": 0, "extra_body": THOUGHTLESS}
    made = client.responses.create(input=ASKED, **body)
    call = made.output[-1]
    assert (made.status, call.type) == ("completed", "function_call")
    assert fits(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(input=[result], previous_response_id=made.id, **body)
    assert fits(again.output[-1].arguments)


FORMAT = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}


def asked(api: str, client: openai.OpenAI, schema: dict[str, Any], *, required: bool) -> tuple[str, dict[str, Any]]:
    """A path, and a body that has a tool and a format of the content."""
    function = {**TOOLS[0]["function"], "strict": True}  # calls that are not required end, too
    model = {"model": client.models.list().data[0].id, "temperature": 0}
    named = {"name": "x", "schema": schema}
    match api:
        case "chat":
            format = {"type": "json_schema", "json_schema": named}
            tools = [{"type": "function", "function": function}]
            body = {"messages": ASKED, "tools": tools, "response_format": format, "max_tokens": 400, **THOUGHTLESS}
            choice = {"tool_choice": NAMED, "parallel_tool_calls": False}
        case "responses":
            format = {"format": {"type": "json_schema", **named}}
            tools = [{"type": "function", **function}]
            body = {"input": ASKED, "tools": tools, "text": format, "max_output_tokens": 400, **THOUGHTLESS}
            choice = {"tool_choice": "required", "parallel_tool_calls": False}
        case _:
            format = {"format": {"type": "json_schema", "schema": schema}}
            tools = [{"name": function["name"], "input_schema": function["parameters"], "strict": True}]
            body = {"messages": ASKED, "tools": tools, "output_config": format, "max_tokens": 400}
            body |= {"thinking": {"type": "disabled"}}
            choice = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    path = {"chat": "chat/completions", "responses": "responses"}.get(api, "messages")
    return path, {**model, **body, **(choice if required else {})}


def read(api: str, answer: dict[str, Any]) -> tuple[str, list[Any]]:
    """The content, and the arguments of the calls."""
    match api:
        case "chat":
            message = answer["choices"][0]["message"]
            return message["content"] or "", [one["function"]["arguments"] for one in message.get("tool_calls", ())]
        case "responses":
            texts = [part["text"] for one in answer["output"] if one["type"] == "message" for part in one["content"]]
            return "".join(texts), [one["arguments"] for one in answer["output"] if one["type"] == "function_call"]
        case _:
            texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
            return "".join(texts), [json.dumps(one["input"]) for one in answer["content"] if one["type"] == "tool_use"]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_format_of_the_content_stands_beside_a_required_call(client, api):
    """The answer is a call and has no content. Where no call is required, an answer that has none matches the format.
    One that cannot be honoured is refused in both."""
    http = client.with_options(timeout=PATIENCE)._client
    for required in (True, False):
        path, body = asked(api, client, FORMAT, required=required)
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        content, calls = read(api, response.json())
        if required:
            assert (content, list(map(fits, calls))) == ("", [True])
        else:
            assert calls or set(json.loads(content)) == {"sunny"}
        path, body = asked(api, client, {"not": {}}, required=required)
        refused = http.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert "this json_schema cannot be honoured: Unimplemented" in refused.json()["error"]["message"]


def test_a_required_call_and_a_text_that_the_answer_must_be_are_refused_by_their_names(client):
    path, body = asked("chat", client, FORMAT, required=True)
    del body["response_format"]
    for fields, name in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs.choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ):
        response = client._client.post(path, json=body | fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["message"] == f"tool_choice requires a call, and {name} another text; send one of them"
        assert error["param"] == name


def test_a_format_of_ollama_is_that_of_the_content_beside_tools(client):
    """This API cannot require a call."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    body = {"model": client.models.list().data[0].id, "messages": ASKED, "tools": tools, "format": FORMAT}
    body |= {"stream": False, "think": False, "options": {"temperature": 0, "num_predict": 400}}
    message = client._client.post(client.base_url.join("/api/chat"), json=body).json()["message"]
    calls = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
    assert all(fits(json.dumps(given)) for given in calls)
    assert calls or set(json.loads(message["content"])) == {"sunny"}
