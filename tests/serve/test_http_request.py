"""A request hands on what the engine says, in order and bounded, and never leaves anything running."""

import asyncio
import threading

import pytest

from kvcellar.errors import BadRequest, EngineClosed, EngineFailed
from kvcellar.events import Delta, Done, Failed, Finished, Timings, Usage
from kvcellar.sample.params import SamplingParams
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.http_request import HttpRequest

DONE = Done(Usage(1, 0, 1), Timings(0.0, 0.0, 0.0))


def piece(number: int) -> Delta:
    return Delta(0, str(number), (number,))


class Ticket:
    begun = True

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


class Engine:
    """Keeps what it was given; the test speaks for it."""

    def __init__(self, taken: int = 10) -> None:
        self.taken = taken
        self.deliver = []
        self.tickets = []

    def submit(self, prompt, params, *, deliver):
        if len(self.tickets) == self.taken:
            raise BadRequest("no more", "prompt")
        self.deliver.append(deliver)
        self.tickets.append(Ticket())
        return self.tickets[-1]

    def cancels(self) -> list[int]:
        return [ticket.cancelled for ticket in self.tickets]


def fly(play, *, prompts=1, limit=100, engine=None):
    """Run `play(request, engine)` on a loop, and give the engine back."""
    engine = engine or Engine()

    async def trip():
        with HttpRequest(engine, limit) as request:
            await asyncio.to_thread(request.submit, [[1]] * prompts, SamplingParams())
            await play(request, engine)

    asyncio.run(trip())
    return engine


async def settle():
    """Let everything that was delivered arrive."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_events_come_in_order_and_then_it_is_over():
    async def play(request, engine):
        said = [piece(i) for i in range(50)] + [Finished(0, "stop"), DONE]
        speaker = threading.Thread(target=lambda: [engine.deliver[0](event) for event in said])
        speaker.start()
        heard = []
        while not request.finished:
            heard += await request.next_batch()
            request.check()
        speaker.join()
        assert heard == [(0, event) for event in said]

    assert fly(play).cancels() == [0]


def test_it_is_over_when_every_run_is():
    async def play(request, engine):
        engine.deliver[1](DONE)
        assert await request.next_batch() == [(1, DONE)]
        assert not request.finished
        engine.deliver[0](DONE)
        assert await request.next_batch() == [(0, DONE)]
        assert request.finished

    assert fly(play, prompts=2).cancels() == [0, 0]


def test_patience_ends_with_an_empty_batch():
    async def play(request, engine):
        assert await request.next_batch(0.001) == []
        engine.deliver[0](piece(1))
        assert await request.next_batch(5) == [(0, piece(1))]

    fly(play)


def test_leaving_cancels_what_is_still_open_and_only_that():
    async def play(request, engine):
        engine.deliver[0](DONE)
        await settle()

    assert fly(play, prompts=3).cancels() == [0, 1, 1]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_leaving_by_an_error_cancels_too(error):
    engine = Engine()

    async def play(request, engine):
        raise error

    with pytest.raises(type(error)):
        fly(play, engine=engine)
    assert engine.cancels() == [1]


def test_a_prompt_that_is_refused_takes_back_the_others():
    engine = Engine(taken=2)
    with pytest.raises(BadRequest):
        fly(None, prompts=3, engine=engine)
    assert engine.cancels() == [1, 1]


def test_a_failure_is_raised_in_its_turn_and_the_others_are_cancelled():
    failure = EngineFailed("broken")

    async def play(request, engine):
        engine.deliver[0](piece(1))
        engine.deliver[0](Failed(failure))
        engine.deliver[1](piece(2))
        await settle()
        assert engine.cancels() == [0, 1]
        assert await request.next_batch() == [(0, piece(1))]
        assert not request.finished
        for _ in range(2):
            with pytest.raises(EngineFailed) as raised:
                await request.next_batch()
            assert raised.value is failure

    fly(play, prompts=2)


def test_a_run_that_the_engine_gave_up_is_a_failure():
    async def play(request, engine):
        engine.deliver[0](Finished(0, "cancelled"))
        with pytest.raises(EngineClosed):
            await request.next_batch()

    fly(play)


def test_events_that_nobody_takes_are_bounded_and_then_the_request_ends():
    async def play(request, engine):
        with request.waiting_for_client():
            for number in range(1000):
                engine.deliver[0](piece(number))
            await settle()
            request.check()
        assert engine.cancels() == [1]
        assert [event.token_ids[0] for _, event in await request.next_batch()] == list(range(8))
        with pytest.raises(ApiError, match="8 events"):
            await request.next_batch()

    fly(play, limit=8)


def test_a_taker_who_is_only_slow_gets_everything_in_parts():
    async def play(request, engine):
        for number in range(1000):
            engine.deliver[0](piece(number))
        engine.deliver[0](DONE)
        await settle()
        heard = []
        while not request.finished:
            batch = await request.next_batch()
            request.check()
            assert 0 < len(batch) <= 256
            heard += batch
        assert [event.token_ids[0] for _, event in heard[:-1]] == list(range(1000))

    assert fly(play, limit=8).cancels() == [0]


def test_takers_of_long_queues_let_each_other_have_their_turn():
    turns = []

    async def take(name, engine, together):
        with HttpRequest(engine, 8) as request:
            await asyncio.to_thread(request.submit, [[1]], SamplingParams())
            for number in range(1000):
                engine.deliver[-1](piece(number))
            engine.deliver[-1](DONE)
            await together.wait()
            while not request.finished:
                await request.next_batch()
                turns.append(name)

    async def both():
        together = asyncio.Barrier(2)
        await asyncio.gather(take("a", Engine(), together), take("b", Engine(), together))

    asyncio.run(both())
    assert sorted(turns[:4]) == ["a", "a", "b", "b"]


def test_a_word_after_the_end_is_not_heard_and_not_an_error():
    async def play(request, engine):
        pass

    engine = fly(play)
    engine.deliver[0](piece(1))  # the loop has been closed by now


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_run_that_is_just_being_submitted_when_everybody_leaves_is_cancelled_too(prompts):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def submit(self, *args, **kwargs):
            entered.set()
            assert go_on.wait(10)
            return super().submit(*args, **kwargs)

    engine = Slow()

    async def trip():
        async def fly_alone():
            with HttpRequest(engine, 100) as request:
                await asyncio.to_thread(request.submit, [[1]] * prompts, SamplingParams())

        task = asyncio.create_task(fly_alone())
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(trip())  # waits for its threads when it ends
    assert engine.cancels() == [1]  # and the others were never submitted


def test_a_failure_while_others_are_being_submitted_cancels_all_of_them():
    failure = EngineFailed("broken")
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def submit(self, *args, **kwargs):
            if self.tickets:
                entered.set()
                assert go_on.wait(10)
            return super().submit(*args, **kwargs)

    engine = Slow()

    async def trip():
        with HttpRequest(engine, 100) as request:
            launching = asyncio.create_task(asyncio.to_thread(request.submit, [[1]] * 4, SamplingParams()))
            await asyncio.to_thread(entered.wait, 10)
            engine.deliver[0](Failed(failure))
            await settle()
            go_on.set()
            await launching
            with pytest.raises(EngineFailed):
                await request.next_batch()

    asyncio.run(trip())
    assert engine.cancels() == [0, 1]
