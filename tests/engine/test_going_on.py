"""A request that an engine has answered in part goes on in another one: what both have told together is what one engine
would have told, wherever the first one has died."""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from kvcellar import BadRequest, Constraint, Engine
from kvcellar.engine.core.request import Request
from kvcellar.engine.messages import Drawn, Ended, EngineEvent, Produced, Submission
from kvcellar.events import Done, Embedded, Failed, PromptScored
from kvcellar.memory.prefix.node import ids_of, key_of
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import assert_at_rest, made, small_engine, tokens
from tests.engine.test_limits import held
from tests.engine.world import Heard

NAMES = ("llama", "gemma3", "lfm2")  # all positions; windows; convolutions
CONTEXT = 36
SEQUENCES = 3
CUTS = 3  # at random places, beside those that are chosen
SAMPLED = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 20},
    "seeded": SAMPLED | {"seed": 5},
    "without a seed": SAMPLED,
    "outputs": SAMPLED | {"n": 3, "ignore_eos": False},
    "more outputs than sequences": SAMPLED | {"n": 8, "max_tokens": 7},
    "penalties": SAMPLED | {"repetition_penalty": 1.5, "presence_penalty": 0.7, "repeat_last_n": 6, "n": 2},
    "counted penalties": {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "frequency_penalty": 1.5},
    "n-grams": SAMPLED | {"top_k": 3, "no_repeat_ngram_size": 2},
    "phrases": SAMPLED | {"top_k": 4, "sequence_bias": {(5, 6): 9.0, (7,): 6.0}, "bad_words_ids": [[7, 7]]},
    "biases": SAMPLED | {"logit_bias": {7: 12.0, 8: 12.0}, "begin_suppress_tokens": [7], "n": 2},
    "ends": SAMPLED | {"stop_token_ids": list(range(3, 100, 6)), "min_tokens": 4, "n": 4},
    "longer and longer": SAMPLED | {"ignore_eos": False, "exponential_decay_length_penalty": (3, 1.6), "n": 3},
    "logprobs": SAMPLED | {"logprobs": 2, "prompt_logprobs": 1},
    "a full context": {"temperature": 1.0, "ignore_eos": True, "n": 2},
}  # fmt: skip


class Ear:
    """Hears the events of a request."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._over = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, Done | Failed):
            self._over.set()

    def tokens(self, choice: int) -> int:
        return sum(len(e.token_ids) for e in list(self.events) if isinstance(e, Drawn) and e.choice == choice)

    def wait(self) -> list[EngineEvent]:
        assert self._over.wait(60), "the request does not come to an end"
        return self.events


def told(engine: Engine, submissions: Sequence[Submission]) -> list[list[EngineEvent]]:
    """What an engine tells of requests that run together."""
    built, ears = engine._built, [Ear() for _ in submissions]
    with held(engine):
        for submission, ear in zip(submissions, ears, strict=True):
            numbered = replace(submission, number=engine._loop.number())
            built.intake.submit(numbered, ear, engine._loop.submit)
    return [ear.wait() for ear in ears]


def submission(prompt: Sequence[int], *, number: int = 0, **how: Any) -> Submission:
    params = SamplingParams(**how)
    seed = 77 if params.seed is None else params.seed
    return Submission(number=number, prompt=key_of(prompt), params=params, seed=seed)


def singly(events: Sequence[EngineEvent]) -> list[EngineEvent]:
    """The same, with a `Drawn` for each token."""
    return [
        part
        for event in events
        for part in (
            [
                replace(event, token_ids=(token,), logprobs=event.logprobs and event.logprobs[place : place + 1])
                for place, token in enumerate(event.token_ids)
            ]
            if isinstance(event, Drawn)
            else [event]
        )
    ]


def rest(of: Submission, before: Sequence[EngineEvent]) -> Submission:
    """What is left of a request when an engine has died that had told this of it."""
    found: dict[int, Produced] = {}
    for event in before:
        if isinstance(event, Drawn | Ended):
            known = found.get(event.choice, Produced(event.choice, ()))
            if isinstance(event, Drawn):
                found[event.choice] = replace(known, token_ids=known.token_ids + event.token_ids)
            else:
                found[event.choice] = replace(known, ended=event.tokens)
    prompt_told = any(isinstance(event, PromptScored | Embedded) for event in before)
    return replace(of, produced=tuple(found.values()), prompt_told=prompt_told and not found)


def answers(events: Sequence[EngineEvent]) -> Any:
    """All that does not depend on time and memory, in an order that does not either."""
    heard = Heard()
    for event in events:
        heard(event)
    assert heard.error is None, heard.error
    drawn: dict[int, list[Any]] = {}
    for event in events:
        if isinstance(event, Drawn):
            drawn.setdefault(event.choice, []).extend(
                zip(event.token_ids, [one.token_id for one in event.logprobs or ()] or event.token_ids, strict=True)
            )
    done = events[-1]
    assert isinstance(done, Done)
    ended = {event.choice: event for event in events if isinstance(event, Ended)}
    prompts = Counter(type(event) for event in events if isinstance(event, PromptScored | Embedded))
    return drawn, ended, prompts, done.usage.prompt_tokens, done.usage.completion_tokens


def cuts(events: Sequence[EngineEvent], draw: random.Random) -> list[int]:
    """How many of the events one engine has told: none, all but `Done`, up to each end, and any."""
    ends = [place for place, event in enumerate(events) if isinstance(event, Ended)]
    chosen = draw.sample(ends, min(2, len(ends)))
    some = [draw.randrange(len(events)) for _ in range(CUTS)]
    return sorted({0, 1, len(events) - 1, *chosen, *(place + 1 for place in chosen), *some})


def assert_goes_on(first: Engine, second: Engine, asked: Submission, draw: random.Random) -> list[EngineEvent]:
    """Wherever `first` dies, `second` tells the rest: of one beside others that have died elsewhere, and alone."""
    (events,) = told(first, [asked])
    events, whole = singly(events), answers(events)
    places = cuts(events, draw)
    left = [rest(asked, events[:place]) for place in places]
    after = told(second, left)
    alone = draw.randrange(len(places))
    after.append(told(second, [left[alone]])[0])
    for place, more in zip([*places, places[alone]], after, strict=True):
        assert answers([*events[:place], *more]) == whole, f"cut behind {place} of {len(events)} events"
        done = more[-1]
        assert isinstance(done, Done)
        assert done.usage.cached_tokens < len(ids_of(asked.prompt))
    return events


@contextmanager
def two(name: str, **settings: Any) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model that schedule in different ways."""
    settings = {"context": CONTEXT, **settings}
    with (
        small_engine(name, **settings) as first,
        small_engine(name, max_sequences=SEQUENCES, step_tokens=24, **settings) as second,
    ):
        yield first, second
        assert_at_rest(second)


@pytest.fixture(scope="module", params=NAMES)
def engines(request) -> Iterator[tuple[Engine, Engine]]:
    with two(request.param) as both:
        yield both


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_engines_tell_of_a_request_is_what_one_would(engines, kind) -> None:
    draw = random.Random(kind)
    events = assert_goes_on(*engines, submission(tokens(draw, 11), **KINDS[kind]), draw)
    reasons = {event.reason for event in events if isinstance(event, Ended)}
    assert ("stop" in reasons) <= (kind in ("greedy", "outputs", "ends", "longer and longer"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_a_text_that_outlives_the_context_goes_on(name) -> None:
    """Keys turn, a text is computed again, and so is one with states."""
    how = {"max_tokens": 56, "ignore_eos": True, "shift": True, "num_keep": 2, "temperature": 1.0}
    with two(name) as (first, second):
        draw = random.Random(name)
        assert_goes_on(first, second, submission(tokens(draw, 20), **how), draw)
        stats = second.stats()
        assert stats.shifts + sum(stats.recomputes.values()) > 0


def test_a_text_goes_on_whose_first_part_fills_the_context_and_is_in_memory() -> None:
    """There is nothing to compute before the context shifts, and it has not ended."""
    asked = submission([5] * 20, max_tokens=40, ignore_eos=True, shift=True, temperature=1.0)
    with small_engine("lfm2", context=CONTEXT) as engine:
        (events,) = told(engine, [asked])
        place = CONTEXT - 10
        (after,) = told(engine, [rest(asked, events[:place])])
        assert answers([*events[:place], *after]) == answers(events)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.2, "seed": 3}], ids=str)
def test_drafts_change_nothing_of_that(sampling) -> None:
    with two("llama", draft="ngram") as (first, second):
        draw = random.Random(1)
        prompt = [5, 6, 7, 8] * 3
        asked = submission(prompt, max_tokens=20, ignore_eos=True, logit_bias={5: 6.0, 6: 6.0}, **sampling)
        events = assert_goes_on(first, second, asked, draw)
        done = events[-1]
        assert isinstance(done, Done)
        assert done.speculation is not None
        assert done.speculation.accepted > 0


@cache
def constraints() -> dict[str, Constraint]:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}}
    return {
        "schema": Constraint.json_schema(schema | {"required": ["a", "b"], "additionalProperties": False}),
        "regex": Constraint.regex("([a-f]{2,5}-){3,9}[0-9]{3}"),
    }


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[Engine, Engine]]:
    settings: Any = {"draft": "none", "cache_bytes": 40_000_000, "context": 64}
    with made(None, **settings) as first, made(None, max_sequences=SEQUENCES, **settings) as second:
        yield first, second


@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_a_text_that_matches_a_constraint_goes_on_where_it_is_in_it(embedded, kind) -> None:
    draw, first = random.Random(kind), embedded[0]
    how = {"temperature": 1.2, "max_tokens": 40, "n": 2, "constraint": constraints()[kind]}
    assert_goes_on(*embedded, submission(first.encode("def main():"), **how), draw)


def test_tokens_that_a_constraint_does_not_allow_are_refused(embedded) -> None:
    engine = embedded[0]
    asked = submission(engine.encode("x"), max_tokens=40, constraint=Constraint.regex("[a-f]{30}"))
    for text, allowed in (("abc", True), ("abz", False), ("abcdef" * 5, True), ("abcdef" * 6, False)):
        produced = (Produced(0, tuple(engine.encode(text, special=False))),)
        if allowed:
            assert isinstance(told(engine, [replace(asked, produced=produced)])[0][-1], Done)
        else:
            with pytest.raises(BadRequest, match="do not match"):
                told(engine, [replace(asked, produced=produced)])
    assert engine._built.intake.prompts.taken == 0


@pytest.fixture(scope="module")
def llama() -> Iterator[Engine]:
    with small_engine("llama", context=CONTEXT) as opened:
        yield opened


def test_a_choice_whose_text_has_ended_is_counted_as_far_as_its_text_goes(llama) -> None:
    """It has no event more; the others go on."""
    asked = submission([5, 6, 7], temperature=1.0, max_tokens=9, ignore_eos=True, n=4)
    (events,) = told(llama, [asked])
    produced = (Produced(0, answered(events, 0)[:6], ended=4), Produced(3, answered(events, 3)[:3]))
    (after,) = told(llama, [replace(asked, produced=produced)])
    assert {event.choice for event in after if isinstance(event, Drawn | Ended)} == {1, 2, 3}
    assert [answered(after, choice) for choice in (1, 2)] == [answered(events, choice) for choice in (1, 2)]
    assert answered(after, 3) == answered(events, 3)[3:]
    assert isinstance(after[-1], Done)
    assert after[-1].usage.completion_tokens == 4 + 3 * 9


def answered(events: Sequence[EngineEvent], choice: int) -> tuple[int, ...]:
    return tuple(
        token for event in events if isinstance(event, Drawn) and event.choice == choice for token in event.token_ids
    )


def test_choices_are_ranked_in_their_order_whichever_begins_first(llama) -> None:
    """The third one begins when the fourth has tokens already."""
    asked = submission([5, 6, 7], n=4)
    request = Request(replace(asked, produced=(Produced(0, (), 5), Produced(3, (8,)))), lambda event: None)
    request.completions += llama._built.intake.completions(request)
    request.completions += llama._built.intake.siblings(request.completions[1], 1)
    assert [one.sampler.index for one in request.completions] == [0, 1, 3, 2]
    assert request.depths() == {0: 0, 1: 0, 2: 1, 3: 2}


def test_a_request_that_goes_on_can_be_stopped_and_cancelled(llama) -> None:
    asked = submission([5, 6, 7], temperature=1.0, max_tokens=40, ignore_eos=True, n=2)
    produced = (Produced(1, (8, 9), None),)
    ear, number = Ear(), llama._loop.number()
    with held(llama):
        llama._built.intake.submit(replace(asked, number=number, produced=produced), ear, llama._loop.submit)
        llama._loop.stop(number, 1, 1)
        llama._loop.cancel(number)
    events = ear.wait()
    assert [event for event in events if isinstance(event, Ended)] == [Ended(1, "stop", 1), Ended(0, "cancelled", 0)]
    assert isinstance(events[-1], Done)
    assert events[-1].usage.completion_tokens == 1
    assert_at_rest(llama)


@pytest.mark.parametrize(
    ("produced", "why"),
    [
        ([Produced(0, (5,)), Produced(0, (5, 6))], "each named once"),
        ([Produced(2, (5,))], "are 0 to 1"),
        ([Produced(-1, (5,))], "are 0 to 1"),
        ([Produced(0, (5, 101))], "not a token id"),
        ([Produced(0, (5, -1))], "not a token id"),
        ([Produced(0, (101,), 1)], "not a token id"),
        ([Produced(0, (5,) * 13)], "max_tokens is 12"),
        ([Produced(0, (), 13)], "max_tokens is 12"),
        ([Produced(0, (), -1)], "ended with -1"),
        ([Produced(0, (9, 5))], "in no text"),
    ],
    ids=str,
)
def test_what_no_engine_can_have_produced_is_refused(llama, produced, why) -> None:
    asked = submission([5, 6, 7], max_tokens=12, n=2, stop_token_ids=[9])
    with pytest.raises(BadRequest, match=why):
        told(llama, [replace(asked, produced=tuple(produced))])
    assert llama._built.intake.prompts.taken == 0


def test_more_tokens_than_the_context_are_refused_unless_it_shifts(llama) -> None:
    for shift, count in ((False, CONTEXT - 2), (True, CONTEXT + 30)):
        asked = submission([5, 6, 7], max_tokens=CONTEXT + 40, shift=shift, ignore_eos=True)
        produced = (Produced(0, (8,) * count),)
        if shift:
            (events,) = told(llama, [replace(asked, produced=produced)])
            assert len(answered(events, 0)) == 10
        else:
            assert told(llama, [replace(asked, produced=(Produced(0, (8,) * (count)),))])[0][:1] == [
                Ended(0, "length", count)
            ]
            with pytest.raises(BadRequest, match="in a context of"):
                told(llama, [replace(asked, produced=(Produced(0, (8,) * (count + 1)),))])
