"""A request's record says what came from memory, and why it was not more."""

import random

import pytest

from kvcellar import Engine
from kvcellar.events import Recall
from kvcellar.prefix.why import SHOWN
from tests.engine.mixes import bytes_for, small_engine, tokens

GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
PROMPT = list(tokens(random.Random(1), 60))


def asked(engine: Engine, prompt: list[int]) -> Recall:
    result = engine.generate(prompt, **GREEDY)
    recall = result.recall
    assert recall is not None
    assert result.usage.cached_tokens == recall.restored <= recall.matched <= recall.asked == len(prompt) - 1
    return recall


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_the_first_prompt_is_new_and_the_same_again_is_complete(name) -> None:
    with small_engine(name) as engine:
        assert asked(engine, PROMPT).reason == "new"
        again = asked(engine, PROMPT)
        assert (again.reason, again.restored) == ("complete", len(PROMPT) - 1)
        longer = asked(engine, [*PROMPT, *engine.generate(PROMPT, **GREEDY).token_ids, 7, 8])
        assert (longer.reason, longer.restored) == ("new", len(PROMPT) + 1)


def test_a_prompt_that_diverges_shows_the_tokens_on_both_sides() -> None:
    with small_engine("llama") as engine:
        asked(engine, PROMPT)
        other = [*PROMPT[:20], 5 if PROMPT[20] != 5 else 6, *PROMPT[21:]]
        found = asked(engine, other)
        assert (found.reason, found.matched, found.restored) == ("diverged", 20, 20)
        assert found.ours == tuple(other[20 : 20 + SHOWN])
        assert found.theirs == tuple(PROMPT[20 : 20 + SHOWN])


@pytest.mark.parametrize(("name", "kind"), [("gemma3", "sliding"), ("lfm2", "recurrent")])
def test_layers_that_cannot_resume_where_a_prompt_diverged_are_named(name, kind) -> None:
    with small_engine(name) as engine:
        asked(engine, PROMPT)
        found = asked(engine, [*PROMPT[:20], 5 if PROMPT[20] != 5 else 6])
        assert (found.reason, found.matched, found.restored) == ("no checkpoint", 20, 0)
        assert kind in found.detail
        assert asked(engine, [*PROMPT[:20], 7 if PROMPT[20] != 7 else 8, 9]).restored == 20, (
            "a checkpoint was left there"
        )


def test_what_was_evicted_is_said_with_its_cause() -> None:
    with small_engine("llama", cache_bytes=bytes_for("llama", 100)) as engine:
        asked(engine, PROMPT)
        asked(engine, list(tokens(random.Random(2), 90)))
        found = asked(engine, PROMPT)
        assert (found.reason, found.restored) == ("evicted", found.matched)
        assert found.restored < len(PROMPT) - 1
        assert "cells of" in found.detail
        engine.clear_cache()
        assert "an order to clear the cache" in asked(engine, PROMPT).detail
