"""Tokens that a completion is given several at once are as if it had been given them one by one, however they are
split: the same text, end and usage, and none is taken behind the one that ends it. Those that it is given at once are
delivered at once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.engine.request import Completion, Request, Status, Token
from kvcellar.events import Delta, Done, Event, TokenLogprob
from kvcellar.sample.params import SamplingParams

TEXT = 'def f(x):\n    """naïve 🙂 ☕"""\n    return x + 1\n\n\ndef g(y):\n    return f(y)\n'
CONTEXT = 40
# What ends it: nothing, a stop string inside or across tokens, a length, a full context, a token that ends the text.
HOW: dict[str, dict[str, Any]] = {
    "nothing": {"max_tokens": 1000},
    "stop string": {"stop": ["return x +"]},
    "stop string, not before": {"stop": ["n"], "min_tokens": 9},
    "held back": {"stop": ["☕!", "return f(y)\n\n"]},
    "length": {"max_tokens": 7},
    "context": {"max_tokens": 1000, "shift": False},
    "end of text": {"max_tokens": 1000},
    "stop token": {"stop_token_ids": [0]},
    "penalties": {"frequency_penalty": 0.5, "repeat_last_n": 4, "max_tokens": 12},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(cache_bytes=4_000_000) as made:
        yield made


def drawn(engine: Engine, ends_with: int | None, logprobs: bool) -> list[Token]:
    ids = [*engine.encode(TEXT), *([ends_with] if ends_with is not None else []), *engine.encode("and more")]
    return [(token, TokenLogprob(token, -0.5 - place) if logprobs else None) for place, token in enumerate(ids)]


def given(engine: Engine, how: dict[str, Any], context: int, batches: Sequence[Sequence[Token]]) -> tuple[Any, ...]:
    """What a completion delivers, and what it and its sampling state are afterwards."""
    events: list[Event] = []
    request = Request((5, 6, 7), SamplingParams(**{"temperature": 0.0, **how}), events.append)
    completion: Completion = engine._built.intake.completion(request, seed=1)
    request.completions.append(completion)
    for stage in (Status.PREFILL, Status.DECODE):
        completion.become(stage)
    taken = 0
    for batch in batches:
        found = completion.accept(batch, context)
        taken += found.tokens
        assert found.reason is not None or found.tokens == len(batch)
        if found.reason is not None:
            completion.finish(found.reason)
            break
    completion.sampler.check()
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) <= len(batches) + 1, "several deltas for one batch, beside the text that was held back"
    return (
        [replace(event, timings=None) if isinstance(event, Done) else event for event in events[len(deltas) :]],
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or ()],
        taken,
        completion.tokens,
        completion.status,
        request.usage(),
        completion.sampler.seen_ids,
        completion.sampler.seen_counts,
    )


def split(tokens: Sequence[Token], draw: Random, most: int) -> Iterator[Sequence[Token]]:
    start = 0
    while start < len(tokens):
        count = draw.randint(1, most)
        yield tokens[start : start + count]
        start += count


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", HOW)
def test_however_drawn_tokens_are_split_what_is_delivered_is_that_of_one_at_a_time(engine, kind, logprobs) -> None:
    how = HOW[kind] | ({"logprobs": 0} if logprobs else {})
    ends_with = {"end of text": next(iter(engine._built.loaded.end_ids)), "stop token": 0}.get(kind)
    context = CONTEXT if kind == "context" else 10_000
    tokens = drawn(engine, ends_with, logprobs)
    expected = given(engine, how, context, [[token] for token in tokens])
    assert (expected[4] < len(tokens)) == (kind not in ("nothing", "held back")), "it ends where it should"
    assert given(engine, how, context, [tokens]) == expected
    for seed in range(8):
        batches = list(split(tokens, Random(seed), most=2 + 2 * seed))
        assert given(engine, how, context, batches) == expected


def test_the_token_that_ends_a_completion_is_taken_and_none_behind_it(engine) -> None:
    tokens = drawn(engine, None, logprobs=False)
    _, _, ids, _, taken, kept, *_ = given(engine, {"max_tokens": 7}, 10_000, [tokens])
    assert taken == 7
    assert kept == [5, 6, 7, *(token for token, _ in tokens[:7])]
    assert ids == kept[3:]
