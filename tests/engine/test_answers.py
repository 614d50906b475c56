"""What an engine answers does not depend on who else is there: batches, chunks, preemptions change no token."""

import shutil

import pytest

from kvcellar.engine.load.settings import RECORD
from kvcellar.kernels.compiled import COMPILERS
from tests.engine.mixes import Clock, assert_at_rest, assert_greedy, bytes_for, mix, small_engine

FLAT = ["llama", "gemma3", "gemma3n", "llama4", "gpt-oss", "deepseek-v3", "gpt2", "lfm3", "mamba2", "qwen3-next"]
RECURRENT = ["mamba2", "qwen3-next"]
SOLO = ["bloom"]
COMPILED = any(map(shutil.which, COMPILERS))
TIGHT = 59  # tokens that fit at once: the longest request of a mix, alone

SEEDS = {
    "gemma3n": 1,
    "deepseek-v3": 1,
    "gpt2": 1,
}  # others than 0 where a tie came up, or memory was not scarce enough

WAYS = {
    "token by token": {"step_tokens": 1, "max_sequences": 3},
    "in small chunks, memory scarce": {"step_tokens": 7, "max_sequences": 6},
    "all at once": {"step_tokens": 512, "max_sequences": 64},
}
RECORDED = "in small chunks, memory scarce"  # every day; the other ways run by modules then


def settings_of(name, way, **more):
    settings = {**WAYS[way], **more}
    if "scarce" in way:
        settings["cache_bytes"] = bytes_for(name, TIGHT, **settings)
    return settings


def ways():
    """Token by token takes long; a few are enough for every day. Each way is enough in one of both: by modules, or with
    recorded steps."""
    for name in (*FLAT, *SOLO):
        for way in WAYS:
            if name in RECURRENT and "scarce" in way:
                continue  # before their cells are scarce, there are rows of state for one answer alone
            for record in RECORD[name in SOLO :]:
                slow = way == "token by token" and name not in ("llama", "gemma3", "bloom", "lfm3")
                slow |= name not in (*SOLO, *RECURRENT) and (record == "auto") != (way == RECORDED)
                yield pytest.param(name, way, record, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "way", "record"), list(ways()))
def test_greedy_text_is_that_of_plain_forwards(name, way, record):
    asks = mix((name, SEEDS.get(name, 0)))
    with small_engine(name, **settings_of(name, way, record=record)) as engine:
        assert engine.model.mode == ("solo" if name in SOLO else "flat")
        ears = Clock(engine, asks).run()
        stats = engine.stats()
        assert stats.recording.steps > 0 or record == "off" or not COMPILED
        assert_at_rest(engine)
    assert stats.preemptions > 0 or "scarce" not in way
    for ask, ear in zip(asks, ears, strict=True):
        answers = ear.answers()
        assert len(answers) == ask.sampling["n"]
        for ids, reason in answers:
            assert_greedy(name, ask.prompt, ids, ended=reason == "stop")
            assert reason == "stop" or len(ids) == ask.sampling["max_tokens"]


SAMPLING = {
    "plain": {"temperature": 1.0},
    "everything": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 1.5, 9: -3.0},
        "min_tokens": 1,
    },
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3n", marks=pytest.mark.slow), "bloom"])
def test_a_seed_gives_the_same_text_whoever_else_is_there(name, sampling):
    asks = mix((name, sampling, SEEDS.get(name, 0)), count=6, seed=11, **SAMPLING[sampling])
    answers = []
    for way in WAYS:
        with small_engine(name, **settings_of(name, way)) as engine:
            answers.append([ear.answers() for ear in Clock(engine, asks).run()])
            assert engine.stats().preemptions > 0 or "scarce" not in way
    assert answers[1:] == answers[:1] * (len(WAYS) - 1)
    with small_engine(name) as engine:
        for ask, answer in zip(asks, answers[0], strict=True):
            alone = engine.generate(ask.prompt, **ask.sampling)
            assert [(choice.token_ids, choice.finish_reason) for choice in alone.choices] == answer


def test_different_seeds_and_choices_give_different_texts():
    with small_engine("llama") as engine:
        texts = [
            choice.token_ids
            for seed in range(4)
            for choice in engine.generate([5, 6, 7], seed=seed, n=3, temperature=1.0, max_tokens=12).choices
        ]
    assert len(set(texts)) == len(texts) == 12


def test_without_a_seed_every_request_has_its_own():
    with small_engine("llama") as engine:
        texts = {engine.generate([5, 6, 7], temperature=1.0, max_tokens=12).token_ids for _ in range(4)}
    assert len(texts) == 4
