"""Masks are computed by other threads: in order for a request, by few for an owner, and never waited for long."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.sample import mask_threads as module
from kvcellar.engine.sample.mask_threads import MOST, OF_OWNER, PATIENCE, Lane, MaskThreads, Patience

TIMEOUT = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 1)), max_size=40))
def test_at_most_half_of_any_time_is_waited_and_a_bit(turns: list[tuple[float, float]]) -> None:
    """In any stretch of time: as long as what came between, and `PATIENCE`."""
    clock = Clock()
    patience, spans = Patience(clock), list[tuple[float, float]]()
    for other, share in turns:
        clock.now += other
        waited = share * patience.begin()
        assert waited <= PATIENCE
        clock.now += waited
        patience.end()
        spans.append((other, waited))
    for start in range(len(spans)):
        others, waits = 0.0, 0.0
        for other, waited in spans[start:]:
            waits += waited
            assert waits <= PATIENCE + others + other + 1e-9
            others += other


class Gate:
    """Work of a lane that waits to be let through."""

    def __init__(self) -> None:
        self.started, self.gate, self.done = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.gate.wait(TIMEOUT)
        self.done.set()


def ask(threads: MaskThreads, lane: Lane, work: Callable[[], None]) -> None:
    with threads.changed:
        threads.ask(lane, work)
    threads.check()


def test_a_lane_does_one_thing_after_the_other_in_order() -> None:
    threads, lane, done, end = MaskThreads(), Lane("a"), list[int](), threading.Event()
    running = 0

    def work(number: int) -> None:
        nonlocal running
        running += 1
        assert running == 1
        done.append(number)
        running -= 1

    with threads.changed:  # all are there before the first is begun
        for number in range(50):
            threads.ask(lane, lambda number=number: work(number))
        threads.ask(lane, end.set)
    assert end.wait(TIMEOUT)
    assert done == list(range(50))


def test_an_owner_has_few_threads_and_others_have_the_rest() -> None:
    threads, works = MaskThreads(), {name: Gate() for name in ("a1", "a2", "a3", "b1", "c1", "d1")}
    for name, work in works.items():
        ask(threads, Lane(name[0]), work)
    for name in ("a1", "a2", "b1", "c1"):
        assert works[name].started.wait(TIMEOUT)
    assert (MOST, OF_OWNER) == (4, 2)
    assert not works["a3"].started.is_set()
    assert not works["d1"].started.is_set()
    works["b1"].gate.set()
    assert works["d1"].started.wait(TIMEOUT), "a3 was first, and its owner has two"
    assert not works["a3"].started.is_set()
    for work in works.values():
        work.gate.set()
    assert all(work.done.wait(TIMEOUT) for work in works.values())
    threads.check()


def test_what_takes_too_long_is_waited_for_once_and_its_thread_is_the_last_to_have_a_cpu(monkeypatch) -> None:
    clock, lowered = Clock(), list[threading.Thread]()
    threads, slow, other = MaskThreads(clock), Lane("a"), Lane("a")
    monkeypatch.setattr(module, "lower", lowered.append)
    waits: list[float] = []

    def wait_for(_: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        clock.now += seconds
        return False

    gate, quick = Gate(), threading.Event()
    ask(threads, slow, gate)
    assert gate.started.wait(TIMEOUT)
    with threads.changed, monkeypatch.context() as patched:
        patched.setattr(threads.changed, "wait_for", wait_for)
        for _ in range(64):
            assert not threads.wait(slow, gate.done.is_set)
    assert waits == [PATIENCE]
    assert lowered == [slow.thread]
    ask(threads, other, quick.set)
    assert quick.wait(TIMEOUT), "another request has another thread"
    gate.gate.set()
    assert gate.done.wait(TIMEOUT)
    again = threading.Event()
    ask(threads, slow, again.set)
    assert again.wait(TIMEOUT)
    threads.check()


def test_threads_without_work_end() -> None:
    threads, done = MaskThreads(), threading.Event()
    ask(threads, Lane("a"), done.set)
    assert done.wait(TIMEOUT)
    for thread in list(threads._threads):
        thread.join(TIMEOUT)
    assert not threads._threads
    threads.check()


def test_what_a_lane_was_asked_for_can_be_taken_back() -> None:
    threads, lane, never, end = MaskThreads(), Lane("a"), threading.Event(), threading.Event()
    with threads.changed:
        threads.ask(lane, never.set)
        lane.asked.clear()
        threads.ask(Lane("a"), end.set)
    assert end.wait(TIMEOUT)
    for thread in list(threads._threads):
        thread.join(TIMEOUT)
    assert not never.is_set()
    threads.check()


@pytest.mark.parametrize("known", [True, False])
def test_what_is_known_is_not_waited_for(known: bool) -> None:
    clock = Clock()
    threads, lane = MaskThreads(clock), Lane("a")
    lane.stuck = True
    with threads.changed:
        assert threads.wait(lane, lambda: known) == known
    assert threads.patience.left == PATIENCE
