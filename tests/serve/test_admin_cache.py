"""The routes below /admin/cache list, remove, verify, export and import what a server has, while it serves."""

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import BadRequest, Engine
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.upkeep import exported
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.mixes import small_engine, tokens
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE
from tests.serve.wire import error_of
from tests.zoo import ARCHS

ADMIN = "an-admin-key-of-the-server"
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


@contextmanager
def served(engine: Engine, **more: float) -> Iterator[httpx.Client]:
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),), **more)
    headers = {"authorization": f"Bearer {ADMIN}"}
    with Server(engine, settings) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE, headers=headers) as http:
            yield http


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name in ("llama", "lfm2"):
        made[name] = tmp_path_factory.mktemp(name)
        ARCHS[name].build(max_position_embeddings=2048).save_pretrained(made[name])
    return made


def stored_engine(model: Path, directory: Path) -> Engine:
    return Engine(model, dtype="float32", cache_bytes=8_000_000, threads=1, store=str(directory))


def prompt(seed: int, n: int = 100) -> list[int]:
    return list(tokens(random.Random(seed), n))


def written(engine: Engine) -> None:
    while engine.stats().store.unwritten:
        time.sleep(0.005)


def stored(engine: Engine) -> int:
    """Entries on disk, of all models."""
    return sum(one["entries"] for one in engine.cache.disk.totals)


def done(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def post(http: httpx.Client, verb: str, **body: object) -> Any:
    return done(http.post(f"/admin/cache/{verb}", json=body))


def listed(http: httpx.Client, **query: object) -> list[dict[str, Any]]:
    found = done(http.get("/admin/cache/tree", params=query))
    assert not found["more"]
    return found["entries"]


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_entries_are_listed_and_counted(name) -> None:
    with small_engine(name) as engine, served(engine) as http:
        first, second = prompt(1), [*prompt(1)[:40], *prompt(2)]
        for text in (first, second, second):
            engine.generate(text, **GREEDY)
        entries = listed(http)
        assert {one["tier"] for one in entries} == {"device"}
        by_name = {one["name"]: one for one in entries}
        for one in entries:
            assert one["start"] == (by_name[one["parent"]]["end"] if one["parent"] else 0)
        root = next(one for one in entries if not one["parent"])
        assert root["tokens"] == first[:16]
        (namespace,) = done(http.get("/admin/cache"))["device"]["namespaces"]
        assert namespace["tokens"] == sum(one["end"] - one["start"] for one in entries)
        assert namespace["bytes"] > 0
        assert namespace["in_use"] == 0
        hottest = done(http.get("/admin/cache/hot?limit=1"))
        assert hottest == {"entries": [max(entries, key=lambda one: one["value"])], "more": len(entries) > 1}
        some = done(http.get("/admin/cache/tree?limit=1"))
        assert (len(some["entries"]), some["more"]) == (1, len(entries) > 1)
        engine.check()


def test_what_is_removed_is_computed_again_and_the_rest_is_not() -> None:
    with small_engine("llama") as engine, served(engine) as http:
        texts = {number: prompt(number) for number in range(4)}
        for text in texts.values():
            engine.generate(text, **GREEDY)
        by_first = {one["tokens"][0]: one["name"] for one in listed(http)}
        assert post(http, "remove", entry=by_first[texts[0][0]])["tokens"] >= 100
        assert post(http, "remove", prefix=texts[1][:5])["tokens"] >= 100
        assert post(http, "remove", prefix=[*texts[2][:5], 3, 3, 3]) == {"tokens": 0, "stored": 0}
        assert post(http, "remove", entry="0" * 12) == {"tokens": 0, "stored": 0}
        cached = [engine.generate(text, **GREEDY).usage.cached_tokens for text in texts.values()]
        assert cached == [0, 0, 99, 99]
        assert post(http, "remove", namespace="another")["tokens"] == 0
        assert post(http, "remove", namespace="")["tokens"] > 300
        assert listed(http) == []
        response = http.post("/admin/cache/remove", json={})
        assert error_of(response)["message"] == "name what to remove: a namespace, an entry or a prefix"
        for body in ({"entry": 5}, {"entry": "0"}, {"prefix": ""}, {"prefix": []}):
            assert http.post("/admin/cache/remove", json=body).status_code == 400
        engine.check()
        assert engine.stats().cells_cached == 0


def test_what_a_running_request_uses_stays() -> None:
    text = prompt(1, 60)
    with small_engine("llama") as engine, served(engine) as http:
        stream = engine.stream(text, max_tokens=400, temperature=0.0, ignore_eos=True)
        next(iter(stream))
        post(http, "clear")
        engine.check()
        assert (engine.stats().running, len(listed(http))) == (1, 1)
        list(stream)
        assert post(http, "clear")["tokens"] > 60
        assert engine.stats().cells_cached == 0


def test_clearing_a_server_leaves_what_other_models_have_stored_unless_all_is_named(models, tmp_path) -> None:
    store = tmp_path / "store"
    with stored_engine(models["lfm2"], store) as other:
        other.generate(prompt(2), **GREEDY)
        written(other)
        theirs = stored(other)
    with stored_engine(models["llama"], store) as engine, served(engine) as http:
        engine.generate(prompt(1), **GREEDY)
        written(engine)
        assert stored(engine) == 1 + theirs
        assert post(http, "clear") == {"tokens": 101, "stored": 1}
        assert stored(engine) == theirs > 0
        assert post(http, "clear", all_models=True) == {"tokens": 0, "stored": theirs}
        assert stored(engine) == 0
        assert error_of(http.post("/admin/cache/clear", json={"all": True}))["param"] == "all"


def test_clearing_frees_memory_and_the_store(models, tmp_path) -> None:
    with stored_engine(models["llama"], tmp_path / "store") as engine, served(engine) as http:
        engine.generate(prompt(1), **GREEDY)
        written(engine)
        about = done(http.get("/admin/cache"))["store"]
        assert about["directory"] == str(tmp_path / "store")
        assert about["namespaces"][0]["tokens"] == 101
        assert [one["tokens"] for one in listed(http, tier="disk")] == [prompt(1)[:16]]
        assert post(http, "clear") == {"tokens": 101, "stored": 1}
        assert listed(http) == listed(http, tier="disk") == []
        assert engine.generate(prompt(1), **GREEDY).usage.cached_tokens == 0
        written(engine)
        assert post(http, "remove", prefix=prompt(1)[:3])["stored"] == 1
        assert list((tmp_path / "store" / "data").iterdir()) == []


def test_entries_of_other_models_are_not_removed(models, tmp_path) -> None:
    for name in ("lfm2", "llama"):
        with stored_engine(models[name], tmp_path) as engine:
            engine.generate(prompt(1), **GREEDY)
            written(engine)
            if name == "llama":
                assert engine.cache.remove(namespace="").stored == 1
                assert len(engine.cache.disk.totals) == 1


def test_damaged_entries_are_found_and_collected(models, tmp_path) -> None:
    with stored_engine(models["llama"], tmp_path) as engine, served(engine) as http:
        text = prompt(1)
        text = [*text, *engine.generate(text, **GREEDY).token_ids, *prompt(2)]
        written(engine)
        engine.generate(text, **GREEDY)
        written(engine)
        assert post(http, "verify")["damaged"] == 0
        first = next(one for one in listed(http, tier="disk") if one["start"] == 0)
        for file in (tmp_path / "data").iterdir():
            content = file.read_bytes()
            if content[28 + 32 :].startswith(bytes.fromhex(first["name"])):  # where its key is
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = post(http, "verify")
        assert (found["damaged"], found["read"]) == (1, len(listed(http, tier="disk")))
        assert post(http, "collect")["removed"] == found["read"]
        assert listed(http, tier="disk") == []


def test_an_archive_warms_another_server(models, tmp_path) -> None:
    text = prompt(1, 150)
    with stored_engine(models["llama"], tmp_path / "one") as engine, served(engine) as http:
        answer = engine.generate(text, **GREEDY).token_ids
        written(engine)
        archive = http.post("/admin/cache/export", json={}).content
    with stored_engine(models["llama"], tmp_path / "two") as engine, served(engine) as http:
        found = upload(http, archive)
        assert (found["refused"], found["stored"] > 0) == ({}, True)
        again = engine.generate(text, **GREEDY)
        assert (again.token_ids, again.usage.cached_tokens) == (answer, 149)
    with stored_engine(models["lfm2"], tmp_path / "three") as engine, served(engine) as http:
        found = upload(http, archive)
        (reason,) = found["refused"]
        assert found["stored"] == 0
        assert "other weights" in reason
        assert listed(http, tier="disk") == []


def upload(http: httpx.Client, archive: bytes) -> dict[str, Any]:
    parts = (archive[at : at + 50_000] for at in range(0, len(archive), 50_000))
    return done(http.post("/admin/cache/import", content=parts, headers={"content-type": "application/x-tar"}))


FORGED: dict[str, Callable[[Snapshot], Snapshot]] = {
    "a token that the model does not have": lambda one: replace(one, tokens=key_of([10**9] * len(one.span))),
    "a record of another kind": lambda one: replace(one, record=b'{"shape": 5}'),
    "a record that is no JSON": lambda one: replace(one, record=b"\xff" * 100),
}


@pytest.mark.parametrize("what", FORGED)
def test_an_archive_that_was_forged_is_refused_and_changes_nothing(models, tmp_path, what) -> None:
    """Its checksums are right: computing them needs no key."""
    text = prompt(1, 150)
    with stored_engine(models["llama"], tmp_path / "one") as engine, served(engine) as http:
        answer = engine.generate(text, **GREEDY).token_ids
        written(engine)
        store = engine._loop.manager.store
        loaded = store.disk.get(next(one.key for one in store.catalogue if one.parent is None))
        forger = DiskTier(tmp_path / "forged", identity=store.identity, max_bytes=1 << 20, share_of_free=1.0)
        assert forger.put(FORGED[what](loaded.snapshot), loaded.chunks)
        archive = b"".join(exported(forger))
        forger.close()
        http.post("/admin/cache/clear", json={})
        assert listed(http, tier="disk") == []
        found = upload(http, archive)
        assert found == {"stored": 0, "refused": {"its record or its tokens are not those of a snapshot": 1}}
        assert listed(http, tier="disk") == []
        assert len(store.catalogue) == 0
        again = engine.generate(text, **GREEDY)
        assert (again.token_ids, again.usage.cached_tokens) == (answer, 0)
        engine.check()


def test_what_is_no_archive_is_refused_while_it_arrives(models, tmp_path) -> None:
    with stored_engine(models["llama"], tmp_path) as engine, served(engine) as http:
        tar = {"content-type": "application/x-tar"}
        for content in (b"", b"no archive" * 10_000_000):
            response = http.post("/admin/cache/import", content=content, headers=tar)
            assert "is not an archive" in error_of(response)["message"]
        response = http.post("/admin/cache/import", content=b"", headers={"content-type": "text/plain"})
        assert response.status_code == 415
        assert http.post("/admin/cache/clear", content=b"").status_code == 415, "a web page could send that"


def test_an_archive_that_does_not_arrive_does_not_block_other_requests(models, tmp_path) -> None:
    with stored_engine(models["llama"], tmp_path) as engine, served(engine, body_seconds=0.2) as http:
        url = httpx.URL(str(http.base_url))
        with socket.create_connection((url.host, url.port), timeout=PATIENCE) as stalled:
            head = f"POST /admin/cache/import HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {ADMIN}\r\n"
            head += "content-type: application/x-tar\r\ncontent-length: 100000\r\n\r\n"
            stalled.sendall(head.encode() + bytes(100))
            assert b" 408 " in stalled.makefile("rb").readline()
            assert done(http.get("/admin/cache"))["store"] is not None


@pytest.mark.parametrize("verb", ["collect", "verify", "export"])
def test_without_a_store_what_needs_one_is_refused(verb) -> None:
    with small_engine("llama") as engine, served(engine) as http:
        response = http.post(f"/admin/cache/{verb}", json={})
        assert (response.status_code, error_of(response)["message"]) == (400, "this engine has no store on disk")
        assert done(http.get("/admin/cache"))["store"] is None
        assert http.get("/admin/cache/tree?tier=disk").status_code == 400
        with pytest.raises(BadRequest, match="no store"):
            engine.cache.verify()


def test_a_route_without_fields_refuses_those_that_are_sent() -> None:
    with small_engine("llama") as engine, served(engine) as http:
        for verb in ("clear", "collect", "verify", "export"):
            response = http.post(f"/admin/cache/{verb}", json={"namespace": "mine"})
            assert (response.status_code, error_of(response)["code"]) == (400, "unknown_parameter"), verb


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("tier=host", "tier must be device or disk"),
        ("limit=0", "limit must be a whole number from 1 to 100000"),
        ("limit=0000000000000000019", "limit must be a whole number from 1 to 100000"),
        (f"limit=000000001{'9' * 5000}", "limit must be a whole number from 1 to 100000"),
    ],
)
def test_other_values_are_refused(query, message) -> None:
    with small_engine("llama") as engine, served(engine) as http:
        for path in ("tree", "hot"):
            assert error_of(http.get(f"/admin/cache/{path}?{query}"))["message"] == message
