"""Where an engine says no, when it says so, and what it does at the very border."""

import threading
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcellar import BadRequest, CapacityTooSmall, Engine, Overloaded, PromptTooLong
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, bytes_for, small_engine
from tests.zoo import ARCHS
from tests.zoo_test_support.tiny import tiny

CONTEXT = 32


@pytest.fixture(scope="module")
def engine():
    with small_engine("llama", context=CONTEXT, max_sequences=4) as engine:
        yield engine
        assert_at_rest(engine)


def prompt(length):
    return [3 + i % 90 for i in range(length)]


# -- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, CONTEXT - 1, CONTEXT])
def test_an_answer_goes_on_to_the_end_of_the_context(engine, length):
    """The last token needs no place: it is told and never read."""
    result = engine.generate(prompt(length), ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (CONTEXT + 1 - length, "length")
    assert engine.generate(prompt(length), ignore_eos=True, max_tokens=10**6).token_ids == result.token_ids


@pytest.mark.parametrize("length", [CONTEXT + 1, 100 * CONTEXT])
def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(engine, length):
    with pytest.raises(PromptTooLong, match=rf"{length} tokens; the model's context allows {CONTEXT}") as caught:
        engine.generate(prompt(length))
    assert (caught.value.tokens, caught.value.limit, caught.value.param) == (length, CONTEXT, "prompt")


@pytest.mark.parametrize(("name", "group"), [("llama", "causal"), ("gemma3", "causal"), ("mistral", "sliding 8")])
def test_a_prompt_beyond_memory_is_refused_and_one_that_just_fits_is_answered(name, group):
    fits = 5 if name == "mistral" else 20
    budget = bytes_for(name, fits, max_sequences=2, step_tokens=4)
    with small_engine(name, cache_bytes=budget, max_sequences=2, step_tokens=4) as engine:
        with pytest.raises(PromptTooLong, match=rf"{fits + 1} tokens; .*{group} layers allows {fits}\..*cache_bytes"):
            engine.generate(prompt(fits + 1))
        result = engine.generate(prompt(fits), ignore_eos=True, max_tokens=9)
        assert (len(result.token_ids), result.finish_reason) == (1, "length")
        result = engine.generate(prompt(fits - 3), ignore_eos=True, max_tokens=9)
        assert (len(result.token_ids), result.finish_reason) == (4, "length")
        assert_at_rest(engine)


def test_a_prompt_is_measured_by_the_memory_of_the_engine_that_runs_now(monkeypatch):
    """One that was started again may have less than the one that has died."""
    with small_engine("llama") as engine:
        client = engine._client
        monkeypatch.setattr(client, "card", replace(client.card, cells={"causal": 5}))
        with pytest.raises(PromptTooLong, match="6 tokens; the memory for causal layers allows 5"):
            engine.generate(prompt(6))


def test_an_answer_that_memory_ends_is_the_beginning_of_the_whole_one():
    with small_engine("llama") as roomy:
        whole = roomy.generate(prompt(10), ignore_eos=True, max_tokens=30)
    with small_engine("llama", cache_bytes=bytes_for("llama", 20)) as tight:
        for part in tight.generate([prompt(10)] * 3, ignore_eos=True, max_tokens=30):
            assert part.finish_reason == "length"
            assert part.token_ids == whole.token_ids[:11]


def test_every_sample_of_a_prompt_gets_as_far_as_memory_carries_it_alone():
    with small_engine("llama", cache_bytes=bytes_for("llama", 20)) as engine:
        alone = engine.generate(prompt(10), ignore_eos=True)
        assert len(alone.token_ids) == 11
        for choice in engine.generate(prompt(10), ignore_eos=True, n=3).choices:
            assert (choice.token_ids, choice.finish_reason) == (alone.token_ids, "length")


def test_a_window_needs_no_room_for_what_is_out_of_sight():
    """200 tokens pass through the 11 cells of an 8 wide window."""
    budget = bytes_for("mistral", 11, max_sequences=2, step_tokens=4)
    with small_engine("mistral", cache_bytes=budget, max_sequences=2, step_tokens=4) as engine:
        result = engine.generate(prompt(100), ignore_eos=True, max_tokens=100)
        assert (len(result.token_ids), result.finish_reason) == (100, "length")
    with small_engine("mistral") as roomy:
        assert roomy.generate(prompt(100), ignore_eos=True, max_tokens=100).token_ids == result.token_ids


@pytest.mark.parametrize("budget", [1, 1000])
def test_memory_that_holds_not_even_two_tokens_is_refused_at_the_start(budget):
    with pytest.raises(CapacityTooSmall, match=rf"{budget} bytes \(cache_bytes\).*Raise cache_bytes"):
        small_engine("llama", cache_bytes=budget)


def test_two_tokens_of_memory_do_work():
    with small_engine("llama", cache_bytes=bytes_for("llama", 2)) as engine:
        assert engine.generate([5, 6], ignore_eos=True).finish_reason == "length"
        assert len(engine.generate([5], ignore_eos=True).token_ids) == 2


def test_more_memory_than_there_is_is_refused_at_the_start():
    with pytest.raises(CapacityTooSmall, match=r"cannot be had on cpu: .*Lower cache_bytes"):
        small_engine("llama", cache_bytes=2**62, max_sequences=2**40)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(BadRequest, match="context is 257; this model is made for 256 tokens") as caught:
        small_engine("llama", context=257)
    assert caught.value.param == "context"
    with small_engine("llama", context=256) as engine:
        assert engine.model.context == 256


# -- what a request may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        [],
        (),
        [101],
        [-1],
        [2**63],
        [5, 1.0],
        [1.5],
        [True],
        [5, None],
        [5, "6"],
        [[[5]]],
        [[5], [1.5]],
        [[5], []],
        [[5], 6],
        [[5], None],
        None,
        5,
        b"abc",
        {5, 6},
        numpy.array([[5, 6]]),
        [numpy.float64(5)],
        torch.tensor([5, 6]),
        (token for token in (5, 6)),
    ],
    ids=lambda bad: "generator" if isinstance(bad, Generator) else repr(bad),  # whose repr has its address
)
def test_what_is_no_prompt_is_refused(engine, bad):
    with pytest.raises(BadRequest) as caught:
        engine.generate(bad)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("good", [[5, 6], (5, 6), range(5, 7), array("q", [5, 6]), numpy.array([5, 6])])
def test_what_is_a_sequence_of_ids_is_a_prompt(engine, good):
    assert engine.generate(good, max_tokens=3).token_ids == engine.generate([5, 6], max_tokens=3).token_ids


def test_padding_is_no_text_where_positions_are_counted_without_it():
    """transformers would give what lies behind it other positions, and others again when it goes on from a cache."""
    config = tiny("roberta", is_decoder=True, vocab_size=101, pad_token_id=1)
    with Engine(AutoModelForCausalLM.from_config(config).eval(), cache_bytes=10**6, context=64) as engine:
        assert len(engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True, logit_bias={1: -100}).token_ids) == 3
        for ask in (lambda: engine.generate([5, 1, 6]), lambda: engine.session().send([1, 5, 6])):
            with pytest.raises(BadRequest, match=r"token 1 at \d, which is padding.* Leave it out") as caught:
                ask()
            assert caught.value.param == "prompt"


@pytest.mark.parametrize("ends_with", [1, 2])
def test_padding_is_not_drawn_where_it_could_not_be_read(ends_with):
    """An answer that ended there, as it did once, would end where the model wanted to go on."""
    config = tiny("roberta", is_decoder=True, vocab_size=101, pad_token_id=1, eos_token_id=ends_with)
    how = {"max_tokens": 12, "logit_bias": {1: 100}, "logprobs": 3}
    with Engine(AutoModelForCausalLM.from_config(config).eval(), cache_bytes=10**6, context=64) as engine:
        for more in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 3}, {"min_tokens": 9}):
            for answer in engine.generate([5, 6, 7], ignore_eos=True, **how, **more).choices:
                assert 1 not in answer.token_ids
                assert (len(answer.token_ids), answer.finish_reason) == (12, "length")
        ended = engine.generate(
            [5, 6, 7], temperature=0, **how
        )  # where it is the end of a text it is never read, and ends the answer
        assert (len(ended.token_ids), ended.finish_reason) == ((0, "stop") if ends_with == 1 else (12, "length"))


def test_text_needs_a_tokenizer(engine):
    assert not engine.model.has_text
    for ask in (lambda: engine.generate("text"), lambda: engine.encode("text"), lambda: engine.decode([5])):
        with pytest.raises(BadRequest, match="no tokenizer"):
            ask()
    with pytest.raises(BadRequest, match="no tokenizer"):
        engine.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(BadRequest, match="stop strings need a tokenizer"):
        engine.generate([5], stop=["x"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, -1, 10**9, 1.0, True)],
        *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, 1.5, "5")],
        *[("temperature", value) for value in (-1, float("nan"), float("inf"), -float("inf"), 1e308, "1")],
        *[("top_p", value) for value in (0, -0.1, 1.1, float("nan"))],
        *[("min_p", value) for value in (-0.1, 1.1, float("nan"))],
        *[("top_k", value) for value in (-1, 1.5, 2**31)],
        *[("logprobs", value) for value in (-1, 10**6, True)],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.5)],
        *[("presence_penalty", value) for value in (float("nan"), 2.5, -2.5)],
        *[("stop", value) for value in ([""], 5, {"a": 1}, ["x" * 5000], ["x"] * 100, [5])],
        *[("stop_token_ids", value) for value in (5, [-1], [101], [1.5], ["5"])],
        *[("logit_bias", value) for value in ({101: 1.0}, {-1: 1.0}, {5: float("nan")}, {"5": 1.0}, [5])],
        ("min_tokens", -1),
        ("temprature", 1.0),
    ],
)
def test_a_sampling_parameter_out_of_its_bounds_is_refused_by_name(engine, name, value):
    with pytest.raises(BadRequest, match=name) as caught:
        engine.generate([5], **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("stop", None), ("stop_token_ids", None), ("max_tokens", None), ("seed", None)]
)
def test_none_is_what_was_not_said(engine, name, value):
    said = engine.generate([5, 6], **{"max_tokens": 4, name: value})
    assert said.token_ids[:4] == engine.generate([5, 6], max_tokens=4).token_ids


def test_outputs_that_there_are_no_sequences_for_follow_and_are_those_of_a_roomy_engine(engine):
    how = {"n": 11, "max_tokens": 6, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    with small_engine("llama") as roomy:
        wanted = [choice.token_ids for choice in roomy.generate([5, 6, 7], **how).choices]
    assert engine._built.settings.max_sequences < 11 < roomy._built.settings.max_sequences
    assert [choice.token_ids for choice in engine.generate([5, 6, 7], **how).choices] == wanted


def test_more_answers_than_a_step_has_tokens_are_written_all_the_same():
    with small_engine("llama") as roomy:
        wanted = [c.token_ids for c in roomy.generate([5], n=7, max_tokens=6, seed=1, temperature=1.0).choices]
    with small_engine("llama", step_tokens=3) as engine:
        got = [c.token_ids for c in engine.generate([5], n=7, max_tokens=6, seed=1, temperature=1.0).choices]
    assert got == wanted


def test_an_engine_setting_that_does_not_exist_is_refused_by_name():
    with pytest.raises(BadRequest, match="no engine setting 'cache_byte'") as caught:
        Engine(cache_byte=1)
    assert caught.value.param == "cache_byte"


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_a_network_that_came_built_is_not_turned_into_another_in_silence(setting):
    with pytest.raises(BadRequest, match="the network that was given is") as caught:
        small_engine("llama", **setting)
    assert [caught.value.param] == list(setting)
    with small_engine("llama", dtype="float32", device="cpu") as engine:
        assert (engine.model.dtype, engine.model.device) == ("float32", "cpu")


# -- too many ---------------------------------------------------------------------------------------------------------


@contextmanager
def held(engine):
    """The engine's thread does nothing until the block is left."""
    door, there = threading.Event(), threading.Event()
    engine._loop.post(lambda: (there.set(), door.wait(240)))
    assert there.wait(240)
    try:
        yield
    finally:
        door.set()


def test_more_requests_than_may_wait_are_turned_away_and_those_that_wait_are_served():
    with small_engine("llama", max_waiting=3, max_sequences=1) as engine:
        ears = [Ear() for _ in range(3)]
        with held(engine):
            for ear in ears:
                engine.submit([5, 6], SamplingParams(max_tokens=3, temperature=0.0), deliver=ear)
            with pytest.raises(Overloaded, match="3 requests are waiting"):
                engine.generate([5, 6])
            with pytest.raises(Overloaded):
                engine.session().send([5])
        assert len({ear.wait().ids() for ear in ears}) == 1
        assert engine.generate([5, 6], max_tokens=3).token_ids == ears[0].ids()


def test_a_list_of_prompts_may_be_longer_than_the_queue():
    with small_engine("llama", max_waiting=2, max_sequences=2) as engine:
        results = engine.generate([[5 + i] for i in range(30)], max_tokens=2, ignore_eos=True)
        assert [r.usage.completion_tokens for r in results] == [2] * 30
        assert [r.token_ids for r in results[:3]] == [
            engine.generate([5 + i], max_tokens=2, ignore_eos=True).token_ids for i in range(3)
        ]


def test_a_list_of_prompts_waits_where_others_wait_too():
    """Its own requests are waited for instead of being turned away."""
    with small_engine("llama", max_waiting=4, max_sequences=2) as engine:
        results = []

        def ask(first):
            results.append(engine.generate([[first + i] for i in range(20)], max_tokens=2, ignore_eos=True))

        askers = [threading.Thread(target=ask, args=(first,)) for first in (5, 30)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(240)
        assert [len(one) for one in results] == [20, 20]


def test_one_bad_prompt_of_a_list_is_refused_before_any_is_read(engine):
    steps = engine.stats().steps
    with pytest.raises(BadRequest):
        engine.generate([[5], [6], [1000]])
    with pytest.raises(PromptTooLong):
        engine.generate([[5], prompt(CONTEXT + 1)])
    stats = engine.stats()
    assert (stats.steps, stats.running, stats.waiting) == (steps, 0, 0)


def test_the_model_is_described(engine):
    card = engine.model
    assert (card.architecture, card.context, card.vocab_size) == ("LlamaForCausalLM", CONTEXT, 101)
    assert card.vocab_size == ARCHS["llama"].config().vocab_size
    assert "cells" in engine.capacity()


@pytest.mark.measures  # its bytes are enough for what its step takes, and for little more
@pytest.mark.parametrize("name", ["mamba2", "lfm3"])
def test_more_outputs_than_there_are_rows_of_state_for_are_written_one_after_the_other(name):
    with small_engine(name, cache_bytes=1_400_000, context=32, max_sequences=64, step_tokens=8) as engine:
        most = engine._built.capacity.states.sequences
        assert 1 < most < 64
        for n in (most, most + 1, 64):
            result = engine.generate([5, 6, 7], n=n, max_tokens=9, ignore_eos=True, temperature=0.0)
            assert [len(choice.token_ids) for choice in result.choices] == [9] * n
        engine.check()
