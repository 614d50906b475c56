"""Log-probabilities of a prompt are those of a plain forward, however the prompt is computed."""

import math
from dataclasses import replace
from functools import cache

import pytest

from kvcellar import BadRequest, Engine, SamplingParams
from kvcellar.engine.core import prompt_rows
from kvcellar.engine.core.intake import COPY_BYTES, SCORE_BYTES, TOKEN_BYTES
from kvcellar.engine.core.request import Status
from kvcellar.errors import ScoresNotNumbers
from kvcellar.events import Delta, Done, Finished, PromptScored
from kvcellar.frontend.result import Collector
from tests.engine.mixes import (
    Clock,
    Ear,
    assert_at_rest,
    bytes_for,
    judge,
    mix,
    small_engine,
)
from tests.models.lora import ends_with, layers_of, merged, saved
from tests.zoo import ARCHS, reference_logits

MODELS = ["llama", "gemma3", "lfm3", "mamba2"]  # full, sliding, windows with convolutions, state spaces
PROMPT = [*range(7, 47)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@cache
def expected(name, prompt):
    """log-softmax of plain forwards, [L,V] in float64."""
    return reference_logits(judge(name), [*prompt]).double().log_softmax(-1)


def assert_scored(found, own, prompt, most):
    """`found` are the log-probabilities of a prompt by `own` [L,V]."""
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for pos, entry in enumerate(found[1:], start=1):
        row = own[pos - 1]
        assert entry.token_id == prompt[pos]
        assert entry.logprob == pytest.approx(float(row[prompt[pos]]), abs=2e-4)
        assert len(entry.top) == most
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(most).values.tolist(), abs=2e-4)
        near = (row - row[prompt[pos]]).abs() < 1e-3
        assert abs(entry.rank - 1 - int((row > row[prompt[pos]]).sum())) <= int(near.sum()) - 1
        if entry.rank == 1 and most:
            assert entry.logprob == values[0], "not the same float"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step_tokens", [5, 512])
def test_they_are_those_of_a_plain_forward_in_any_chunks(name, step_tokens):
    with small_engine(name, step_tokens=step_tokens) as engine:
        found = engine.generate(PROMPT, max_tokens=3, prompt_logprobs=4, logprobs=0, **GREEDY)
        assert_scored(found.prompt_logprobs, expected(name, tuple(PROMPT)), PROMPT, 4)
        assert len(found.token_ids) == 3
        assert engine.generate(PROMPT, max_tokens=3, **GREEDY).token_ids == found.token_ids
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["llama", "lfm3", "bloom"])
def test_they_are_right_among_other_requests_and_when_preempted(name):
    ways = {"step_tokens": 7, "max_sequences": 6}
    if name == "llama":
        ways["cache_bytes"] = bytes_for(name, 59, **ways)
    asks = [
        replace(ask, sampling={**ask.sampling, "prompt_logprobs": at % 3} if at % 2 else ask.sampling)
        for at, ask in enumerate(mix((name, "scores")))
    ]
    with small_engine(name, **ways) as engine:
        ears = Clock(engine, asks).run()
        if name == "llama":
            assert engine.stats().preemptions > 0
        for ask, ear in zip(asks, ears, strict=True):
            scored = [at for at, event in enumerate(ear.events) if isinstance(event, PromptScored)]
            if (most := ask.sampling.get("prompt_logprobs")) is None:
                assert not scored
                continue
            assert scored == [0], "not once, before everything else"
            assert_scored(ear.events[0].logprobs, expected(name, ask.prompt), ask.prompt, most)
            assert len(ear.answers()) == ask.sampling["n"]
        assert_at_rest(engine)


def test_the_prompt_is_computed_again_and_the_record_says_why():
    with small_engine("llama") as engine:
        cold = engine.generate(PROMPT, max_tokens=2, **GREEDY)
        found = engine.generate(PROMPT, max_tokens=2, prompt_logprobs=0, **GREEDY)
        assert found.usage.cached_tokens == 0
        assert found.recall is not None
        assert (found.recall.matched, found.recall.restored) == (len(PROMPT) - 1, 0)
        assert found.recall.reason == "prompt read"
        assert found.token_ids == cold.token_ids
        again = engine.generate(PROMPT, max_tokens=2, **GREEDY)  # what it computed is in memory once
        assert again.usage.cached_tokens == len(PROMPT) - 1
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "bloom"])
@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_at_all_score_the_prompt_only(name, n):
    with small_engine(name, step_tokens=16) as engine:
        ear = Ear()
        engine.submit(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1, n=n), deliver=ear)
        ear.wait()
        kinds = [type(event) for event in ear.events]
        assert kinds == [PromptScored, *[Finished] * n, Done], "there is a delta, or an end is missing"
        assert set(ear.reasons.values()) == {"length"}
        assert ear.done.usage.completion_tokens == 0
        assert_scored(ear.events[0].logprobs, expected(name, tuple(PROMPT)), PROMPT, 1)
        assert_at_rest(engine)


def test_a_prompt_of_one_token_has_no_log_probability():
    with small_engine("llama") as engine:
        for most in (0, 2):
            assert engine.generate([9], max_tokens=most, prompt_logprobs=5).prompt_logprobs == (None,)
        assert engine.generate([9], max_tokens=1).prompt_logprobs is None


def test_few_rows_of_a_step_are_scored_however_many_requests_there_are(monkeypatch):
    steps = []
    whole = prompt_rows.PromptRows.scored.fget
    monkeypatch.setattr(prompt_rows.PromptRows, "scored", property(lambda self: steps.append(whole(self)) or steps[-1]))
    with small_engine("llama", step_tokens=512) as engine:
        engine._loop.scheduler._scored = 9
        engine.generate([[first, *PROMPT] for first in range(50, 54)], max_tokens=1, prompt_logprobs=0)
        assert max(map(len, steps)) == 9
        assert sum(map(len, steps)) == 4 * len(PROMPT)


def test_fewer_rows_of_a_step_are_scored_in_which_others_decode(monkeypatch):
    steps = []
    init = prompt_rows.PromptRows.__init__

    def counted(self, scheduled, draws):
        init(self, scheduled, draws)
        steps.append((len(self.scored), any(one.completion.status is Status.DECODE for one in scheduled)))

    monkeypatch.setattr(prompt_rows.PromptRows, "__init__", counted)
    with small_engine("llama", step_tokens=512) as engine:
        engine._loop.scheduler._scored, engine._loop.scheduler._scored_beside = 20, 4
        stream = engine.stream([5, 6], max_tokens=10_000, ignore_eos=True, shift=True)
        next(stream)
        beside = engine.generate(PROMPT, max_tokens=1, prompt_logprobs=2, **GREEDY)
        stream.close()
        alone = engine.generate(PROMPT, max_tokens=1, prompt_logprobs=2, **GREEDY)
        assert beside.prompt_logprobs == alone.prompt_logprobs
    assert {decodes: max(rows for rows, also in steps if also is decodes) for decodes in (True, False)} == {
        True: 4,
        False: 20,
    }


def test_rows_are_scored_with_the_adapter_of_the_request(tmp_path):
    network = ARCHS["llama"].build()
    targets = ("q_proj", "v_proj", "down_proj")
    path = saved(tmp_path / "a", layers_of(network, ends_with(*targets)), target_modules=list(targets))
    own = reference_logits(merged(ARCHS["llama"].build(), path), PROMPT).double().log_softmax(-1)
    with small_engine("llama", adapters={"a": str(path)}) as engine:
        collectors = [Collector(1), Collector(1)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=2)
        for collector, adapter in zip(collectors, ("a", ""), strict=True):
            engine.submit(PROMPT, params, deliver=collector.deliver, adapter=adapter)
        with_it, without = (collector.result().prompt_logprobs for collector in collectors)
        assert_scored(with_it, own, PROMPT, 2)
        assert_scored(without, expected("llama", tuple(PROMPT)), PROMPT, 2)


def test_modules_and_recorded_steps_score_alike():
    found = []
    for record in ("off", "auto"):
        with small_engine("llama", record=record) as engine:
            found.append(engine.generate(PROMPT, max_tokens=1, prompt_logprobs=3, **GREEDY).prompt_logprobs)
            assert (engine.stats().recording.steps > 0) == (record == "auto")
    assert found[0] == found[1]


def test_they_are_a_part_of_the_first_step_of_a_stream():
    with small_engine("llama") as engine:
        stream = engine.stream(PROMPT, max_tokens=2, prompt_logprobs=0)
        assert all(isinstance(piece, Delta) for piece in stream)
        assert_scored(stream.result.prompt_logprobs, expected("llama", tuple(PROMPT)), PROMPT, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_request_whose_scores_are_not_numbers_fails_alone(monkeypatch, value):
    """By an error that names them, which has the way out; a score of one token is enough, also of one that is not
    asked for."""

    def damaged(logits, *args):
        if len(logits) > 20:
            logits = logits.clone()
            logits[7, 3] = value
        return real(logits, *args)

    with small_engine("llama") as engine:
        real = engine._built.guest.draws.score
        monkeypatch.setattr(engine._built.guest.draws, "score", damaged)
        short, long = Collector(1), Collector(1)
        engine.submit(PROMPT[:9], SamplingParams(max_tokens=2, prompt_logprobs=0), deliver=short.deliver)
        engine.submit(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0), deliver=long.deliver)
        assert short.result().prompt_logprobs is not None
        with pytest.raises(ScoresNotNumbers, match="scores of a prompt's tokens hold NaN or infinity"):
            long.result()
        assert len(engine.generate(PROMPT, max_tokens=2, ignore_eos=True).token_ids) == 2
        assert_at_rest(engine)


@pytest.mark.parametrize("value", [-1, 21, True, 1.0])
def test_a_bad_number_is_refused_by_name(value):
    with pytest.raises(BadRequest, match="prompt_logprobs must be a whole number from 0 to 20"):
        SamplingParams(prompt_logprobs=value)


def test_scores_count_as_memory_of_prompts():
    with small_engine("llama") as engine:
        prompts = engine._built.intake.prompts
        prompts.most = 40 * (TOKEN_BYTES + COPY_BYTES + 3 * SCORE_BYTES)
        assert engine.generate(PROMPT, max_tokens=0, prompt_logprobs=2).prompt_logprobs is not None
        with pytest.raises(BadRequest, match=r"are for prompts.*prompt_logprobs count"):
            engine.generate(PROMPT, max_tokens=0, prompt_logprobs=3)
        assert prompts.taken == 0


def test_no_tokens_need_scores():
    with pytest.raises(BadRequest, match="max_tokens must be a whole number from 1"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_drafts_of_other_requests_change_nothing():
    """Ones from hidden states, too: these are read of the same steps."""
    prompt = [*range(40, 70)]
    with Engine(threads=1, dtype="float32", cache_bytes=64_000_000, draft="mtp", draft_depth=3) as engine:
        stream = engine.stream(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
        next(stream)
        drafted = engine.generate(prompt, max_tokens=4, prompt_logprobs=2, **GREEDY)
        for _ in stream:
            pass
        assert stream.result.speculation is not None
        assert_at_rest(engine)
    with Engine(threads=1, dtype="float32", cache_bytes=64_000_000) as engine:
        plain = engine.generate(prompt, max_tokens=4, prompt_logprobs=2, **GREEDY)
    assert drafted.token_ids == plain.token_ids
    for found, expected_one in zip(drafted.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True):
        assert found.logprob == pytest.approx(expected_one.logprob, abs=1e-4)
