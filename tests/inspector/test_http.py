"""The routes of the inspector: who may look, what the page and the data are sent with, and bounds on them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.errors import BadRequest
from kvcellar.inspector import routes
from kvcellar.inspector.routes import FILES, OPERATIONS, POLICY, inspector
from kvcellar.inspector.snapshot import VERSION
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.settings import key_digest
from tests.engine.mixes import PATIENCE
from tests.serve.declared import DeclaredClient

MINE, YOURS, ADMIN = "sk-key-of-mine", "sk-key-of-yours", "sk-key-of-the-operator"
KEYS: dict[str, Any] = {"key_digests": (key_digest(MINE), key_digest(YOURS)), "admin_digests": (key_digest(ADMIN),)}
SECRET = "def the_secret_of_mine(path):"
PAGE = ["/inspector", "/favicon.ico", *(f"/inspector/{name}" for name in FILES if not name.endswith(".html"))]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", cache_bytes=16_000_000, max_sequences=4, threads=1) as engine:
        yield engine


@contextmanager
def served(engine: Engine, key: str | None = None, **settings: Any) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    with Server(engine, ServeSettings(port=0, **settings), mount=inspector) as server:
        with DeclaredClient(base_url=server.url, headers=headers, timeout=PATIENCE) as client:
            yield client


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Iterator[httpx.Client]:
    """A server without keys."""
    with served(engine) as client:
        yield client


@pytest.fixture
def closed(engine: Engine) -> Iterator[httpx.Client]:
    """One with keys, whose inspector is on."""
    engine.clear_cache()
    with served(engine, inspector=True, **KEYS) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(client: httpx.Client, prompt: str, **headers: str) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    client.post("/v1/completions", json=body, headers=headers).raise_for_status()


def fresh(client: httpx.Client, holds: Callable[[Any], bool], **headers: str) -> Any:
    """The first snapshot for which something holds: it is up to a second old, and a request ends after its response."""
    for _ in range(int(PATIENCE)):
        found = client.get("/inspector/api/snapshot", headers=headers).raise_for_status().json()
        if holds(found):
            return found
        threading.Event().wait(0.1)
    raise AssertionError("no such snapshot")


@pytest.mark.parametrize("path", PAGE)
def test_every_file_is_sent_under_the_policy_and_is_not_sent_again(plain, path):
    response = plain.get(path)
    assert response.status_code == 200
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    again = plain.get(path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert plain.get(path, headers={"if-none-match": '"another"'}).content == response.content


def test_a_browser_gets_the_chat_at_the_root_and_others_what_ollama_has_there(plain):
    page = plain.get("/", headers=BROWSER)
    assert (page.headers["content-type"], page.headers["content-security-policy"]) == (
        "text/html; charset=utf-8",
        POLICY,
    )
    assert plain.get("/").text == plain.get("/", headers={"accept": "application/json"}).text == "kvcellar is running"
    assert page.headers["vary"] == plain.get("/").headers["vary"] == "accept"


def test_the_chat_needs_no_key_and_no_inspector_and_all_else_does(engine):
    with served(engine, **KEYS) as client:
        for path in ("/", "/inspector/chat/app.js", "/inspector/data.js", "/inspector/vendor/preact-htm.js"):
            assert client.get(path, headers=BROWSER).status_code == 200, path
        assert client.get("/").status_code == 401
        assert client.post("/", headers=BROWSER).status_code == 401, "only reading needs none"
        for path in ("/inspector", "/inspector/app.js", "/inspector/vendor/uplot.js", "/v1/models"):
            assert client.get(path, headers=BROWSER).status_code == 401, path


def test_where_the_chat_is_off_browsers_get_what_others_do_and_none_of_its_files(engine):
    with served(engine, chat_page=False) as client:
        assert client.get("/", headers=BROWSER).text == "kvcellar is running"
        assert client.get("/inspector/chat/app.js").status_code == 404
        assert client.get("/inspector").status_code == client.get("/inspector/data.js").status_code == 200
    with served(engine, chat_page=False, inspector=False) as client:
        for path in ("/favicon.ico", "/inspector", "/inspector/data.js"):
            assert client.get(path).status_code == 404, path
    with served(engine, chat_page=False, **KEYS) as client:
        assert client.get("/", headers=BROWSER).status_code == 401


@pytest.mark.parametrize(
    "name", ["", "index.html", "nothing.js", "../routes.py", "%2e%2e/routes.py", "vendor/", "vendor/../app.js", "api/"]
)
def test_only_the_names_of_the_table_are_found(plain, name):
    response = plain.get(f"/inspector/{name}")
    assert response.status_code in (404, 200)
    assert response.status_code == 404 or response.url.path in PAGE, "the client has made another path of it"


def test_a_snapshot_has_the_documented_shape(plain, engine):
    complete(plain, "import os\nimport sys\n")
    found = fresh(plain, lambda found: found["requests"]["ended"])
    assert found["version"] == VERSION
    assert found["model"] == {"name": engine.model.name, "context": engine.model.context, "all": [engine.model.name]}
    assert found.keys() == {
        *("version", "at", "engine", "rates", "requests", "groups", "more_groups", "tree", "tiers", "steps"),
        *("instance", "model", "sums", "replica", "replicas"),
    }
    for group in found["groups"]:
        assert sum(cells for cells, _, _ in group["runs"]) == sum(group["counts"].values()) == group["cells"]
    request = found["requests"]["ended"][0]
    assert request["recall"].keys() >= {"asked", "matched", "restored", "reason", "detail", "sources"}
    entries = found["tree"]["entries"]
    assert any(entry["begins"].startswith("<|bos|>import os") for entry in entries if entry["parent"] is None)
    way = plain.get("/inspector/api/request", params={"number": request["number"]}).json()
    assert way["prompt"] == request["prompt"]
    assert {part["name"] for part in way["entries"]} <= {entry["name"] for entry in entries}
    text = plain.get("/inspector/api/entry", params={"name": way["entries"][0]["name"]}).json()
    assert text["text"].startswith("<|bos|>import os")


def test_the_stream_sends_what_has_changed_and_only_then(plain, monkeypatch):
    monkeypatch.setattr(routes, "PING", 0.0)
    with plain.stream("GET", "/inspector/api/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["content-security-policy"] == POLICY
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        while next(lines) != ": ":  # the rates change until the last steps are older than what they count
            pass
        complete(plain, "class Cellar:\n")
        number = first["requests"]["ended"][0]["number"] if first["requests"]["ended"] else -1
        for line in lines:
            if line != ": " and json.loads(line.removeprefix("data: "))["requests"]["ended"][0]["number"] > number:
                break


def test_streams_are_counted_and_bounded(engine, monkeypatch):
    monkeypatch.setattr(routes, "STREAMS", 1)
    with served(engine) as client:
        with client.stream("GET", "/inspector/api/stream") as response:
            lines = response.iter_lines()  # without a reference to it, it would close the response
            next(lines)
            refused = client.get("/inspector/api/stream")
            assert refused.status_code == 503
            assert "1 streams are open" in refused.json()["error"]["message"]
        for _ in range(int(10 * PATIENCE)):  # it has ended for the server a moment later
            with client.stream("GET", "/inspector/api/stream") as response:
                if response.status_code == 200:
                    break
            threading.Event().wait(0.1)
        else:
            raise AssertionError("a stream that was closed is still counted")


def test_one_key_leaves_streams_to_the_others(closed, monkeypatch):
    monkeypatch.setattr(routes, "STREAMS", 4)
    monkeypatch.setattr(routes, "STREAMS_OF_KEY", 2)
    path = "/inspector/api/stream"
    with ExitStack() as stack:

        def opened(key: str) -> int:
            response = stack.enter_context(closed.stream("GET", path, headers=bearer(key)))
            if response.status_code == 200:
                lines = response.iter_lines()
                stack.callback(lines.close)
                next(lines)
            return response.status_code

        assert [opened(MINE) for _ in range(3)] == [200, 200, 503]
        refused = closed.get(path, headers=bearer(MINE)).json()["error"]["message"]
        assert "2 streams of this API key are open" in refused
        assert [opened(YOURS), opened(ADMIN), opened(YOURS)] == [200, 200, 503]


def test_an_open_stream_does_not_delay_the_end_of_the_server(engine):
    with Server(engine, ServeSettings(port=0, drain_seconds=PATIENCE), mount=inspector) as server:
        with httpx.stream("GET", f"{server.url}/inspector/api/stream", timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            assert list(lines) is not None  # it ends


@pytest.mark.parametrize(
    ("settings", "key", "page", "data"),
    [
        ({}, None, 200, 200),
        ({"inspector": False}, None, 404, 404),
        ({"host": "0.0.0.0", "allow_open": True}, None, 404, 404),
        (KEYS, None, 401, 401),
        (KEYS, MINE, 404, 403),
        (KEYS, ADMIN, 401, 200),
        (KEYS | {"inspector": True}, None, 200, 401),
        (KEYS | {"inspector": True}, MINE, 200, 200),
        (KEYS | {"inspector": True}, "sk-key-of-a-stranger", 200, 401),
        (KEYS | {"inspector": True}, ADMIN, 200, 200),
    ],
    ids=str,
)
def test_the_page_is_off_where_others_could_look_unless_it_is_allowed(engine, settings, key, page, data, monkeypatch):
    monkeypatch.setattr("kvcellar.serve.http.server.bind", lambda settings: _loopback())
    with served(engine, key, **settings) as client:
        address = str(client.base_url).replace("0.0.0.0", "127.0.0.1")
        assert client.get(f"{address}/inspector").status_code == page
        for route in ("snapshot", "stream"):
            with client.stream("GET", f"{address}/inspector/api/{route}") as response:
                assert response.status_code == data, route


def _loopback() -> Any:
    import socket

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def test_a_key_sees_its_own_requests_and_texts_and_nothing_of_others(closed):
    complete(closed, SECRET, **bearer(MINE))
    complete(closed, "class Yours:\n", **bearer(YOURS))
    mine = fresh(closed, lambda found: found["requests"]["ended"], **bearer(MINE))
    yours = fresh(closed, lambda found: found["requests"]["ended"], **bearer(YOURS))
    all_of_it = fresh(closed, lambda found: len(found["requests"]["ended"]) > 1, **bearer(ADMIN))
    assert [found["sums"] for found in (mine, yours, all_of_it)] == [False, False, True]
    assert "the_secret" in json.dumps(mine)
    assert "the_secret" not in json.dumps(yours) + json.dumps(all_of_it)
    names = [{entry["name"] for entry in found["tree"]["entries"] if entry} for found in (mine, yours, all_of_it)]
    assert not names[0] & names[1]
    assert names[2] == names[0] | names[1]
    numbers = [{one["number"] for one in found["requests"]["ended"]} for found in (mine, yours)]
    assert not numbers[0] & numbers[1]


def test_a_text_is_shown_to_the_key_that_has_computed_it_only(closed):
    complete(closed, SECRET, **bearer(MINE))
    found = fresh(closed, lambda found: any(found["tree"]["entries"]), **bearer(MINE))
    entry = {"name": next(entry["name"] for entry in found["tree"]["entries"] if entry)}
    request = {"number": found["requests"]["ended"][0]["number"]}
    answers = {
        (key, route): closed.get(f"/inspector/api/{route}", params=params, headers=bearer(key))
        for key in (MINE, YOURS, ADMIN)
        for route, params in (("entry", entry), ("request", request))
    }
    assert "the_secret" in answers[MINE, "entry"].json()["text"]
    assert answers[MINE, "request"].json()["entries"][0]["begins"]
    for route in ("entry", "request"):
        assert answers[YOURS, route].status_code == 400
        assert "the_secret" not in answers[YOURS, route].text + answers[ADMIN, route].text
    assert answers[ADMIN, "entry"].json() | {"reads": False, "text": None} == answers[ADMIN, "entry"].json()


def test_keys_that_share_prefixes_read_no_texts(engine):
    engine.clear_cache()
    with served(engine, inspector=True, share_prefixes=True, **KEYS) as client:
        complete(client, SECRET, **bearer(MINE))
        complete(client, SECRET, **bearer(YOURS))
        found = fresh(client, lambda found: len(found["requests"]["ended"]) > 0, **bearer(YOURS))
        assert "the_secret" not in json.dumps(found)


@pytest.mark.parametrize(
    "query",
    [
        *(f"request{number}" for number in ("", "?number=", "?number=-1", "?number=9e9", "?number=123456")),
        *(f"request?number={'9' * 40}", "entry", "entry?name=%00", f"entry?name={'0' * 5000}", "snapshot?model="),
    ],
)
def test_what_is_not_there_is_refused_by_a_client_error(plain, query):
    response = plain.get(f"/inspector/api/{query}")
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


def test_a_model_that_is_not_served_is_not_found(plain):
    assert plain.get("/inspector/api/snapshot?model=nothing").status_code == 404


def test_nothing_can_be_changed(plain):
    for path in ("/inspector", "/inspector/api/snapshot", "/inspector/api/entry"):
        assert plain.post(path, json={}).status_code == 405


def test_many_pages_take_one_picture(plain, engine, monkeypatch):
    taken: list[int] = []
    survey = type(engine.cache)
    picture = survey.picture

    def counted(self: Any, replica: str) -> Any:
        taken.append(1)
        return picture(self, replica)

    monkeypatch.setattr(survey, "picture", counted)
    monkeypatch.setattr(routes, "EVERY", 3600.0)
    for _ in range(5):
        fresh(plain, lambda found: True)
    assert len(taken) <= 1


def test_a_snapshot_is_bounded(plain, engine):
    """With many entries, requests and runs of cells."""
    prompts = [f"{number} bottles of wine in the cellar, and {number} more" for number in range(70)]
    engine.generate(prompts, max_tokens=1)
    held = [engine.stream("def main():", max_tokens=300, ignore_eos=True) for _ in range(3)]
    for one in held:
        next(iter(one))
    found = fresh(plain, lambda found: found["requests"]["live"])
    assert len(found["requests"]["ended"]) == 64
    assert len(json.dumps(found)) < 500_000
    for one in held:
        one.close()


def test_the_engine_is_the_same_after_it_was_looked_at(engine, plain):
    prompt = "def read(path):\n    return"
    engine.clear_cache()
    own = engine.generate(prompt, max_tokens=8, temperature=0)
    fresh(plain, lambda found: any(found["tree"]["entries"]))
    engine.check()
    again = engine.generate(prompt, max_tokens=8, temperature=0)
    assert again.text == own.text
    with pytest.raises(BadRequest):
        engine.cache.way(10**9)
    engine.check()


def test_the_document_of_a_server_has_the_data_of_its_inspector(plain: httpx.Client) -> None:
    paths = plain.get("/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/inspector")} == {path for _, path in OPERATIONS}, (
        "the page has no data"
    )
