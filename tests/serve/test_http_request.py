"""An HTTP request returns events in order, with a limited queue, and never leaves a prompt running."""

import asyncio
import threading

import pytest

from kvcellar.errors import BadRequest, EngineClosed, EngineFailed
from kvcellar.events import Delta, Done, Failed, Finished, Timings, Usage
from kvcellar.serve.generation.http_request import Arrivals, HttpRequest
from kvcellar.serve.http.api_errors import ApiError
from tests.serve.fake_engine import PATIENCE

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
    """Records submissions; the test delivers events."""

    def __init__(self, taken: int = 10) -> None:
        self.taken = taken
        self.deliver = []
        self.tickets = []

    def submit(self, prompt, deliver):
        if len(self.tickets) == self.taken:
            raise BadRequest("no more", "prompt")
        self.deliver.append(deliver)
        self.tickets.append(Ticket())
        return self.tickets[-1]

    def cancels(self) -> list[int]:
        return [ticket.cancelled for ticket in self.tickets]


def run(play, *, prompts=1, limit=100, engine=None):
    """Run `play(request, engine)` on an event loop. Returns the engine."""
    engine = engine or Engine()

    async def main():
        with HttpRequest(limit, Arrivals()) as request:
            await asyncio.to_thread(request.submit, [[1]] * prompts, engine.submit)
            await play(request, engine)

    asyncio.run(main())
    return engine


async def settle():
    """Let delivered events arrive."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_events_are_returned_in_order_until_the_request_is_finished():
    async def play(request, engine):
        events = [piece(i) for i in range(50)] + [Finished(0, "stop"), DONE]
        speaker = threading.Thread(target=lambda: [engine.deliver[0](event) for event in events])
        speaker.start()
        received = []
        while not request.finished:
            received += await request.next_batch()
            request.check()
        speaker.join()
        assert received == [(0, event) for event in events]

    assert run(play).cancels() == [0]


def test_a_request_is_finished_when_all_its_prompts_are():
    async def play(request, engine):
        engine.deliver[1](DONE)
        assert await request.next_batch() == [(1, DONE)]
        assert not request.finished
        engine.deliver[0](DONE)
        assert await request.next_batch() == [(0, DONE)]
        assert request.finished

    assert run(play, prompts=2).cancels() == [0, 0]


def test_a_timeout_returns_an_empty_batch():
    async def play(request, engine):
        assert await request.next_batch(0.001) == []
        engine.deliver[0](piece(1))
        assert await request.next_batch(5) == [(0, piece(1))]

    run(play)


def test_each_wait_has_its_own_limit_though_they_share_a_timer():
    async def play(request, engine):
        for limit in (60, 0.001, None):  # a shorter one after a longer one; then one without a limit
            if limit == 0.001:
                assert await request.next_batch(limit) == []
                continue
            waiting = asyncio.create_task(request.next_batch(limit))
            await settle()
            engine.deliver[0](piece(1))
            assert await waiting == [(0, piece(1))]
            request.check()
        waiting = asyncio.create_task(request.next_batch(60))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await request.next_batch(0.001) == []

    run(play)


def test_leaving_the_context_cancels_open_prompts_only():
    async def play(request, engine):
        engine.deliver[0](DONE)
        await settle()

    assert run(play, prompts=3).cancels() == [0, 1, 1]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_leaving_the_context_by_an_exception_cancels(error):
    engine = Engine()

    async def play(request, engine):
        raise error

    with pytest.raises(type(error)):
        run(play, engine=engine)
    assert engine.cancels() == [1]


def test_a_refused_prompt_cancels_the_others():
    engine = Engine(taken=2)
    with pytest.raises(BadRequest):
        run(None, prompts=3, engine=engine)
    assert engine.cancels() == [1, 1]


def test_a_failure_is_raised_after_earlier_events_and_cancels_other_prompts():
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

    run(play, prompts=2)


def test_a_prompt_cancelled_by_the_engine_is_a_failure():
    async def play(request, engine):
        engine.deliver[0](Finished(0, "cancelled"))
        with pytest.raises(EngineClosed):
            await request.next_batch()

    run(play)


def test_events_queued_for_a_slow_client_are_limited():
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

    run(play, limit=8)


def test_a_slow_reader_without_a_waiting_client_gets_all_events():
    async def play(request, engine):
        for number in range(1000):
            engine.deliver[0](piece(number))
        engine.deliver[0](DONE)
        await settle()
        received = []
        while not request.finished:
            batch = await request.next_batch()
            request.check()
            assert 0 < len(batch) <= 256
            received += batch
        assert [event.token_ids[0] for _, event in received[:-1]] == list(range(1000))

    assert run(play, limit=8).cancels() == [0]


def test_readers_of_long_queues_alternate():
    turns = []

    async def take(name, engine, together):
        with HttpRequest(8, Arrivals()) as request:
            await asyncio.to_thread(request.submit, [[1]], engine.submit)
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


def test_an_event_after_the_end_is_ignored():
    async def play(request, engine):
        pass

    engine = run(play)
    engine.deliver[0](piece(1))  # the loop has been closed by now


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_prompt_being_submitted_when_the_request_ends_is_cancelled(prompts):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def submit(self, *args, **kwargs):
            entered.set()
            assert go_on.wait(120)
            return super().submit(*args, **kwargs)

    engine = Slow()

    async def main():
        async def send():
            with HttpRequest(100, Arrivals()) as request:
                await asyncio.to_thread(request.submit, [[1]] * prompts, engine.submit)

        task = asyncio.create_task(send())
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())  # waits for its threads when it ends
    assert engine.cancels() == [1]  # and the others were never submitted


def test_a_failure_during_submission_cancels_all_prompts():
    failure = EngineFailed("broken")
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def submit(self, *args, **kwargs):
            if self.tickets:
                entered.set()
                assert go_on.wait(120)
            return super().submit(*args, **kwargs)

    engine = Slow()

    async def main():
        with HttpRequest(100, Arrivals()) as request:
            launching = asyncio.create_task(asyncio.to_thread(request.submit, [[1]] * 4, engine.submit))
            await asyncio.to_thread(entered.wait, 10)
            engine.deliver[0](Failed(failure))
            await settle()
            go_on.set()
            await launching
            with pytest.raises(EngineFailed):
                await request.next_batch()

    asyncio.run(main())
    assert engine.cancels() == [0, 1]


def test_a_prompt_may_be_submitted_while_the_drain_looks_at_those_before_it():
    """The thread that submits adds a ticket between two that the event loop looks at."""
    looked, added = threading.Event(), threading.Event()

    class Waiting(Ticket):
        @property
        def begun(self) -> bool:
            looked.set()
            assert added.wait(PATIENCE)
            return False

    class Slow(Engine):
        def submit(self, *args, **options):
            if len(self.tickets) == 2:
                added.set()  # the last one is there, and its ticket was added before the event loop goes on
            if len(self.tickets) == 1:
                assert looked.wait(PATIENCE)
            super().submit(*args, **options)
            self.tickets[-1] = Waiting()
            return self.tickets[-1]

    async def main():
        engine = Slow()
        with HttpRequest(100, Arrivals()) as request:
            submitting = asyncio.create_task(asyncio.to_thread(request.submit, [[1]] * 3, engine.submit))
            while not request._tickets:
                await asyncio.sleep(0)
            request.refuse_if_queued()
            await submitting
            with pytest.raises(ApiError, match="shutting down"):
                await request.next_batch()
            assert engine.cancels() == [1, 1, 1][: len(engine.tickets)]

    asyncio.run(main())
