"""What is read of an answer does not depend on how it arrives, nothing raises, and nothing that is no call is lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.pieces import CallOpened, Content
from kvcellar.text.replies.detection import known
from tests.text.replies.chats import TEMPLATES
from tests.text.replies.reads import TOOLS, pieces_of, read
from tests.text.templates import THINKER

HERMES = known(THINKER)
ANSWER = (
    '<think>\nhm <tool_call> ok\n</think>\n\nSure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", '
    '"more": {"a": [1, 2.5, "}"]}}}\n</tool_call>\n<tool_call>\n{"arguments": "{\\"days\\": 3}", "name": "other"}\n'
    "</tool_call>"
)
CALLS = [("weather", {"city": "Köln", "more": {"a": [1, 2.5, "}"]}}), ("other", {"days": 3})]


def test_reasoning_content_and_calls_are_told_apart():
    seen = read(pieces_of(HERMES, [ANSWER]))
    assert (seen.reasoning, seen.content, seen.calls) == ("hm <tool_call> ok", "Sure.", CALLS)


def test_arguments_arrive_as_they_are_written():
    begun = ANSWER.index("Köln") + 2
    seen = pieces_of(HERMES, [ANSWER[:begun]], deltas=True)
    assert [type(piece).__name__ for piece in seen[-2:]] == ["CallOpened", "CallArguments"]
    assert seen[-1].text == '{"city": "Kö'


def test_the_text_of_a_call_that_is_cut_off_is_content():
    for end in range(len(ANSWER)):
        seen = read(pieces_of(HERMES, [ANSWER[:end]], deltas=False))
        assert seen.calls == CALLS[: len(seen.calls)]
        assert not seen.unclosed
        begun = ANSWER.find("Sure.\n<tool_call>")
        if begun + 6 < end < ANSWER.index("}}}"):
            assert seen.content == ANSWER[begun:end].rstrip() + ANSWER[begun:end][len(ANSWER[begun:end].rstrip()) :]


def test_a_call_that_was_opened_and_cut_off_is_not_closed():
    seen = read(pieces_of(HERMES, [ANSWER[: ANSWER.index("Köln")]]))
    assert (seen.unclosed, seen.calls, seen.content) == (1, [], "Sure.")


def test_what_is_no_call_is_content():
    for text in (
        "<tool_call>\nnothing\n</tool_call>",
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "no json"}\n</tool_call>',
        '<tool_call>\n{"name": "' + "x" * 300 + '", "arguments": {}}\n</tool_call>',
        "<tool_call>",
        "<tool_call",
    ):
        seen = read(pieces_of(HERMES, [text], deltas=False))
        assert seen.content == text, text
        assert not seen.calls


def test_a_broken_call_does_not_hide_the_next_one():
    text = '<tool_call>\n{"name: \n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    broken = '<tool_call>\n{"name" "x"}\n</tool_call>\n' + text[text.index("\n<tool_call>") + 1 :]
    seen = read(pieces_of(HERMES, [broken]))
    assert seen.calls == [("weather", {})]
    assert seen.content == '<tool_call>\n{"name" "x"}\n</tool_call>'


def test_without_tools_a_call_is_content():
    seen = read(pieces_of(HERMES, [ANSWER], tools=None))
    assert not seen.calls
    assert seen.reasoning == "hm <tool_call> ok"
    assert seen.content == ANSWER[ANSWER.index("Sure.") :]


def test_reasoning_that_the_prompt_opened_is_reasoning():
    seen = read(pieces_of(HERMES, ["so\n</think>\n\nYes."], opening="<|im_start|>assistant\n<think>\n"))
    assert (seen.reasoning, seen.content) == ("so", "Yes.")


def test_control_tokens_are_not_shown():
    parts = ["a", "<|im_end|>", "b <|im_end|>", "<tool_call>", '{"name": "x"', "<|im_end|>", " 5"]
    seen = read(pieces_of(HERMES, parts, special=frozenset({"<|im_end|>", "<tool_call>"})))
    assert seen.content == 'ab <|im_end|>{"name": "x" 5'


def test_only_the_first_call_is_read_where_one_is_wanted():
    assert read(pieces_of(HERMES, [ANSWER], parallel=False)).calls == CALLS[:1]


def test_white_space_around_calls_and_reasoning_is_no_content():
    text = '<think>\n\n</think>\n\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>\n\n'
    seen = read(pieces_of(HERMES, [text]))
    assert (seen.content, seen.reasoning, seen.calls) == ("", "", [("weather", {})])
    assert read(pieces_of(HERMES, [" \n plain \n "])).content == " \n plain \n "


def test_an_id_is_made_for_each_call():
    assert [piece.id for piece in pieces_of(HERMES, [ANSWER]) if isinstance(piece, CallOpened)] == ["id0", "id1"]


FRAGMENTS = st.sampled_from(
    (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": ', "}", "text", "é"),
        *('{"name": "get_time"', ', "parameters": {}', '{"city": "x"}', "\n", " ", "<", '"', "\\", "[1, 2]", "<tool"),
    )
)


HOW = st.fixed_dictionaries({"deltas": st.booleans(), "parallel": st.booleans(), "answers": st.booleans()})


@given(st.lists(FRAGMENTS, max_size=14), st.lists(st.integers(0, 200), max_size=6), HOW)
def test_what_is_read_does_not_depend_on_how_it_arrives(fragments, cuts, how):
    text = "".join(fragments)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[start:end] for start, end in pairwise(places)]
    whole = pieces_of(HERMES, [text], **how)
    assert pieces_of(HERMES, parts, **how) == whole
    assert pieces_of(HERMES, list(text), **how) == whole
    seen = read(whole)
    assert not (seen.unclosed and not how["deltas"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_are_text_in_an_answer_that_has_to_match(name):
    """A text that the answer quotes, such as a page that the client has sent, is no reasoning, and no call."""
    form = known(TEMPLATES[name])
    marks = [*(section.begin[0] for section in form.sections), *(one.open for one in form.thoughts)]
    marks += form.channels.begin if form.channels is not None else ()
    call = "<tool_call><function=weather></function></tool_call>[weather(days=1)]"
    text = json.dumps({"page": "so " + " b ".join(marks) + call})
    head = "<|channel|>final<|message|>" if form.channels is not None else ""
    for tools in (TOOLS, None):
        for parts in ([head + text], list(head + text)):
            assert pieces_of(form, parts, tools=tools, answers=True) == [Content(text)]


def test_reasoning_and_calls_are_read_in_place_of_an_answer_that_has_to_match():
    opened = ANSWER.replace("Sure.\n", "")
    seen = read(pieces_of(HERMES, list(opened), answers=True))
    assert (seen.reasoning, seen.content, seen.calls) == ("hm <tool_call> ok", "", CALLS)


@given(st.lists(FRAGMENTS, max_size=14))
def test_without_tools_and_marks_of_reasoning_all_is_content(fragments):
    text = "".join(one for one in fragments if "think" not in one)
    assert pieces_of(HERMES, list(text), tools=None) == ([Content(text)] if text else [])


def test_the_cost_does_not_grow_with_the_length():
    """Each character is looked at a bounded number of times: a long answer in single characters is read in time that a
    quadratic reader would need thousands of times."""
    long = json.dumps({"name": "weather", "arguments": {"city": "x" * 300_000}})
    seen = read(
        pieces_of(HERMES, ["word " * 60_000, "<tool_call>", *(long[n : n + 3] for n in range(0, len(long), 3))])
    )
    assert len(seen.calls[0][1]["city"]) == 300_000
