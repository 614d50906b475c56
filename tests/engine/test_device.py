"""One thread steps all engines on a device."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.engine.core.device import DeviceThread
from kvcellar.errors import EngineClosed, EngineFailed, WrongStage
from kvcellar.frontend.result import Collector
from tests.zoo import ARCHS

PATIENCE = 240
GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}


class Worker:
    """Has `left` turns to do, then waits for a call; ends when `ending` is set."""

    threads = 1

    def __init__(self, name: str, log: list[tuple[str, int]], left: int = 0) -> None:
        self.name, self.left, self._log = name, left, log
        self.ended, self.ending = False, False
        self.turned = threading.Semaphore(0)

    def turn(self) -> float | None:
        self._log.append((self.name, threading.get_ident()))
        self.turned.release()
        if self.ending:
            self.ended = True
            return None
        if self.left:
            self.left -= 1
            return 0.0
        return None


def end(thread: DeviceThread, *workers: Worker) -> None:
    for worker in workers:
        worker.ending = True
    thread.wake()
    for worker in workers:
        thread.wait_for(worker)


def test_engines_that_have_work_are_stepped_in_turn_by_one_thread() -> None:
    thread, log = DeviceThread(), []
    go = threading.Event()
    first, second = Worker("a", log, 1000), Worker("b", log, 1000)
    first.turn = lambda: go.wait(PATIENCE) and Worker.turn(first)  # type: ignore[method-assign]
    thread.add(first)
    thread.add(second)
    go.set()
    for _ in range(1000):
        assert first.turned.acquire(timeout=PATIENCE)
        assert second.turned.acquire(timeout=PATIENCE)
    thread.check()
    end(thread, first, second)
    names, threads = zip(*log, strict=True)
    assert len(set(threads)) == 1
    assert names[names.index("b") :][:1998] == ("b", "a") * 999
    thread.check()


def test_an_engine_that_has_nothing_to_do_is_called_again_only_after_a_wake() -> None:
    thread, log = DeviceThread(), []
    worker = Worker("a", log, 3)
    thread.add(worker)
    for _ in range(4):
        assert worker.turned.acquire(timeout=PATIENCE)
    assert len(log) <= 5  # once more, as the thread may have begun before the wake of `add`
    seen = len(log)
    thread.wake()
    assert worker.turned.acquire(timeout=PATIENCE)
    assert len(log) <= seen + 2
    end(thread, worker)


def test_the_thread_ends_with_its_last_engine_and_a_later_one_has_another() -> None:
    thread, log = DeviceThread(), []
    idents = []
    for _ in range(3):
        before = threading.active_count()
        first, second = Worker("a", log), Worker("b", log)
        thread.add(first)
        thread.add(second)
        end(thread, first)
        assert thread.runs(second)
        assert not thread.runs(first)
        end(thread, second)
        assert not thread.runs(second)
        assert threading.active_count() == before
        thread.check()
        idents.append(log[-1][1])
    assert len(idents) == 3


@pytest.fixture
def pair():
    thread = DeviceThread()
    with (
        Engine(ARCHS["llama"].build(), cache_bytes=400_000, threads=1, thread=thread) as first,
        Engine(ARCHS["lfm2"].build(), cache_bytes=4_000_000, threads=1, thread=thread) as second,
    ):
        yield first, second
    thread.check()


def answers(engines: tuple[Engine, Engine]) -> list[list[list[int]]]:
    """Of three prompts to each, all running together."""
    collectors = []
    for engine in engines:
        params = engine.params(max_tokens=20, **GREEDY)
        collectors.append([Collector(1) for _ in range(3)])
        for number, collector in enumerate(collectors[-1]):
            engine.submit([5, 6, 7 + number], params, deliver=collector.deliver)
    return [[collector.result().token_ids for collector in some] for some in collectors]


def test_two_engines_on_one_thread_answer_as_each_does_alone(pair) -> None:
    together = answers(pair)
    idents = {engine._loop.call(threading.get_ident) for engine in pair}
    assert len(idents) == 1
    for engine, found in zip(pair, together, strict=True):
        alone = [engine.generate([5, 6, 7 + number], max_tokens=20, **GREEDY).token_ids for number in range(3)]
        assert found == alone
        engine.check()


def test_an_engine_that_ends_leaves_the_others_on_its_thread_as_they_were(pair, monkeypatch) -> None:
    first, second = pair
    wanted = second.generate([5, 6], max_tokens=30, **GREEDY).token_ids
    collector = Collector(1)
    second.submit([5, 6], second.params(max_tokens=30, **GREEDY), deliver=collector.deliver)
    monkeypatch.setattr(first._loop.scheduler, "schedule", lambda: 1 // 0)
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        first.generate([5])
    first._loop._device.wait_for(first._loop)
    assert (first.healthy, second.healthy) == (False, True)
    assert collector.result().token_ids == wanted
    second.close()
    with pytest.raises(EngineClosed):
        second.generate([5])


def test_a_receiver_must_not_wait_for_another_engine_of_its_thread(pair) -> None:
    first, second = pair
    errors: list[Exception] = []
    done = threading.Event()

    def waits(event: object) -> None:
        try:
            second.stats()
        except WrongStage as error:
            errors.append(error)
        done.set()

    first.submit([5, 6], first.params(max_tokens=2), deliver=waits)
    assert done.wait(PATIENCE)
    assert "must not wait" in str(errors[0])


def test_nothing_refers_to_an_engine_that_has_ended() -> None:
    thread = DeviceThread()
    own: Any = {"cache_bytes": 400_000, "threads": 1, "thread": thread}
    with Engine(ARCHS["llama"].build(), **own) as first:
        second = Engine(ARCHS["llama"].build(), **own)
        second.generate([5, 6], max_tokens=2, **GREEDY)
        network, loop = weakref.ref(second._built.loaded.model), weakref.ref(second._loop)
        second.close()
        del second
        until = time.monotonic() + PATIENCE
        while (network() is not None or loop() is not None) and time.monotonic() < until:
            gc.collect()  # modules are in cycles
        assert (network(), loop()) == (None, None), "the thread, which is idle, holds the engine"
        assert first.healthy


def test_the_tiers_of_an_engine_are_closed_by_the_thread_that_closes_it(tmp_path, monkeypatch) -> None:
    ARCHS["llama"].build().save_pretrained(tmp_path / "model")
    closed: list[int] = []
    thread = DeviceThread()
    own: Any = {"cache_bytes": 4_000_000, "threads": 1, "thread": thread}
    with (
        Engine(ARCHS["llama"].build(), **own) as other,
        Engine(tmp_path / "model", store=str(tmp_path / "store"), **own) as engine,
    ):
        engine.generate(list(range(5, 95)), max_tokens=4, **GREEDY)
        transfers = engine._loop.manager.store.transfers
        close = transfers.close
        monkeypatch.setattr(transfers, "close", lambda seconds: closed.append(threading.get_ident()) or close(seconds))
        engine.close()
        assert closed == [threading.get_ident()]
        engine.close()
        assert len(closed) == 1
        assert other.healthy
    with Engine(tmp_path / "model", store=str(tmp_path / "store"), **own) as engine:
        assert engine.generate(list(range(5, 95)), max_tokens=1, **GREEDY).recall.restored > 0
