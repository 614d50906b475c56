"""Events reach the event loop in the order of their delivery, and the loop is woken once for many of them."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvcellar.events import Delta, Event
from kvcellar.serve.generation.http_request import Arrivals

STREAMS = 64


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    woken = 0

    def call_soon_threadsafe(self, callback, *args, context=None):
        self.woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def piece(number: int) -> Delta:
    return Delta(0, str(number), (number,))


def run(play: Callable[[CountedLoop], object]) -> None:
    with asyncio.Runner(loop_factory=CountedLoop) as runner:
        runner.run(play(runner.get_loop()))


def test_a_step_wakes_the_loop_once_for_all_its_streams():
    async def play(loop: CountedLoop) -> None:
        arrivals, got = Arrivals(), [list[Event]() for _ in range(STREAMS)]
        streams = [arrivals.receiver(lambda _, event, to=one: to.append(event)) for one in got]
        for step in range(3):
            for receive in streams:
                receive(0, piece(step))
            arrivals.check()
            assert loop.woken == step + 1
            await asyncio.sleep(0)
            arrivals.check()
        assert got == [[piece(0), piece(1), piece(2)]] * STREAMS

    run(play)


def test_events_of_several_threads_all_arrive_each_threads_in_order():
    async def play(loop: CountedLoop) -> None:
        arrivals, got, end = Arrivals(), list[tuple[int, Event]](), asyncio.Event()

        def arrive(number: int, event: Event) -> None:
            got.append((number, event))
            if len(got) == 4000:
                end.set()

        receive = arrivals.receiver(arrive)

        def deliver(number: int) -> None:
            for at in range(1000):
                receive(number, piece(at))

        threads = [threading.Thread(target=deliver, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(120):
            await end.wait()
        for thread in threads:
            thread.join()
        for number in range(4):
            assert [event for of, event in got if of == number] == [piece(at) for at in range(1000)]
        arrivals.check()

    run(play)


def test_a_receiver_that_raises_does_not_hold_up_the_others():
    async def play(loop: CountedLoop) -> None:
        seen, got = list[object](), list[Event]()
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        arrivals, error = Arrivals(), ValueError("a bug")

        def fails(number: int, event: Event) -> None:
            raise error

        broken, well = arrivals.receiver(fails), arrivals.receiver(lambda _, event: got.append(event))
        broken(0, piece(0))
        well(0, piece(1))
        broken(0, piece(2))
        well(0, piece(3))
        for _ in range(4):
            await asyncio.sleep(0)
        assert seen == [error, error]
        assert got == [piece(1), piece(3)]

    run(play)


def test_an_event_that_a_receiver_causes_is_passed_on_after_other_work_of_the_loop():
    async def play(loop: CountedLoop) -> None:
        arrivals, order = Arrivals(), list[object]()
        again = arrivals.receiver(lambda _, event: order.append(event))

        def arrive(number: int, event: Event) -> None:
            order.append(event)
            loop.call_soon(order.append, "other work")
            again(0, piece(1))

        arrivals.receiver(arrive)(0, piece(0))
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == [piece(0), "other work", piece(1)]

    run(play)


def test_nothing_is_kept_for_a_loop_that_was_closed():
    found: list[Callable[[int, Event], None]] = []
    arrivals = Arrivals()

    async def play(loop: CountedLoop) -> None:
        found.append(arrivals.receiver(lambda _, event: pytest.fail("it arrived")))

    run(play)
    for number in range(3):
        found[0](0, piece(number))
    assert not arrivals._waiting
