"""Two decoders alternate: waiting is not measured, and no thread waits for a decoder that has ended."""

import threading

import pytest

from benchmarks import interleave
from benchmarks.interleave import Side, sides


def play(side: Side, steps: int, name: str, order: list[str]) -> None:
    side.step()  # the end of prefill
    for _ in range(steps):
        order.append(name)
        side.step()
    side.end()


def started(*calls: tuple[Side, int, str, list[str]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=play, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_bursts_alternate():
    order: list[str] = []
    one, two = sides(2)
    threads = started((one, 6, "a", order), (two, 6, "b", order))
    one.wait_ready()
    two.wait_ready()
    one.go()
    for thread in threads:
        thread.join(10)
    assert "".join(order) == "aabbaabbaabb"
    assert len(one.seconds) == len(one.cpu) == len(two.seconds) == len(two.cpu) == 6


def test_waiting_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(interleave, "_clocks", lambda: (now[0], 2 * now[0]))
    one, two = sides(2)

    def work(side: Side, takes: float) -> None:
        side.step()
        for _ in range(4):
            now[0] += takes
            side.step()
        side.end()

    threads = [threading.Thread(target=work, args=args, daemon=True) for args in ((one, 1.0), (two, 100.0))]
    for thread in threads:
        thread.start()
    one.wait_ready()
    two.wait_ready()
    one.go()
    for thread in threads:
        thread.join(10)
    assert (one.seconds, two.seconds) == ([1.0] * 4, [100.0] * 4)
    assert (one.cpu, two.cpu) == ([2.0] * 4, [200.0] * 4)


def test_a_side_that_ends_releases_the_other():
    order: list[str] = []
    one, two = sides(1)
    threads = started((one, 5, "a", order), (two, 1, "b", order))
    one.wait_ready()
    two.wait_ready()
    one.go()
    threads[1].join(10)
    one.end()
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert order.count("a") == 5
