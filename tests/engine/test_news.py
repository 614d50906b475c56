"""Servers that share a directory: each uses what the others have stored since it started."""

import random
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from kvcellar.memory import restore_plan as news_module
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.restore_plan import NEXT_LOOK, PATIENCE, News
from kvcellar.memory.retention import Retention
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.tier import Entry
from tests.engine.mixes import tokens
from tests.engine.test_store import GREEDY, acknowledged, always, cache, opened, own_cache, saved  # noqa: F401
from tests.tiers.made import IDENTITY, made, store
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name
from tests.tiers.test_transfers import SOON, transfers


def keys(entries: list[Entry]) -> set[bytes]:
    return {entry.snapshot.key for entry in entries}


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
            assert one.news() == []
            assert other.put(*made(2))
            assert other.shared
            assert other.put(*made(3, made(2)[0]))
            assert other.put(*made(4), Retention(expires=5.0))
            assert third.put(*made(5))
            now[0] = 5.0
            assert keys(one.news()) == {made(2)[0].key, made(3, made(2)[0])[0].key}
            assert one.news() == []
            assert one.put(*made(6))
            assert one.news() == [], "what it has stored itself is no news"
            other.remove([made(2)[0].key])
            assert one.news() == []
            assert IDENTITY != bytes(32)


class Machine:
    """News of a tier whose `news` waits until `go` is set, with the calls for the engine's thread."""

    def __init__(self, opened, disk) -> None:
        self.now, self.go, self.looked = 0.0, threading.Event(), 0
        self.calls: list[Callable[[], None]] = []
        self.posted = threading.Semaphore(0)
        look = disk.news

        def waits() -> list[Entry]:
            self.looked += 1
            assert self.go.wait(SOON)
            return look()

        disk.news = waits
        self.news = News(
            opened,
            post=lambda call: (self.calls.append(call), self.posted.release()),
            clock=lambda: self.now,
        )

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
        machine = Machine(opened, disk)
        news = machine.news
        assert news.ask(lambda: False) is None
        look = news.ask(lambda: True)
        assert news.ask(lambda: True) is look
        assert news.waits(look)
        assert 0 < news.left() <= PATIENCE
        assert other.put(*made(1))
        machine.end()
        assert list(catalogue) == [made(1)[0]]
        assert not news.waits(look)
        assert news.left() == float("inf")
        assert news.ask(lambda: True) is None, "the last one was just now"
        machine.now = NEXT_LOOK
        again = news.ask(lambda: True)
        assert again is not look
        machine.end()
        assert list(catalogue) == [made(1)[0]], "there was nothing new"
        assert machine.looked == 2


def test_a_disk_that_hangs_delays_requests_once(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)), closing(store(tmp_path)) as disk, transfers(disk) as opened:
        machine = Machine(opened, disk)
        look = machine.news.ask(lambda: True)
        assert machine.news.waits(look)
        machine.now = PATIENCE
        assert not machine.news.waits(look)
        later = machine.news.ask(lambda: True)
        assert later is look
        assert not machine.news.waits(later), "what hangs is not waited for again"
        machine.end()


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_asked_where_no_disk_is_shared(tmp_path, alone) -> None:  # noqa: F811
    with closing(store(tmp_path)) as disk, transfers(disk if alone else HostTier(1000)) as opened:
        news = News(opened, post=lambda call: None, clock=lambda: 0.0)
        assert news.ask(lambda: True) is None


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
