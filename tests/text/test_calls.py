"""Histories with tools and reasoning: every template renders all of them, and a client's text stays text."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.text.calls import Arguments
from kvcellar.text.conversation import Caps, Marker, unmarked, unused
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import TextTokenizer
from tests.text import templates
from tests.text.made import CONTROL, RENDERER, byte_level

WORDS = TextTokenizer(byte_level(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
ALL = {**templates.ALL, "strings": templates.STRINGS, "parts only": templates.PARTS_ONLY}
OURS = {name: ChatTemplate(source, WORDS, RENDERER) for name, source in ALL.items()}
READ = {"llama3": Arguments.OBJECT, "thinker": Arguments.OBJECT, "strings": Arguments.STRING}

USER = {"role": "user", "content": "what is it"}


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather_of", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def result(content: Any = "14 degrees", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "content": content, **more}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    "arguments", ['{"city": "Oslo", "day": 1}', {"city": "Oslo", "day": 1}], ids=["text", "object"]
)
def test_a_call_and_its_result_are_in_what_every_template_renders(name: str, arguments: Any) -> None:
    text = OURS[name].render([USER, calling(arguments), result()]).text.lower()
    for part in ("weather_of", '"city": "oslo"', "14 degrees"):
        assert part in text.replace("\\", "")


@pytest.mark.parametrize("name", READ)
def test_arguments_are_an_object_where_the_template_reads_one_and_else_the_clients_own_text(name: str) -> None:
    text = OURS[name].render([USER, calling('{"city":"Oslo"}'), result()]).text
    assert ('{"city": "Oslo"}' in text, '{"city":"Oslo"}' in text) == (
        READ[name] is Arguments.OBJECT,
        READ[name] is Arguments.STRING,
    )
    empty = OURS[name].render([USER, calling(""), result()]).text
    assert empty == OURS[name].render([USER, calling({}), result()]).text
    assert "{}" in empty


@pytest.mark.parametrize("broken", ['{"city": "Os', "Oslo", "[1]", '{"a": NaN}', '{"a": 1' + "0" * 5000 + "}"])
@pytest.mark.parametrize("name", OURS)
def test_arguments_that_a_model_wrote_wrongly_are_rendered_as_the_text_that_they_are(name: str, broken: str) -> None:
    text = OURS[name].render([USER, calling(broken), result()]).text.lower()
    assert broken.lower()[:20] in text.replace("\\", "")


def test_a_template_without_calls_gets_them_as_json_in_the_content() -> None:
    talk = [USER, calling('{"city": "Oslo"}', content="Let me look."), result()]
    call = {"tool_calls": [{"name": "weather_of", "arguments": {"city": "Oslo"}, "id": "call00001"}]}
    wrapped = {"tool_response": {"tool_call_id": "call00001", "content": "14 degrees"}}
    message = {"role": "assistant", "content": "Let me look.\n" + json.dumps(call)}
    as_tool = OURS["chatml"].render([USER, message, {"role": "user", "content": "R"}]).text
    assert OURS["chatml"].render(talk).text == as_tool.replace("user\nR", "tool\n14 degrees")
    as_user = [USER, message, {"role": "user", "content": json.dumps(wrapped)}]
    assert OURS["gemma"].render(talk) == OURS["gemma"].render(as_user)


def test_results_of_several_calls_are_one_turn_of_the_user_where_there_is_no_role_for_them() -> None:
    both = calling("{}")
    both["tool_calls"] = [{**both["tool_calls"][0], "id": ident} for ident in ("one", "two")]
    results = [result("1", tool_call_id="one", name="f"), result([{"type": "text", "text": "2"}], tool_call_id="two")]
    text = OURS["gemma"].render([USER, both, *results, {"role": "assistant", "content": "ok"}, USER]).text
    lines = [
        '{"tool_response": {"tool": "f", "tool_call_id": "one", "content": "1"}}',
        '{"tool_response": {"tool_call_id": "two", "content": "2"}}',
    ]
    assert "<start_of_turn>user\n" + "\n".join(lines) + "<end_of_turn>" in text


def test_deprecated_functions_are_tools() -> None:
    call = {"name": "weather_of", "arguments": '{"city": "Oslo"}'}
    old = [USER, {"role": "assistant", "content": None, "function_call": call}]
    old += [{"role": "function", "name": "weather_of", "content": "14"}]
    new = [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}]
    new += [{"role": "tool", "name": "weather_of", "content": "14"}]
    for template in OURS.values():
        assert template.render(old) == template.render(new)


def test_reasoning_without_content_has_empty_content() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        talk = [USER, {"role": "assistant", "content": None, name: "hm"}, USER]
        assert OURS["chatml"].render(talk) == OURS["chatml"].render([USER, {"role": "assistant", "content": ""}, USER])
        message = OURS["thinker"].render([USER, calling("{}", **{name: "because"}), result()]).text
        assert "<think>\nbecause\n</think>" in message


def test_what_was_sent_is_left_alone() -> None:
    talk = [USER, calling('{"city": "Oslo"}'), result(), {"role": "assistant", "content": "x"}]
    before = json.dumps(talk)
    for template in OURS.values():
        template.render(talk)
    assert json.dumps(talk) == before


fragments = st.sampled_from([*CONTROL[:5], "<|im_end|>", "<|im", "_end|>", "<", "|im_end|>", " ", "\n", "a", "é", '"'])
texts = st.lists(fragments, max_size=5).map("".join)


def history(text: str, key: str) -> list[dict[str, Any]]:
    """A turn with tools in which a client writes `text` and `key` wherever it can."""
    arguments = {key: text, "type": text, "role": [text, {text: 1}], "name": text}
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": text}
    return [USER, message, {"role": "tool", "tool_call_id": text, "name": text, "content": text}]


@cache
def own_control(name: str) -> list[int]:
    """The control tokens that a template itself writes."""
    return [one for one in OURS[name].render(history("x", "k")).encode(WORDS) if one in WORDS.control]


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=max(25, settings.default.max_examples // 2))
@given(text=texts, key=texts)
def test_control_tokens_in_calls_results_and_reasoning_are_text(name: str, text: str, key: str) -> None:
    rendered = OURS[name].render(history(text, key))
    ids = rendered.encode(WORDS)
    assert [one for one in ids if one in WORDS.control] == own_control(name)
    assert WORDS.decode(ids, skip_special=False) == rendered.text


def test_control_tokens_in_variables_are_text() -> None:
    reading = ChatTemplate("{{ mood }}{{ list | tojson }}<|im_end|>", WORDS, RENDERER)
    rendered = reading.render([USER], variables={"mood": "<|im_end|>", "list": [{"<|im_end|>": "<|im_end|>"}]})
    ids = rendered.encode(WORDS)
    assert [one for one in ids if one in WORDS.control] == ids[-1:]


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token"])
def test_a_variable_that_is_not_the_clients_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"chat_template_kwargs.{name} cannot be set") as refused:
        OURS["llama3"].render([USER], variables={name: "x"})
    assert refused.value.param == "chat_template_kwargs"


EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
)


def test_effort_reaches_the_templates_that_read_it_and_no_others() -> None:
    levels = ChatTemplate(EFFORT, WORDS, RENDERER)
    assert [levels.render([USER], effort=level).text for level in (None, "low")] == ["medium", "low"]
    assert levels.render([USER], effort="low", variables={"reasoning_effort": "high"}).text == "high"
    thinking = "<think>\n\n</think>"
    assert OURS["thinker"].render([USER], effort="none").text.endswith(thinking + "\n\n")
    assert OURS["thinker"].render([USER], effort="low") == OURS["thinker"].render([USER])
    for name in set(OURS) - {"thinker"}:
        assert OURS[name].render([USER], effort="none") == OURS[name].render([USER])


DEEP = '{"a":' * 40 + "1" + "}" * 40
DEEPER = '{"a":' * 100_000 + "1" + "}" * 100_000
WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([USER, result()], r"messages\[1\] is the result of a tool call, but no message before it has tool_calls"),
    ([USER, calling("{}"), result(tool_call_id="other")], r"messages\[2\].tool_call_id is not the id of a call"),
    ([USER, calling("{}", function_call={"name": "f"})], r"messages\[1\] has both tool_calls and function_call"),
    ([{**USER, "tool_calls": [{"function": {"name": "f"}}]}], "only messages of the role assistant"),
    ([USER, calling("{}", tool_calls={"name": "f"})], r"messages\[1\].tool_calls must be a list"),
    ([USER, calling("{}", tool_calls=[{"id": "a"}])], r"tool_calls\[0\].function must be an object with name"),
    ([USER, calling("{}", tool_calls=["f"])], r"tool_calls\[0\].function must be an object with name"),
    ([USER, calling([1])], r"tool_calls\[0\].function.arguments must be a string that holds a JSON object"),
    ([USER, calling(DEEP)], r"tool_calls\[0\].function.arguments.*is nested more than 32 deep"),
    ([USER, calling(DEEPER)], r"tool_calls\[0\].function.arguments is nested too deep"),
]


@pytest.mark.parametrize(("messages", "why"), WRONG, ids=[why[-40:] for _, why in WRONG])
def test_wrong_calls_are_refused_with_the_place(messages: list[dict[str, Any]], why: str) -> None:
    for name in ("chatml", "llama3"):
        with pytest.raises(BadRequest, match=why) as refused:
            OURS[name].render(messages)
        assert refused.value.param == "messages"


def test_arguments_count_towards_what_a_conversation_may_have() -> None:
    small = ChatTemplate(templates.LLAMA3, WORDS, RENDERER, Caps(message_chars=100))
    with pytest.raises(BadRequest, match="more than 100 characters"):
        small.render([USER, calling(json.dumps({"a": "x" * 100}))])


def test_in_arguments_even_words_that_templates_look_up_are_a_clients_text() -> None:
    marker, (mark,) = Marker(["user", "name"], 100), unused([])
    call = {"role": "user", "name": "x", "arguments": {"name": "x", "role": "user", "list": [{"name": "user"}]}}
    marked = marker.marked(call, mark)
    inside = json.dumps(marked["arguments"], ensure_ascii=False)
    assert (marked["role"], marked["name"]) == ("user", "x")
    assert "user" not in inside
    assert "name" not in inside
    assert unmarked(inside, mark)[0] == json.dumps(call["arguments"])
