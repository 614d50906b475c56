"""Conversations of agents: messages with tool calls, results and reasoning, as clients copy them from responses."""

import json

import pytest

from tests.serve.wire import CHAT, error_of

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "14"}
ANSWER = {"role": "assistant", "content": "ho"}


def rendered(http, engine, messages, **fields):
    response = http.post(CHAT, json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    ((prompt, _),) = engine.seen
    return bytes(prompt).decode()


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_an_assistant_message_with_tool_calls_needs_no_content(http, engine, content):
    calls = json.dumps({"tool_calls": [CALL]})
    messages = [USER, {"role": "assistant", **content, "tool_calls": [CALL]}, RESULT]
    assert rendered(http, engine, messages) == f'<user>hi<assistant>{calls}<tool>14{{"tool_call_id": "c1"}}'


@pytest.mark.parametrize(
    "extra",
    [
        {"index": 0},
        {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}},
        {"provider_specific_fields": None},
    ],
)
def test_extra_keys_of_a_tool_call_are_not_rendered(http, engine, extra):
    text = rendered(http, engine, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL | extra]}, RESULT])
    assert text.count("index") + text.count("google") + text.count("provider") == 0
    assert json.dumps([CALL]) in text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_accepted_under_all_its_names(http, engine, name):
    text = rendered(http, engine, [USER, {"role": "assistant", "content": None, name: "hm"}, USER])
    assert '<assistant>{"reasoning_content": "hm"' in text.replace(f'"{name}": "hm", ', "")


FULL = {  # the message of a text response as sent by openai's package, litellm and others
    **ANSWER,
    "refusal": None,
    "annotations": [{"type": "url_citation"}],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": None,
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [],
    "reasoning_details": [],
    "id": "msg_1",
    "cache_control": {"type": "ephemeral"},
}


def test_messages_copied_from_responses_are_accepted(http, engine):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert rendered(http, engine, [{**USER, "content": [part]}, FULL, USER]) == "<user>hi<assistant>ho<user>hi"


def test_a_refusal_is_rendered_as_content(http, engine):
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert rendered(http, engine, [USER, refused, USER]) == "<user>hi<assistant>I will not.<user>hi"


def test_deprecated_function_calls_are_rendered_as_tool_calls(http, engine):
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    text = rendered(http, engine, [USER, called, {"role": "function", "name": "f", "content": "14"}])
    assert "<tool>14" in text
    assert '{"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}' in text


WRONG = [
    ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    ([USER, {"role": "assistant"}], "messages[1].content"),
    ([USER, {"role": "assistant", "content": []}], "messages[1].content"),
    ([USER, {"role": "assistant", "content": None, "reasoning": ""}], "messages[1].content"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
    ([USER, {**ANSWER, "refusal": "no"}], "messages[1].refusal"),
    ([USER, {**ANSWER, "tool_calls": [CALL | {"type": "custom"}]}], "messages[1].tool_calls[0].type"),
    ([USER, {**ANSWER, "tool_calls": [{"id": "c", "function": {}}]}], "messages[1].tool_calls[0].function.name"),
    ([USER, {**ANSWER, "tool_calls": [CALL]}, {**RESULT, "content": None}], "messages[2].content"),
    ([USER, {**ANSWER, "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "c2"}], "messages"),
    ([USER, RESULT], "messages"),
    ([{**USER, "tool_calls": [CALL]}], "messages"),
    ([USER, {**ANSWER, "audio": {"id": "audio_1"}}], "messages[1].audio"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG)
def test_invalid_histories_are_refused_with_the_field(http, engine, messages, param):
    response = http.post(CHAT, json={"messages": messages})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert f"messages[{len(messages) - 1}]" in error["message"]
    assert not engine.seen


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort_and_variables_are_passed_to_the_template(http, engine, effort):
    given = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    for how in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort}}):
        assert http.post(CHAT, json={"messages": [USER], **how, **given}).status_code == 200
    one, other = engine.rendered
    assert one == other == {"effort": effort, "variables": {"enable_thinking": False}, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning": {"effort": "low", "max_tokens": 5}}, "reasoning.max_tokens"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_invalid_reasoning_effort_is_refused(http, engine, fields, param):
    assert error_of(http.post(CHAT, json={"messages": [USER], **fields}))["param"] == param
    assert not engine.seen
