"""Transcripts against the dumb model: a whole state for each turn, of which nothing is shared."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar import BadRequest
from kvcellar.frontend.transcript import Prompt, Transcript, shown_from
from kvcellar.sampling_params import SamplingParams

PARAMS = SamplingParams()
TOKENS = st.lists(st.integers(0, 3), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), TOKENS, TOKENS, st.integers(0, 3)),
        st.tuples(st.just("rewind"), st.integers(0, 4)),
        st.tuples(st.just("fork"), st.integers(0, 5)),
        st.tuples(st.just("kept")),
    ),
    max_size=25,
)
State = tuple[list[int], list[dict[str, Any]], int]


def stated(transcript: Transcript) -> State:
    return transcript.tokens, transcript.messages, transcript.last.omitted


def said(number: int, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": str(number)}


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans())
def test_turns_that_are_shared_are_what_whole_copies_would_be(steps: list[Any], chat: bool) -> None:
    begins = [said(-1)] if chat else []
    every = [(Transcript(chat=chat, messages=begins, tokens=(7, 8)), [([7, 8], begins, 0)])]
    for number, (what, *rest) in enumerate(steps):
        transcript, states = every[-1]
        tokens, messages, omitted = states[-1]
        match what:
            case "turn":
                kept, answer, more = rest
                text = [*(tokens[: len(kept)] if chat else tokens), *kept]  # of a chat, any prompt follows any other
                new, omits = [said(number)] if chat else [], min(omitted + more, len(messages)) if chat else 0
                transcript.conclude(Prompt(text, text, PARAMS, new, omits), answer, said(number, "assistant"))
                after = [*messages, *new, said(number, "assistant")] if chat else []
                states.append(([*text, *answer], after, omits))
            case "rewind" if rest[0] < len(states):
                transcript.rewind(rest[0])
                del states[len(states) - rest[0] :]
            case "rewind":
                with pytest.raises(BadRequest, match=f"there are {len(states) - 1}"):
                    transcript.rewind(rest[0])
            case "fork":
                other, theirs = every[rest[0] % len(every)]
                every.append((other.copy(), theirs[:]))
            case _:
                again = Transcript.decoded(transcript.encoded(), chat=chat, vocab_size=9)
                assert again.encoded() == transcript.encoded()
                every[-1] = again, states
        for one, whole in every:
            assert (stated(one), one.turns) == (whole[-1], len(whole) - 1)
    for one, whole in every:
        for left in range(len(whole) - 1, -1, -1):
            assert stated(one) == whole[left]
            one.rewind(min(left, 1))


def test_what_earlier_versions_have_kept_is_read() -> None:
    """Of each turn: its prompt, the tokens it has in common with those before it, the rest of those, and how many
    messages there were, and were omitted."""
    messages = [said(0), said(1, "assistant"), said(2), said(3, "assistant")]
    turns = [[2, 0, [], 0, 0], [3, 1, [6], 2, 0]]
    kept = {"tokens": [5, 7, 8, 9], "messages": messages, "omitted": 2, "turns": turns}
    found = Transcript.decoded(json.dumps(kept).encode(), chat=True, vocab_size=10)
    assert stated(found) == ([5, 7, 8, 9], messages, 2)
    assert json.loads(found.encoded()) == kept
    bare = found.without_tokens()
    assert (stated(bare), bare.turns) == (([], messages, 2), 2)
    found.rewind(1)
    assert stated(found) == ([5, 6], messages[:2], 0)
    found.rewind(1)
    assert stated(found) == ([], [], 0)


@pytest.mark.parametrize(("start", "shown"), [(0, "sduau"), (2, "sduau"), (4, "sdu"), (9, "sd")])
def test_messages_of_the_system_are_never_omitted(start: int, shown: str) -> None:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [said(0, roles[letter]) for letter in "sduau"]
    assert shown_from(messages, start) == [said(0, roles[letter]) for letter in shown]
