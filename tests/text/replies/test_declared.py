"""The form that a checkpoint declares is used where its marks are fixed texts, and no pattern of it is run."""

import pytest
from transformers.utils.chat_parsing import ResponseParser

from kvcellar.text.replies.detection import declared
from tests.text.replies.reads import pieces_of, read

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call\.>",
            "close": "</call.>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"},
    },
}
TEXT = '<think>\nso\n</think>\n\nWell.\n<call.>\n{"name": "weather", "arguments": {"days": 1}}\n</call.>'


def changed(**calls):
    return {**TEMPLATE, "fields": {**TEMPLATE["fields"], "tool_calls": {**TEMPLATE["fields"]["tool_calls"], **calls}}}


def test_it_is_read_as_transformers_reads_it():
    seen = read(pieces_of(declared(TEMPLATE), list(TEXT)))
    parser = ResponseParser(TEMPLATE, prefix="")
    parser.feed(TEXT)
    message, _ = parser.finalize()
    theirs = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert (seen.calls, seen.content, seen.reasoning) == (theirs, message["content"], message["reasoning_content"])


@pytest.mark.parametrize(
    "template",
    [
        None,
        5,
        {"fields": []},
        changed(open_pattern="(a|aa)+b"),
        changed(open_pattern=r"call (?P<name>\w+)"),
        changed(open_pattern=r"\s*"),
        changed(content="xml-inline"),
        changed(transform={"function": {"name": "{content.tool}", "arguments": "{content.args}"}}),
        changed(close=["</call.>", 5]),
    ],
)
def test_other_templates_are_not_used(template):
    assert declared(template) is None


def test_parameters_are_arguments_of_another_name():
    function = {"name": "{content.name}", "arguments": "{content.parameters}"}
    form = declared(changed(transform={"type": "function", "function": function}))
    text = '<call.>{"name": "weather", "parameters": {"days": 1}}</call.>'
    assert read(pieces_of(form, [text])).calls == [("weather", {"days": 1})]
