"""Few grammars are compiled at once, each owner has one turn, and what takes too long takes no turn of others."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcellar import BadRequest, Overloaded
from kvcellar.errors import NativePanic
from kvcellar.sample import compiling as module
from kvcellar.sample.compiling import AT_ONCE, LATE, WAITING, Compiling

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


def waits(made: Compiling, count: int) -> None:
    with made._changed:
        assert made._changed.wait_for(lambda: len(made._waiting) == count, TIMEOUT)


def ask(threads: ThreadPoolExecutor, made: Compiling, owner: str, work: Slow) -> Future[str]:
    """Its call waits, or runs, when this returns."""
    before = len(made._waiting)
    future = threads.submit(made.run, owner, "schema", work)
    with made._changed:
        there = lambda: len(made._waiting) > before or work.started.is_set() or future.done()  # noqa: E731
        while not there():
            made._changed.wait(0.01)
    return future


def test_an_owner_has_one_turn_and_all_together_few(threads) -> None:
    made, works = Compiling(), {name: Slow() for name in ("a1", "a2", "b1", "c1")}
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


def test_what_takes_too_long_is_refused_and_others_have_its_turn_but_not_its_owner(threads, monkeypatch) -> None:
    made, works = Compiling(), [Slow() for _ in range(LATE)]
    monkeypatch.setattr(module, "LONG", 0.0)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    for number, work in enumerate(works):
        with pytest.raises(BadRequest, match="it takes more than 0 s to compile") as caught:
            made.run(f"owner {number}", "schema", work)
        assert caught.value.param == "schema"
        if number + 1 < LATE:
            with pytest.raises(Overloaded, match="other grammars"):
                made.run(f"owner {number}", "schema", lambda: "never")
            monkeypatch.setattr(module, "SECONDS", TIMEOUT)
            assert made.run("other", "schema", lambda: 3) == 3
            monkeypatch.setattr(module, "SECONDS", 0.0)
    with pytest.raises(Overloaded, match="other grammars"):
        made.run("other", "schema", lambda: "never")
    made.check()
    for work in works:
        work.gate.set()
    monkeypatch.setattr(module, "SECONDS", TIMEOUT)
    assert made.run("owner 0", "schema", lambda: 4) == 4


def test_one_owner_cannot_be_all_that_waits(threads) -> None:
    made, first = Compiling(), Slow()
    asked = [ask(threads, made, "a", first)]
    assert first.started.wait(TIMEOUT)
    rest = Slow()
    rest.gate.set()
    asked += [threads.submit(made.run, "a", "schema", rest) for _ in range(WAITING // 2)]
    waits(made, WAITING // 2)
    with pytest.raises(Overloaded, match="too many requests wait"):
        made.run("a", "schema", rest)
    assert made.run("b", "schema", lambda: 1) == 1
    first.gate.set()
    assert {one.result(TIMEOUT) for one in asked} == {"done"}
    made.check()


def test_errors_of_the_work_are_raised_to_its_caller_and_leave_no_turn_taken() -> None:
    made = Compiling()

    def fails() -> None:
        raise KeyError("of the work")

    for _ in range(3 * AT_ONCE):
        with pytest.raises(KeyError, match="of the work"):
            made.run("a", "schema", fails)
    made.check()


def test_a_panic_of_the_work_is_an_exception_without_its_text() -> None:
    broken = Tokenizer(models.BPE({"a": 0}, []))
    broken.pre_tokenizer = pre_tokenizers.FixedLength(0)
    made = Compiling()
    with pytest.raises(NativePanic, match=r"^the compiler of grammars has panicked$"):
        made.run("a", "schema", lambda: broken.encode("a"))
    made.check()


def test_a_thread_that_cannot_start_is_an_overload_and_leaves_no_turn_taken(monkeypatch) -> None:
    made = Compiling()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        for _ in range(3 * AT_ONCE):
            with pytest.raises(Overloaded, match="no memory for a thread"):
                made.run("a", "schema", lambda: 1)
    assert made.run("a", "schema", lambda: 1) == 1
    assert threading.stack_size() == 0
