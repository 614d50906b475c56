"""What one request has computed is not computed by another: later, at the same time, or after a preemption; and answers
are those of an engine that shares nothing."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.events import Delta, Event
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, bytes_for, small_engine, tokens
from tests.engine.test_limits import held

HOW: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
ANYWHERE = ["llama", "deepseek-v3", "gemma3", "llama4"]  # these resume at any token
AT_CHECKPOINTS = ["qwen3.5", "mamba2", "lfm3"]  # hybrid, recurrent, with windows, too
KINDS = [*ANYWHERE, "bloom", *AT_CHECKPOINTS]
CONTEXT = 48
TEXT = tokens(random.Random(0), 100)


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class Counter:
    """Counts the tokens that the network of an engine computes from now on."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = 0
        self._forward, guest = engine._built.guest.forward, engine._built.guest
        guest.forward = self._counted  # type: ignore[method-assign]

    def _counted(self, memory: Any, plan: Any, ids: list[int], rows: list[int]) -> Any:
        self.tokens += len(ids)
        return self._forward(memory, plan, ids, rows)


@cache
def cold_engine(name: str) -> Engine:
    return small_engine(name)


def cold(name: str, prompt: Any, **how: Any) -> tuple[int, ...]:
    engine = cold_engine(name)
    engine.clear_cache()
    result = engine.generate(prompt, **HOW | how)
    assert result.usage.cached_tokens == 0
    return result.token_ids


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for name in KINDS:
        cold_engine(name).close()
    cold_engine.cache_clear()


# -- one after another ------------------------------------------------------------------------------------------------


def test_a_prompt_resumes_where_an_earlier_answer_or_prompt_ended(name: str) -> None:
    prompt, new = TEXT[:40], tokens(random.Random(1), 7)
    with small_engine(name) as engine:
        first = engine.generate(prompt, max_tokens=5, **HOW)
        assert first.usage.cached_tokens == 0
        longer = [*prompt, *first.token_ids, *new]
        second = engine.generate(longer, max_tokens=5, **HOW)
        assert second.usage.cached_tokens == 44, "the last token of the answer was never computed"
        again = engine.generate(longer, max_tokens=5, **HOW)
        assert again.usage.cached_tokens == len(longer) - 1
        assert again.token_ids == second.token_ids == cold(name, longer, max_tokens=5)
        other = engine.generate([*prompt, 99, 98], max_tokens=5, **HOW)
        assert other.usage.cached_tokens >= 39, "the end of the first prompt"
        assert other.token_ids == cold(name, [*prompt, 99, 98], max_tokens=5)
        assert_at_rest(engine)


def test_where_two_prompts_diverge_a_third_one_resumes(name: str) -> None:
    with small_engine(name) as engine:
        cached = []
        for last in (50, 51, 52):
            prompt = [*TEXT[:30], *[last] * 20]
            result = engine.generate(prompt, max_tokens=3, **HOW)
            cached.append(result.usage.cached_tokens)
            assert result.token_ids == cold(name, prompt, max_tokens=3)
        assert cached[2] == 30
        assert cached[1] == (25 if name in AT_CHECKPOINTS else 30), "a spare checkpoint, or there"


@pytest.mark.parametrize("marked", [False, True])
def test_a_prompt_leaves_checkpoints_where_they_are_wanted(name: str, marked: bool) -> None:
    with small_engine(name) as engine:
        ear = Ear()
        positions = [29, 37] if marked else []
        engine.submit(TEXT[:60], SamplingParams(max_tokens=1, **HOW), deliver=ear, checkpoint_positions=positions)
        ear.wait()
        anywhere = name not in AT_CHECKPOINTS
        for at, mark, spare in ((38, 37, 35), (30, 29, 27)):
            prompt = [*TEXT[:at], 99, 99]
            result = engine.generate(prompt, max_tokens=3, **HOW)
            assert result.usage.cached_tokens == (at if anywhere else mark if marked else spare)
            assert result.token_ids == cold(name, prompt, max_tokens=3)


def test_every_output_of_a_request_goes_on(name: str) -> None:
    """Their prompt is computed once, and what each has drawn is resumed like an answer."""
    with small_engine(name) as engine:
        counter = Counter(engine)
        result = engine.generate(TEXT[:40], n=3, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        assert counter.tokens == 40 + 3 * 5
        texts = [(*TEXT[:40], *choice.token_ids) for choice in result.choices]
        assert len(set(texts)) == 3
        for text in texts:
            more = engine.generate([*text, 9], max_tokens=4, **HOW)
            assert more.usage.cached_tokens == 45
            assert more.token_ids == cold(name, [*text, 9], max_tokens=4)
        assert_at_rest(engine)


# -- while it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [1, 6])
def test_what_a_running_request_has_computed_is_resumed_by_another(name: str, drawn: int) -> None:
    with small_engine(name) as engine:
        own, other, told = Ear(), Ear(), []

        def deliver(event: Event) -> None:
            own(event)
            told.extend(event.token_ids if isinstance(event, Delta) else ())
            if len(told) == drawn and isinstance(event, Delta):
                engine.submit([*TEXT[:40], *told, 9], SamplingParams(max_tokens=5, **HOW), deliver=other)

        engine.submit(TEXT[:40], SamplingParams(max_tokens=30, **HOW), deliver=deliver)
        own.wait()
        other.wait()
        # A prompt ends at a multiple of the tokens between spare checkpoints, and its last token is one once another
        # was drawn behind it.
        known = 40 + drawn - 1
        assert other.done.usage.cached_tokens == known
        prompt = [*TEXT[:40], *own.ids()[:drawn], 9]
        assert other.ids() == cold(name, prompt, max_tokens=5)
        assert own.ids() == cold(name, TEXT[:40], max_tokens=30)
        assert_at_rest(engine)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_that_is_cancelled_in_its_prompt_leaves_what_it_computed(name: str, steps: int) -> None:
    with small_engine(name, step_tokens=16) as engine:
        ear, runner, done = Ear(), engine._built.runner, 0
        step, ticket = runner.step, []

        def stepped(scheduled: Any) -> None:
            nonlocal done
            step(scheduled)
            done += 1
            if done == steps:
                ticket[0].cancel()

        runner.step = stepped  # type: ignore[method-assign]
        with held(engine):
            ticket.append(engine.submit(TEXT, SamplingParams(max_tokens=3, **HOW), deliver=ear))
        assert ear.wait().reasons == {0: "cancelled"}
        result = engine.generate(TEXT, max_tokens=3, **HOW)
        assert result.usage.cached_tokens == 16 * steps
        assert result.token_ids == cold(name, TEXT, max_tokens=3)
        assert_at_rest(engine)


@pytest.mark.parametrize("way", ["one step", "many steps", "whole steps"])
def test_requests_that_arrive_together_compute_what_they_have_in_common_once(name: str, way: str) -> None:
    """The second and third have 60 and 30 tokens in common with the first, the fourth 80 with the second, and the fifth
    is the first again."""
    prompts = [
        TEXT,
        (*TEXT[:60], *[97] * 30),
        (*TEXT[:30], *[98] * 12),
        (*TEXT[:60], *[97] * 20, *[99] * 5),
        TEXT,
    ]
    with small_engine(name, **({"step_tokens": 16} if way == "many steps" else {})) as engine:
        if way == "whole steps":
            engine._built.guest.no_partial_commit = "a test"
            engine._loop.manager.cache.in_parts = False
        ears, counter = [Ear() for _ in prompts], Counter(engine)
        with held(engine):
            for prompt, ear in zip(prompts, ears, strict=True):
                engine.submit(prompt, SamplingParams(max_tokens=1, **HOW), deliver=ear)
        cached = [ear.wait().done.usage.cached_tokens for ear in ears]
        assert cached == [0, 60, 30, 80, 99]
        assert counter.tokens == sum(map(len, prompts)) - sum(cached)
        assert_at_rest(engine)
    for prompt, ear in zip(prompts, ears, strict=True):
        assert ear.ids() == cold(name, prompt, max_tokens=1)


def test_one_that_waits_for_a_prompt_that_is_cancelled_computes_it(name: str) -> None:
    with small_engine(name, step_tokens=16) as engine:
        first, second, ticket = Ear(), Ear(), []
        step, runner = engine._built.runner.step, engine._built.runner

        def stepped(scheduled: Any) -> None:
            step(scheduled)
            if engine._loop.steps == 2:
                ticket[0].cancel()

        runner.step = stepped  # type: ignore[method-assign]
        with held(engine):
            ticket.append(engine.submit(TEXT, SamplingParams(max_tokens=3, **HOW), deliver=first))
            engine.submit(TEXT, SamplingParams(max_tokens=3, **HOW), deliver=second)
        assert first.wait().reasons == {0: "cancelled"}
        assert second.wait().ids() == cold(name, TEXT, max_tokens=3)
        assert second.done.usage.cached_tokens == 48
        assert_at_rest(engine)


# -- pressure ---------------------------------------------------------------------------------------------------------


def test_a_preempted_completion_computes_again_only_what_was_evicted() -> None:
    """Of two that together need a half more cells than there are, the second resumes with what the first left."""
    budget = bytes_for("llama", 60)
    with small_engine("llama", cache_bytes=budget) as engine:
        counter = Counter(engine)
        prompts = [TEXT[:20], TEXT[20:40]]
        results = engine.generate(prompts, max_tokens=24, **HOW)
        stats = engine.stats()
        assert stats.preemptions == 1
        again = counter.tokens - 2 * (20 + 23)
        assert 0 < again <= 2 * 43 - 60, "more was computed again than there were cells too few"
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == cold("llama", prompt, max_tokens=24)
            assert result.usage.cached_tokens == 0, "its own work does not count as cached"
        assert_at_rest(engine)


def test_a_completion_that_was_preempted_for_a_short_time_computes_next_to_nothing_again(name: str) -> None:
    with small_engine(name) as engine:
        counter, loop = Counter(engine), engine._loop
        step, runner, done = engine._built.runner.step, engine._built.runner, []

        def stepped(scheduled: Any) -> None:
            step(scheduled)
            if loop.steps in (4, 9):
                done.append(loop.scheduler.preempt_last(loop.scheduler.running[0]))

        runner.step = stepped  # type: ignore[method-assign]
        with held(engine):
            ears = [Ear(), Ear()]
            for ear, prompt in zip(ears, (TEXT[:40], TEXT[50:80]), strict=True):
                engine.submit(prompt, SamplingParams(max_tokens=20, **HOW), deliver=ear)
        for ear, prompt in zip(ears, (TEXT[:40], TEXT[50:80]), strict=True):
            assert ear.wait().ids() == cold(name, prompt, max_tokens=20)
        assert done == [True, True]
        assert counter.tokens == 40 + 30 + 2 * 19
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm3"])
def test_unused_memory_is_evicted_before_anything_is_preempted_or_has_to_wait(name: str) -> None:
    settings = {"context": 80, "max_sequences": 3}
    with small_engine(name, cache_bytes=bytes_for(name, 200, **settings), **settings) as engine:
        for number in range(8):
            engine.generate([5 + number] * 50, max_tokens=10, **HOW)
        assert engine.stats().cells_cached > 150
        prompts = [[50 + number] * 30 for number in range(3)]
        with held(engine):  # so that the first does not begin before the others are there
            ears = [Ear() for _ in prompts]
            for ear, prompt in zip(ears, prompts, strict=True):
                engine.submit(prompt, SamplingParams(max_tokens=30, **HOW), deliver=ear)
        answers = [ear.wait().ids() for ear in ears]
        assert engine.stats().preemptions == 0
        assert engine.stats().steps == 8 * 10 + 30, "they ran together"
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == cold(name, prompt, max_tokens=30)
        assert_at_rest(engine)


# -- what is not shared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # keys are rotated in place
@pytest.mark.parametrize("when", ["while it runs", "afterwards"])
def test_text_behind_a_context_shift_is_not_shared(name: str, when: str) -> None:
    with small_engine(name, context=CONTEXT) as engine, small_engine(name, context=CONTEXT) as other:
        ear, second, texts = Ear(), Ear(), []
        how = SamplingParams(max_tokens=70, shift=True, num_keep=3, **HOW)

        def deliver(event: Event) -> None:
            ear(event)
            if len(ear.ids()) == 60 and not texts:
                texts.append([*engine._loop.scheduler.running[0].tokens])
                if when == "while it runs":
                    engine.submit(texts[0], SamplingParams(max_tokens=4, **HOW), deliver=second)

        engine.submit(TEXT[:10], how, deliver=deliver)
        ear.wait()
        assert engine.stats().shifts > 0
        if when == "afterwards":
            engine.submit(texts[0], SamplingParams(max_tokens=4, **HOW), deliver=second)
        second.wait()
        assert 10 + 60 > len(texts[0]) > 10
        original = [*TEXT[:10], *ear.ids()]
        assert second.done.usage.cached_tokens <= common_prefix(texts[0], original) < 10, "what the text began with"
        assert second.ids() == other.generate(texts[0], max_tokens=4, **HOW).token_ids
        assert_at_rest(engine)


def test_text_that_is_computed_again_in_place_of_a_shift_is_shared() -> None:
    with small_engine("bloom", context=CONTEXT) as engine:
        ear, texts = Ear(), []

        def deliver(event: Event) -> None:
            ear(event)
            texts.extend([one.tokens for one in engine._loop.scheduler.running if len(ear.ids()) == 60])

        engine.submit(TEXT[:10], SamplingParams(max_tokens=61, shift=True, num_keep=3, **HOW), deliver=deliver)
        ear.wait()
        assert engine.stats().recomputes
        text = texts[0][:40]
        assert engine.generate([*text, 9], max_tokens=1, **HOW).usage.cached_tokens == 40
        assert_at_rest(engine)


def test_a_request_of_another_namespace_shares_nothing(name: str) -> None:
    with small_engine(name) as engine:

        def ask(namespace: str) -> Any:
            ear = Ear()
            engine.submit(TEXT, SamplingParams(max_tokens=3, **HOW), deliver=ear, namespace=namespace)
            return ear.wait()

        found = [ask(namespace) for namespace in ("", "b", "b", "", "c")]
        assert [ear.done.usage.cached_tokens for ear in found] == [0, 0, 99, 99, 0]
        assert len({ear.ids() for ear in found}) == 1
        with held(engine):
            ears = []
            for namespace in ("d", "e", "d"):
                ears.append(Ear())
                engine.submit(TEXT, SamplingParams(max_tokens=3, **HOW), deliver=ears[-1], namespace=namespace)
        assert [ear.wait().done.usage.cached_tokens for ear in ears] == [0, 0, 99]
        assert_at_rest(engine)
