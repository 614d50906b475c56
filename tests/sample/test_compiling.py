"""Few grammars are compiled at once, and each owner has one turn."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvcellar import Overloaded
from kvcellar.engine.sample import compiling as module
from kvcellar.engine.sample.compiling import AT_ONCE, STACK, WAITING, Turns, on_a_stack

TIMEOUT = 60.0


class Slow:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.started, self.gate = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.gate.wait(TIMEOUT)
        return "done"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * WAITING) as made:
        yield made


def waits(made: Turns, count: int) -> None:
    with made._changed:
        assert made._changed.wait_for(lambda: len(made._waiting) == count, TIMEOUT)


def run(made: Turns, owner: str, work: Slow) -> str:
    with made.turn(owner):
        return work()


def ask(threads: ThreadPoolExecutor, made: Turns, owner: str, work: Slow) -> Future[str]:
    """Its call waits, or runs, when this returns."""
    before = len(made._waiting)
    future = threads.submit(run, made, owner, work)
    with made._changed:
        there = lambda: len(made._waiting) > before or work.started.is_set() or future.done()  # noqa: E731
        while not there():
            made._changed.wait(0.01)
    return future


def test_an_owner_has_one_turn_and_all_together_few(threads) -> None:
    made, works = Turns(), {name: Slow() for name in ("a1", "a2", "b1", "c1")}
    asked = {name: ask(threads, made, name[0], work) for name, work in works.items()}
    assert works["a1"].started.wait(TIMEOUT)
    assert works["b1"].started.wait(TIMEOUT)
    waits(made, 2)
    made.check()
    assert AT_ONCE == 2
    assert not works["a2"].started.is_set() or not works["c1"].started.is_set()
    works["b1"].gate.set()
    assert works["c1"].started.wait(TIMEOUT), "a2 was first, and its owner has a turn"
    assert not works["a2"].started.is_set()
    works["a1"].gate.set()
    assert works["a2"].started.wait(TIMEOUT)
    works["a2"].gate.set()
    works["c1"].gate.set()
    assert [one.result(TIMEOUT) for one in asked.values()] == ["done"] * 4
    made.check()


def test_one_owner_cannot_be_all_that_waits_and_none_waits_for_ever(threads, monkeypatch) -> None:
    made, first = Turns(), Slow()
    asked = [ask(threads, made, "a", first)]
    assert first.started.wait(TIMEOUT)
    rest = Slow()
    rest.gate.set()
    asked += [threads.submit(run, made, "a", rest) for _ in range(WAITING // 2)]
    waits(made, WAITING // 2)
    with pytest.raises(Overloaded, match="too many requests wait"):
        run(made, "a", rest)
    with made.turn("b"):
        monkeypatch.setattr(module, "SECONDS", 0.0)
        with pytest.raises(Overloaded, match="other grammars have been compiled for 0 s"):
            run(made, "c", rest)
    first.gate.set()
    assert {one.result(TIMEOUT) for one in asked} == {"done"}
    made.check()


def test_an_error_leaves_no_turn_taken() -> None:
    made = Turns()
    for _ in range(3 * AT_ONCE):
        with pytest.raises(KeyError, match="of the work"), made.turn("a"):
            raise KeyError("of the work")
    made.check()


def test_work_on_a_stack_returns_or_raises_as_it_does_and_the_size_of_other_stacks_stays() -> None:
    assert on_a_stack(STACK, lambda: "done") == "done"
    with pytest.raises(KeyError):
        on_a_stack(STACK, lambda: {}["of the work"])
    assert threading.stack_size() == 0


def test_a_thread_that_cannot_start_is_an_overload(monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(Overloaded, match="no memory for a thread"):
            on_a_stack(STACK, lambda: 1)
    assert on_a_stack(STACK, lambda: 1) == 1
    assert threading.stack_size() == 0
