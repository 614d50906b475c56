"""Layers with windows, and those that attend to chunks, resume at any token that memory has, as full attention does."""

import random
from collections.abc import Sequence

import pytest

from kvcellar import Engine
from kvcellar.frontend.result import Result
from tests.engine.mixes import assert_at_rest, bytes_for, small_engine, tokens

HOW = {"temperature": 0.0, "ignore_eos": True}
WINDOWED = ["gemma3", "mistral", "llama4", "gpt-oss"]  # sliding and full, sliding only, chunked, with sinks
TEXT = list(tokens(random.Random(3), 130))


@pytest.fixture(params=WINDOWED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def other(seed: int, count: int) -> list[int]:
    """Tokens of which the first is not that of `TEXT` at any position that is used here."""
    return [9, *tokens(random.Random(seed), count - 1)]


def asked(engine: Engine, prompt: Sequence[int], drawn: int = 4) -> Result:
    return engine.generate(list(prompt), max_tokens=drawn, logprobs=3, **HOW)


def assert_as_cold(name: str, prompt: Sequence[int], found: Result) -> None:
    with small_engine(name) as engine:
        cold = asked(engine, prompt, len(found.token_ids))
    assert cold.usage.cached_tokens == 0
    assert found.token_ids == cold.token_ids
    for one, same in zip(found.logprobs or (), cold.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_the_second_prompt_computes_what_the_first_has_not(name: str) -> None:
    with small_engine(name) as engine:
        asked(engine, TEXT)
        for shared in (125, 61):
            prompt = [*TEXT[:shared], *other(shared, 130 - shared)]
            found = asked(engine, prompt)
            assert found.usage.cached_tokens == shared
            assert_as_cold(name, prompt, found)
        assert_at_rest(engine)


@pytest.mark.parametrize("drawn", [40, 23])
def test_a_prompt_parts_from_an_answer_at_any_token(name: str, drawn: int) -> None:
    with small_engine(name) as engine:
        answer = asked(engine, TEXT[:30], 50).token_ids
        prompt = [*TEXT[:30], *answer[:drawn], *other(drawn, 7)]
        assert answer[drawn] != 9, "it does not part there"
        found = asked(engine, prompt)
        assert found.usage.cached_tokens == 30 + drawn
        assert_as_cold(name, prompt, found)


def test_where_a_prompt_has_parted_a_checkpoint_stays_when_the_tail_has_gone(name: str) -> None:
    with small_engine(name) as engine:
        asked(engine, TEXT)
        asked(engine, [*TEXT[:61], *other(1, 9)])
        tree = engine._loop.manager.prefixes.tree
        while (tail := tree._order.next_tail()) is not None:
            assert tree.evict_window(lambda kept: False, 10)
            tree.check()
            assert tail.node.tail is None or tree._claims.of(tail.node.claim).tail < tail.node.end
        prompt = [*TEXT[:61], *other(2, 9)]
        found = asked(engine, prompt)
        assert found.usage.cached_tokens == 61
        assert_as_cold(name, prompt, found)


def test_in_a_small_memory_requests_are_answered_at_once_and_as_in_a_large_one(name: str) -> None:
    """What tails have is free for every request: none is preempted, or ends early, because of it."""
    draw, prompts = random.Random(5), list[list[int]]()
    for _ in range(12):
        prompts.append([*TEXT[: draw.choice([0, 20, 50])], *tokens(draw, 60)])
    with small_engine(name, cache_bytes=bytes_for(name, 120, max_sequences=2), max_sequences=2) as engine:
        for prompt in prompts:
            found = asked(engine, prompt)
            assert found.finish_reason == "length"
            assert len(found.token_ids) == 4
            engine.check()
        assert engine.stats().preemptions == 0
    assert_as_cold(name, prompts[-1], found)
