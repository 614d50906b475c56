"""The index finds what a search through the whole text finds; the drafter repeats texts, and keeps namespaces apart."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.speculate import ngram
from kvcellar.engine.speculate.chain import Chain, verify
from kvcellar.engine.speculate.ngram import BREAK, LEAST, LONGEST, TRIES, Match, NGramDrafter, Suffixes
from tests.speculate.chains import Model, sampler

texts = st.lists(st.integers(0, 2), max_size=60)


def dumb(index: Suffixes, text: Sequence[int], tail: Sequence[int]) -> Match | None:
    """The longest match of `tail` in `text` by looking at every place, the last ones first."""
    if len(tail) < LEAST:
        return None
    slot = index.slot(tail[len(tail) - LEAST :])
    places = [end for end in range(len(text), LEAST - 1, -1) if index.slot(text[end - LEAST : end]) == slot][:TRIES]
    best: Match | None = None
    for end in places:
        length = 0
        while length < min(end, len(tail), LONGEST) and text[end - 1 - length] == tail[len(tail) - 1 - length]:
            length += 1
        if end < len(text) and length >= LEAST and (best is None or length > best.length):
            best = Match(length, end)
    return best


@given(texts, texts)
def test_the_index_finds_what_a_search_finds(text: list[int], other: list[int]) -> None:
    index = Suffixes(len(text))
    index.extend(text[:10])
    index.extend(text[10:])
    index.check()
    for tail in (text, other, text[: len(text) // 2], other[:5] + text[:7]):
        assert index.find(tail) == dumb(index, text, tail)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_few_heads_find_the_same_as_many(text: list[int]) -> None:
    few, many = Suffixes(0), Suffixes(2**20)
    text = text * 3
    few.extend(text)
    many.extend(text)
    few.check()
    if len(text) <= TRIES:
        assert few.find(text) == many.find(text)


def test_what_follows_stops_at_a_break() -> None:
    index = Suffixes(10)
    index.extend([1, 2, 3, BREAK, 1, 2])
    assert index.following(2, 5) == [3]
    assert index.following(4, 5) == [1, 2]
    assert index.find([9, 1, 2]) == Match(2, 2)


def chain(text: Sequence[int], room: int, *, number: int = 0, namespace: str = "", shared: int = 0) -> Chain:
    sampling = sampler(vocab=100_000)
    return Chain((number, 0), text, sampling, len(text), room, namespace=namespace, shared=shared)


def drafts(drafter: NGramDrafter, text: Sequence[int], room: int = 8, **where: object) -> list[int]:
    one = chain(text, room, **where)  # type: ignore[arg-type]
    drafter.propose([one])
    drafter.check()
    return one.tokens


def test_a_text_that_was_quoted_goes_on() -> None:
    quoted = list(range(100, 130))
    assert drafts(NGramDrafter(), [*quoted, 1, 2, 3, *quoted[:4]], 6) == quoted[4:10]


def test_a_text_that_repeats_itself_is_repeated() -> None:
    assert drafts(NGramDrafter(), [9, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert drafts(NGramDrafter(), [7, 1, 2, 50, 8, 1, 2, 51, 7, 1, 2], 1) == [50]
    assert drafts(NGramDrafter(), [1, 2, 50, 8, 1, 2, 51, 7, 1, 2], 1) == [51]


def test_a_new_text_has_no_drafts() -> None:
    assert drafts(NGramDrafter(), list(range(50))) == []
    assert drafts(NGramDrafter(), [5]) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_text_that_grows_has_the_drafts_of_one_that_is_new(text: list[int], room: int) -> None:
    grows = NGramDrafter()
    for end in range(1, len(text) + 1):
        assert drafts(grows, text[:end], room) == drafts(NGramDrafter(), text[:end], room)


def test_texts_that_have_ended_are_found_in_their_namespace_only() -> None:
    drafter = NGramDrafter()
    drafts(drafter, [*range(20, 60)], number=1, namespace="a")
    drafter.close((1, 0), keep=True)
    assert drafts(drafter, [1, 30, 31], 4, number=2, namespace="a") == [32, 33, 34, 35]
    assert drafts(drafter, [1, 30, 31], 4, number=3, namespace="b") == []
    assert drafts(drafter, [1, 58, 59], 4, number=4, namespace="a") == []
    drafter.forget("a")
    assert drafts(drafter, [1, 30, 31, 30, 31], 1, number=2, namespace="a") == [30]
    assert drafts(drafter, [1, 32, 33], 4, number=5, namespace="a") == []


def test_of_equal_matches_that_in_the_own_text_wins() -> None:
    drafter = NGramDrafter()
    drafts(drafter, [1, 2, 77, 5, 1, 2, 78], number=1)
    drafter.close((1, 0), keep=True)
    assert drafts(drafter, [1, 2, 50, 9, 1, 2], 1, number=2) == [50]
    assert drafts(drafter, [3, 5, 1, 2], 1, number=3) == [78]


def test_what_an_earlier_text_had_is_not_kept_twice() -> None:
    drafter = NGramDrafter()
    text = list(range(2000))
    for number in range(5):
        drafts(drafter, text, number=number, shared=2000 * (number > 0))
        drafter.close((number, 0), keep=True)
    drafts(drafter, text, number=9)
    assert len(drafter._ended[""].new) == 2000 + 1 + 4 * (LONGEST + 1)


def test_texts_and_namespaces_that_are_kept_are_limited() -> None:
    drafter, dice = NGramDrafter(shared_tokens=400), random.Random(1)
    for number in range(40):
        namespace = str(number % 20)
        drafts(drafter, dice.choices(range(50), k=300), number=number, namespace=namespace)
        drafter.close((number, 0), keep=True)
        drafter.check()
        waiting = sum(len(each.waiting) for each in drafter._ended.values())
        assert waiting <= 400 * ngram.NAMESPACES
    assert len(drafter._ended) == ngram.NAMESPACES


def test_a_long_text_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEXED", 100)
    drafter = NGramDrafter()
    text = [*range(1000, 1250), 1, 1000, 1001, 2, 1100, 1101]
    found = [drafts(drafter, text, 2) for _ in range(3)]
    assert found == [[], [1102, 1103], [1102, 1103]]
    assert len(drafter._own[0, 0].index) == len(text)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 4, "temperature": 0.3}, {"temperature": 0.3}])
def test_texts_equal_those_of_plain_decoding_and_many_drafts_are_accepted(options: dict[str, float]) -> None:
    target, drafter = Model(1, 50, 4.0), NGramDrafter()

    def text(room: int) -> tuple[list[int], int]:
        sampling, found, rounds = sampler(vocab=50, **options), [0], 0
        while len(found) < 200:
            one = Chain((0, 0), found, sampling, len(found), min(room, 199 - len(found)), namespace="", shared=0)
            if one.left > 0:
                drafter.propose([one])
            verified = verify([one], target([found[-1], *one.tokens]))[0]
            for drawn in verified.drawn:
                sampling.accept(drawn.token_id)
                found.append(drawn.token_id)
            rounds += 1
        return found, rounds

    plain, without = text(0)
    drafted, rounds = text(6)
    assert drafted == plain
    assert without == 199
    assert rounds < 120


def test_closing_what_is_unknown_is_no_error() -> None:
    NGramDrafter().close((1, 0), keep=True)
