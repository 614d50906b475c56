"""Reads that neither return nor fail: requests compute what was not read, and do not wait for that tier again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.engine.core.loop import Loop
from kvcellar.frontend.result import Collector
from kvcellar.frontend.thread_client import LOOK
from kvcellar.memory.restore_plan import LONGEST, SHORTEST, SLACK, Part, Planner
from kvcellar.memory.restores import Fetch, Restores
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.admission import Piece
from tests.engine.places import eventually
from tests.engine.test_store import GREEDY, conversation, opened, saved  # noqa: F401
from tests.engine.tiered import settled, store_of

SOON = 120.0  # seconds after which a test fails


@dataclass
class Clock:
    """The clock of a store and its transfers, which moves when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Hanging:
    """`get` of a tier that waits until `go` is set. `inside` counts the calls that have begun."""

    get: Any
    go: threading.Event = field(default_factory=threading.Event)
    inside: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    calls: int = 0

    def __call__(self, key: bytes, take: Any) -> Any:
        self.calls += 1
        self.inside.release()
        assert self.go.wait(SOON)
        return self.get(key, take)


@pytest.fixture(autouse=True)
def restores(monkeypatch) -> None:
    """What is stored is restored, however fast this machine computes it again."""
    monkeypatch.setattr(Planner, "speed", lambda self: None)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "clock", clock)
    return clock


@contextmanager
def hangs(engine: Engine) -> Iterator[Hanging]:
    disk = store_of(engine).transfers.tiers[0]
    disk.get = hanging = Hanging(disk.get)
    try:
        yield hanging
    finally:
        hanging.go.set()


def begun(engine: Engine, prompt: list[int]) -> Collector:
    collector = Collector(1)
    engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
    return collector


def stepped(engine: Engine) -> None:
    """Wait until the engine has looked at the waiting requests once more."""
    loop, done = engine._loop, threading.Event()

    def once() -> None:
        Loop._step(loop)
        del loop.__dict__["_step"]
        done.set()

    loop.call(lambda: setattr(loop, "_step", once))
    assert done.wait(SOON)


def test_a_read_that_hangs_ends_the_restore_and_frees_its_bytes_when_it_returns(saved, tmp_path, clock) -> None:  # noqa: F811
    prompt = next(conversation("hangs", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        engine.clear_cache()
        transfers = store_of(engine).transfers
        with hangs(engine) as disk:
            first = begun(engine, prompt)
            assert disk.inside.acquire(timeout=SOON)
            clock.now += 0.9 * SHORTEST
            stepped(engine)
            assert engine.stats().waiting == 1, "it did not wait as long as it should"
            clock.now += 0.2 * SHORTEST
            stepped(engine)
            found = first.result()
            assert (found.token_ids, found.recall.restored, found.recall.sources) == (wanted, 0, ())
            assert found.recall.reason == "tier unavailable"
            assert "199 stored tokens were not read: the disk tier did not end for 5.5 s" in found.recall.detail
            assert transfers.staged() > 0, "the bytes of a read that goes on were freed"
            tier = engine.stats().store.tier("disk")
            assert (tier.down, tier.failures) == (True, {"too slow": 1})
            engine.clear_cache()
            again = begun(engine, prompt).result()
            assert (again.token_ids, again.recall.reason) == (wanted, "tier unavailable")
            assert "in tiers that have failed or were too slow" in again.recall.detail
            assert disk.calls == 1, "a tier that hangs was read again"
        settled(engine)
        clock.now += 2.0
        engine.clear_cache()
        last = begun(engine, prompt).result()
        assert (last.token_ids, dict(last.recall.sources)) == (wanted, {"disk": 199})
        settled(engine)


def test_an_engine_that_only_waits_for_a_read_wakes_by_itself(saved, tmp_path, clock) -> None:  # noqa: F811
    prompt = next(conversation("wakes", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, **GREEDY)
        settled(engine)
        engine.clear_cache()
        awake, waits = engine._loop._device._awake, []

        def wait(timeout: float | None) -> bool:
            waits.append(timeout)
            if timeout is not None:  # as if the time had passed
                clock.now += timeout
                timeout = 0.0
            return awake.wait(timeout)

        fake = SimpleNamespace(wait=wait, set=awake.set, clear=awake.clear)
        with hangs(engine):
            engine._loop.call(lambda: setattr(engine._loop._device, "_awake", fake))
            assert begun(engine, prompt).result().recall.reason == "tier unavailable"
            timed = [timeout for timeout in waits if timeout is not None]
            assert timed
            assert max(timed) <= SHORTEST
            del waits[:]
            engine.generate([5, 6, 7], **GREEDY)
            stepped(engine)
            eventually(lambda: waits[-1:] == [None], "an engine that has nothing to do, and has told so, sleeps")
            assert all(timeout is None or timeout <= LOOK for timeout in waits)
        settled(engine)


def test_a_restore_that_finds_no_staging_memory_ends_too(saved, tmp_path, clock) -> None:  # noqa: F811
    prompt = next(conversation("short", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        engine.clear_cache()
        transfers = store_of(engine).transfers
        fetch, transfers.fetch = transfers.fetch, lambda snapshot: None
        first = begun(engine, prompt)
        stepped(engine)
        assert engine.stats().waiting == 1
        clock.now += SHORTEST
        stepped(engine)
        found = first.result()
        assert (found.token_ids, found.recall.reason) == (wanted, "tier unavailable")
        assert "no staging memory" in found.recall.detail
        assert not engine.stats().store.tier("disk").down
        transfers.fetch = fetch
        engine.clear_cache()
        assert dict(begun(engine, prompt).result().recall.sources) == {"disk": 199}
        settled(engine)


def test_patience_is_within_its_bounds_and_grows_with_what_it_would_save() -> None:
    planner = Planner.__new__(Planner)

    def patience(*pieces: Piece, speed: float | None) -> float:
        planner.speed = lambda: speed
        return planner.patience([Part(None, 0, 0, piece) for piece in pieces])

    assert patience(Piece(100, 0.0), speed=None) == SHORTEST
    assert patience(Piece(100, 0.0), speed=1e6) == SHORTEST
    assert patience(Piece(100, 0.0), Piece(900, 0.0), speed=100.0) == pytest.approx(10.0)
    assert patience(Piece(100, 3.0), Piece(100, 9.0), speed=None) == SLACK * 3.0
    assert patience(Piece(10**6, 1e6), speed=1.0) == LONGEST


def test_a_read_that_ends_when_it_is_given_up_is_used(saved, tmp_path, clock, monkeypatch) -> None:  # noqa: F811
    prompt = next(conversation("race", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        engine.clear_cache()
        with hangs(engine) as disk:
            first = begun(engine, prompt)
            assert disk.inside.acquire(timeout=SOON)
            clock.now += 2 * SHORTEST
            real = Restores._patience

            def patience(self: Restores, fetch: Fetch, waited: float | None) -> float:
                if fetch.reads and waited is not None:  # the read ends now, on its thread
                    disk.go.set()
                    assert self._staged[fetch.reads[0].snapshot.key].transfer.ended.wait(SOON)
                return real(self, fetch, waited)

            monkeypatch.setattr(Restores, "_patience", patience)
            stepped(engine)
            found = first.result()
        assert (found.token_ids, dict(found.recall.sources)) == (wanted, {"disk": 199})
        assert not engine.stats().store.tier("disk").down
        settled(engine)


def test_a_tier_that_fails_is_the_reason_of_the_record(saved, tmp_path, clock) -> None:  # noqa: F811
    prompt = next(conversation("fails", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = engine.generate(prompt, **GREEDY).token_ids
        settled(engine)
        engine.clear_cache()

        def get(key: bytes) -> None:
            raise OSError(5, "Input/output error")

        store_of(engine).transfers.tiers[0].get = get
        found = begun(engine, prompt).result()
        assert (found.token_ids, found.recall.reason) == (wanted, "tier unavailable")
        assert "199 stored tokens could not be read" in found.recall.detail
        settled(engine)


def test_how_long_one_request_finds_no_staging_memory_does_not_count_for_another(saved, tmp_path, clock) -> None:  # noqa: F811
    prompt = next(conversation("stale", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, **GREEDY)
        settled(engine)
        engine.clear_cache()
        transfers = store_of(engine).transfers
        fetch, transfers.fetch = transfers.fetch, lambda snapshot: None
        gone = Collector(1)
        ticket = engine.submit(prompt, engine.params(**GREEDY), deliver=gone.deliver)
        stepped(engine)
        ticket.cancel()
        stepped(engine)
        clock.now += 100.0
        second = begun(engine, prompt)
        stepped(engine)
        assert engine.stats().waiting == 1, "it was given up at once"
        transfers.fetch = fetch
        clock.now += 100.0
        stepped(engine)
        second.result()
        settled(engine)
