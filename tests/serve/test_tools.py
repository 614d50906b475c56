"""Chats with tools: what is asked of the model, and calls and reasoning in responses and streams."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.serve import Server, ServeSettings
from kvcellar.text.replies.detection import known
from tests.serve.fake_engine import FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, chat, chunks_of, completion, error_of

FORM = known('<tool_call> "arguments" <think>')
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, TIME]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def calling(engine: FakeEngine) -> FakeEngine:
    """Its answers are written with reasoning and calls."""
    assert FORM is not None
    engine.replies.use(FORM)
    return engine


def said(http, engine, output: str, **fields: Any) -> dict[str, Any]:
    """The only choice of a response."""
    with engine.scripted(output=output.encode()):
        response = http.post(CHAT, json=chat(tools=TOOLS, **fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def streamed(http, engine, output: str, **fields: Any) -> list[dict[str, Any]]:
    with engine.scripted(output=output.encode()):
        response = http.post(CHAT, json=chat(**({"tools": TOOLS} | fields), stream=True))
    return [chunk["choices"][0] for chunk in chunks_of(response.text)]


def put_together(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the chunks of one choice, after a check of their form."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": part["id"], "type": part["type"], "function": part["function"]})
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                assert part["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
    return message


def test_a_call_is_told_in_a_response(http, calling):
    choice = said(http, calling, call("weather", city="Rome"))
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert calling.tools == TOOLS


def test_content_and_reasoning_stand_beside_calls(http, calling):
    text = "<think>Hm.</think>Wait." + call("weather", city="Rome") + call("time")
    choice = said(http, calling, text)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Wait.")
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["weather", "time"]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert "reasoning" not in message


def test_chunks_of_a_call_have_its_id_once(http, calling):
    first, *choices, last = streamed(http, calling, call("weather", city="Rome"))
    assert first["delta"] == {"role": "assistant", "content": ""}
    opened, *more = [choice["delta"]["tool_calls"][0] for choice in choices]
    assert opened == {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert len(more) > 1
    assert "".join(part["function"]["arguments"] for part in more) == '{"city": "Rome"}'
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("half", [10, 25, 40, 50])
def test_half_a_call_at_the_end_of_the_tokens_is_text(http, calling, half):
    text = "Wait. " + call("weather", city="Rome")[:half]
    choice = said(http, calling, text, max_tokens=len(text))
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert streamed(http, calling, text)[-1]["finish_reason"] == "stop"


BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", ]'
HALF = BROKEN[:-1]


def last_event(text: str) -> dict[str, Any]:
    return json.loads(text.strip().rpartition("data: ")[2])


@pytest.mark.parametrize(("most", "reason"), [(None, "stop"), (len(HALF) - 1, "length")])
@pytest.mark.parametrize("text", [BROKEN, HALF])
def test_a_call_that_was_opened_in_a_stream_and_broke_off_is_none(http, calling, text, most, reason):
    """In every API: the answer has not ended to have a tool called."""
    most = {} if most is None else {"max_tokens": most}
    choice = streamed(http, calling, text, **most)
    assert any("tool_calls" in one["delta"] for one in choice), "it was told"
    assert choice[-1]["finish_reason"] == reason
    both = streamed(http, calling, call("time") + text)
    assert both[-1]["finish_reason"] == "tool_calls", "one of them is complete"
    asked = [{"role": "user", "content": "x"}]
    with calling.scripted(output=text.encode()):
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        body = {"model": "cellar/fake-1", "messages": asked, "tools": tools, "stream": True, "max_tokens": 999} | most
        events = http.post("/v1/messages", json=body).text
        stopped = json.loads(events.split("event: message_delta\ndata: ")[1].split("\n")[0])["delta"]["stop_reason"]
        assert stopped == {"stop": "end_turn", "length": "max_tokens"}[reason]
        options = {} if not most else {"options": {"num_predict": most["max_tokens"]}}
        body = {"model": "cellar/fake-1", "messages": asked, "tools": TOOLS} | options
        lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
        assert lines[-1]["done_reason"] == reason
        assert not any("tool_calls" in line["message"] for line in lines)
        flat = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
        bound = {} if not most else {"max_output_tokens": most["max_tokens"]}
        body = {"input": "x", "tools": flat, "stream": True} | bound
        response = last_event(http.post("/v1/responses", json=body).text)["response"]
        assert response["status"] == "incomplete"
        details = {"reason": "max_output_tokens" if reason == "length" else None}
        assert response["incomplete_details"] == details
        assert next(one for one in response["output"] if one["type"] == "function_call")["status"] == "incomplete"
    continued = http.post("/v1/responses", json={"input": "y", "previous_response_id": response["id"]})
    assert continued.status_code == 200, "the call is no part of the conversation, since it can have no result"
    assert "Rome" not in bytes(calling.seen[-1][0]).decode().partition("assistant")[2].partition("user")[0]


def test_an_answer_without_calls_ends_as_ever(http, calling):
    choice = said(http, calling, "Hello")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Hello")


def test_every_choice_has_calls_of_its_own(http, calling):
    with calling.scripted(output=call("time").encode()):
        plain = http.post(CHAT, json=chat(tools=TOOLS, n=2)).json()["choices"]
    assert plain[0]["message"]["tool_calls"][0]["function"]["name"] == "time"
    assert plain[0]["finish_reason"] == "tool_calls"
    assert plain[1]["finish_reason"] == "stop"  # the fake engine rotates its text by one character


def test_without_parallel_calls_the_first_call_ends_the_answer(http, calling):
    text = call("time") + call("weather", city="Rome")
    assert len(said(http, calling, text)["message"]["tool_calls"]) == 2
    choice = said(http, calling, text, parallel_tool_calls=False)
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["time"]
    assert choice["finish_reason"] == "tool_calls"


NAMED = {"type": "function", "function": {"name": "time"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ()),
        ("auto", "auto", ()),
        ("none", "none", ()),
        ("required", "required", ()),
        (NAMED, "required", ("time",)),
        ({"type": "function", "name": "time"}, "required", ("time",)),
        (ALLOWED, "required", ("time",)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}, "auto", ("time",)),
    ],
)
def test_tool_choice_is_asked_of_the_model(http, calling, choice, mode, names):
    said(http, calling, "Hello", tool_choice=choice)
    (asked,) = calling.replies.asked
    assert (asked["choice"], asked["names"]) == (mode, names)
    assert calling.tools == (None if mode == "none" else TOOLS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 1}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [NAMED]}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": "time"}, "tools"),
        ({"tools": ["time"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_with_tools_is_named(http, calling, fields, param):
    error = error_of(http.post(CHAT, json=chat(**({"tools": TOOLS} | fields))))
    assert error["param"] == param
    assert not calling.seen


def test_a_model_without_a_form_of_calls_refuses_tools(http, engine):
    error = error_of(http.post(CHAT, json=chat(tools=TOOLS)))
    assert (error["param"], error["type"]) == ("tools", "invalid_request_error")
    assert http.post(CHAT, json=chat(tools=[])).status_code == 200


def test_completions_have_no_tools(http, calling):
    assert error_of(http.post(COMPLETIONS, json=completion(tools=TOOLS)))["code"] == "unsupported_parameter"


def test_reasoning_can_be_left_out(http, calling):
    text = "<think>Hm.</think>Hello"
    with calling.scripted(output=text.encode()):
        body = http.post(CHAT, json=chat(include_reasoning=False)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    message = put_together(streamed(http, calling, text, include_reasoning=False, tools=[]))
    assert (message["content"], message["reasoning_content"]) == ("Hello", "")


def test_a_setting_tells_reasoning_under_both_names(engine):
    assert FORM is not None
    engine.replies.use(FORM)
    with Server(engine, ServeSettings(port=0, both_reasoning_names=True)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with engine.scripted(output=b"<think>Hm.</think>Hello"):
            given = client.chat.completions.create(model="cellar/fake-1", messages=[{"role": "user", "content": "hi"}])
        client.close()
    message = given.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Hello")


def test_logprobs_are_of_all_tokens(http, calling):
    text = "<think>Hm.</think>Hello" + call("time")
    choice = said(http, calling, text, logprobs=True)
    assert len(choice["logprobs"]["content"]) == len(text)
    chunks = streamed(http, calling, text, logprobs=True)
    told = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert told == choice["logprobs"]["content"]


def test_a_conversation_keeps_calls_and_reasoning(http, calling):
    http.post("/kvcellar/conversations", json={"name": "agent"})
    said(http, calling, "<think>Hm.</think>" + call("weather", city="Rome"), conversation="agent")
    kept = http.get("/kvcellar/conversations/agent").json()["messages"][-1]
    assert (kept["content"], kept["reasoning_content"]) == ("", "Hm.")
    (made,) = kept["tool_calls"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": "sunny"}
    with calling.scripted(output=b"It is sunny."):
        body = {"messages": [result], "tools": TOOLS, "conversation": "agent"}
        assert http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "It is sunny."
    http.delete("/kvcellar/conversations/agent")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_package_assembles_a_stream(client, calling):
    with (
        calling.scripted(output=("Wait." + call("weather", city="Rome")).encode()),
        client.chat.completions.stream(
            model="cellar/fake-1", messages=[{"role": "user", "content": "hi"}], tools=TOOLS
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "Wait."
    assert message.message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_an_agent_of_the_openai_package_sends_its_messages_back(client, calling):
    with calling.scripted(output=("<think>Hm.</think>" + call("weather", city="Rome")).encode()):
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="cellar/fake-1", messages=asked, tools=TOOLS).choices[0].message
    made = answer.tool_calls[0]
    asked += [answer, {"role": "tool", "tool_call_id": made.id, "content": "sunny"}]
    with calling.scripted(output=b"It is sunny."):
        again = client.chat.completions.create(model="cellar/fake-1", messages=asked, tools=TOOLS)
    assert again.choices[0].message.content == "It is sunny."


PARTS = st.lists(
    st.sampled_from(["Hello ", "<think>", "</think>", "<tool_call>\n", "\n</tool_call>", '{"name": "time", "argum'])
    | st.just(call("time"))
    | st.just(call("weather", city='a"b\n{}')),
    max_size=6,
).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARTS)
def test_the_chunks_of_a_stream_make_up_a_message(http, calling, text):
    """Where every call is complete, that of the response; else all of the text is in one of its parts."""
    if not text:
        return
    *choices, last = streamed(http, calling, text)
    made, whole = put_together([*choices, last]), said(http, calling, text)
    broken = len(made["tool_calls"]) > len(whole["message"].get("tool_calls", ()))
    if not broken:
        assert made["content"] == (whole["message"]["content"] or "")
        assert made["reasoning_content"] == whole["message"].get("reasoning_content", "")
        functions = [one["function"] for one in made["tool_calls"]]
        assert functions == [one["function"] for one in whole["message"].get("tool_calls", ())]
        assert last["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_tool_that_is_required_by_its_name_is_called_once(http, calling, parallel):
    """A client that names a tool reads one call; a model that goes on would run into `max_tokens`."""
    text = call("time") + call("time")
    choice = said(http, calling, text, tool_choice=NAMED, parallel_tool_calls=parallel)
    assert len(choice["message"]["tool_calls"]) == 1
    assert calling.replies.asked[-1]["parallel"] is False
