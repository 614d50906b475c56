"""One engine, many callers: threads, an event loop, and what each of them gets is its own."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcellar.events import Delta, Done, Failed, Finished
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import assert_at_rest, bytes_for, small_engine

THREADS = 8


def ask(index):
    return {"max_tokens": 4 + index % 5, "temperature": 1.0, "seed": index, "ignore_eos": True}


@pytest.fixture(scope="module")
def wanted():
    """What each thread's requests come to when nobody else is there."""
    with small_engine("llama") as engine:
        return [one_threads_work(engine, index) for index in range(THREADS)]


def one_threads_work(engine, index):
    """Everything that a caller may do, twice."""
    got = []
    prompt = [5 + index, 6, 7]
    for _ in range(2):
        got.append(engine.generate(prompt, **ask(index)).token_ids)
        got.append([r.token_ids for r in engine.generate([prompt, [8, index + 9]], **ask(index))])
        got.append(tuple(token for piece in engine.stream(prompt, **ask(index)) for token in piece.token_ids))
        got.append([choice.token_ids for choice in engine.generate(prompt, n=2, **ask(index)).choices])
        with engine.session() as session:
            got += [session.send([token, 12], **ask(index)).token_ids for token in (9, 10)]
            with session.fork() as twin:
                got.append(twin.send([11], **ask(index)).token_ids)
        for piece in engine.stream(prompt, max_tokens=60, ignore_eos=True):
            got.append(piece.token_ids)
            break
        assert engine.stats().cells_used >= 0
        engine.check()
    return got


@pytest.mark.parametrize("memory", [pytest.param("roomy", marks=pytest.mark.slow), "scarce"])
def test_threads_get_what_they_would_get_alone(wanted, memory):
    scarce = {"max_sequences": 5, "step_tokens": 9} if memory == "scarce" else {}
    if scarce:
        scarce["cache_bytes"] = bytes_for("llama", 60, **scarce)
    with small_engine("llama", **scarce) as engine:
        together = threading.Barrier(THREADS)

        def work(index):
            together.wait(240)
            return one_threads_work(engine, index)

        with ThreadPoolExecutor(THREADS) as pool:
            got = list(pool.map(work, range(THREADS)))
        assert got == wanted
        assert_at_rest(engine)


def test_an_event_loop_hears_its_requests_without_waiting_for_them():
    async def answer(engine, prompt, params):
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        ticket = engine.submit(prompt, params, deliver=lambda e: loop.call_soon_threadsafe(events.put_nowait, e))
        tokens = []
        while not isinstance(event := await events.get(), Done):
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                reason = event.reason
            if len(tokens) == 3 and prompt[0] % 2:
                ticket.cancel()
        return tuple(tokens), reason

    async def many(engine):
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        return await asyncio.gather(*(answer(engine, [3 + i, 6], params) for i in range(20)))

    with small_engine("llama") as engine:
        answers = asyncio.run(many(engine))
        alone = [engine.generate([3 + i, 6], max_tokens=30, ignore_eos=True).token_ids for i in range(20)]
        assert_at_rest(engine)
    for i, (got, reason) in enumerate(answers):
        if (3 + i) % 2:
            assert got == alone[i][: len(got)]
            assert len(got) >= 3
        else:
            assert (got, reason) == (alone[i], "length")


def test_an_event_loop_that_has_gone_leaves_nothing_running():
    async def leave(engine):
        loop = asyncio.get_running_loop()
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        heard = asyncio.Event()

        def deliver(event):
            loop.call_soon_threadsafe(heard.set)

        engine.submit([5], params, deliver=deliver)
        await heard.wait()

    with small_engine("llama") as engine:
        asyncio.run(leave(engine))
        engine.generate([6], max_tokens=3)
        assert_at_rest(engine)


def test_two_engines_live_beside_each_other():
    with small_engine("llama") as one, small_engine("gemma3") as other:
        wanted = [engine.generate([5, 6], max_tokens=12, ignore_eos=True).token_ids for engine in (one, other)]
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(e.generate, [5, 6], max_tokens=12, ignore_eos=True) for e in (one, other) for _ in "123"
            ]
        assert [future.result().token_ids for future in asked] == [ids for ids in wanted for _ in range(3)]
        one.close()
        assert other.generate([5, 6], max_tokens=12, ignore_eos=True).token_ids == wanted[1]
