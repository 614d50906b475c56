"""Tokens that a completion is given several at once are as if it had been given them one by one, however they are
split: the same text, end and usage, and nothing is delivered or counted behind the one that ends it. Those that it is
given at once are delivered at once."""

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from kvcellar import Engine
from kvcellar.engine.core.request import Request, Status, Token
from kvcellar.engine.messages import Submission
from kvcellar.events import Delta, Done, Event, TokenLogprob
from kvcellar.frontend.output_processor import OutputProcessor
from kvcellar.memory.prefix.node import key_of
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.output import Stops

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


def given(
    engine: Engine, how: dict[str, Any], context: int, batches: Sequence[Sequence[Token]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What is delivered of a completion, and what it and its sampling state are afterwards."""
    events: list[Event] = []
    stopped: list[int] = []
    params = SamplingParams(**{"temperature": 0.0, **how})
    ways: Any = {"stop": lambda choice, tokens: stopped.append(choice), "fail": lambda error: None}
    output = partial(engine._codec.output, Stops(params.stop), (5, 6, 7))
    processor = OutputProcessor(params, output, events.append, **ways)
    request = Request(Submission(number=0, prompt=key_of((5, 6, 7)), params=params, seed=1), processor.receive)
    (completion,) = engine._built.intake.completions(request)
    request.completions.append(completion)
    for stage in (Status.PREFILL, Status.DECODE):
        completion.become(stage)
    for batch in batches:
        found = completion.accept(batch, context)
        assert found.reason is not None or found.tokens == len(batch)
        if found.reason is not None or stopped:
            completion.finish(found.reason or "stop")
            break
    completion.sampler.check()
    assert stopped in ([], [0]), "the engine is told once that a text has ended"
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) <= len(batches) + 1, "several deltas for one batch, beside the text that was held back"
    return (
        [replace(event, timings=None) if isinstance(event, Done) else event for event in events[len(deltas) :]],
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or ()],
    ), (completion.tokens, completion.status, completion.sampler.seen_ids, completion.sampler.seen_counts)


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
    delivered, left = given(engine, how, context, [[token] for token in tokens])
    assert (len(delivered[2]) + (ends_with is not None) < len(tokens)) == (kind not in ("nothing", "held back"))
    for seed in (None, *range(8)):
        batches = [tokens] if seed is None else list(split(tokens, Random(seed), most=2 + 2 * seed))
        found = given(engine, how, context, batches)
        assert found[0] == delivered
        assert found[1] == left or kind.startswith("stop string"), "tokens behind a stop string may have been drawn"


def test_the_token_that_ends_a_completion_is_taken_and_none_behind_it(engine) -> None:
    tokens = drawn(engine, None, logprobs=False)
    (_, _, ids, _), (kept, *_) = given(engine, {"max_tokens": 7}, 10_000, [tokens])
    assert kept == [5, 6, 7, *(token for token, _ in tokens[:7])]
    assert ids == kept[3:]


def test_tokens_behind_a_stop_string_are_neither_delivered_nor_counted(engine) -> None:
    tokens = drawn(engine, None, logprobs=False)
    (ends, text, ids, _), _ = given(engine, HOW["stop string"], 10_000, [tokens])
    assert text == TEXT[: TEXT.index("return x +")]
    assert ends[-1].usage.completion_tokens == len(ids) < len(tokens)
