"""Samplers keep what the next draw depends on, and are forked for several completions of one prompt."""

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvcellar.engine.sample.sampler import Sampler
from kvcellar.sampling_params import SamplingParams
from tests.counted import lines

FIELDS = ("params", "seed", "index", "vocab_size", "produced", "greedy", "penalised", "end_ids", "end_array")
TABLES = ("seen_ids", "seen_counts")


def made(index: int, last_n: int = -1) -> Sampler:
    prompt = random.Random(1).choices(range(90), k=200)
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "repeat_last_n": last_n}
    rules: dict[str, Any] = {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": ((9,), (4, 79), (90, 4)),
        "sequence_bias": {(4, 11): 2.0, (3,): 1.0},
        "suppress_tokens": (5,),
        "begin_suppress_tokens": (6,),
        "min_length": 202,
        "exponential_decay_length_penalty": (2, 1.5),
    }
    params = SamplingParams(**penalties, **rules, logit_bias={3: 1.0}, stop_token_ids=(7,))
    return Sampler(params, seed=5, index=index, prompt_ids=prompt, vocab_size=80, end_ids=frozenset({2}))


@pytest.mark.parametrize("last_n", [-1, 0, 3, 40])
def test_a_fork_equals_a_sampler_made_for_its_index(last_n: int) -> None:
    forked, alone = made(0, last_n).fork(3), made(3, last_n)
    for token in (4, 90, 4, 79, 11):
        for name in (*FIELDS, *TABLES):
            assert getattr(forked, name) == getattr(alone, name)
        assert forked.uniform(17) == alone.uniform(17)
        assert (forked.biases(), forked.forbidden(), forked.end_boost()) == (
            alone.biases(),
            alone.forbidden(),
            alone.end_boost(),
        )
        forked.check()
        forked.accept(token)
        alone.accept(token)


@pytest.mark.parametrize("last_n", [-1, 3])
def test_a_token_accepted_by_one_does_not_change_the_others(last_n: int) -> None:
    first = made(0, last_n)
    second = first.fork(1)
    third = second.fork(2)
    second.accept(4)
    second.accept(50)
    for untouched in (first, third):
        assert (untouched.produced, sum(untouched.seen_counts)) == (0, 0)
        untouched.check()


@pytest.mark.parametrize("last_n", [-1, 0, 3, 40])
def test_a_sampler_after_a_draft_equals_one_that_has_accepted_it(last_n: int) -> None:
    tokens = (4, 90, 4, 79, 11, 4)
    before, accepted = made(0, last_n), made(0, last_n)
    before.accept(79)
    accepted.accept(79)
    drafted = before
    for token in tokens:
        drafted = drafted.after(token)
        accepted.accept(token)
        for name in FIELDS:
            assert getattr(drafted, name) == getattr(accepted, name)
        assert dict(zip(drafted.seen_ids, drafted.seen_counts, strict=True)) == dict(
            zip(accepted.seen_ids, accepted.seen_counts, strict=True)
        )
        assert [sorted(drafted.forbidden()), drafted.biases(), drafted.end_boost()] == [
            sorted(accepted.forbidden()),
            accepted.biases(),
            accepted.end_boost(),
        ]
        drafted.check()
    untouched = made(0, last_n)
    untouched.accept(79)
    assert (before.produced, before.seen_ids, before.seen_counts) == (1, untouched.seen_ids, untouched.seen_counts)
    assert before.forbidden() == untouched.forbidden()


def of_length(tokens: int, **rules: Any) -> Sampler:
    prompt = random.Random(2).choices(range(10, 5000), k=tokens)
    return Sampler(SamplingParams(**rules), seed=1, index=0, prompt_ids=prompt, vocab_size=5000, end_ids=frozenset({2}))


RULES = [
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "repeat_last_n": 50_000},
    {"no_repeat_ngram_size": 3, "bad_words_ids": ((4, 5),)},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_fork_a_draft_and_a_token_cost_the_same_after_a_prompt_of_any_length(rules: dict[str, Any]) -> None:
    def costs(tokens: int) -> list[tuple[int, int]]:
        one = of_length(tokens, **rules)
        acts: list[Callable[[], object]] = [lambda: one.fork(1), lambda: one.after(5), lambda: one.accept(5)]
        return [(lines(act), allocated(act)) for act in acts]

    for (few, small), (many, large) in zip(costs(100), costs(20_000), strict=True):
        assert many <= few
        assert large <= small + 2000, "bytes: something of the prompt was copied"


def allocated(act: Callable[[], object]) -> int:
    """Bytes that are in use at most while `act` runs, of those that it allocates."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
