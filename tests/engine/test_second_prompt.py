"""The second of two prompts that differ in their last tokens computes hardly more than these, on every kind of
layer."""

import random
from typing import Any

import pytest

from kvcellar import Engine
from tests.engine.mixes import small_engine, tokens
from tests.models.served import SERVED

LENGTH, LAST = 130, 5  # tokens of a prompt, or what the context has, and those that differ
MOST = 16  # tokens that the second one computes
FIRST = ("llama", "gemma3", "llama4", "gpt-oss", "lfm2", "qwen3-next", "mamba2", "falcon-h1")
NAMES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(SERVED)]
ASKED: Any = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "logprobs": 5}


def drawn(engine: Engine, prompt: list[int]) -> tuple[int, list[dict[int, float]]]:
    """Tokens that came from memory, and the likeliest of each draw."""
    result = engine.generate(prompt, **ASKED)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    return result.usage.cached_tokens, [dict(one.top) for one in logprobs]


@pytest.mark.parametrize("name", NAMES)
def test_the_second_of_two_prompts_computes_their_last_tokens_with_the_logits_of_a_cold_engine(name: str) -> None:
    with small_engine(name) as engine:
        first = list(tokens(random.Random(3), min(LENGTH, engine._built.intake.context - ASKED["max_tokens"])))
        second = [*first[:-LAST], *((token + 1) % 50 for token in first[-LAST:])]
        _, cold = drawn(engine, second)
        engine.clear_cache()
        assert drawn(engine, first)[0] == 0
        cached, warm = drawn(engine, second)
    assert cached >= len(second) - MOST
    for ours, theirs in zip(warm, cold, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
