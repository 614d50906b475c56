"""What an answer remembers for its next draw, and how several answers to one prompt come by it."""

import random
from typing import Any

import pytest

from kvcellar.sample.choice import Choice
from kvcellar.sample.params import SamplingParams

FIELDS = ("params", "seed", "choice", "vocab_size", "produced", "greedy", "penalised", "end_ids", "end_array")
TABLES = ("seen_ids", "seen_counts")


def made(choice: int, last_n: int = -1) -> Choice:
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
    return Choice(params, seed=5, choice=choice, prompt_ids=prompt, vocab_size=80, end_ids=frozenset({2}))


@pytest.mark.parametrize("last_n", [-1, 0, 3, 40])
def test_a_twin_is_what_it_would_be_if_it_had_been_made_alone(last_n: int) -> None:
    twin, alone = made(0, last_n).twin(3), made(3, last_n)
    for token in (4, 90, 4, 79, 11):
        for name in (*FIELDS, *TABLES):
            assert getattr(twin, name) == getattr(alone, name)
        assert twin.uniform(17) == alone.uniform(17)
        assert (twin.biases(), twin.forbidden(), twin.ends_gain()) == (
            alone.biases(),
            alone.forbidden(),
            alone.ends_gain(),
        )
        twin.check()
        twin.accept(token)
        alone.accept(token)


@pytest.mark.parametrize("last_n", [-1, 3])
def test_what_one_answer_accepts_the_others_do_not_see(last_n: int) -> None:
    first = made(0, last_n)
    second = first.twin(1)
    third = second.twin(2)
    second.accept(4)
    second.accept(50)
    for untouched in (first, third):
        assert (untouched.produced, sum(untouched.seen_counts)) == (0, 0)
        untouched.check()
