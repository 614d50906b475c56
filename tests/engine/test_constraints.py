"""Answers to requests with a constraint match it, and are otherwise drawn as without: by seed, by penalties, with
drafts, after preemptions."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from kvcellar import BadRequest, Constraint, Engine, SamplingParams
from kvcellar.errors import ConstraintFailed
from kvcellar.events import Delta
from kvcellar.sampling_params import MAX_CHOICES
from tests.engine.mixes import Ear, assert_at_rest
from tests.engine.schemas import random_schema
from tests.engine.speculating import Oracle, ask, speculates, told
from tests.engine.test_limits import held
from tests.sample.hostile import LARK

MANY = 1000  # schemas with --long
ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
NESTED = "(([a-z]{1,500}){1,500}){1,500}"  # compiles, and is too much after a few tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(threads=1, draft="none") as made:
        yield made
        assert_at_rest(made)


def batch(engine: Engine, prompts: list[tuple[str, dict[str, Any]]]) -> list[Ear]:
    """Requests that run together."""
    ears = [Ear() for _ in prompts]
    with held(engine):
        for (prompt, how), ear in zip(prompts, ears, strict=True):
            engine.submit(engine.encode(prompt), SamplingParams(**how), deliver=ear)
    for ear in ears:
        ear.wait()
    return ears


def judged(engine: Engine, seeds: range) -> int:
    """How many of these schemas have an answer that is complete; each of these is judged by another library."""
    schemas = {seed: random_schema(seed) for seed in seeds}
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 256}
    asks = [
        ("data = ", how | {"seed": seed, "constraint": Constraint.json_schema(schema, compact=bool(seed % 2))})
        for seed, schema in schemas.items()
    ]
    complete = 0
    for ear, schema in zip(batch(engine, asks), schemas.values(), strict=True):
        assert ear.error is None, (schema, ear.error)
        if ear.reasons[0] == "stop":
            validator = jsonschema.Draft202012Validator
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(ear.text(0)))
            complete += 1
    return complete


@pytest.mark.parametrize("part", [pytest.param(p, marks=pytest.mark.slow if p else ()) for p in range(MANY // 50)])
def test_every_complete_answer_to_a_random_schema_is_valid_for_another_library(engine: Engine, part: int) -> None:
    """At temperature 1 from a model that has never seen one. Most answers are complete after 256 tokens."""
    assert judged(engine, range(50 * part, 50 * part + 50)) > 25


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        (Constraint.regex("[a-z]{3}-[0-9]{2}"), lambda text: re.fullmatch("[a-z]{3}-[0-9]{2}", text)),
        (Constraint.choice(["yes", "no", "don't know"]), lambda text: text in ("yes", "no", "don't know")),
        (Constraint.grammar('root ::= "x" [0-9]{2,3} "y"'), lambda text: re.fullmatch("x[0-9]{2,3}y", text)),
        (Constraint.grammar('start: "(" start? ")"'), lambda text: text == "(" * (n := len(text) // 2) + ")" * n),
        (Constraint.json_schema(ORDER, strict=True), lambda text: jsonschema.validate(json.loads(text), ORDER) is None),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)  # fmt: skip
def test_every_choice_of_a_request_matches_its_constraint_by_itself(engine: Engine, constraint, matches) -> None:
    found = engine.generate("def main():", n=4, seed=3, temperature=1.5, max_tokens=120, constraint=constraint)
    texts = [choice.text for choice in found.choices]
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 4
    assert all(matches(text) for text in texts), texts
    assert len(set(texts)) > 1
    alone = engine.generate("def main():", seed=3, temperature=1.5, max_tokens=120, constraint=constraint)
    assert alone.text == texts[0]


def test_an_answer_that_max_tokens_cuts_off_says_so(engine: Engine) -> None:
    found = engine.generate("x", max_tokens=5, constraint=Constraint.json_schema(ORDER, strict=True))
    assert found.choices[0].finish_reason == "length"


def test_requests_with_and_without_a_constraint_share_steps_and_change_no_token_of_each_other(engine: Engine) -> None:
    plain: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "frequency_penalty": 0.5}
    asks = [
        ("import ", plain),
        ("import ", plain | {"constraint": Constraint.json_schema(ORDER, strict=True)}),
        ("import ", plain | {"constraint": Constraint.regex("[a-z ]{30}"), "logit_bias": {5: 3.0}}),
        ("import ", plain | {"temperature": 0.0, "constraint": Constraint.choice(["os, sys", "re"])}),
    ]
    together = [ear.answers() for ear in batch(engine, asks)]
    assert together == [batch(engine, [one])[0].answers() for one in asks]


def test_logprobs_are_those_of_the_model_whatever_the_constraint(engine: Engine) -> None:
    """So a token has a likely other beside it that the constraint does not allow."""
    made = engine.generate(
        "import os", max_tokens=3, logprobs=3, temperature=0.0, constraint=Constraint.regex("[0-9]{9}")
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    first = logprobs[0]
    free = engine.generate("import os", max_tokens=1, logprobs=3, temperature=0.0).choices[0].logprobs
    assert free is not None
    assert first.top == free[0].top
    assert first.token_id not in [token for token, _ in first.top]
    assert first.logprob < first.top[-1][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "constraint", [Constraint.json_schema(ORDER), Constraint.regex("([a-c]{2},)*")], ids=["json", "re"]
)
def test_drafts_change_no_token_of_a_text_with_a_seed_or_a_greedy_one(constraint, temperature) -> None:
    sampling: dict[str, Any] = {
        "n": 2, "seed": 7, "max_tokens": 48, "temperature": temperature, "constraint": constraint,
        "repetition_penalty": 1.05,
    }  # fmt: skip
    with Engine(threads=1, draft="none") as engine:
        prompts = [engine.encode(text) for text in ("x = ", "def f(a):", "[1, 2")]
        plain = told(prompts, ask(engine, prompts, **sampling))
        for right in (0, 2, 4, None):  # of four drafts
            drafter = Oracle(plain, right)
            speculates(engine, drafter)
            ears = ask(engine, prompts, **sampling)
            assert told(prompts, ears) == plain
            assert right == 0 or sum(drafter.rounds) > 0
        speculates(engine, None)
        assert_at_rest(engine)


def test_drafts_of_a_text_without_a_seed_match_its_constraint_too() -> None:
    with Engine(threads=1, draft="mtp") as engine:
        found = engine.generate("x = ", n=6, temperature=1.0, max_tokens=150, constraint=Constraint.json_schema(ORDER))
        complete = [json.loads(choice.text) for choice in found.choices if choice.finish_reason == "stop"]
        assert len(complete) >= 4
        for value in complete:
            jsonschema.validate(value, ORDER)
        assert_at_rest(engine)


def test_completions_that_are_preempted_go_on_where_they_were_in_their_grammar() -> None:
    asks = [
        (
            f"{letter} = ",
            {"seed": 1, "temperature": 1.0, "max_tokens": 50, "constraint": Constraint.regex("([a-f]{2}-){40}")},
        )
        for letter in "abcdef"
    ]
    settings: dict[str, Any] = {"threads": 1, "draft": "none", "context": 128, "step_tokens": 32}
    with Engine(**settings, cache_bytes=11_000_000) as engine:
        plain = [ear.answers() for ear in batch(engine, asks)]
        assert engine.stats().preemptions == 0
        has = engine._built.capacity
    # A token takes so many bytes with those of its edits; all answers together have 320. Checkpoints get a quarter.
    few = 4 * (has.scratch + 2 * has.states.sequences * has.states.bytes_per_row + 3_600 * 160) // 3
    with Engine(**settings, cache_bytes=few) as engine:
        scarce = [ear.answers() for ear in batch(engine, asks)]
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)
    assert scarce == plain


def test_a_constraint_that_cannot_be_honoured_is_refused_before_anything_runs(engine: Engine) -> None:
    ear, before = Ear(), engine.stats()
    params = SamplingParams(constraint=Constraint.json_schema({"not": {}}), max_tokens=4)
    with pytest.raises(BadRequest, match="json_schema cannot be honoured") as caught:
        engine.submit(engine.encode("x"), params, deliver=ear)
    assert caught.value.param == "constraint"
    assert not ear.events
    assert engine.stats().steps == before.steps
    assert engine._built.intake.prompts.taken == 0


def test_a_grammar_that_reaches_a_limit_fails_its_request_and_no_other(engine: Engine) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 40}
    failed, other = batch(engine, [
        ("x", how | {"constraint": Constraint.regex(NESTED)}),
        ("x", how | {"constraint": Constraint.regex("[a-z]{500}")}),
    ])  # fmt: skip
    assert isinstance(failed.error, ConstraintFailed)
    assert "its constraint cannot be followed further: lexer error: too many expressions" in str(failed.error)
    assert other.reasons[0] == "length"
    engine.check()


def test_a_grammar_that_ends_its_compiler_is_refused_and_streams_go_on(engine: Engine) -> None:
    stream = engine.stream("x", constraint=Constraint.regex("[a-z]{500}"), max_tokens=40)
    next(stream)
    with pytest.raises(BadRequest, match="this grammar ends its compiler"):
        engine.generate("x", constraint=Constraint.grammar(LARK["rules"](7500)))
    assert sum(len(event.token_ids) for event in stream if isinstance(event, Delta)) > 30
    engine.check()


LONG = {"type": "string", "minLength": 500, "maxLength": 1000}
UNKIND = {  # with the levels of objects that are put around it: those with any are refused
    "nested objects": ({"properties": {"a": {}}}, 200),
    "many properties": ({"type": "object", "properties": {f"p{i}": {"maxLength": i} for i in range(2000)}}, 0),
    "many values": ({"enum": [f"value {i * 7919 % 10_000}" for i in range(10_000)]}, 0),
    "long bounds": ({"type": "array", "items": LONG, "minItems": 500}, 0),
    "nullable repeats": ({"type": "string", "pattern": "^" + "(a?){30}" * 30 + "$"}, 0),
    "backtracking": ({"type": "string", "pattern": "^(a+)+$"}, 0),
    "states": ({"type": "string", "pattern": "^(a|b)*a(a|b){60}$"}, 0),
    "alternatives": ({"anyOf": [{"type": "object", "properties": {f"k{i}": {"$ref": "#"}}} for i in range(100)]}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKIND)
def test_unkind_schemas_are_refused_answered_or_fail_alone_and_never_hang(engine: Engine, name: str) -> None:
    schema, levels = UNKIND[name]
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    ears = []
    try:
        asks = [("x", {"temperature": 1.0, "seed": 2, "max_tokens": 12, "constraint": Constraint.json_schema(schema)})]
        ears = batch(engine, [*asks, ("x", {"temperature": 0.0, "max_tokens": 4})])
    except BadRequest:
        assert levels, "this one can be honoured"
        return
    assert isinstance(ears[0].error, ConstraintFailed | None)
    assert ears[1].error is None, "the one beside it"
    engine.check()


def test_as_many_choices_as_there_may_be_each_have_a_matcher_of_their_own(engine: Engine) -> None:
    found = engine.generate("x", n=MAX_CHOICES, temperature=2.0, max_tokens=8, constraint=Constraint.regex("[ab]{4}"))
    assert all(re.fullmatch("[ab]{4}", choice.text) for choice in found.choices)
