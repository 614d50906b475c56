"""The rules that a generation config may hold, judged by transformers' own processors over random texts and scores."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from kvcellar.engine.sample import draw as ops
from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import BadRequest
from kvcellar.sampling_params import MAX_IDS, MAX_NGRAM, MAX_SEQUENCES, SamplingParams, check_ids, merged
from tests.sample.test_draw import VOCAB, each, judged_by, random_logits, support

SMALL = 12  # a vocabulary in which rules meet their cases often
ENDS = [0, 1]
tokens = st.integers(0, SMALL - 1)
texts = st.lists(tokens, min_size=1, max_size=24)
words = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=8)
biases = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=3).map(tuple), st.floats(-9, 9)), max_size=8)


def after(prompt: list[int], completion: list[int], *, forked: bool = False, **fields: Any) -> Sampler:
    """The sampler after these tokens, or a fork of it."""
    sampler = Sampler(
        SamplingParams(**fields), seed=1, index=0, prompt_ids=prompt, vocab_size=SMALL, end_ids=frozenset(ENDS)
    )
    sampler = sampler.fork(1) if forked else sampler
    for token in completion:
        sampler.accept(token)
    sampler.check()
    return sampler


def edited(sampler: Sampler, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = random_logits(1, SMALL, seed=seed)
    return scores, ops.edit(scores, [sampler])


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@given(texts, texts, st.integers(1, 5), st.booleans())
def test_no_ngram_comes_twice_as_in_transformers(
    prompt: list[int], completion: list[int], size: int, forked: bool
) -> None:
    scores, ours = edited(after(prompt, completion, forked=forked, no_repeat_ngram_size=size), len(prompt))
    theirs = hf.NoRepeatNGramLogitsProcessor(size)(torch.tensor([prompt + completion]), scores.clone())
    same(ours, theirs)


@given(texts, texts, words, st.booleans())
def test_words_are_forbidden_as_in_transformers(
    prompt: list[int], completion: list[int], bad: list[list[int]], forked: bool
) -> None:
    scores, ours = edited(after(prompt, completion, forked=forked, bad_words_ids=bad), len(prompt))
    same(ours, hf.NoBadWordsLogitsProcessor(bad)(torch.tensor([prompt + completion]), scores))


@given(texts, texts, biases.filter(bool), st.booleans())
def test_sequences_are_biased_as_in_transformers(
    prompt: list[int], completion: list[int], pairs: list[tuple[tuple[int, ...], float]], forked: bool
) -> None:
    scores, ours = edited(after(prompt, completion, forked=forked, sequence_bias=dict(pairs)), len(prompt))
    same(ours, hf.SequenceBiasLogitsProcessor(dict(pairs))(torch.tensor([prompt + completion]), scores))


@given(texts, st.lists(tokens, max_size=9), st.integers(1, 20), st.integers(1, 9))
def test_a_completion_does_not_end_too_early_as_in_transformers(
    prompt: list[int], completion: list[int], length: int, new: int
) -> None:
    ids = torch.tensor([prompt + completion])
    scores, ours = edited(after(prompt, completion, min_length=length, min_tokens=new), len(prompt))
    theirs = hf.MinLengthLogitsProcessor(length, ENDS)(ids, scores)
    same(ours, hf.MinNewTokensLengthLogitsProcessor(len(prompt), new, ENDS)(ids, theirs))


@given(texts, st.lists(tokens, max_size=2), st.lists(tokens, min_size=1), st.lists(tokens, min_size=1))
def test_tokens_are_suppressed_as_in_transformers(
    prompt: list[int], completion: list[int], always: list[int], first: list[int]
) -> None:
    ids = torch.tensor([prompt + completion])
    scores, ours = edited(after(prompt, completion, suppress_tokens=always, begin_suppress_tokens=first), len(prompt))
    theirs = hf.SuppressTokensLogitsProcessor(always)(ids, scores)
    same(ours, hf.SuppressTokensAtBeginLogitsProcessor(first, len(prompt))(ids, theirs))


@given(texts, st.lists(tokens, max_size=20), st.integers(0, 8), st.floats(0.5, 2.0))
def test_ends_get_likelier_as_in_transformers(
    prompt: list[int], completion: list[int], start: int, factor: float
) -> None:
    decay = (start, factor)
    scores, ours = edited(after(prompt, completion, exponential_decay_length_penalty=decay), len(prompt))
    same(ours, hf.ExponentialDecayLengthPenalty(decay, ENDS, len(prompt))(torch.tensor([prompt + completion]), scores))


def test_ends_get_no_likelier_than_floats_can_say() -> None:
    sampler = after([5], [6] * 5000, exponential_decay_length_penalty=(2, 100.0), ignore_eos=False)
    drawn = draw(random_logits(1, SMALL, seed=3).abs(), [sampler], [0])
    assert drawn[0].error is None
    assert drawn[0].token_id in ENDS


@given(texts, texts, words, st.integers(2, 4))
def test_rules_together_forbid_what_transformers_forbids(
    prompt: list[int], completion: list[int], bad: list[list[int]], size: int
) -> None:
    ids = torch.tensor([prompt + completion])
    fields: dict[str, Any] = {"repetition_penalty": 1.3, "suppress_tokens": [7], "min_length": 12}
    pairs = {tuple(word): 1.5 for word in bad}
    sampler = after(
        prompt, completion, bad_words_ids=bad[:3], no_repeat_ngram_size=size, sequence_bias=pairs,
        exponential_decay_length_penalty=(3, 1.1), **fields,
    )  # fmt: skip
    scores, ours = edited(sampler, len(prompt))
    for rule in (
        hf.SequenceBiasLogitsProcessor(pairs),
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.NoRepeatNGramLogitsProcessor(size),
        hf.NoBadWordsLogitsProcessor(bad[:3]),
        hf.MinLengthLogitsProcessor(12, ENDS),
        hf.ExponentialDecayLengthPenalty((3, 1.1), ENDS, len(prompt)),
        hf.SuppressTokensLogitsProcessor([7]),
    ):
        scores = rule(ids, scores)
    same(ours, scores)


@pytest.mark.parametrize("scale", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_cutoffs_keep_what_transformers_keeps(scale: float, temperature: float) -> None:
    logits = random_logits(12, scale=scale, seed=int(scale * 10))
    warm = hf.TemperatureLogitsWarper(temperature)
    for cut in (3e-4, 2e-3, 0.02, 0.3):
        ours = support(logits, temperature, [lambda w, b, s, c=cut: ops.keep_epsilon(w, each(s, c))])
        assert ours == judged_by(logits, warm, hf.EpsilonLogitsWarper(cut))
        ours = support(logits, temperature, [lambda w, b, s, c=cut: ops.keep_eta(w, b, each(s, c))])
        assert ours == judged_by(logits, warm, hf.EtaLogitsWarper(cut))
    for share in (0.05, 0.4, 0.75, 0.95):
        ours = support(logits, temperature, [lambda w, b, s, c=share: ops.keep_top_h(w, s, each(s, c))])
        assert ours == judged_by(logits, warm, hf.TopHLogitsWarper(share))


def test_all_filters_together_keep_what_transformers_keeps() -> None:
    logits = random_logits(16, seed=3)
    fields = {"top_h": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "epsilon_cutoff": 0.01, "eta_cutoff": 0.05}
    kept = judged_by(
        logits, hf.TemperatureLogitsWarper(1.3), hf.TopHLogitsWarper(0.9), hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.95), hf.MinPLogitsWarper(0.01), hf.EpsilonLogitsWarper(0.01), hf.EtaLogitsWarper(0.05),
    )  # fmt: skip
    params = SamplingParams(temperature=1.3, **fields)
    for row, allowed in enumerate(kept):
        rows = [
            Sampler(params, seed=seed, index=0, prompt_ids=(), vocab_size=VOCAB, end_ids=frozenset())
            for seed in range(99)
        ]
        drawn = {one.token_id for one in draw(logits[row].expand(99, VOCAB), rows, range(99))}
        assert drawn <= allowed
        assert len(drawn) > 1 or len(allowed) == 1


def test_what_a_step_costs_does_not_grow_with_the_text() -> None:
    """Counted in tokens that are looked at: with rules in which the last token does not occur, none."""
    for length in (100, 10_000):
        sampler = after([2] * length + [5], [], no_repeat_ngram_size=2, bad_words_ids=[[2, 2, 3]] * 50)
        assert len(sampler.forbidden()) == 0
    assert len(after([2] * 9, [], no_repeat_ngram_size=2).forbidden()) == 1


def test_completions_share_only_what_was_collected_from_the_prompt() -> None:
    first = after([2, 3, 4, 2], [], no_repeat_ngram_size=2)
    second, third = first.fork(1), first.fork(2)
    second.accept(5)
    second.accept(2)
    assert (sorted(second.forbidden()), sorted(third.forbidden())) == ([3, 5], [3])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"no_repeat_ngram_size": MAX_NGRAM + 1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"min_length": 1.5}, "min_length"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [5]}, "bad_words_ids"),
        ({"bad_words_ids": 5}, "bad_words_ids"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
        ({"bad_words_ids": [[-1]]}, "bad_words_ids"),
        ({"bad_words_ids": [[1] * (MAX_NGRAM + 1)]}, "bad_words_ids"),
        ({"bad_words_ids": [[1]] * (MAX_SEQUENCES + 1)}, "bad_words_ids"),
        ({"sequence_bias": {(): 1.0}}, "sequence_bias"),
        ({"sequence_bias": [[[1], math.nan]]}, "sequence_bias"),
        ({"sequence_bias": [[[1], -math.inf]]}, "sequence_bias"),
        ({"sequence_bias": [[1, 2, 3]]}, "sequence_bias"),
        ({"sequence_bias": "ab"}, "sequence_bias"),
        ({"suppress_tokens": [1] * (MAX_IDS + 1)}, "suppress_tokens"),
        ({"suppress_tokens": [True]}, "suppress_tokens"),
        ({"begin_suppress_tokens": 5}, "begin_suppress_tokens"),
        ({"exponential_decay_length_penalty": (1,)}, "exponential_decay_length_penalty"),
        ({"exponential_decay_length_penalty": (1.5, 2)}, "exponential_decay_length_penalty"),
        ({"exponential_decay_length_penalty": (1, 0)}, "exponential_decay_length_penalty"),
        ({"top_h": 0.0}, "top_h"),
        ({"epsilon_cutoff": 1.5}, "epsilon_cutoff"),
        ({"eta_cutoff": "1"}, "eta_cutoff"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rules_that_make_no_sense_are_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(**fields)
    assert refusal.value.param == name


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"])
def test_tokens_that_the_model_does_not_have_are_named(name: str) -> None:
    value = {"bad_words_ids": [[3, 99]], "sequence_bias": {(3, 99): 1.0}}.get(name, [99])
    check_ids(SamplingParams(**{name: value}), 100)
    with pytest.raises(BadRequest, match=f"{name} names token 99"):
        check_ids(SamplingParams(**{name: value}), 99)


def test_parameters_of_a_request_replace_defaults_of_the_model() -> None:
    defaults = SamplingParams(min_tokens=9, max_tokens=20)
    for most, least in itertools.product((None, 4, 30), (None, 3)):
        given = {name: value for name, value in (("max_tokens", most), ("min_tokens", least)) if value is not None}
        params = merged(defaults, given)
        assert params.max_tokens == (most or 20)
        assert params.min_tokens == (least or min(9, most or 20))
    with pytest.raises(BadRequest, match="min_tokens 5 is more than max_tokens 4"):
        merged(defaults, {"min_tokens": 5, "max_tokens": 4})
