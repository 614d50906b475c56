"""The compiled draw is the draw by torch: the same tokens, from the same weights, with the same log-probabilities."""

import math
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from kvcellar.engine.sample.couple import Draft
from kvcellar.engine.sample.draw import Drawn, Draws
from kvcellar.engine.sample.native_draws import NativeDraws
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import ScoresNotNumbers
from kvcellar.events import TokenLogprob
from kvcellar.kernels.compiled import COMPILERS, NotCompiled
from kvcellar.kernels.sampling import SampleKernel
from kvcellar.sampling_params import SamplingParams

OBVIOUS = Draws()
ENDS = frozenset({0, 1})


BUILDS = {"native": "", "AVX2": "-mno-avx512f", "portable": "-mno-avx"}


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> NativeDraws:
    """Compiled once for all tests, and kept in the user's cache."""
    options = BUILDS[request.param]
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if options and platform.machine() != "x86_64":
        pytest.skip("the instruction sets named here are those of x86-64")
    try:
        return NativeDraws(SampleKernel({**os.environ, "CXX": f"{compiler} {options}"} if options else os.environ))
    except NotCompiled as error:
        pytest.skip(str(error))


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-4, 0.3, 0.8, 1.0, 2.0, 100.0]),
        "top_h": st.sampled_from([None, 1e-9, 0.4, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 399, 2**31 - 1]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "typical_p": st.sampled_from([1e-9, 0.6, 0.95, 1.0]),
        "epsilon_cutoff": st.sampled_from([0.0, 1e-4, 0.01, 0.5]),
        "eta_cutoff": st.sampled_from([0.0, 1e-4, 0.01, 0.5]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 2.0]),
        "repeat_last_n": st.sampled_from([-1, 0, 4]),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.sampled_from([-100.0, 3.0, 100.0]), max_size=4),
        "min_tokens": st.sampled_from([0, 3, 10]),
        "exponential_decay_length_penalty": st.sampled_from([None, (2, 1.5)]),
        "no_repeat_ngram_size": st.sampled_from([0, 1]),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
    },
)
SHAPES = st.sampled_from(["peaked", "plain", "flat", "equal", "few", "nothing", "nan", "infinite"])


def logits_of(shape: str, vocab: int, seed: int) -> torch.Tensor:
    x = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    match shape:
        case "peaked":
            return 5 * x + 12 * (x > 2)
        case "plain":
            return 2 * x
        case "flat":
            return 0.01 * x
        case "equal":
            return torch.zeros(vocab)
        case "few":
            x[x.argsort()[: vocab - 3]] = -math.inf
        case "nothing":
            x[:] = -math.inf
        case "nan":
            x[vocab // 2] = math.nan
        case "infinite":
            x[vocab // 3] = math.inf
    return x


class Masked:
    """Stands in for the matcher of a constraint: allows a share of the tokens, in time or too late."""

    error = None

    def __init__(self, share: float, *, late: bool) -> None:
        self._share, self._late = share, late

    def accept(self, token: int) -> None:
        pass

    def fill(self, drafts: tuple[int, ...], mask: np.ndarray) -> bool:
        bits = np.random.default_rng(5).random(32 * len(mask)) < self._share
        mask[:] = 0 if self._late else np.packbits(bits, bitorder="little").view(np.int32)
        return not self._late


MATCHERS = st.sampled_from([None, None, Masked(0.5, late=False), Masked(0.01, late=False), Masked(1.0, late=True)])


def sampler(fields: dict[str, Any], number: int, vocab: int, matcher: Any = None) -> Sampler:
    made = Sampler(
        SamplingParams(**fields), seed=number, index=number, prompt_ids=(3, 4, 5, 3, vocab + 1, 90), vocab_size=vocab,
        end_ids=ENDS, never_ids=frozenset({7}), matcher=matcher,
    )  # fmt: skip
    for token in (4, 8, 8, 2)[: number % 5]:
        made.accept(token)
    return made


def assert_same(one: Drawn, other: Drawn) -> None:
    assert (one.token_id, str(one.error), one.late) == (other.token_id, str(other.error), other.late)
    assert (one.logprob is None) == (other.logprob is None)
    if one.logprob is not None and other.logprob is not None:
        near: Any = {"abs": 1e-6, "rel": 1e-6}
        assert one.logprob.token_id == other.logprob.token_id
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, **near)
        assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
        assert [value for _, value in one.logprob.top] == pytest.approx([v for _, v in other.logprob.top], **near)


@given(
    st.lists(st.tuples(FIELDS, SHAPES, MATCHERS), min_size=1, max_size=5),
    st.sampled_from([100, 127, 128, 400, 3001]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**20),
)
def test_every_row_draws_what_it_draws_by_torch(
    native: NativeDraws, rows: list[tuple[dict[str, Any], str, Any]], vocab: int, dtype: torch.dtype, seed: int
) -> None:
    wide = torch.full((len(rows), vocab + 3), math.nan)
    for at, (_, shape, _) in enumerate(rows):
        wide[at, :vocab] = logits_of(shape, vocab, seed + at)
    logits = wide.to(dtype)
    before = logits.clone()
    samplers = [sampler(fields, number, vocab, matcher) for number, (fields, _, matcher) in enumerate(rows)]
    positions = range(seed, seed + len(rows))
    found = native.draw(logits, samplers, positions)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    for one, other in zip(found, OBVIOUS.draw(logits, samplers, positions), strict=True):
        assert_same(one, other)
    for at, one in enumerate(found):
        (alone,) = native.draw(logits[at : at + 1], samplers[at : at + 1], positions[at : at + 1])
        assert (alone.token_id, alone.logprob, str(alone.error)) == (one.token_id, one.logprob, str(one.error))


@given(FIELDS, SHAPES, st.sampled_from([128, 400, 3001, 70_000]), st.integers(0, 2**20))
def test_what_is_drawn_from_is_what_it_is_by_torch(
    native: NativeDraws, fields: dict[str, Any], shape: str, vocab: int, seed: int
) -> None:
    logits, one = logits_of(shape, vocab, seed)[None].bfloat16(), sampler(fields, 3, vocab)
    (found,), (other,) = (draws.propose(logits, [one], [0.4]) for draws in (native, OBVIOUS))
    assert found.score == other.score or (math.isnan(found.score) and math.isnan(other.score))
    if math.isfinite(other.score):
        assert found.token_id == other.token_id
        assert (found.weights is None) == (other.weights is None) == one.greedy
    if math.isfinite(other.score) and found.weights is not None and other.weights is not None:
        assert found.weights.shape == (vocab,)
        assert torch.equal(found.weights > 1, other.weights > 1)
        assert (found.weights - other.weights).abs().max() <= 1


@given(st.integers(0, 2**20), st.sampled_from([0.3, 1.0]), st.sampled_from([1.0, 0.9]), st.booleans())
def test_a_coupled_row_draws_what_it_draws_by_torch(
    native: NativeDraws, seed: int, temperature: float, top_p: float, logprobs: bool
) -> None:
    vocab = 300
    logits, guessed = (logits_of("plain", vocab, seed + at)[None] for at in range(2))
    fields = {"temperature": temperature, "top_p": top_p, "logprobs": 2 if logprobs else None}
    one = sampler(fields, 3, vocab)
    (draft,) = OBVIOUS.propose(guessed, [one], [0.7])
    drafts = [Draft(draft.token_id, draft.weights)]
    assert_same(*(draws.draw(logits, [one], [seed], drafts)[0] for draws in (native, OBVIOUS)))


@given(SHAPES, st.sampled_from([100, 128, 3001]), st.integers(0, 20), st.integers(0, 2**20))
def test_a_given_token_is_scored_as_by_torch(native: NativeDraws, shape: str, vocab: int, most: int, seed: int) -> None:
    logits, tokens = torch.stack([logits_of(shape, vocab, seed + at) for at in range(3)]).bfloat16(), [5, 0, vocab - 1]

    def found(draws: Draws) -> list[TokenLogprob] | str:
        try:
            return draws.score(logits, tokens, most)
        except ScoresNotNumbers as error:
            return str(error)

    ours, theirs = found(native), found(OBVIOUS)
    assert isinstance(ours, str) == isinstance(theirs, str)
    if isinstance(ours, list) and isinstance(theirs, list):
        assert [one.rank for one in ours] == [one.rank for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert_same(Drawn(one.token_id, one), Drawn(other.token_id, other))


def test_the_score_of_a_given_token_is_that_of_a_drawn_one(native: NativeDraws) -> None:
    logits = torch.stack([logits_of("plain", 3001, at) for at in range(9)])
    drawn = native.draw(logits, [sampler({"logprobs": 4}, 3, 3001)] * 9, range(9))
    scored = native.score(logits, [one.token_id for one in drawn], 4)
    assert [replace(one, rank=0) for one in scored] == [one.logprob for one in drawn]


FILTERS = {
    "top_k": {"top_k": 9}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}, "typical_p": {"typical_p": 0.8},
    "top_h": {"top_h": 0.6}, "epsilon": {"epsilon_cutoff": 0.02}, "eta": {"eta_cutoff": 0.05},
}  # fmt: skip
WARPERS: dict[str, Callable[[], hf.LogitsProcessor]] = {
    "top_h": lambda: hf.TopHLogitsWarper(0.6), "top_k": lambda: hf.TopKLogitsWarper(9),
    "typical_p": lambda: hf.TypicalLogitsWarper(0.8), "top_p": lambda: hf.TopPLogitsWarper(0.8),
    "min_p": lambda: hf.MinPLogitsWarper(0.1), "epsilon": lambda: hf.EpsilonLogitsWarper(0.02),
    "eta": lambda: hf.EtaLogitsWarper(0.05),
}  # fmt: skip
PAIRS = [(), *combinations(FILTERS, 1), *combinations(FILTERS, 2)]
DRAWS = 4000


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_tokens_are_drawn_as_often_as_transformers_says_in_float64(native: NativeDraws, names: tuple[str, ...]) -> None:
    """A chi-square test, passed by all but one in a thousand."""
    vocab = 40
    logits = logits_of("plain", vocab, 11)[None]
    fields = {"temperature": 0.9, **{key: value for name in names for key, value in FILTERS[name].items()}}
    drawn = native.draw(logits.expand(DRAWS, vocab), [sampler(fields, 0, vocab)] * DRAWS, range(DRAWS))
    scores = logits.double() / 0.9
    scores[0, 7] = -math.inf  # which is never drawn
    for name in (one for one in WARPERS if one in names):
        scores = WARPERS[name]()(torch.zeros(1, 1, dtype=torch.int64), scores)
    expected = scores[0].softmax(0) * DRAWS
    counts = torch.bincount(torch.tensor([one.token_id for one in drawn]), minlength=vocab)
    possible = expected > 0
    assert not counts[~possible].any()
    often = possible & (expected >= 5)
    rest = torch.stack([counts[possible & ~often].sum(), expected[possible & ~often].sum()])
    found = ((counts - expected) ** 2 / expected)[often].sum() + (rest[0] - rest[1]) ** 2 / rest[1].clamp(min=1)
    freedom = max(1, int(often.sum()))
    assert found < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty


EDITS = {
    "presence": {"presence_penalty": 1.5}, "frequency": {"frequency_penalty": -0.5}, "decay": {
        "exponential_decay_length_penalty": (1, 1.5)
    }, "repetition": {"repetition_penalty": 1.3}, "bias": {"logit_bias": {30: 3.0}}, "least": {"min_tokens": 9},
    "repeats": {"no_repeat_ngram_size": 1}, "suppressed": {"suppress_tokens": (9,)},
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_each_edit_changes_what_is_drawn_from_as_by_torch(native: NativeDraws, name: str) -> None:
    """Alone, and after three tokens of the completion: 4, 8 and 8."""
    logits = logits_of("plain", 128, 5)[None]
    plain, one = (sampler(fields, 3, 128) for fields in ({}, EDITS[name]))
    (without,), (found,), (other,) = (
        draws.propose(logits, [each], [0.4]) for draws, each in ((native, plain), (native, one), (OBVIOUS, one))
    )
    assert found.weights is not None
    assert other.weights is not None
    assert without.weights is not None
    assert (found.weights - other.weights).abs().max() <= 1
    assert (found.weights - without.weights).abs().max() > 1
