"""Answers that outlive the context: they go on, and what they say depends on nobody else, whatever memory had to do."""

import pytest

from kvcellar import BadRequest
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Clock, Ear, assert_at_rest, bytes_for, mix, small_engine

CONTEXT = 48
LONG = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.0, "shift": True, "num_keep": 2}
MORE = ["deepseek-v3", "gemma2", "gemma3", "llama4", "bloom"]  # three in place, and two that read again
ENOUGH = 75  # tokens that fit: two completions together have too little
IN_PLACE = ("llama", "gemma2", "gemma3", "deepseek-v3")  # keys turn exactly, and no window is too short


@pytest.mark.parametrize("name", ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_text_is_the_same_whoever_is_there_and_however_scarce_memory_is(name):
    prompts = [[5, 6, 7, 8], [9] * 30, [3]]
    with small_engine(name, context=CONTEXT) as roomy:
        alone = [roomy.generate(prompt, **LONG).token_ids for prompt in prompts]
        assert roomy.stats().preemptions == 0
        together = roomy.generate(prompts, **LONG)
        roomy.check()
    assert [result.token_ids for result in together] == alone
    for settings in ({"step_tokens": 5}, {"step_tokens": 64, "max_sequences": 4}):
        budget = bytes_for(name, ENOUGH, context=CONTEXT, **settings)
        with small_engine(name, context=CONTEXT, cache_bytes=budget, **settings) as engine:
            results = engine.generate(prompts, n=2, **LONG)
            stats = engine.stats()
            assert stats.preemptions > 0
            assert_at_rest(engine)
            assert bool(stats.recomputes) == (name not in IN_PLACE)
        for result, ids in zip(results, alone, strict=True):
            assert [(c.token_ids, c.finish_reason) for c in result.choices] == [(ids, "length")] * 2


def test_samples_that_outlive_the_context_depend_on_their_seed_alone():
    asks = mix("shift", count=6, longest=30, shift=True, max_tokens=90, ignore_eos=True, temperature=1.0, seed=3)
    answers = []
    for tokens in (4000, ENOUGH):
        settings = {"context": CONTEXT, "max_sequences": 20}
        with small_engine("llama", cache_bytes=bytes_for("llama", tokens, **settings), **settings) as engine:
            answers.append([ear.answers() for ear in Clock(engine, asks).run()])
            assert (engine.stats().preemptions > 0) == (tokens == ENOUGH)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_until_the_context_is_full_a_shift_changes_nothing(name):
    with small_engine(name, context=CONTEXT) as engine:
        short = engine.generate([5, 6, 7], ignore_eos=True, temperature=0.0)
        long = engine.generate([5, 6, 7], **LONG)
    assert short.finish_reason == "length"
    assert long.token_ids[: len(short.token_ids)] == short.token_ids
    assert len(long.token_ids) == 80


def test_two_lines_in_memory_for_one_write_what_they_write_alone():
    """No cell is free when a completion fills the context, and the other has been sent back by then."""
    prompts = [[5, 6, 7, 8], [9] * 30]
    with small_engine("llama", context=CONTEXT, cache_bytes=bytes_for("llama", CONTEXT, context=CONTEXT)) as engine:
        alone = [engine.generate(prompt, **LONG).token_ids for prompt in prompts]
        assert (engine.stats().groups[0].cells, engine.stats().preemptions) == (CONTEXT, 0)
        together = engine.generate(prompts, **LONG)
        assert engine.stats().preemptions > 0
        assert engine.stats().recomputes == {}
        engine.check()
    assert [result.token_ids for result in together] == alone


def test_the_text_does_not_depend_on_how_much_is_read_in_a_step_nor_on_the_cells_that_are_free():
    """With one sequence, as many cells are free in a full context as a step may read: fewer than keys move."""
    sizes = {"context": 256, "max_sequences": 1}
    told = []
    for step_tokens, tight in ((32, False), (512, False), (32, True)):
        cells = {"cache_bytes": bytes_for("llama", 256, step_tokens=step_tokens, **sizes)} if tight else {}
        with small_engine("llama", step_tokens=step_tokens, **sizes, **cells) as engine:
            told.append(engine.generate([5, 6, 7, 8], **{**LONG, "max_tokens": 270}).token_ids)
            stats = engine.stats()
            assert (stats.shifts, stats.recomputes) == (1, {})
            assert stats.groups[0].cells == {(32, False): 288, (512, False): 768, (32, True): 256}[step_tokens, tight]
            engine.check()
    assert len(told[0]) == 270
    assert told[1:] == told[:-1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("keep", [CONTEXT, CONTEXT - 1, 10**6])
def test_all_but_one_token_of_the_context_can_be_kept(name, keep):
    """Each token that is written takes the place of the one before, and nothing is read again."""
    with small_engine(name, context=CONTEXT) as engine:
        spans = reads(engine)
        result = engine.generate([5, 6, 7], **{**LONG, "num_keep": keep})
        assert (len(result.token_ids), result.finish_reason) == (80, "length")
        assert spans[-1] == (CONTEXT - 1, CONTEXT)
        assert sum(end - start for start, end in spans) == 3 + 79
        assert engine.stats().recomputes == {}
        head = [5, 6, 7, *result.token_ids][: CONTEXT - 1]
        for last in range(CONTEXT - 4, 79, 9):
            prompt = [*head, result.token_ids[last]]
            asked = engine.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            assert asked.token_ids[0] == result.token_ids[last + 1]
        whole_prompt = engine.generate([5] * CONTEXT, **{**LONG, "num_keep": -1})
        assert len(whole_prompt.token_ids) == 80


def test_why_text_was_read_again_is_counted():
    with small_engine("gpt2", context=CONTEXT) as engine:
        engine.generate([5, 6, 7], **LONG)
        (reason,) = engine.stats().recomputes
    assert "logits change" in reason


def reads(engine):
    """From now on, the positions that each step reads of its one sequence."""
    spans, forward = [], engine._built.guest.forward

    def watched(memory, plan, *rest):
        spans.extend((feed.pos.start, feed.pos.end) for feed in plan.feeds)
        return forward(memory, plan, *rest)

    engine._built.guest.forward = watched
    return spans


@pytest.mark.parametrize(("name", "kept"), [("gpt2", 20), ("bloom", 20), ("llama4", 16)])
def test_what_stands_before_the_gap_is_not_read_again(name, kept):
    """Where a chunk is over, it is gone on from where one began."""
    with small_engine(name, context=CONTEXT) as engine:
        spans = reads(engine)
        result = engine.generate([5, 6, 7, 8], **{**LONG, "num_keep": 20, "max_tokens": 60})
        engine.check()
    tail = CONTEXT + 1 - 14  # half of what was behind the head is gone
    again = [span for span in spans[1:] if span[1] - span[0] > 1]
    assert 1 <= len(again) <= 2
    assert all(start >= kept and end == tail for start, end in again), "more may be known where the text repeats itself"
    assert len(result.token_ids) == 60


def test_an_answer_without_end_must_say_how_long():
    with pytest.raises(BadRequest, match="max_tokens"):
        SamplingParams(shift=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_session_goes_on_from_what_a_shift_left(name):
    with small_engine(name, context=CONTEXT) as engine:
        session = engine.session()
        session.send([5, 6, 7], **LONG)
        assert len(session.tokens) == 83
        engine.check()
        session.rewind()
        again = session.send([5, 6, 8], max_tokens=3, temperature=0.0)
        assert again.token_ids == engine.generate([5, 6, 8], max_tokens=3, temperature=0.0).token_ids
        session.close()
        assert_at_rest(engine)


@pytest.mark.parametrize("moment", [46, 47, 60])
def test_a_cancel_beyond_the_context_gives_everything_back(moment):
    with small_engine("llama", context=CONTEXT) as engine:
        ear, ticket = Ear(), []

        def listen(event):
            ear(event)
            if len(ear.events) == moment:
                ticket[0].cancel()

        engine._loop.call(lambda: ticket.append(engine.submit([5, 6], SamplingParams(**LONG), deliver=listen)))
        assert ear.wait().reasons == {0: "cancelled"}
        assert_at_rest(engine)
