"""Rounds give the text of plain decoding where it does not depend on drafts, stop where the text ends, and keep in
memory what plain decoding keeps."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate.chain import Chain, Verified, extend, verify
from tests.speculate.chains import VOCAB, Model, chain, random_logits, sampler

TARGET = Model(1)
TARGET.table[range(VOCAB), [(token + 1) % VOCAB for token in range(VOCAB)]] += 4  # a greedy text has all tokens

Propose = Callable[[Chain], None]


def plain(sampling: Sampler, text: list[int], count: int) -> list[int]:
    """Tokens of plain decoding, up to the end of the text."""
    found = list(text)
    while len(found) - len(text) < count:
        token = draw(TARGET([found[-1]]), [sampling], [len(found)])[0].token_id
        sampling.accept(token)
        found.append(token)
        if sampling.ends_with(token):
            break
    return found[len(text) :]


def one_round(one: Chain) -> Verified:
    return verify([one], TARGET([one.text[-1], *one.tokens]))[0]


def speculated(sampling: Sampler, text: list[int], count: int, depth: int, propose: Propose) -> list[int]:
    found = list(text)
    while len(found) - len(text) < count:
        one = chain(sampling, min(depth, count - (len(found) - len(text)) - 1), text=found)
        propose(one)
        one.check()
        verified = one_round(one)
        assert 0 < len(verified.drawn) <= one.rows
        for drawn in verified.drawn:
            sampling.accept(drawn.token_id)
            found.append(drawn.token_id)
        if sampling.ends_with(found[-1]):
            break
    assert len(found) - len(text) <= count
    return found[len(text) :]


def guesses(shift: int) -> Propose:
    def propose(one: Chain) -> None:
        while one.left > 0:
            one.add((one.pos * shift + len(one.drafts)) % VOCAB)

    return propose


def model(draft: Model) -> Propose:
    def propose(one: Chain) -> None:
        while one.left > 0:
            extend([one], draft([one.tokens[-1] if one.drafts else one.text[-1]]))

    return propose


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    {"seed": 1, "top_p": 0.9},
    {"seed": 1, "temperature": 1.5, "presence_penalty": 0.7, "repeat_last_n": 5, "min_p": 0.05},
    {"seed": 1, "bad_words_ids": ((1, 2), (3,)), "min_tokens": 12, "sequence_bias": {(2, 4): 2.0}},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_greedy_texts_and_those_with_a_seed_do_not_depend_on_drafts(options: dict[str, Any], depth: int) -> None:
    text = [0, 1, 2, 3, 1]
    drafters = [guesses(1), guesses(2), model(TARGET), model(TARGET.near(1.5)), model(Model(5))]
    for propose in drafters:
        expected = plain(sampler(text, end=5, **options), text, 40)
        assert speculated(sampler(text, end=5, **options), text, 40, depth, propose) == expected


def test_guesses_do_not_change_a_sampled_text_without_a_seed() -> None:
    expected = plain(sampler(noise=9), [0], 60)
    assert speculated(sampler(noise=9), [0], 60, 4, guesses(1)) == expected


def test_a_draft_model_that_is_the_target_is_always_right() -> None:
    for options in ({"temperature": 0.0}, {"seed": 3}, {"top_k": 4, "presence_penalty": 0.5}):
        one = chain(sampler([0], **options), 7)
        model(TARGET)(one)
        verified = one_round(one)
        assert (verified.accepted, verified.tried, len(verified.drawn)) == (7, 7, 8)


@given(st.lists(st.booleans(), max_size=6), st.booleans())
def test_the_right_drafts_before_the_first_wrong_one_are_accepted(right: list[bool], ends: bool) -> None:
    expected = plain(sampler(temperature=0.0), [0], len(right) + 1)
    end = expected[-1] if ends else -1
    one = chain(sampler(temperature=0.0, end=end), len(right))
    for token, good in zip(expected, right, strict=False):
        if one.left:
            one.add(token if good else (token + 1) % VOCAB)
    verified = one_round(one)
    good = next((i for i, ok in enumerate(right) if not ok), len(right))
    until = expected.index(end) + 1 if ends and end in expected[:good] else good + 1
    tokens = [drawn.token_id for drawn in verified.drawn]
    assert tokens[: good + 1] == expected[: len(tokens)]
    assert len(tokens) == min(until, good + 1)


def test_nothing_follows_an_accepted_end_and_it_is_not_kept() -> None:
    expected = plain(sampler(temperature=0.0), [0], 4)
    end = expected[2]
    assert end not in expected[:2]
    one = chain(sampler(temperature=0.0, end=end), 6)
    for token in expected[:3]:
        one.add(token)
    assert one.left == 0
    with pytest.raises(ValueError, match="no other can follow"):
        one.add(0)
    verified = one_round(one)
    assert [drawn.token_id for drawn in verified.drawn] == expected[:3]
    assert (verified.accepted, verified.tried) == (3, 3)
    assert len(verified.drawn) == 3  # rows kept: the current token and two drafts, as in plain decoding


def test_chains_of_different_depth_are_verified_together_as_alone() -> None:
    chains = [chain(sampler([i], noise=i, seed=i if i % 2 else None, logprobs=1), i, number=i) for i in range(5)]
    for one in chains:
        model(TARGET.near(0.5))(one)
    logits = torch.cat([TARGET([one.text[-1], *one.tokens]) for one in chains])
    assert verify(chains, logits) == [one_round(one) for one in chains]


def test_an_error_in_a_row_comes_after_the_tokens_before_it() -> None:
    expected = plain(sampler(temperature=0.0), [0], 4)
    one = chain(sampler(temperature=0.0), 3)
    for token in expected[:3]:
        one.add(token)
    logits = TARGET([0, *expected[:3]]).clone()
    logits[2] = math.nan
    verified = verify([one], logits)[0]
    assert [drawn.token_id for drawn in verified.drawn] == [*expected[:2], -1]
    assert verified.drawn[-1].error is not None
    assert (verified.accepted, verified.tried) == (2, 3)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    one = chain(sampler(temperature=0.3, presence_penalty=1.0, logprobs=2), 3)
    model(TARGET.near(0.3))(one)
    for row, drawn in enumerate(one_round(one).drawn):
        raw = TARGET([0, *one.tokens])[row].double().log_softmax(0)
        assert drawn.logprob is not None
        assert drawn.logprob.logprob == pytest.approx(float(raw[drawn.token_id]), abs=1e-6)
        assert len(drawn.logprob.top) == 2


def test_a_draft_outside_the_vocabulary_is_refused() -> None:
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="is not a token"):
            chain(sampler(), 1).add(token)


def test_a_draft_model_may_have_fewer_or_more_tokens() -> None:
    wide, narrow = random_logits(1, VOCAB + 3), random_logits(1, VOCAB - 2)
    wide[0, VOCAB] = 50.0
    for logits, most in ((wide, VOCAB), (narrow, VOCAB - 2)):
        for options in ({"temperature": 0.0}, {"seed": 1}, {}):
            chains = [chain(sampler(noise=i, **options), 1) for i in range(30)]
            extend(chains, logits.expand(30, -1))
            assert all(one.tokens[0] < most for one in chains)


def test_a_chain_ends_where_the_draft_model_gives_no_number() -> None:
    logits = random_logits(3)
    logits[1, 2] = math.nan
    chains = [chain(sampler(noise=i), 2) for i in range(3)]
    extend(chains, logits)
    assert [len(one.drafts) for one in chains] == [1, 0, 1]
    assert [one.left for one in chains] == [1, 0, 1]


def test_a_cleared_chain_is_plain_decoding() -> None:
    one = chain(sampler(noise=9), 4)
    guesses(1)(one)
    one.cut(0)
    one.check()
    assert (one.left, one.rows) == (0, 1)
    assert one_round(one).drawn[0] == draw(TARGET([0]), [sampler(noise=9)], [1])[0]


@given(st.integers(0, 10**6), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 9))
def test_rows_that_are_drawn_in_parts_have_the_same_tokens(seed: int, depths: list[int], part: int) -> None:
    chains = [chain(sampler(noise=seed + number, logprobs=2), depth) for number, depth in enumerate(depths)]
    for one in chains:
        guesses(seed)(one)
    logits = random_logits(sum(one.rows for one in chains), seed=seed)
    with mock.patch("kvcellar.engine.speculate.chain.PART", part):
        found = verify(chains, logits)
    assert found == verify(chains, logits)
