"""A matcher allows, token by token, what an enumeration of all the texts of its language allows."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray

from kvcellar import BadRequest
from kvcellar.constraint import Constraint
from kvcellar.engine.sample import matcher as module
from kvcellar.engine.sample.grammars import Grammars
from kvcellar.engine.sample.matcher import GRANTED, PER_TOKEN, SLOWEST, Matcher
from tests.sample.languages import (
    END,
    LANGUAGES,
    WORDS,
    Language,
    agrees,
    allowed,
    by_looking,
    grammars,
    regex,
    settle,
)

SCHEMAS = [
    (
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 10, "a"]}, "b": {"type": "array", "items": {"const": 0}, "maxItems": 2}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": a} | b for a in (1, 10, "a") for b in ({}, {"b": []}, {"b": [0]}, {"b": [0, 0]})],
    ),
    ({"anyOf": [{"const": "ab"}, {"enum": [10, 1]}]}, ["ab", 10, 1]),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["a", "c"]}], "items": False, "minItems": 2},
        [[1, "a"], [1, "c"]],
    ),
]  # fmt: skip


def walk(matcher: Matcher, texts: frozenset[str], choose) -> None:
    """Write a text, comparing what is allowed at each token, until it ends."""
    text = ""
    while True:
        found = allowed(matcher)
        assert agrees(found, texts, text), text
        token = choose(sorted(found))
        matcher.accept(token)
        if token == END:
            assert text in texts
            return
        text += WORDS[token]


@given(LANGUAGES, st.data())
def test_each_token_keeps_a_text_of_the_language_possible_and_ends_only_complete_ones(
    language: Language, data: st.DataObject
) -> None:
    walk(grammars().matcher(regex(language)), language.texts, lambda tokens: data.draw(st.sampled_from(tokens)))


@pytest.mark.parametrize(("schema", "values"), SCHEMAS, ids=json.dumps)
def test_each_token_keeps_a_value_of_a_schema_possible(schema, values) -> None:
    made = grammars().matcher(Constraint.json_schema(schema, compact=True))
    texts = frozenset(json.dumps(value, separators=(",", ":")) for value in values)
    for seed in range(30):
        steps = itertools.count(seed)
        walk(made.copy(), texts, lambda tokens, steps=steps: tokens[next(steps) * 7919 % len(tokens)])


def test_each_token_keeps_a_choice_possible() -> None:
    texts = ["ab", "abc", "aab", "c{1}", "[a]"]
    for seed in range(10):
        steps = itertools.count(seed)
        walk(grammars().matcher(Constraint.choice(texts)), frozenset(texts), lambda t, s=steps: t[next(s) % len(t)])


@given(LANGUAGES, st.data())
def test_drafts_copies_and_tokens_in_any_order_equal_a_matcher_that_reads_the_tokens_once(
    language: Language, data: st.DataObject
) -> None:
    """Of a completion with drafts: masks behind any drafts, and any token, whether it was a draft or not."""
    matcher, text = grammars().matcher(regex(language)), ""
    tokens = st.integers(0, len(WORDS) - 1)
    for _ in range(8):
        step = data.draw(st.sampled_from(["fill", "allows", "accept", "copy"]))
        drafts = tuple(data.draw(st.lists(tokens, max_size=4)))
        after = [text + "".join(WORDS[token] for token in drafts[:count]) for count in range(len(drafts) + 1)]
        possible = all(any(known.startswith(one) for known in language.texts) for one in after)
        if step == "fill" and possible:
            assert agrees(allowed(matcher, drafts), language.texts, after[-1])
        elif step == "fill":
            assert allowed(matcher, drafts) == set(range(40)), "drafts that do not match make any token possible"
        elif step == "allows":
            settle(matcher, drafts)
            token = data.draw(tokens | st.just(END))
            assert matcher.allows(drafts, token) == (possible and token in by_looking(language.texts, after[-1]))
        elif step == "copy" and matcher.at_start:
            matcher = matcher.copy()
        elif going := sorted(by_looking(language.texts, text) - {END}):
            token = data.draw(st.sampled_from(going))
            matcher.accept(token)
            text += WORDS[token]
    assert agrees(allowed(matcher), language.texts, text)
    assert matcher.error is None


def test_a_copy_does_not_follow_the_original_and_is_made_before_its_first_token() -> None:
    matcher = grammars().matcher(Constraint.regex("(ab|c)c"))
    other = matcher.copy()
    matcher.accept(WORDS.index("c"))
    assert allowed(matcher) == {WORDS.index("c")}
    assert agrees(allowed(other), frozenset({"abc", "cc"}), "")
    with pytest.raises(AssertionError, match="cannot be copied"):
        matcher.copy()


def test_a_token_that_does_not_match_is_an_error_that_stays_and_allows_nothing() -> None:
    matcher = grammars().matcher(Constraint.regex("ab"))
    matcher.accept(WORDS.index("c"))
    assert allowed(matcher) == set()
    assert matcher.error is not None
    assert "satisfy the grammar" in matcher.error
    matcher.accept(WORDS.index("c"))
    assert allowed(matcher) == set()
    assert not matcher.allows((), END)


class Clock:
    """CPU time of a thread, of which each mask of these grammars takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Grammars, seconds: float) -> None:
        self.now, self.masks, self.seconds = 0.0, 0, seconds
        monkeypatch.setattr(module.time, "thread_time", lambda: self.now)
        real, threads = Matcher._fill, made._compiler("")[1]._threads

        def fill(matcher: Matcher, library: LLMatcher, bits: NDArray[np.int32]) -> None:
            real(matcher, library, bits)
            if matcher._threads is threads:
                self.masks += 1
                self.now += self.seconds

        monkeypatch.setattr(Matcher, "_fill", fill)


def test_a_mask_that_takes_too_long_ends_the_request_and_is_refused_if_it_is_the_first(monkeypatch) -> None:
    matcher = grammars().matcher(Constraint.regex("a[bc]{5}"))
    slow = itertools.count(0, SLOWEST * 1.5)
    with monkeypatch.context() as patched:
        patched.setattr(module.time, "thread_time", lambda: next(slow))
        matcher.accept(WORDS.index("a"))
        assert not allowed(matcher)
        assert matcher.error is not None
        assert f"more than {SLOWEST} s" in matcher.error
        with pytest.raises(BadRequest, match="no answer can begin: it takes more than"):
            grammars().matcher(Constraint.regex("b[ac]{7}"))
    assert not allowed(matcher), "an error stays"
    assert allowed(grammars().matcher(Constraint.regex("b[ac]{7}"))), "nothing of the refused one is kept"


@pytest.mark.parametrize("count", [1, 3, 64])
def test_masks_that_are_all_nearly_too_slow_end_the_request_before_it_has_used_more_than_it_was_granted(
    monkeypatch, count
) -> None:
    """All of its completions at once; another request with the same grammar has a budget of its own."""
    made = grammars()
    first = made.matcher(Constraint.regex("[ab]{200}"))
    every = [first, *(first.fork() for _ in range(count - 1))]
    clock, tokens = Clock(monkeypatch, made, SLOWEST * 0.9), 0
    while all(matcher.error is None for matcher in every):
        for matcher in every:
            matcher.accept(WORDS.index("a"))
            tokens += 1
        for matcher in every:
            settle(matcher)
    assert clock.masks <= (GRANTED + tokens * PER_TOKEN) / clock.seconds + 1, "none was begun beyond that"
    assert clock.masks > 5
    assert "s of CPU for each token" in next(matcher.error for matcher in every if matcher.error is not None)
    other = made.matcher(Constraint.regex("[ab]{200}"))
    other.accept(WORDS.index("a"))
    assert allowed(other)
    assert other.error is None


def test_masks_that_take_less_than_their_share_never_end_a_request(monkeypatch) -> None:
    made = grammars()
    matcher = made.matcher(Constraint.regex("[ab]{900}"))
    Clock(monkeypatch, made, PER_TOKEN * 0.9)
    for _ in range(800):
        assert allowed(matcher)
        matcher.accept(WORDS.index("a"))


def test_a_mask_that_is_known_is_not_computed_again(monkeypatch) -> None:
    """For each of several answers, and for drafts that became tokens."""
    made = grammars()
    clock = Clock(monkeypatch, made, 0.0)
    first = made.matcher(Constraint.regex("[ab]{9}"))
    every = [first, *(first.fork() for _ in range(63)), made.matcher(Constraint.regex("[ab]{9}"))]
    assert all(allowed(matcher) for matcher in every)
    assert clock.masks == 1
    a = WORDS.index("a")
    assert all(allowed(first, drafts) for drafts in ((), (a,), (a, a), (a,)))
    assert clock.masks == 3
    first.accept(a)
    assert allowed(first)
    first.accept(a)
    assert allowed(first)
    assert clock.masks == 3


def test_a_failure_of_the_library_is_an_error_of_its_request(monkeypatch) -> None:
    matcher = grammars().matcher(Constraint.regex("[ab]{9}"))
    monkeypatch.setattr(Matcher, "_fill", lambda *_: (_ for _ in ()).throw(KeyError("of the library")))
    matcher.accept(WORDS.index("a"))
    assert not allowed(matcher)
    assert matcher.error is not None
    assert "the library failed with KeyError" in matcher.error


def test_what_is_asked_for_a_request_that_is_over_is_not_computed(monkeypatch) -> None:
    made = grammars()
    first = made.matcher(Constraint.regex("[ab]{9}"))
    every = [first, *(first.fork() for _ in range(9))]
    clock = Clock(monkeypatch, made, 0.0)
    with first._threads.changed:  # none is begun before all are asked for
        for matcher in every:
            matcher.accept(WORDS.index("a"))
        first.close()
    first.accept(WORDS.index("a"))
    assert allowed(first)
    assert clock.masks == 1
