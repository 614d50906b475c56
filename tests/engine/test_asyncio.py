"""From an event loop: a stream is waited for without holding anybody up, and a cancelled task leaves nothing."""

import asyncio
import threading

import pytest

from kvcellar import BadRequest, EngineFailed
from kvcellar.errors import WrongStage
from tests.engine.mixes import assert_at_rest, small_engine

ASK = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared():
    with small_engine("llama") as engine:
        yield engine


@pytest.fixture
def engine(shared):
    yield shared
    while (stats := shared.stats()).running or stats.waiting:  # a cancel is done between two steps
        pass
    assert_at_rest(shared)


async def ids(stream):
    return tuple([token async for piece in stream for token in piece.token_ids])


def test_tasks_side_by_side_hear_what_each_would_hear_alone(engine):
    alone = [engine.generate([3 + i, 6], **ASK) for i in range(12)]
    engine.clear_cache()

    async def all_of_them():
        streams = [engine.stream([3 + i, 6], **ASK) for i in range(12)]
        heard = await asyncio.gather(*map(ids, streams))
        return heard, [stream.result for stream in streams]

    heard, results = asyncio.run(all_of_them())
    assert heard == [result.token_ids for result in alone]
    assert [(r.choices, r.usage) for r in results] == [(r.choices, r.usage) for r in alone]


def test_the_loop_turns_while_a_stream_is_waited_for(engine, monkeypatch):
    """The engine stands still until somebody else on the loop has had a turn."""
    turned = threading.Event()
    forward = engine._built.guest.forward

    def held(*args):
        assert turned.wait(120), "the event loop was held up"
        return forward(*args)

    monkeypatch.setattr(engine._built.guest, "forward", held)

    async def both():
        asking = asyncio.create_task(ids(engine.stream([5, 6], **ASK)))
        await asyncio.sleep(0.01)
        turned.set()
        return await asking

    assert len(asyncio.run(both())) == 20


def test_a_text_is_tokenised_beside_the_loop(engine, monkeypatch):
    turned = threading.Event()

    def slow(prompt):
        assert turned.wait(120), "the event loop was held up"
        return [5, 6]

    monkeypatch.setattr(engine, "_ids", slow)

    async def both():
        asking = asyncio.create_task(ids(engine.stream("a long text", **ASK)))
        await asyncio.sleep(0.01)
        turned.set()
        return await asking

    assert len(asyncio.run(both())) == 20


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_a_task_that_is_cancelled_cancels_its_request(engine, pieces):
    async def cancelled():
        heard, enough = [], asyncio.Event()

        async def listen():
            async for piece in engine.stream([5, 6], **{**ASK, "max_tokens": 240, "n": 2}):
                heard.append(piece)
                if len(heard) == pieces:
                    enough.set()
                    await asyncio.sleep(60)

        task = asyncio.create_task(listen())
        if pieces:
            await enough.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(heard)

    assert asyncio.run(cancelled()) == pieces


def test_a_task_that_is_cancelled_while_its_request_is_prepared_leaves_nothing(engine, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def slow(prompt):
        entered.set()
        assert go_on.wait(120)
        return [5, 6]

    monkeypatch.setattr(engine, "_ids", slow)

    async def cancelled():
        task = asyncio.create_task(ids(engine.stream("text", **{**ASK, "max_tokens": 10_000})))
        await asyncio.to_thread(entered.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(cancelled())


def test_leaving_the_loop_early_cancels_the_request(engine):
    async def leave():
        async for _ in engine.stream([5, 6], **{**ASK, "max_tokens": 240}):
            break
        await asyncio.sleep(0)

    asyncio.run(leave())


def test_what_goes_wrong_is_raised_where_the_stream_is_waited_for(engine, monkeypatch):
    async def ask(prompt):
        return await ids(engine.stream(prompt, **ASK))

    for wrong in ([], "", [10**6], [5] * 300):
        with pytest.raises(BadRequest):
            asyncio.run(ask(wrong))
    monkeypatch.setattr(engine._built.guest, "forward", lambda *_: 1 // 0)
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        asyncio.run(ask([5]))


def test_a_stream_is_gone_through_once_and_in_one_way(engine):
    async def twice(stream):
        await ids(stream)
        return await ids(stream)

    with pytest.raises(WrongStage, match="once"):
        asyncio.run(twice(engine.stream([5], **ASK)))
    begun = engine.stream([5], **ASK)
    next(begun)
    with pytest.raises(WrongStage, match="not done"):
        _ = begun.result
    with pytest.raises(WrongStage, match="once"):
        asyncio.run(ids(begun))
    assert len(list(begun)) == 19
    assert list(begun) == []
    assert len(begun.result.token_ids) == 20

    async def other_way():
        stream = engine.stream([5], **ASK)
        async for _ in stream:
            next(stream)

    with pytest.raises(WrongStage, match="async for"):
        asyncio.run(other_way())


def test_a_stream_that_is_closed_early_is_cancelled(engine):
    stream = engine.stream([5, 6], **{**ASK, "max_tokens": 240})
    stream.close()
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []


def test_waiting_in_a_thread_serves_an_event_loop_too(engine):
    async def many():
        asking = [asyncio.to_thread(engine.generate, [3 + i, 6], **ASK) for i in range(5)]
        return [result.token_ids for result in await asyncio.gather(*asking)]

    assert asyncio.run(many()) == [engine.generate([3 + i, 6], **ASK).token_ids for i in range(5)]
