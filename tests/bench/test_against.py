"""Caches of other systems are counted on the same traces; `crop` decides what transformers can keep."""

import json

import pytest

from benchmarks.against import in_transformers
from benchmarks.replay import ANEW, KINDS, TRACES, WINDOW, Served, Turn, Writer, computed, ideal
from benchmarks.run import main
from kvcellar.memory.prefix.node import common_prefix


def growing(conversation: int, seed: int, turns: int = 4) -> list[Turn]:
    """A conversation whose every prompt goes on from the answer before."""
    writer = Writer(seed, 1.0)
    text, found = writer.some(400), list[Turn]()
    for _ in range(turns):
        text = [*text, *writer.some(50)]
        answer = writer.some(20)
        found.append(Turn(list(text), answer, conversation))
        text += answer
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_that_only_grows_computes_what_is_new(kind: str) -> None:
    turns = growing(0, 0)
    assert in_transformers(turns, kind) == ideal(turns) == 450 + 3 * 51


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_share_nothing_and_do_not_disturb_each_other(kind: str) -> None:
    one, other = growing(0, 0), growing(1, 0)
    mixed = [turn for both in zip(one, other, strict=True) for turn in both]
    assert in_transformers(mixed, kind) == 2 * in_transformers(one, kind)
    assert ideal(mixed) < 2 * ideal(one)


@pytest.mark.parametrize("kind", KINDS)
def test_full_attention_is_cropped_and_other_layers_begin_anew(kind: str) -> None:
    (turn, *_) = growing(0, 0)
    again = turn._replace(prompt=[*turn.prompt[:300], *Writer(7, 1.0).some(10)])
    computed = in_transformers([turn, again], kind) - len(turn.prompt)
    assert computed == (10 if kind == "full" else 310)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_a_window_that_has_not_moved_on_is_cropped(kind: str) -> None:
    prompt = Writer(0, 1.0).some(WINDOW // 2)
    turns = [Turn(prompt, [1, 2]), Turn([*prompt[:50], 3, 4], [5])]
    assert in_transformers(turns, kind) == len(prompt) + 2


@pytest.mark.parametrize("name", TRACES)
def test_it_computes_no_less_than_an_ideal_cache(name: str) -> None:
    turns = list(TRACES[name](Writer(1, 0.1)))
    assert ideal(turns) <= in_transformers(turns, "full") <= in_transformers(turns, "hybrid")


def test_the_row_has_both_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for some in (TRACES, KINDS):
        for name in list(some)[1:]:
            monkeypatch.delitem(some, name)
    main(["replay-transformers", "--quick"])
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["rows"]["replay-transformers"]
    assert list(found) == ["agent full"]
    assert table[-1].split()[:5] == ["agent", "full", *map(str, found["agent full"].values())]


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_goes_on_from_what_a_server_drew(name: str) -> None:
    known, prompts = list[list[int]](), list[list[int]]()
    drawn = iter(range(10**6, 10**7))

    def serve(prompt: list[int], new: int) -> Served:
        longest = max((common_prefix(text, prompt) for text in known), default=0)
        answer = [next(drawn) for _ in range(new)]
        known.append([*prompt, *answer[:-1]])
        prompts.append(list(prompt))
        return Served(answer, min(longest, len(prompt) - 1))

    found = computed(name, serve, scale=0.05)
    assert 0 < found.computed == found.ideal < found.tokens
    goes_on = any(token >= 10**6 for prompt in prompts for token in prompt)
    assert goes_on == (name not in ANEW)
