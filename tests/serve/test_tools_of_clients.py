"""Calls of tools and reasoning in Anthropic's and Ollama's APIs, with their own clients."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from kvcellar.serve import Server
from kvcellar.text.replies.detection import known
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import MODEL

FORM = known('<tool_call> "arguments" <think>')
ASKED: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TOOL_A: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REPLY = f"<think>Hm.</think>Wait.{CALL}{CALL}"


@pytest.fixture
def calling(engine: FakeEngine) -> FakeEngine:
    """Its answers are written with reasoning and calls."""
    assert FORM is not None
    engine.replies.use(FORM)
    return engine


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=PATIENCE)
    yield client
    client._client.close()


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(model=MODEL, max_tokens=500, messages=ASKED, tools=[TOOL_A], **options)


def test_blocks_are_in_the_order_in_which_they_were_written(claude: anthropic.Anthropic, calling: FakeEngine) -> None:
    with calling.scripted(output=REPLY.encode()):
        message = ask(claude)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert (thinking.thinking, text.text, message.stop_reason) == ("Hm.", "Wait.", "tool_use")
    assert [(one.name, one.input) for one in calls] == [("weather", {"city": "Rome"})] * 2
    assert len({one.id for one in calls}) == 2
    assert calling.tools == [TOOL]


def test_a_stream_of_blocks_adds_up_to_the_message(claude: anthropic.Anthropic, calling: FakeEngine) -> None:
    """One block is open at a time; each has its number; reasoning ends with a signature, which clients send back."""
    with calling.scripted(output=REPLY.encode()):
        whole = ask(claude)
        with claude.messages.stream(model=MODEL, max_tokens=500, messages=ASKED, tools=[TOOL_A]) as stream:
            events = [event.model_dump() for event in stream]
            message = stream.get_final_message()
    kept = ("type", "text", "thinking", "signature", "name", "input")
    both = [[{name: getattr(b, name, None) for name in kept} for b in one.content] for one in (message, whole)]
    assert both[0] == both[1]
    assert both[0][0]["signature"]
    borders = [(one["type"], one["index"]) for one in events if one["type"].startswith("content_block_s")]
    assert borders == [(f"content_block_{what}", index) for index in range(4) for what in ("start", "stop")]


def test_tools_are_chosen(claude: anthropic.Anthropic, calling: FakeEngine) -> None:
    for choice, (mode, names) in {
        '{"type": "auto"}': ("auto", ()),
        '{"type": "any"}': ("required", ()),
        '{"type": "none"}': ("none", ()),
        '{"type": "tool", "name": "weather"}': ("required", ("weather",)),
    }.items():
        ask(claude, tool_choice=json.loads(choice))
        assert (calling.replies.asked[-1]["choice"], tuple(calling.replies.asked[-1]["names"])) == (mode, names)
    ask(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert calling.replies.asked[-1]["parallel"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "such a tool runs at Anthropic"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [TOOL_A], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"output_config": {"format": {"type": "json_schema", "schema": []}}}, "format.schema must be an object"),
    ],
)
def test_tools_that_cannot_be_served_are_named(http: httpx.Client, changes: dict[str, Any], message: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": ASKED, **changes}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_thinking_is_switched_by_the_effort(claude: anthropic.Anthropic, calling: FakeEngine) -> None:
    for fields, effort in (
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({}, None),
    ):
        ask(claude, **fields)
        assert calling.rendered[-1]["effort"] == effort


def test_an_answer_that_matches_a_schema_is_asked_of_the_engine(
    claude: anthropic.Anthropic, calling: FakeEngine
) -> None:
    ask(claude, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    constraint = calling.replies.asked[-1]["answer"]
    assert constraint is not None
    assert constraint.kind == "json_schema"


def test_calls_are_whole_and_their_arguments_objects(llama: ollama.Client, calling: FakeEngine) -> None:
    with calling.scripted(output=REPLY.encode()):
        whole = llama.chat(MODEL, ASKED, tools=[TOOL])
        lines = list(llama.chat(MODEL, ASKED, tools=[TOOL], stream=True))
    message = whole.message
    assert (message.thinking, message.content, whole.done_reason) == ("Hm.", "Wait.", "stop")
    assert message.tool_calls is not None
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls]
    assert calls == [("weather", {"city": "Rome"})] * 2
    told = [one for line in lines for one in line.message.tool_calls or ()]
    assert [(one.function.name, one.function.arguments) for one in told] == calls
    assert "".join(line.message.content or "" for line in lines) == "Wait."
    assert "".join(line.message.thinking or "" for line in lines) == "Hm."
    assert calling.tools == [TOOL]


def test_no_tools_are_as_if_there_were_none(llama: ollama.Client, calling: FakeEngine) -> None:
    """Ollama's client always sends `tools`."""
    llama.chat(MODEL, ASKED, tools=[])
    assert not calling.tools


@pytest.mark.parametrize(("form", "kind"), [("json", "json_object"), (SCHEMA, "json_schema")])
def test_formats_are_constraints(llama: ollama.Client, calling: FakeEngine, form: Any, kind: str) -> None:
    llama.chat(MODEL, ASKED, format=form)
    constraint = calling.replies.asked[-1]["answer"]
    assert constraint is not None
    assert constraint.kind == kind
