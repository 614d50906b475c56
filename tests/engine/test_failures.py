"""Things go wrong for one request, for one step, for the whole engine; nobody waits for ever, nobody else is hurt."""

import logging
import os
import threading
import time
import warnings

import pytest
import torch

from kvcellar import BadRequest, EngineClosed, EngineFailed
from kvcellar.engine.core.request import Completion
from kvcellar.errors import CacheFull, NoToken, WrongStage
from kvcellar.events import Delta, Finished
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, small_engine
from tests.engine.test_limits import held
from tests.zoo import ARCHS

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
POISON = 66  # a token that some of the forwards below cannot stand


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)


@pytest.fixture(params=["llama", "bloom"])
def engine(request):
    with small_engine(request.param) as engine:
        yield engine
        if engine.healthy:
            assert_at_rest(engine)


def submitted(engine, *prompts, params=GREEDY):
    """All of them at once: they share their steps."""
    ears = [Ear() for _ in prompts]
    with held(engine):
        for prompt, ear in zip(prompts, ears, strict=True):
            engine.submit(prompt, params, deliver=ear)
    return [ear.wait() for ear in ears]


def poisoned(engine, monkeypatch, what):
    """The forward does `what` to its logits if the poison is among what it reads."""
    guest = engine._built.guest
    forward = guest.forward

    def wrapped(memory, plan, ids, want):
        logits = forward(memory, plan, ids, want)
        return what(logits, plan, ids) if POISON in ids else logits

    monkeypatch.setattr(guest, "forward", wrapped)


def raises(logits, plan, ids):
    raise RuntimeError("cannot stand it")


def loses_device(built, monkeypatch, after=0):
    """All that is computed on its device fails, from a forward on. Returns the errors."""
    guest, errors = built.guest, []
    forward, left = guest.forward, iter(range(after))

    def failing(*args):
        if next(left, None) is not None:
            return forward(*args)
        monkeypatch.setattr(built.memory, "device", torch.device("meta"))  # has no values
        errors.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
        raise errors[-1]

    monkeypatch.setattr(guest, "forward", failing)
    return errors


# -- one request ------------------------------------------------------------------------------------------------------


def test_a_forward_that_fails_for_one_fails_for_one(engine, monkeypatch):
    alone = engine.generate([5, 6, 7], max_tokens=8, ignore_eos=True).token_ids
    poisoned(engine, monkeypatch, raises)
    good, bad, other = submitted(engine, [5, 6, 7], [8, POISON, 9], [5, 6, 7])
    assert good.ids() == other.ids() == alone
    assert isinstance(bad.error, EngineFailed)
    assert "RuntimeError: cannot stand it" in str(bad.error)
    assert engine.healthy


def test_a_forward_that_fails_once_is_not_noticed(engine, monkeypatch):
    """As a batch too large for what the device has left does: its parts go through."""
    wanted = [e.ids() for e in submitted(engine, [5, 6, 7], [8, 9], [10, 11, 12])]
    guest = engine._built.guest
    forward, failures = guest.forward, iter([torch.OutOfMemoryError("not enough")])

    def wrapped(memory, plan, *rest):
        if plan.tokens > 3 or engine.model.mode == "solo":
            for failure in failures:
                raise failure
        return forward(memory, plan, *rest)

    monkeypatch.setattr(guest, "forward", wrapped)
    ears = submitted(engine, [5, 6, 7], [8, 9], [10, 11, 12])
    got = [ear.ids() for ear in ears if ear.error is None]
    assert got == (wanted if engine.model.mode == "flat" else wanted[1:])  # alone there is no smaller part to try


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_end_their_own_request(engine, monkeypatch, value):
    alone = engine.generate([5, 6, 7], max_tokens=8, ignore_eos=True).token_ids

    def spoil(logits, plan, ids):
        logits = logits.clone()
        for row, feed in enumerate(plan.feeds):
            first = sum(len(before.pos) for before in plan.feeds[:row])
            if POISON in ids[first : first + len(feed.pos)]:
                logits[row, 3] = value
        return logits

    poisoned(engine, monkeypatch, spoil)
    good, bad = submitted(engine, [5, 6, 7], [8, POISON])
    assert good.ids() == alone
    assert isinstance(bad.error, NoToken)
    assert "float32" in str(bad.error)


def test_weights_that_are_not_numbers_end_in_an_error_not_in_garbage():
    """The self-test refuses such a model; weights that go bad later are told by each request."""
    model = ARCHS["llama"].build()
    from kvcellar import Engine

    with Engine(model, cache_bytes=1_000_000, pack=False) as engine:
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
        for prompt in ([5, 6], [[5], [6]]):
            with pytest.raises(NoToken):
                engine.generate(prompt, max_tokens=4)
        assert engine.healthy
        assert_at_rest(engine)


def test_one_bad_choice_ends_all_choices_of_its_request_and_nobody_elses(engine, monkeypatch):
    accept = Completion.accept

    def breaks(completion, token, *rest):
        if completion.sampler.index == 1 and completion.sampler.produced == 2:
            raise UnicodeError("a tokenizer that cannot read its own token")
        return accept(completion, token, *rest)

    alone = engine.generate([5, 6], max_tokens=8, ignore_eos=True).token_ids
    monkeypatch.setattr(Completion, "accept", breaks)
    three = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1, ignore_eos=True)
    many, one = Ear(), Ear()
    with held(engine):
        engine.submit([5, 6, 7], three, deliver=many)
        engine.submit([5, 6], GREEDY, deliver=one)
    assert isinstance(many.wait().error, EngineFailed)
    assert one.wait().ids() == alone


# -- the engine -------------------------------------------------------------------------------------------------------


def test_after_closing_nothing_is_answered_and_closing_again_is_nothing(engine):
    session = engine.session()
    session.send([5, 6], max_tokens=2)
    engine.close()
    engine.close()
    assert not engine.healthy
    for ask in (
        lambda: engine.generate([5]),
        lambda: list(engine.stream([5])),
        lambda: engine.generate([[5], [6]]),
        lambda: engine.submit([5], GREEDY, deliver=Ear()),
        engine.stats,
        engine.check,
        lambda: session.send([5]),
        lambda: session.fork().send([5]),
    ):
        with pytest.raises(EngineClosed, match="open a new one"):
            ask()
    session.close()


def test_running_and_waiting_requests_fail_when_the_engine_is_closed():
    with small_engine("llama", max_sequences=2) as engine:
        started = threading.Event()
        ears = [Ear() for _ in range(5)]

        def first(event):
            ears[0](event)
            started.set()

        many = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        engine.submit([5], many, deliver=first)
        for ear in ears[1:]:
            engine.submit([5, 6], many, deliver=ear)
        assert started.wait(240)
        engine.close()
    for ear in ears:
        assert isinstance(ear.wait().error, EngineClosed)
    assert ears[0].pieces()


def test_whoever_waits_for_an_answer_while_the_engine_closes_is_told():
    with small_engine("llama") as engine:
        pieces = engine.stream([5], max_tokens=250, ignore_eos=True)
        next(pieces)
        closer = threading.Thread(target=engine.close)
        closer.start()
        with pytest.raises(EngineClosed):
            list(pieces)
        closer.join(240)


def test_a_receiver_may_close_the_engine():
    with small_engine("llama") as engine:
        ear = Ear()

        def closes(event):
            ear(event)
            if len(ear.events) == 3:
                engine.close()

        engine.submit([5], SamplingParams(max_tokens=200, ignore_eos=True), deliver=closes)
        assert isinstance(ear.wait().error, EngineClosed)
    assert not engine.healthy


def test_a_receiver_may_submit_and_cancel_but_not_wait():
    with small_engine("llama") as engine:
        ear, other, refused = Ear(), Ear(), []

        def meddles(event):
            ear(event)
            if len(ear.events) != 2:
                return
            for wait in (
                engine.stats,
                engine.check,
                lambda: engine.generate([5]),
                lambda: next(engine.stream([5])),
                lambda: engine.session().send([5]),
                lambda: engine.generate([[5], [6]]),
            ):
                try:
                    wait()
                except WrongStage as error:
                    refused.append(error)
            tickets.append(engine.submit([9], GREEDY, deliver=other))
            tickets[0].cancel()

        tickets = []
        with held(engine):
            tickets.append(engine.submit([5], SamplingParams(max_tokens=200, ignore_eos=True), deliver=meddles))
        assert ear.wait().reasons == {0: "cancelled"}
        assert other.wait().reasons == {0: "length"}
        assert len(refused) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told_that_it_has_no_engine():
    with small_engine("llama") as engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
            child = os.fork()
        if child == 0:
            told = 1
            try:
                engine.generate([5])
            except EngineClosed as error:
                told = 0 if "forked" in str(error) and not engine.healthy else 2
            finally:
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(engine.generate([5], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_if_the_thread_fails_everybody_is_told_and_later_callers_are_refused(monkeypatch):
    with small_engine("llama") as engine:
        ears = [Ear() for _ in range(3)]
        with held(engine):
            for ear in ears:
                engine.submit([5, 6], GREEDY, deliver=ear)
            monkeypatch.setattr(engine._loop.scheduler, "schedule", lambda: 1 // 0)
        for ear in ears:
            assert isinstance(ear.wait().error, EngineFailed)
            assert "ZeroDivisionError" in str(ear.error)
        engine._loop._device.wait_for(engine._loop)
        assert not engine.healthy
        with pytest.raises(EngineClosed):
            engine.generate([5])
        assert not engine._built.memory.sequences


def test_who_asked_something_just_before_the_end_gets_an_answer():
    with small_engine("llama") as engine:
        answers = []
        with held(engine):
            closer = threading.Thread(target=engine.close)
            closer.start()
            asker = threading.Thread(target=lambda: answers.append(engine._loop.call(lambda: "heard")))
            while len(engine._loop._inbox) == 0:
                time.sleep(0.001)
            try:
                engine._loop.post(lambda: 1 // 0)
                asker.start()
                while len(engine._loop._inbox) < 3:
                    time.sleep(0.001)
            except EngineClosed:
                pytest.fail("the gate was shut before the thread could be")
        asker.join(240)
        closer.join(240)
        assert answers == ["heard"]


def test_a_step_that_finds_too_little_memory_ends_no_request_and_loses_nothing_of_the_cache(engine, monkeypatch):
    """It should not happen, as memory for a step is reserved. Then the step is scheduled again."""
    prompts = [list(range(5, 40)), list(range(50, 80)), list(range(5, 30))]
    wanted = [engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True).token_ids for prompt in prompts]
    memory, calls = engine._built.memory, []
    begin = memory.begin

    def short(batch, **how):
        calls.append(len(batch.feeds))
        if len(calls) in (2, 3, 7):
            raise CacheFull(next(iter(memory.free())), 99, 0)
        return begin(batch, **how)

    monkeypatch.setattr(memory, "begin", short)
    found = submitted(engine, *prompts)
    assert [ear.error for ear in found] == [None] * 3
    assert [ear.answers() for ear in found] == [[(tokens, "length")] for tokens in wanted]
    assert engine.generate(prompts[0], max_tokens=1, temperature=0.0).usage.cached_tokens == len(prompts[0]) - 1
    assert len(calls) > 7


# -- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before admission", "while reading", "while writing", "after the end"])
def test_a_cancel_ends_a_request_at_any_moment(moment):
    with small_engine("llama", step_tokens=4, max_sequences=1) as engine:
        ear, ticket = Ear(), []
        turn, turns = engine._loop._step, []

        def cancels_while_reading():
            turn()
            if not engine._loop.scheduler.running:
                return
            turns.append(engine._loop.scheduler.running)
            if moment == "while reading" and len(turns) == 3:
                assert turns[-1][0].computed == 12
                ticket[0].cancel()

        engine._loop._step = cancels_while_reading

        def listens(event):
            ear(event)
            if moment == "while writing" and len(ear.events) == 3:
                ticket[0].cancel()

        with held(engine):
            params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
            ticket.append(engine.submit(list(range(5, 25)), params, deliver=listens))
            if moment == "before admission":
                ticket[0].cancel()
        ear.wait()
        if moment == "after the end":
            for _ in range(3):
                ticket[0].cancel()
        assert_at_rest(engine)
        assert ear.reasons == {0: "length" if moment == "after the end" else "cancelled"}
        expected = {"before admission": 0, "while reading": 0, "while writing": 3, "after the end": 10}
        assert len(ear.ids()) == expected[moment]
        assert ear.done.usage.completion_tokens == expected[moment]
        assert ear.done.usage.prompt_tokens == 20


def test_leaving_a_stream_cancels_its_request():
    with small_engine("llama") as engine:
        for piece in engine.stream([5], max_tokens=200, ignore_eos=True):
            assert isinstance(piece, Delta)
            break
        assert_at_rest(engine)


def test_whoever_is_interrupted_while_waiting_leaves_nothing_running(monkeypatch):
    with small_engine("llama") as engine:
        from kvcellar.frontend.result import Collector

        def interrupted(self):
            raise KeyboardInterrupt

        monkeypatch.setattr(Collector, "result", interrupted)
        for prompt in ([5], [[5], [6]]):
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompt, max_tokens=200, ignore_eos=True)
            assert_at_rest(engine)


def test_cancelling_one_of_many_changes_nothing_for_the_others():
    with small_engine("llama") as engine:
        alone = engine.generate([5, 6], max_tokens=12, ignore_eos=True).token_ids
        ears, tickets = [Ear() for _ in range(4)], []
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

        def listener(ear, index):
            def listen(event):
                ear(event)
                if index % 2 and len(ear.events) == index:
                    tickets[index].cancel()

            return listen

        with held(engine):
            for index, ear in enumerate(ears):
                tickets.append(engine.submit([5, 6], params, deliver=listener(ear, index)))
        assert [ear.wait().reasons[0] for ear in ears] == ["length", "cancelled", "length", "cancelled"]
        assert ears[0].ids() == ears[2].ids() == alone
        assert ears[3].ids() == alone[: len(ears[3].ids())]


def test_a_cancelled_request_of_many_answers_ends_each_of_them_once():
    with small_engine("llama") as engine:
        ear, ticket = Ear(), []

        def listen(event):
            ear(event)
            if len(ear.events) == 7:
                ticket[0].cancel()

        params = SamplingParams(max_tokens=50, n=3, temperature=1.0, seed=3, ignore_eos=True)
        with held(engine):
            ticket.append(engine.submit([5, 6], params, deliver=listen))
        assert ear.wait().reasons == dict.fromkeys(range(3), "cancelled")
        assert sum(isinstance(event, Finished) for event in ear.events) == 3


def test_params_of_a_batch_are_checked_before_anything_is_asked():
    with small_engine("llama") as engine, pytest.raises(BadRequest):
        engine.generate([[5], [6]], temperature=-1.0)


@pytest.mark.parametrize("name", ["llama", "lfm3"])
def test_a_step_that_cannot_be_kept_is_given_up_and_the_engine_goes_on(name, monkeypatch):
    """A recurrent layer that a model passed over has left no state, say."""
    with small_engine(name) as engine:
        whole = engine.generate([5, 6, 7], max_tokens=6, ignore_eos=True, temperature=0.0).token_ids
        memory, faults = engine._built.memory, [WrongStage("a layer has put nothing")]
        commit = memory.commit

        def failing(*accepted):
            if faults:
                raise faults.pop()
            return commit(*accepted)

        monkeypatch.setattr(memory, "commit", failing)
        with pytest.raises(EngineFailed, match="a layer has put nothing"):
            engine.generate([5, 6, 7], max_tokens=6, temperature=0.0)
        engine.check()
        assert engine.healthy
        assert engine.generate([5, 6, 7], max_tokens=6, ignore_eos=True, temperature=0.0).token_ids == whole
        assert_at_rest(engine)


@pytest.mark.parametrize("after", [0, 4])
def test_a_lost_device_is_the_end_of_the_engine_at_the_first_error(monkeypatch, after):
    """Of no request alone: each would fail that comes."""
    with small_engine("llama") as engine:
        errors = loses_device(engine._built, monkeypatch, after)
        found = submitted(engine, [5, 6, 7], [8, 9])
        assert len(errors) == 1
        for ear in found:
            assert "the engine stopped on DeviceLost: meta computes nothing any more" in str(ear.error)
        assert not engine.healthy


def test_a_draw_on_a_lost_device_is_the_end_of_the_engine(monkeypatch):
    with small_engine("llama") as engine:
        built = engine._built

        def failing(*args):
            monkeypatch.setattr(built.memory, "device", torch.device("meta"))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(built.guest.draws, "draw", failing)
        with pytest.raises(EngineFailed, match="the engine stopped on DeviceLost"):
            engine.generate([5, 6, 7], max_tokens=3)
        assert not engine.healthy


@pytest.mark.parametrize("name", ["llama", "lfm3"])
def test_what_was_drawn_in_a_step_that_cannot_be_kept_is_drawn_again(name, monkeypatch):
    """A completion knows nothing of a draw before its step is committed."""
    how = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True, "frequency_penalty": 1.0, "logprobs": 2}
    with small_engine(name) as engine:

        def play():
            ears = [Ear() for _ in range(3)]
            with held(engine):
                for seed, ear in enumerate(ears):
                    params = SamplingParams(seed=seed, n=1 + (seed == 1), **how)
                    engine.submit([5, 6, 7 + seed], params, deliver=ear)
            return [ear.wait().answers() for ear in ears]

        whole, memory = play(), engine._built.memory
        commit, failed = memory.commit, []

        def failing(accepted):
            if len(accepted) > 1:
                failed.append(accepted)
                raise WrongStage("a layer has put nothing")
            return commit(accepted)

        monkeypatch.setattr(memory, "commit", failing)
        assert play() == whole
        assert failed
        engine.check()


def test_a_step_is_drawn_while_it_is_open_and_delivered_when_it_is_kept(monkeypatch):
    with small_engine("llama") as engine:
        memory, order = engine._built.memory, []

        def watch(owner, name):
            real = getattr(owner, name)

            def watched(*args):
                order.append((name, memory.step is not None))
                return real(*args)

            monkeypatch.setattr(owner, name, watched)

        watch(engine._built.guest.draws, "draw")
        watch(Completion, "accept")
        watch(memory, "commit")
        engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
    assert order == [("draw", True), ("commit", True), ("accept", False)] * 3
