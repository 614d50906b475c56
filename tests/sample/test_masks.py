"""Masks: scores keep their bits where a constraint allows their tokens, and are minus infinity elsewhere; tokens are
drawn by these, log-probabilities by the model's own."""

import math

import pytest
import torch

from kvcellar.constraint import Constraint
from kvcellar.engine.sample.draw import _spread, draw, forbid_unmatched
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.sampling_params import SamplingParams
from tests.sample.languages import COLUMNS, END, WORDS, allowed, grammars

PATTERNS = ["[ab]+", None, "c", "(ab|ba|cc)*"]


def sampler(pattern: str | None, index: int = 0, **how) -> Sampler:
    constraint = None if pattern is None else Constraint.regex(pattern)
    return Sampler(
        SamplingParams(constraint=constraint, **how), seed=3, index=index, prompt_ids=(5,), vocab_size=COLUMNS,
        end_ids=frozenset({END}), matcher=None if constraint is None else grammars().matcher(constraint),
    )  # fmt: skip


@pytest.mark.parametrize("patterns", [PATTERNS, PATTERNS[:1], PATTERNS[2:], ["a"] * 40])
def test_scores_stay_where_a_token_is_allowed_and_are_minus_infinity_elsewhere(patterns) -> None:
    samplers = [sampler(pattern) for pattern in patterns]
    raw = torch.randn(len(patterns), COLUMNS) * 50
    scores = raw.clone()
    forbid_unmatched(scores, samplers)
    for one, before, after in zip(samplers, raw, scores, strict=True):
        may = range(COLUMNS) if one.matcher is None else allowed(one.matcher)
        expected = [float(before[token]) if token in may else -math.inf for token in range(COLUMNS)]
        assert after.tolist() == expected


def test_on_a_device_bits_are_spread_as_on_the_host() -> None:
    """The form of other devices, here on a CPU."""
    words = torch.randint(-(2**31), 2**31 - 1, (3, 2), dtype=torch.int32)
    expected = [
        [bool((int(words[row, token // 32]) >> token % 32) & 1) for token in range(COLUMNS)] for row in range(3)
    ]
    assert _spread(words, COLUMNS).tolist() == expected


@pytest.mark.gpu
def test_a_device_masks_as_the_host_does() -> None:
    samplers = [sampler(pattern) for pattern in PATTERNS]
    scores = torch.randn(len(PATTERNS), COLUMNS)
    on_device = scores.to("cuda")
    forbid_unmatched(scores, samplers)
    forbid_unmatched(on_device, samplers)
    assert torch.equal(on_device.cpu(), scores)


def test_draws_follow_penalties_and_biases_within_the_constraint_and_logprobs_do_not() -> None:
    logits = torch.zeros(2, COLUMNS + 3)
    logits[:, WORDS.index("c")] = 9.0  # the likeliest, and not allowed
    how = {"temperature": 0.0, "logprobs": 1, "logit_bias": {WORDS.index("b"): 2.0}}
    biased, plain = draw(logits, [sampler("[ab]", **how), sampler(None, **how)], [1, 1])
    assert (biased.token_id, plain.token_id) == (WORDS.index("b"), WORDS.index("c"))
    assert biased.logprob is not None
    assert plain.logprob is not None
    assert biased.logprob.top == plain.logprob.top == ((WORDS.index("c"), plain.logprob.logprob),)
    expected = float(torch.log_softmax(logits[0, :COLUMNS].double(), 0)[WORDS.index("b")])
    assert biased.logprob.logprob == pytest.approx(expected, abs=1e-6)


def test_if_everything_that_is_allowed_is_forbidden_the_row_has_an_error_and_others_have_tokens() -> None:
    banned = sampler("a+", suppress_tokens=(WORDS.index("a"), WORDS.index("ab"), WORDS.index("aab")))
    none, other = draw(torch.randn(2, COLUMNS), [banned, sampler("c+")], [1, 1])
    assert "all 40 tokens are forbidden" in str(none.error)
    assert other.token_id in (WORDS.index("c"), WORDS.index("cc"))
