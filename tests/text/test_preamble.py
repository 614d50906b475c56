"""A model's own messages come before those of a conversation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.conversation import Preamble

ROLES = ("system", "developer", "user", "assistant")
MESSAGES = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), st.text()))
EXAMPLES = (({"role": "user", "content": "two?"}), ({"role": "assistant", "content": "2"}))


@given(MESSAGES)
def test_the_messages_of_a_conversation_keep_their_order_and_each_is_there_once(messages: list[dict[str, Any]]) -> None:
    found = Preamble("be short", EXAMPLES).before(messages)
    system = {"role": "system", "content": "be short"}
    assert [one for one in found if not any(one is own for own in EXAMPLES) and one not in ([system])] == [
        one for one in messages if one != system
    ]


@given(MESSAGES)
def test_the_system_prompt_is_used_where_a_conversation_has_none(messages: list[dict[str, Any]]) -> None:
    found = Preamble("be short", EXAMPLES).before(messages)
    if messages and messages[0]["role"] in ("system", "developer"):
        assert found[0] is messages[0]
        assert sum(one == {"role": "system", "content": "be short"} for one in found) == sum(
            one == {"role": "system", "content": "be short"} for one in messages
        )
    else:
        assert found[0] == {"role": "system", "content": "be short"}


@given(MESSAGES)
def test_examples_come_after_the_system_messages_and_before_all_others(messages: list[dict[str, Any]]) -> None:
    found = list(Preamble(None, EXAMPLES).before(messages))
    at = next(index for index, one in enumerate(found) if one is EXAMPLES[0])
    assert found[at + 1] is EXAMPLES[1]
    assert all(one["role"] in ("system", "developer") for one in found[:at])
    assert [one["role"] for one in found[at + 2 : at + 3]] not in (["system"], ["developer"])


@pytest.mark.parametrize("messages", [None, "text", 5, {"role": "user"}])
def test_what_is_no_conversation_is_left_to_be_refused(messages: Any) -> None:
    assert Preamble("be short", EXAMPLES).before(messages) is messages


def test_without_a_preamble_a_conversation_is_the_same_object() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert Preamble().before(messages) is messages
