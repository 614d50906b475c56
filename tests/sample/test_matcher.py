"""A matcher allows, token by token, what an enumeration of all the texts of its language allows."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import BadRequest
from kvcellar.sample import matcher as module
from kvcellar.sample.constraint import Constraint
from kvcellar.sample.matcher import GRANTED, PER_TOKEN, SLOWEST, Matcher
from tests.sample.languages import (
    COLUMNS,
    END,
    LANGUAGES,
    WORDS,
    Language,
    agrees,
    allowed,
    by_looking,
    grammars,
    regex,
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
            token = data.draw(tokens | st.just(END))
            assert matcher.allows(drafts, token) == (possible and token in by_looking(language.texts, after[-1]))
        elif step == "copy":
            matcher = matcher.copy()
        elif going := sorted(by_looking(language.texts, text) - {END}):
            token = data.draw(st.sampled_from(going))
            matcher.accept(token)
            text += WORDS[token]
    assert agrees(allowed(matcher), language.texts, text)
    assert matcher.error is None


def test_a_copy_does_not_follow_the_original() -> None:
    matcher = grammars().matcher(Constraint.regex("(ab|c)c"))
    other = matcher.copy()
    matcher.accept(WORDS.index("c"))
    assert allowed(matcher) == {WORDS.index("c")}
    assert agrees(allowed(other), frozenset({"abc", "cc"}), "")


def test_a_token_that_does_not_match_is_an_error_that_stays_and_allows_nothing() -> None:
    matcher = grammars().matcher(Constraint.regex("ab"))
    matcher.accept(WORDS.index("c"))
    assert matcher.error is not None
    assert "satisfy the grammar" in matcher.error
    assert allowed(matcher) == allowed(matcher.copy()) == set()
    assert not matcher.allows((), END)


def test_a_mask_that_takes_too_long_ends_the_request_and_is_refused_if_it_is_the_first(monkeypatch) -> None:
    matcher = grammars().matcher(Constraint.regex("a[bc]{5}"))
    matcher.accept(WORDS.index("a"))
    slow = itertools.count(0, SLOWEST * 1.5)
    monkeypatch.setattr(module.time, "thread_time", lambda: next(slow))
    assert not allowed(matcher)
    assert matcher.error is not None
    with pytest.raises(BadRequest, match="no answer can begin: it takes more than"):
        grammars().matcher(Constraint.regex("b[ac]{7}"))
    monkeypatch.undo()
    assert not allowed(matcher), "an error stays"
    assert allowed(grammars().matcher(Constraint.regex("b[ac]{7}"))), "nothing of the refused one is kept"


@pytest.mark.parametrize("count", [1, 3])
def test_masks_that_are_all_nearly_too_slow_end_the_request_by_what_they_take_together(monkeypatch, count) -> None:
    """Of all its completions; another request with the same grammar has a budget of its own."""
    made = grammars()
    first = made.matcher(Constraint.regex("[ab]{200}"))
    every = [first, *(first.fork() for _ in range(count - 1))]
    seconds = SLOWEST * 0.9
    clock = itertools.chain.from_iterable((at * seconds, (at + 1) * seconds) for at in itertools.count())
    steps = 0
    while all(matcher.error is None for matcher in every):
        monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
        steps += 1
        found = allowed(every[steps % count])
        monkeypatch.undo()
        if found:
            every[steps % count].accept(WORDS.index("a"))
    assert GRANTED / seconds <= steps <= GRANTED / (seconds - PER_TOKEN) + 1
    assert "s of CPU for each token" in next(matcher.error for matcher in every if matcher.error is not None)
    assert all(not allowed(matcher) for matcher in every), "all of the request"
    other = made.matcher(Constraint.regex("[ab]{200}"))
    assert allowed(other)
    assert other.error is None


def test_masks_that_take_less_than_their_share_never_end_a_request(monkeypatch) -> None:
    matcher = grammars().matcher(Constraint.regex("[ab]{900}"))
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "thread_time", lambda: next(ticks) * PER_TOKEN * 0.3)  # three times a token
    mask = np.zeros(-(-COLUMNS // 32), np.int32)
    for _ in range(800):
        matcher.fill((), mask)
        assert matcher.error is None
        assert mask.any()
        matcher.accept(WORDS.index("a"))
