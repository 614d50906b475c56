"""The draw: judged by transformers' own processors, by the softmax, and by itself in other company."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from kvcellar.engine.sample import draw as ops
from kvcellar.engine.sample.draw import Drawn, draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import NoToken
from kvcellar.events import TokenLogprob
from kvcellar.sampling_params import SamplingParams

VOCAB = 400


def sampler(
    prompt: tuple[int, ...] = (), *, seed: int = 1, number: int = 0, vocab: int = VOCAB, **fields: Any
) -> Sampler:
    params = SamplingParams(**fields)
    return Sampler(params, seed=seed, index=number, prompt_ids=prompt, vocab_size=vocab, end_ids=frozenset({0, 1}))


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def ids(drawn: list[Drawn]) -> list[int]:
    assert all(d.error is None for d in drawn)
    return [d.token_id for d in drawn]


def support(logits: torch.Tensor, temperature: float, stages: list[Any]) -> list[set[int]]:
    """The tokens that could still be drawn from each row after `stages`."""
    best = logits.max(1).values
    below, weights = ops.weigh(logits, best, torch.full((len(logits),), temperature, dtype=torch.float64))
    for stage in stages:
        weights = stage(weights, below, logits)
    return [set(row.nonzero()[:, 0].tolist()) for row in weights]


def each(logits: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((len(logits),), value, dtype=torch.float64)


def judged_by(logits: torch.Tensor, *warpers: Any) -> list[set[int]]:
    """The same from transformers, without tokens so unlikely that they weigh nothing here."""
    for warper in warpers:
        logits = warper(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
    least = logits.max(1).values - (ops.WEIGHT_BITS + 1) * math.log(2)
    return [set((row >= low).nonzero()[:, 0].tolist()) for row, low in zip(logits, least, strict=True)]


@pytest.mark.parametrize("scale", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_filters_keep_what_transformers_keeps(scale: float, temperature: float) -> None:
    logits = random_logits(12, scale=scale, seed=int(scale * 10))
    warm = hf.TemperatureLogitsWarper(temperature)
    for p in (0.05, 0.5, 0.9, 0.99):
        ours = support(logits, temperature, [lambda w, b, s, p=p: ops.keep_top_p(w, s, each(s, p))])
        assert ours == judged_by(logits, warm, hf.TopPLogitsWarper(p))
        ours = support(logits, temperature, [lambda w, b, s, p=p: ops.keep_typical(w, b, each(s, p))])
        assert ours == judged_by(logits, warm, hf.TypicalLogitsWarper(p))
        ours = support(logits, temperature, [lambda w, b, s, p=p: ops.keep_min_p(w, each(s, p))])
        assert ours == judged_by(logits, warm, hf.MinPLogitsWarper(p))
    for k in (1, 7, 300):
        ours = support(logits, temperature, [lambda w, b, s, k=k: ops.keep_top_k(w, s, each(s, k), k)])
        assert ours == judged_by(logits, warm, hf.TopKLogitsWarper(k))


def test_filters_together_keep_what_transformers_keeps_in_the_same_order() -> None:
    logits = random_logits(16, seed=3)
    stages = [
        lambda w, b, s: ops.keep_top_k(w, s, each(s, 60), 60),
        lambda w, b, s: ops.keep_typical(w, b, each(s, 0.95)),
        lambda w, b, s: ops.keep_top_p(w, s, each(s, 0.8)),
        lambda w, b, s: ops.keep_min_p(w, each(s, 0.03)),
    ]
    warpers = hf.TopKLogitsWarper(60), hf.TypicalLogitsWarper(0.95), hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.03)
    assert support(logits, 1.3, stages) == judged_by(logits, hf.TemperatureLogitsWarper(1.3), *warpers)


def test_every_token_of_the_support_is_drawn_and_no_other() -> None:
    logits = random_logits(1, vocab=12, seed=5, scale=1.0)
    fields = {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4}
    warpers = (
        hf.TemperatureLogitsWarper(1.4),
        hf.TopKLogitsWarper(9),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
    )
    rows = [sampler(vocab=12, **fields) for _ in range(2000)]
    drawn = draw(logits.expand(2000, 12), rows, range(2000))
    assert set(ids(drawn)) == judged_by(logits, *warpers)[0]


def test_tokens_are_drawn_as_often_as_their_softmax() -> None:
    logits = random_logits(1, vocab=8, seed=6, scale=1.0)
    drawn = ids(draw(logits.expand(8000, 8), [sampler(vocab=8, temperature=0.8) for _ in range(8000)], range(8000)))
    expected = (logits[0].double() / 0.8).softmax(0) * 8000
    counts = torch.bincount(torch.tensor(drawn), minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees, one in a thousand


def test_ranking_is_by_score_then_by_lowest_id() -> None:
    scores = random_logits(6, seed=9).round()  # many ties, both signs, zeros of both signs
    scores[0, ::3] = -0.0
    scores[1, 5:50] = -math.inf
    for width in (7, VOCAB):
        for row, order in zip(scores.tolist(), ops.ranked(scores, width).tolist(), strict=True):
            assert order == sorted(range(VOCAB), key=lambda i: (-row[i], i))[:width]


# The parameters of a row, in all mixtures.
fields_of_rows = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-45, 1e-6, 1e-4, 0.3, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([0, 1, 5, 399, 400, 2**31 - 1]),
        "top_p": st.sampled_from([1e-9, 0.5, 0.97, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "typical_p": st.sampled_from([1e-9, 0.6, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0]), max_size=4),
        "min_tokens": st.sampled_from([0, 3, 10]),
        "stop_token_ids": st.sampled_from([(), (5, 6)]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
    },
)


def made(fields: dict[str, Any], number: int) -> Sampler:
    rng = random.Random(number)
    one = sampler(tuple(rng.choices(range(VOCAB + 40), k=9)), seed=number - 2, number=number, **fields)
    for token in rng.choices(range(VOCAB), k=6):
        one.accept(token)
    one.check()
    return one


@given(
    st.lists(fields_of_rows, min_size=2, max_size=6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_a_row_draws_the_same_whatever_stands_beside_it(fields: list[dict[str, Any]], dtype: torch.dtype) -> None:
    logits = random_logits(len(fields), VOCAB + 48, seed=len(fields)).to(dtype)
    before = logits.clone()
    rows = [made(one, number) for number, one in enumerate(fields)]
    positions = [100 + 3 * number for number in range(len(rows))]
    together = draw(logits, rows, positions)
    assert torch.equal(logits, before)
    assert all(0 <= token < VOCAB for token in ids(together))
    for r, one in enumerate(rows):
        assert draw(logits[r : r + 1], [one], positions[r : r + 1]) == [together[r]]
    turned = draw(logits.flip(0), rows[::-1], positions[::-1])
    assert turned[::-1] == together
    twice = draw(torch.cat([logits, logits]), rows + rows, positions + positions)
    assert twice == together + together


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(1, VOCAB).expand(4, VOCAB)
    rows = [sampler(), sampler(seed=2), sampler(number=1), sampler()]
    assert len(set(ids(draw(logits, rows, [5, 5, 5, 6])))) == 4


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-6, 1e-5, 1e-4])
def test_cold_rows_take_the_best_and_among_equals_the_lowest(temperature: float) -> None:
    logits = random_logits(3) * 100
    logits[0, [17, 300]] = 4e3
    logits[1] = -3e38
    logits[1, 200] = 3e38
    logits[2, 99] = 5e3
    rows = [sampler(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1) for _ in range(3)]
    first, second, third = ids(draw(logits, rows, [0, 0, 0]))
    assert first in ({17} if temperature < 1e-5 else {17, 300})
    assert (second, third) == (200, 99)


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=30),
    st.lists(st.integers(0, VOCAB - 1), max_size=30),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-1.0, 0.0, 1.1]),
)
def test_penalties_are_those_of_the_papers(
    prompt: list[int], completion: list[int], repetition: float, presence: float, frequency: float
) -> None:
    one = sampler(tuple(prompt), repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    for token in completion:
        one.accept(token)
    one.check()
    logits = random_logits(1, seed=11)
    expected = logits
    if prompt + completion:
        expected = hf.RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + completion]), logits)
    expected = expected.clone()
    for token in set(completion):
        expected[0, token] -= frequency * completion.count(token) + presence
    torch.testing.assert_close(ops.edit(logits, [one]), expected)


TOKENS = st.lists(st.integers(0, 12) | st.just(VOCAB), max_size=30)  # few, so that they repeat; one is out of range


@given(
    TOKENS,
    TOKENS,
    st.sampled_from([-1, 0, 1, 2, 3, 7, 30, 2**31 - 1]),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-1.0, 0.0, 1.1]),
)
def test_penalties_see_what_the_last_n_tokens_hold_and_nothing_else(
    prompt: list[int], completion: list[int], last_n: int, repetition: float, presence: float, frequency: float
) -> None:
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    one = sampler(tuple(prompt), repeat_last_n=last_n, **penalties)
    logits = random_logits(1, seed=12)
    for step in range(len(completion) + 1):
        one.check()
        written = completion[:step]
        text = prompt + written
        window = text if last_n < 0 else text[len(text) - min(last_n, len(text)) :]
        own = window[max(0, len(window) - len(written)) :]  # of the completion
        expected = logits.clone()
        for token in range(VOCAB):
            if token in window:
                score = expected[0, token]
                expected[0, token] = score * repetition if score < 0 else score / repetition
            expected[0, token] -= frequency * own.count(token) + presence * (token in own)
        torch.testing.assert_close(ops.edit(logits, [one]), expected)
        if step < len(completion):
            one.accept(completion[step])


def test_bias_is_added_and_can_forbid_or_force() -> None:
    logits = random_logits(2)
    forced, forbidden = (
        sampler(logit_bias={33: 100.0}),
        sampler(temperature=0, logit_bias={int(logits[1].argmax()): -100}),
    )
    assert ids(draw(logits, [forced, forbidden], [0, 0])) == [33, int(logits[1].topk(2).indices[1])]


def test_a_completion_cannot_end_before_its_minimum() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :2] = 50.0  # the model's own end tokens
    logits[0, 7] = 40.0
    logits[0, 9] = 30.0
    one = sampler(min_tokens=2, stop_token_ids=(7,))
    for _ in range(2):
        (token,) = ids(draw(logits, [one], [3]))
        assert token == 9
        assert not one.ends_with(token)
        one.accept(token)
    (token,) = ids(draw(logits, [one], [3]))
    assert one.ends_with(token)


@given(fields_of_rows, st.integers(0, 99))
def test_a_token_that_no_text_has_is_drawn_only_where_it_ends_the_completion(fields: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**{**fields, "logit_bias": {5: 100.0, 9: 100.0}})
    never = frozenset({5, 9, VOCAB + 3})
    one = Sampler(
        params, seed=seed, index=0, prompt_ids=(5, 6, 9), vocab_size=VOCAB, end_ids=frozenset({0}), never_ids=never
    )
    one.check()
    logits = random_logits(1, seed=seed)
    logits[0, [5, 9]] = 90.0
    (token,) = ids(draw(logits, [one], [0]))
    assert token not in never or one.ends_with(token)


def test_where_nothing_else_is_left_the_row_gets_the_error() -> None:
    one = Sampler(
        SamplingParams(),
        seed=0,
        index=0,
        prompt_ids=(),
        vocab_size=VOCAB,
        end_ids=frozenset(),
        never_ids=frozenset({7}),
    )
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 7] = 3.0
    (drawn,) = draw(logits, [one], [0])
    assert "all 400 tokens are forbidden" in str(drawn.error)


def test_ignoring_the_end_frees_it_but_not_the_stop_ids() -> None:
    one = sampler(ignore_eos=True, min_tokens=1, stop_token_ids=(7,))
    assert one.end_ids == {7}
    assert sampler(stop_token_ids=(7,)).end_ids == {0, 1, 7}


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3).bfloat16()
    rows = [
        sampler(temperature=0.3, top_k=1, logit_bias={12: 100.0}, logprobs=3),
        sampler(temperature=0),
        sampler(temperature=0, logprobs=0),
    ]
    first, none, bare = draw(logits, rows, [0, 0, 0])
    truth = logits.double().log_softmax(1)
    assert first.logprob is not None
    assert first.token_id == first.logprob.token_id == 12
    assert first.logprob.logprob == pytest.approx(truth[0, 12].item(), abs=1e-6)
    assert [token for token, _ in first.logprob.top] == ops.ranked(logits[:1].float(), 3)[0].tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(truth[0].topk(3).values.tolist(), abs=1e-6)
    assert none.logprob is None
    assert bare.logprob == TokenLogprob(bare.token_id, truth[2].max().float().item())


def test_a_small_vocabulary_has_no_more_top_logprobs_than_tokens() -> None:
    (drawn,) = draw(torch.zeros(1, 3), [sampler(vocab=3, logprobs=20)], [0])
    assert drawn.logprob is not None
    assert [token for token, _ in drawn.logprob.top] == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sick_row_gets_an_error_and_the_others_do_not_notice(temperature: float) -> None:
    logits = random_logits(6)
    fields = {"temperature": temperature, "top_k": 50, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01, "logprobs": 2}
    rows = [sampler(number=number, **fields) for number in range(6)]
    well = draw(logits, rows, range(6))
    logits[1] = -math.inf
    logits[2, 7] = math.nan
    logits[3] = math.nan
    logits[4, 9] = math.inf
    drawn = draw(logits, rows, range(6))
    assert [d.error is None for d in drawn] == [True, False, False, False, False, True]
    assert (drawn[0], drawn[5]) == (well[0], well[5])
    for row, word in ((1, "forbidden"), (2, "NaN"), (3, "NaN"), (4, "infinity")):
        error = drawn[row].error
        assert isinstance(error, NoToken)
        assert word in str(error)
        assert f"pos {row} of choice {row}" in str(error)


def test_sickness_in_the_padding_is_not_seen() -> None:
    logits = random_logits(2, VOCAB + 8)
    logits[:, VOCAB:] = torch.tensor([math.nan, math.inf, 9e9, 0, 0, 0, 0, 0])
    rows = [sampler(temperature=0), sampler()]
    assert draw(logits, rows, [0, 0]) == draw(logits[:, :VOCAB], rows, [0, 0])


def test_banning_every_token_is_an_error_with_this_reason() -> None:
    one = sampler(vocab=2, min_tokens=1)
    (drawn,) = draw(torch.zeros(1, 2), [one], [0])
    assert "all 2 tokens are forbidden" in str(drawn.error)


def test_disagreeing_shapes_are_refused() -> None:
    assert draw(torch.zeros(0, VOCAB), [], []) == []
    with pytest.raises(ValueError, match="1 samplers, 2 positions"):
        draw(torch.zeros(1, VOCAB), [sampler()], [0, 1])
    with pytest.raises(ValueError, match="a vocabulary of 400; logits have 399"):
        draw(torch.zeros(1, 399), [sampler()], [0])
    with pytest.raises(ValueError, match=r"different vocabularies in one draw: \[3, 400\]"):
        draw(torch.zeros(2, VOCAB), [sampler(), sampler(vocab=3)], [0, 0])
