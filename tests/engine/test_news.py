"""Servers that share a directory: each uses what the others have stored since it started."""

import random
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from kvcellar.memory import restore_plan as news_module
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.restore_plan import NEXT_LOOK, PATIENCE, Look, News
from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.remote import RemoteTier
from kvcellar.memory.tiers.tier import Entry
from tests.engine.mixes import tokens
from tests.engine.test_store import GREEDY, acknowledged, always, cache, opened, own_cache, saved  # noqa: F401
from tests.tiers.in_memory import InMemory
from tests.tiers.made import IDENTITY, made, store
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name
from tests.tiers.test_transfers import SOON, transfers


def keys(entries: list[Entry]) -> set[bytes]:
    return {entry.snapshot.key for entry in entries}


class Reports:
    """The catalogue of a tier: what it was told of since it was asked last."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier, self._told = tier, set[bytes]()
        tier.catalogue = self

    def stored(self, tier: str, snapshot: Snapshot, retention: Retention) -> None:
        self._told.add(snapshot.key)

    def removed(self, tier: str, key: bytes, why: str) -> None: ...

    def of(self, key: bytes) -> frozenset[str]:
        raise NotImplementedError

    def after_a_look(self) -> set[bytes]:
        self._told.clear()
        self._tier.look("", b"", [])
        return self._told.copy()


def test_a_tier_reports_each_entry_of_other_processes_once(tmp_path) -> None:  # noqa: F811
    now = [0.0]
    with closing(store(tmp_path)) as other:
        assert other.put(*made(1))
        assert not other.shared
        with (
            closing(store(tmp_path, clock=lambda: now[0])) as one,
            closing(store(tmp_path, identity=bytes(32))) as third,
        ):
            assert one.shared
            assert keys(one.entries()) == {made(1)[0].key}
            reports = Reports(one)
            assert not reports.after_a_look()
            assert other.put(*made(2))
            assert other.shared
            assert other.put(*made(3, made(2)[0]))
            assert other.put(*made(4), Retention(expires=5.0))
            assert third.put(*made(5))
            now[0] = 5.0
            assert reports.after_a_look() == {made(2)[0].key, made(3, made(2)[0])[0].key}
            assert not reports.after_a_look()
            assert one.put(*made(6))
            assert not reports.after_a_look(), "what it has stored itself is no news"
            other.remove([made(2)[0].key])
            assert not reports.after_a_look()
            assert IDENTITY != bytes(32)


class Machine:
    """News of a tier that waits in `look` until `go` is set, with the calls for the engine's thread."""

    def __init__(self, opened, tier, catalogue=None) -> None:
        self.now, self.go, self.looked = 0.0, threading.Event(), 0
        self.calls: list[Callable[[], None]] = []
        self.posted = threading.Semaphore(0)
        look = tier.look

        def waits(*text: Any, **how: Any) -> None:
            self.looked += 1
            assert self.go.wait(SOON)
            look(*text, **how)

        tier.look = waits
        self.news = News(
            opened,
            catalogue or Catalogue(anywhere=True),
            post=lambda call: (self.calls.append(call), self.posted.release()),
            clock=lambda: self.now,
        )

    def ask(self, text: bytes = b"", *, misses: bool = True) -> list[Look]:
        return self.news.ask("n", lambda: text, lambda: misses)

    def end(self) -> None:
        self.go.set()
        assert self.posted.acquire(timeout=SOON)
        self.calls.pop()()
        self.go.clear()


def test_one_look_serves_all_requests_that_miss_and_the_next_one_is_later(tmp_path) -> None:  # noqa: F811
    catalogue = Catalogue(anywhere=True)
    with (
        closing(store(tmp_path)) as other,
        closing(store(tmp_path)) as disk,
        transfers(disk, catalogue=catalogue) as opened,
    ):
        machine = Machine(opened, disk, catalogue)
        assert machine.ask(misses=False) == []
        looks = machine.ask(b"one")
        assert machine.ask(b"another") == looks
        assert len(looks) == 1
        assert machine.news.left(looks) == PATIENCE
        assert other.put(*made(1))
        machine.end()
        assert list(catalogue) == [made(1)[0]]
        assert machine.news.left(looks) == 0
        assert machine.ask() == [], "the last one was just now"
        machine.now = NEXT_LOOK
        assert machine.ask() != looks
        machine.end()
        assert list(catalogue) == [made(1)[0]], "there was nothing new"
        assert machine.looked == 2


def test_a_store_elsewhere_is_looked_into_once_for_each_text() -> None:
    tier = RemoteTier(InMemory(), identity=IDENTITY, cap=1 << 20)
    with transfers(tier) as opened:
        machine = Machine(opened, tier)
        texts = [key_of([number] * 100) for number in range(3)]
        looks = [machine.ask(text) for text in texts]
        assert [machine.ask(text) for text in texts] == looks
        assert len({id(look) for (look,) in looks}) == 3
        for _ in texts:
            machine.end()
        assert [machine.ask(text) for text in texts] == [[], [], []]
        machine.now = NEXT_LOOK
        assert len(machine.ask(texts[0])) == 1
        assert len(machine.news._looks[0]) == 1, "what is over is forgotten"
        machine.end()


def test_all_shared_tiers_are_looked_into_and_the_last_one_is_waited_for(tmp_path) -> None:  # noqa: F811
    tier = RemoteTier(InMemory(), identity=IDENTITY, cap=1 << 20)
    with closing(store(tmp_path)), closing(store(tmp_path)) as disk, transfers(disk, tier) as opened:
        machine = Machine(opened, tier)
        looks = machine.ask(b"")
        assert len(looks) == 2
        assert machine.posted.acquire(timeout=SOON)
        machine.calls.pop()()  # the disk's
        assert [look.ended for look in looks] == [True, False]
        assert machine.news.left(looks) == PATIENCE
        machine.end()
        assert machine.news.left(looks) == 0


def test_a_tier_that_hangs_delays_requests_once(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)), closing(store(tmp_path)) as disk, transfers(disk) as opened:
        machine = Machine(opened, disk)
        looks = machine.ask()
        assert machine.news.left(looks) == PATIENCE
        machine.now = PATIENCE
        assert machine.news.left(looks) == 0
        assert machine.ask() == [], "what hangs is not waited for again"
        machine.end()
        assert len(machine.ask()) == 1
        machine.end()


def test_a_look_that_fails_for_an_unknown_reason_is_over() -> None:
    tier = RemoteTier(InMemory(), identity=IDENTITY, cap=1 << 20)
    with transfers(tier) as opened:
        tier.look = lambda *text, **how: 1 / 0
        machine = Machine(opened, tier)
        looks = machine.ask(b"")
        machine.end()
        assert machine.news.left(looks) == 0


def test_a_look_that_no_request_waits_for_any_more_calls_no_store() -> None:
    objects = InMemory()
    tier = RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    with transfers(tier) as opened:
        machine = Machine(opened, tier)
        machine.ask(key_of([1] * 100))
        machine.now = PATIENCE
        machine.end()
        assert not objects.calls


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_asked_where_no_tier_is_shared(tmp_path, alone) -> None:  # noqa: F811
    with closing(store(tmp_path)) as disk, transfers(disk if alone else HostTier(1000)) as opened:
        news = News(opened, Catalogue(anywhere=True), post=lambda call: None, clock=lambda: 0.0)
        assert news.ask("", lambda: b"", lambda: True) == []


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_conversation_moves_between_engines_that_run(saved, tmp_path, monkeypatch, name) -> None:  # noqa: F811
    monkeypatch.setattr(news_module, "PATIENCE", 240.0)
    monkeypatch.setattr(news_module, "NEXT_LOOK", 0.0)
    draw = random.Random(name)
    prompt, restored = tokens(draw, 200), {}
    with opened(saved[name], tmp_path) as one, opened(saved[name], tmp_path) as two, opened(saved[name], None) as cold:
        for turn in range(4):
            engine = (one, two)[turn % 2]
            found = engine.generate(prompt, **GREEDY).token_ids
            assert found == cold.generate(prompt, **GREEDY).token_ids
            acknowledged(engine)
            engine.check()
            if turn:
                assert engine.stats().store.restored >= restored.get(turn % 2, 0) + 150, (
                    "of what the other has computed"
                )
            restored[turn % 2] = engine.stats().store.restored
            prompt = (*prompt, *found, *tokens(draw, 200))
