"""Routes for the operator: they need an admin key, exist only where there is one, and say why prompts missed."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from kvcellar import BadRequest, Engine
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.generation.records import MOST, MOST_PROMPTS, Records
from kvcellar.serve.http.request_log import RequestLog
from tests.engine.mixes import small_engine, tokens
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import error_of

API, ADMIN = "an-api-key-of-the-server", "an-admin-key-of-the-server"
PATHS = ["/admin/requests", "/admin/requests/x", "/admin/nothing"]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@contextmanager
def served(engine: Engine | FakeEngine, *, api: bool = True, admin: bool = True) -> Iterator[httpx.Client]:
    settings = ServeSettings(
        port=0,
        key_digests=(key_digest(API),) if api else (),
        admin_digests=(key_digest(ADMIN),) if admin else (),
    )
    with Server(engine, settings) as server, DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def complete(http: httpx.Client, prompt: object, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    response = http.post("/v1/completions", json=body, headers=bearer(API))
    assert response.status_code == 200, response.text
    return response


def recorded(http: httpx.Client, name: str) -> dict:
    response = http.get(f"/admin/requests/{name}", headers=bearer(ADMIN))
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, API, "some-other-key", ADMIN[:-1]])
def test_admin_routes_need_the_admin_key(path, key) -> None:
    with FakeEngine() as engine, served(engine) as http:
        response = http.get(path, headers=bearer(key))
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_admin_key")
        assert http.get(path, headers=bearer(ADMIN)).status_code == (200 if path == PATHS[0] else 404)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("api", [False, True])
def test_without_an_admin_key_there_are_no_admin_routes(path, api) -> None:
    with FakeEngine() as engine, served(engine, api=api, admin=False) as http:
        response = http.get(path, headers=bearer(API))
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
        if api:
            assert http.get(path, headers=bearer(ADMIN)).status_code == 401


def test_an_admin_key_is_no_api_key() -> None:
    with FakeEngine() as engine, served(engine) as http:
        assert http.get("/v1/models", headers=bearer(ADMIN)).status_code == 401
    with pytest.raises(BadRequest, match="an API key, too"):
        ServeSettings(key_digests=(key_digest(API),), admin_digests=(key_digest(API),))
    with pytest.raises(BadRequest, match="admin_digests are what key_digest"):
        ServeSettings(admin_digests=(b"a key",))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with small_engine("llama") as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with served(engine) as http:
        yield http


def test_a_record_says_where_a_prompt_diverged_by_both_ids(http) -> None:
    text = list(tokens(random.Random(1), 80))
    other = [*text[:50], 9 if text[50] != 9 else 10, *text[51:]]
    complete(http, text)
    response = complete(http, other, return_recall=True)
    found = recorded(http, response.json()["id"])
    assert found == recorded(http, response.headers["x-request-id"])
    assert (found["route"], found["outcome"]) == ("/v1/completions", "ok")
    (prompt,) = found["prompts"]
    recall = prompt["recall"]
    assert (prompt["prompt_tokens"], recall["restored"], recall["sources"]) == (80, 50, {"device": 50})
    assert (recall["reason"], recall["ours"]["tokens"][0], recall["theirs"]["tokens"][0]) == (
        "diverged",
        other[50],
        text[50],
    )
    (told,) = response.json()["usage"]["recall"]
    assert recall == told | {"salted": 0}


def test_another_salt_of_the_same_key_is_told_to_the_operator_only(http) -> None:
    text = list(tokens(random.Random(2), 90))
    complete(http, text, cache_salt="one")
    response = complete(http, text, cache_salt="two", return_recall=True)
    (told,) = response.json()["usage"]["recall"]
    assert (told["reason"], "salted" in told) == ("new", False)
    (prompt,) = recorded(http, response.json()["id"])["prompts"]
    assert prompt["recall"]["salted"] == 64


def test_each_prompt_of_a_request_has_its_own_record(http) -> None:
    draw = random.Random(3)
    response = complete(http, [list(tokens(draw, 30)), list(tokens(draw, 40))])
    found = recorded(http, response.json()["id"])
    assert [(one["prompt"], one["prompt_tokens"]) for one in found["prompts"]] == [(0, 30), (1, 40)]


def test_the_last_requests_are_listed(http) -> None:
    ids = [complete(http, [5, 6, 7, number]).json()["id"] for number in range(3)]
    listed = http.get("/admin/requests?limit=2", headers=bearer(ADMIN)).json()["requests"]
    assert [one["id"] for one in listed] == ids[:0:-1]
    for limit in ("0", "x", "1001", "-1", "9" * 30):
        response = http.get("/admin/requests", params={"limit": limit}, headers=bearer(ADMIN))
        assert error_of(response)["message"] == "limit must be a whole number from 1 to 1000"
    response = http.get("/admin/requests/none", headers=bearer(ADMIN))
    assert error_of(response)["message"] == "no request 'none' is recorded; /admin/requests lists the last ones"


def test_a_stream_is_recorded_too(http) -> None:
    with http.stream(
        "POST", "/v1/completions", json={"prompt": [5] * 40, "max_tokens": 2, "stream": True}, headers=bearer(API)
    ) as response:
        name = response.headers["x-request-id"]
        chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert recorded(http, name)["id"] == json.loads(chunks[0])["id"]


def logged(name: str, prompts: int = 1) -> RequestLog:
    log = RequestLog(name, response_id=f"cmpl-{name}")
    log.set_prompts([[5]] * prompts)
    return log


def test_a_record_does_not_change_when_the_log_line_is_written_after_it_was_read(monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.serve.http.request_log.time", SimpleNamespace(monotonic=count().__next__))
    records, log = Records(), logged("one")
    records.add(log)
    record = records.find("one")
    before = record.summary()
    log.write()
    assert before == record.summary()
    assert before.ms < log.ms()


def test_records_are_bounded_by_requests_and_by_prompts() -> None:
    records = Records()
    for number in range(MOST + 5):
        records.add(logged(str(number)))
        records.check()
    assert records.find("4") is records.find("cmpl-4") is None
    assert records.find("5") is records.find("cmpl-5") is not None
    records.add(logged("5"))
    for number in range(3):
        records.add(logged(f"long-{number}", prompts=MOST_PROMPTS // 2))
        records.check()
    assert [one.log.response_id for one in records.last(9)] == ["cmpl-long-2", "cmpl-long-1"]
    records.add(logged("last"))
    assert records.find("5") is None
    records.check()


def test_a_client_cannot_replace_or_hide_a_record_by_the_id_of_a_request() -> None:
    records = Records()

    def add(name: str, response: str, owner: str) -> None:
        log = RequestLog(name, response_id=response, owner=owner)
        log.set_prompts([[5]])
        records.add(log)
        records.check()

    def found(name: str) -> str | None:
        record = records.find(name)
        return record.log.response_id if record is not None else None

    add("a", "cmpl-1", "one")
    add("a", "cmpl-2", "another")
    add("cmpl-1", "cmpl-3", "another")
    assert (found("a"), found("cmpl-1"), found("cmpl-2"), found("cmpl-3")) == ("cmpl-1", "cmpl-1", "cmpl-2", "cmpl-3")
    add("a", "cmpl-4", "one")
    assert found("a") == "cmpl-4", "the owner of an id may use it again"
