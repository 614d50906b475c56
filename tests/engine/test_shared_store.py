"""A store that replicas share: each restores what any other has computed, at once, and one writes it for all."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import Engine, RetentionOptions
from kvcellar.memory import restore_plan
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.tiers import remote
from kvcellar.memory.tiers.objects import DirectoryObjects, RedisObjects
from tests.engine.mixes import tokens
from tests.engine.test_restores import until
from tests.engine.test_store import GREEDY, acknowledged, always, cache, kept, opened, saved  # noqa: F401
from tests.engine.tiered import store_of
from tests.tiers.redis_server import BINARY, RedisServer

KINDS = ["llama", "gemma3", "lfm2", "mamba2"]  # full, sliding, hybrid, recurrent
needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """A request waits for its look, however slow the machine is."""
    monkeypatch.setattr(restore_plan, "PATIENCE", 240.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket is short
        running = RedisServer(Path(directory))
        running.start()
        yield running
        running.kill()


@pytest.fixture(params=["directory", pytest.param("redis", marks=needs_server)])
def url(request, tmp_path) -> str:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    return f"file://{tmp_path}/shared" if request.param == "directory" else request.getfixturevalue("server").url


class Calls:
    """Counts those to stores elsewhere."""

    def __init__(self, monkeypatch) -> None:
        self.made: list[str] = []
        for kind in (RedisObjects, DirectoryObjects):
            for name in ("read", "write", "delete", "names", "add", "members", "strike"):
                monkeypatch.setattr(kind, name, self._counted(name, getattr(kind, name)))

    def _counted(self, name, call):
        def counted(objects, *arguments):
            self.made.append(name)
            return call(objects, *arguments)

        return counted


def asked(engine: Engine, prompt, **how) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and how many of the prompt came from the store elsewhere."""
    found = engine.generate(prompt, **GREEDY, **how)
    assert found.recall is not None
    return found.token_ids, dict(found.recall.sources).get("remote", 0)


@pytest.mark.parametrize("name", KINDS)
def test_what_one_has_computed_another_restores_and_answers_alike(saved, url, name, monkeypatch) -> None:  # noqa: F811
    calls, draw = Calls(monkeypatch), random.Random(f"{name} {url}")
    prompt = tokens(draw, 560)
    with (
        opened(saved[name], None, store_remote=url) as one,
        opened(saved[name], None, store_remote=url) as two,
        opened(saved[name], None) as cold,
    ):
        for engine, least in ((one, 0), (two, 550)):
            found, restored = asked(engine, prompt)
            assert found == asked(cold, prompt)[0]
            acknowledged(engine)
            engine.check()
            assert restored >= least
            prompt = (*prompt, *found, *tokens(draw, 130))
        with opened(saved[name], None, store_remote=url) as third:
            assert asked(third, prompt)[1] >= 680, "a replica that starts is warm"
    assert "names" not in calls.made


def test_what_a_look_finds_is_read_while_the_request_waits_for_its_turn(saved, url) -> None:  # noqa: F811
    prompt = tokens(random.Random(f"ahead {url}"), 300)
    with opened(saved["llama"], None, store_remote=url) as one, opened(saved["llama"], None, store_remote=url) as two:
        asked(one, prompt)
        acknowledged(one)
        restores, loop, key = store_of(two).restores, two._loop, key_of(prompt)
        fetch = loop.call(lambda: restores.prefetch("", lambda: key))
        looks = list(fetch.looks)
        until(lambda: all(look.ended for look in looks), "the look does not end")
        assert looks
        assert not fetch.reads
        loop.call(lambda: restores.advance(fetch, lambda: key, enters=False))
        assert fetch.node is None
        assert fetch.missing >= 250
        assert fetch.reads, "it is not read ahead"
        loop.call(lambda: restores.end(fetch))


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_both_have_computed_is_written_once(saved, url, name, monkeypatch) -> None:  # noqa: F811
    draw = random.Random(f"both {name} {url}")
    prompt = tokens(draw, 600)
    with opened(saved[name], None, store_remote=url) as one, opened(saved[name], None, store_remote=url) as two:
        monkeypatch.setattr(restore_plan, "LEAST", 10**6)  # nothing is looked up
        calls = Calls(monkeypatch)
        asked(one, prompt)
        acknowledged(one)
        first, calls.made[:] = calls.made.count("write"), []
        assert first > 1
        asked(two, prompt)
        acknowledged(two)
        assert calls.made.count("write") == 0
        assert {entry.snapshot for entry in store_of(one).transfers.tiers[-1].entries()} == {
            entry.snapshot for entry in store_of(two).transfers.tiers[-1].entries()
        }


def test_replicas_with_one_key_share_and_others_find_nothing(saved, url) -> None:  # noqa: F811
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    prompt = tokens(random.Random(url), 300)
    with (
        opened(saved["llama"], None, store_remote=url, store_key=bytes(32)) as one,
        opened(saved["llama"], None, store_remote=url, store_key=bytes(32)) as two,
        opened(saved["llama"], None, store_remote=url, store_key=bytes([1]) * 32) as other,
        opened(saved["llama"], None, store_remote=url) as plain,
    ):
        asked(one, prompt)
        acknowledged(one)
        assert asked(two, prompt)[1] == 299
        assert asked(other, prompt)[1] == 0
        assert asked(plain, prompt)[1] == 0


def test_what_is_removed_for_all_is_found_by_none(saved, url, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(remote, "NEXT_LOOK", 0.0)
    monkeypatch.setattr(restore_plan, "NEXT_LOOK", 0.0)
    prompt = tokens(random.Random(f"removed {url}"), 300)
    with opened(saved["llama"], None, store_remote=url) as one, opened(saved["llama"], None, store_remote=url) as two:
        asked(one, prompt, retention=RetentionOptions(owner="a"))
        acknowledged(one)
        assert two.cache.remove(prefix=prompt[:5]).stored > 0
        assert asked(two, prompt)[1] == 0
