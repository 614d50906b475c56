"""Turns: a trie of texts against a list of them, within its bytes."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.text.turns import TURN_BYTES, PromptTurn, Turns, prompt_key

TEXTS = st.text(st.sampled_from("ab"), min_size=1, max_size=6)
NAMES = st.sampled_from(["", "other"])
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), NAMES, TEXTS),
        st.tuples(st.just("reply"), NAMES, TEXTS),
        st.tuples(st.just("walk"), NAMES, TEXTS),
    ),
    max_size=40,
)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def add(turns: Turns, name: str, text: str, parent: PromptTurn | None) -> PromptTurn:
    how: dict[str, Any] = {"marks": (), "said": (), "history": f"{name} {text}".encode()}
    return turns.add(name, text, ids_of(text), parent=parent, **how)


@settings(max_examples=200, deadline=None)
@given(acts=ACTS, most=st.sampled_from([2, 5, 1000]))
def test_turns_are_found_by_text_and_by_tokens(acts: list[tuple[str, str, str]], most: int) -> None:
    turns, added = Turns(most * TURN_BYTES), dict[tuple[str, str], PromptTurn]()
    for act, name, text in acts:
        walk = turns.walk(name, text)
        there = {key: turn for key, turn in added.items() if turn in turns}
        expected = [there[name, text[:end]] for end in range(1, len(text) + 1) if (name, text[:end]) in there]
        assert walk.turns == expected
        if act == "prompt":
            shorter = [turn for turn in expected if turn.end < len(text)]
            added[name, text] = add(turns, name, text, shorter[-1] if shorter else None)
        elif act == "reply" and expected:
            turns.reply(expected[-1], [1, len(text)])
            assert expected[-1] not in turns or list(expected[-1].replies[-1]) == [1, len(text)]
        turns.check()
        for (known, said), turn in added.items():
            if turn in turns:
                assert turns.of_prompt(prompt_key(known, ids_of(said))) is turn
                assert turn.all_ids() == ids_of(said)
                assert turns.of_history(f"{known} {said}".encode()) is turn
    turns.clear()
    turns.check()
    assert (len(turns), turns.bytes) == (0, 0)


def test_a_turn_stays_as_long_as_one_that_continues_it() -> None:
    turns = Turns(6 * TURN_BYTES)
    first = add(turns, "", "a", None)
    last = add(turns, "", "ab", first)
    for number in range(20):
        add(turns, "", f"c{number:02}", None)
        turns.reply(last, [number])
        turns.check()
    assert first in turns
    assert last in turns
    assert [list(reply) for reply in last.replies] == [[number] for number in range(12, 20)]
    assert turns.below(turns.walk("", "a").node) is last
