"""Ollama's package, and plain HTTP, against the routes that list, load, create and remove models."""

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import __version__
from kvcellar.errors import ModelRefused
from kvcellar.frontend import capabilities
from kvcellar.progress import Progress, report
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.generation import handler as generation
from kvcellar.serve.http.server import bind
from kvcellar.serve.models.failed_loads import without_paths
from kvcellar.serve.ollama import details
from kvcellar.serve.ollama.details import Details
from tests.library.made import FakeTools, made
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine, FakeModel
from tests.serve.fake_library import World, source_in

ollama: Any = pytest.importorskip("ollama")

NAMES = ("one", "owner/two:small")


@pytest.fixture(autouse=True)
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads tokenizers for seconds (`test_shown_models.py`)."""
    monkeypatch.setattr(details, "capabilities_of", capabilities.read)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return source_in(tmp_path)


@pytest.fixture
def world(tmp_path: Path, source: Path) -> Iterator[World]:
    world = World(tmp_path / "models")
    for number, name in enumerate(NAMES):
        made(world.library, name, f"FROM {source}\nPARAMETER top_k {number + 5}\nSYSTEM Be {name}.", source.parent)
    yield world
    world.host.close()  # again, where there was a server; ends the threads of the engines


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    with world.serving() as server:
        yield server


@contextmanager
def connected(server: Server) -> Iterator[Any]:
    with ollama.Client(host=server.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with connected(server) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def test_models_are_listed_with_their_files(client: Any, world: World) -> None:
    found = {one.model: one for one in client.list().models}
    assert list(found) == ["fake", "one:latest", "owner/two:small"]
    one = found["one:latest"]
    assert one.digest == world.library.manifest("one").id
    assert one.size == world.library.manifest("one").size
    assert one.details is not None
    assert (one.details.format, one.details.family, one.details.parameter_size) == ("safetensors", "llama", "1.2M")


def test_a_model_is_shown(client: Any, http: httpx.Client) -> None:
    shown = client.show("one")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 512
    assert shown.template == "{{ messages }}"
    assert shown.capabilities == ["completion"]
    raw = http.post("/api/show", json={"name": "one:latest"}).json()
    assert raw["system"] == "Be one."
    assert raw["parameters"].split() == ["top_k", "5"]
    assert "FROM one:latest" in raw["modelfile"]
    assert http.post("/api/show", json={"model": "fake"}).json()["modelfile"] == ""


def test_parameters_are_shown_as_ollama_does(client: Any, http: httpx.Client) -> None:
    """Numbers as they are, texts in quotes."""
    stops = ["<|end|>", 'a \n"b"', "é"]
    client.create("new", from_="one", parameters={"stop": stops, "temperature": 0.5, "num_predict": 7}, stream=False)
    name = "{:<30} ".format
    expected = [*(name("stop") + json.dumps(one, ensure_ascii=False) for one in stops), name("num_predict") + "7"]
    shown = client.show("new").parameters.split("\n")
    assert sorted(shown) == sorted([*expected, name("temperature") + "0.5", name("top_k") + "5"])
    assert r'stop                           "a \n\"b\""' in shown


def test_a_model_is_loaded_listed_and_unloaded(client: Any, world: World) -> None:
    assert [one.model for one in client.ps().models] == ["fake"]
    loaded = client.generate("one", keep_alive="1h")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    (running,) = [one for one in client.ps().models if one.model == "one:latest"]
    assert running.context_length == FakeModel().context
    assert running.size is not None
    assert running.size > 4_800_000
    assert client.generate("one:latest", keep_alive=0).done_reason == "unload"
    assert client.chat("owner/two:small").done_reason == "load"
    assert world.loaded == ["one:latest", "owner/two:small"]


def test_a_request_that_generates_loads_the_model_and_says_how_long_it_stays(client: Any, world: World) -> None:
    assert client.generate("one", "hello", raw=True, keep_alive=0).response == "hello"
    assert world.loaded == ["one:latest"]
    assert client.chat("owner/two:small", [{"role": "user", "content": "a"}], keep_alive="1h").message.content
    (running,) = [one for one in client.ps().models if one.model == "owner/two:small"]
    assert (running.expires_at - datetime.now(UTC)).total_seconds() > 3000


def test_models_are_created_copied_and_deleted(client: Any, world: World) -> None:
    lines = list(client.create("three", from_="one", system="Be short.", parameters={"temperature": 0.5}, stream=True))
    assert lines[-1].status == "success"
    assert len(lines) > 1
    manifest = world.library.manifest("three")
    assert (manifest.system, manifest.parameters) == ("Be short.", {"top_k": 5, "temperature": 0.5})
    client.copy("three", "owner/four")
    client.delete("three")
    assert [one.model for one in client.list().models] == ["fake", "one:latest", "owner/four:latest", "owner/two:small"]
    client.generate("owner/four")
    client.delete("owner/four")
    assert "owner/four:latest" not in [one.model for one in client.list().models]
    world.library.check()


def test_a_name_that_gets_other_weights_gets_another_engine(client: Any, world: World, tmp_path: Path) -> None:
    client.generate("one")
    client.create("one", from_="owner/two:small", stream=False)
    client.generate("one")
    assert world.loaded == ["one:latest"], "the weights are the same"
    other = source_in(tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    made(world.library, "one", f"FROM {other}", tmp_path)
    client.generate("one")
    assert world.loaded == ["one:latest", "one:latest"]


def test_a_model_that_is_replaced_while_it_is_loaded_is_not_served_in_its_place(http: Any, world: World) -> None:
    made_engines: list[FakeEngine] = []
    make = world.make

    def replaced(*args: Any) -> FakeEngine:
        world.library.copy("owner/two:small", "one")
        made_engines.append(make(*args))
        return made_engines[-1]

    world.catalogue._make = replaced
    response = http.post("/api/generate", json={"model": "one"})
    assert response.status_code == 400
    assert "it was created again while it was loaded; try again" in response.json()["error"]
    assert [engine._closed for engine in made_engines] == [True]
    world.catalogue._make = make
    assert http.post("/api/generate", json={"model": "one"}).status_code == 200


def test_a_creation_has_texts_messages_and_quantization(http: httpx.Client, world: World) -> None:
    body = {
        "model": "new", "from": "one", "template": "{{ messages }}!", "license": ["MIT", "BSD"], "quantize": "int8",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}], "stream": False,
        "unknown": 1,
    }  # fmt: skip
    assert http.post("/api/create", json=body).json() == {"status": "success"}
    manifest = world.library.manifest("new")
    assert manifest.template == "{{ messages }}!"
    assert manifest.licenses == ("MIT", "BSD")
    assert [(one.role, one.content) for one in manifest.messages] == [("user", "Hi"), ("assistant", "Yes")]
    assert manifest.quantized == "int8"


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "show", {}, 400, "model is required"),
    ("POST", "show", {"model": 5}, 400, "model must be a string"),
    ("POST", "show", {"model": "none"}, 404, "model 'none' not found; /v1/models lists what is served here"),
    ("POST", "show", {"model": "../../etc/passwd"}, 404, "model '../../etc/passwd' not found"),
    ("POST", "generate", {"model": "none"}, 404, "model 'none' not found"),
    ("POST", "generate", {"model": "one", "keep_alive": "1e99h"}, 400, "keep_alive must be a time like 30s"),
    ("POST", "generate", {"model": "one", "keep_alive": "abc"}, 400, "keep_alive must be a time like 30s"),
    (
        "POST",
        "generate",
        {"model": "fake", "keep_alive": 0},
        409,
        "the model fake was named when the server",
    ),
    ("POST", "copy", {"source": "none", "destination": "a"}, 404, "model 'none' not found"),
    ("POST", "copy", {"source": "fake", "destination": "a"}, 400, "the model fake is not in the library"),
    ("POST", "copy", {"source": "one", "destination": "../a"}, 400, "'../a' is not the name of a model"),
    ("DELETE", "delete", {"model": "fake"}, 400, "the model fake is not in the library of this server"),
    ("DELETE", "delete", {"model": "none"}, 404, "model 'none' not found"),
    ("POST", "create", {"model": "new"}, 400, "either from is required, the name of a model, or files"),
    ("POST", "create", {"model": "..", "from": "one"}, 400, "'..' is not the name of a model"),
    ("POST", "create", {"model": "new", "from": "/etc", "stream": False}, 400, "paths of this machine are not read"),
    (
        "POST",
        "create",
        {"model": "new", "from": "gone", "stream": False},
        400,
        "there is no model of that name in the library",
    ),
    ("POST", "create", {"model": "new", "from": "one", "files": {"a": "sha256:0"}}, 400, "either from is required"),
    ("POST", "create", {"model": "new", "from": "one", "quantize": "q9", "stream": False}, 400, "is no type"),
    (
        "POST",
        "create",
        {"model": "new", "from": "one", "messages": [{"role": "x", "content": "a"}]},
        400,
        "the role of a message must be system, user or assistant",
    ),
    ("POST", "create", {"model": "new", "from": "one", "parameters": {"top_q": 1}}, 200, "there is no parameter"),
    ("POST", "create", {"model": "new", "from": "one", "parameters": {"system": "x"}}, 400, "there is no parameter"),
    ("POST", "create", {"model": "new", "from": "one", "system": 'x """\ny'}, 400, "no Modelfile can have this value"),
    ("POST", "pull", {"model": "owner/name"}, 403, "this server does not download models"),
    ("POST", "push", {"model": "one"}, 400, "models cannot be pushed from this server"),
    ("POST", "blobs/sha256:00", {}, 400, "a digest is sha256: and 64 digits of 0-9 and a-f, not 'sha256:00'"),
    ("GET", "nothing", {}, 404, "there is no such route"),
]


@pytest.mark.parametrize(("method", "route", "body", "status", "message"), REFUSED)
def test_what_is_wrong_is_refused_in_ollamas_form(
    http: httpx.Client, world: World, method: str, route: str, body: dict[str, Any], status: int, message: str
) -> None:
    before = world.library.names()
    response = http.request(method, f"/api/{route}", json=None if method == "GET" else body)
    found = response.json() if response.status_code != 200 else json.loads(response.text.splitlines()[-1])
    assert list(found) == ["error"]
    assert message in found["error"]
    assert response.status_code == status
    assert world.library.names() == before


def test_the_server_is_found(http: httpx.Client) -> None:
    assert http.get("/api/version").json() == {"version": __version__}
    assert http.get("/").text == "kvcellar is running"
    assert http.head("/").status_code == 200
    assert http.head("/api/blobs/sha256:00").status_code == 400


KEYS = {"key_digests": (key_digest("client-1"),)}
ADMIN = {"admin_digests": (key_digest("operator-1"),)}
RIGHTS = [
    ({}, None, 200, 200),
    (ADMIN, None, 200, 401),
    (ADMIN, "operator-1", 200, 200),
    (KEYS, "client-1", 200, 403),
    (KEYS | ADMIN, "client-1", 200, 401),
    (KEYS | ADMIN, "operator-1", 200, 200),
    (KEYS | ADMIN, None, 401, 401),
    ({"host": "0.0.0.0", "allow_open": True}, None, 200, 403),
]


@pytest.mark.parametrize(("settings", "key", "looks", "changes"), RIGHTS)
def test_only_an_operator_changes_the_library(
    tmp_path: Path, source: Path, settings: dict[str, Any], key: str | None, looks: int, changes: int
) -> None:
    world = World(tmp_path / "models", **settings)
    made(world.library, "one", f"FROM {source}", source.parent)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with world.serving(bind(ServeSettings(port=0))) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{url}/api/tags", headers=headers).status_code == looks
        body = {"source": "one", "destination": "two"}
        assert httpx.post(f"{url}/api/copy", json=body, headers=headers).status_code == changes


def test_a_model_is_pulled_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    asked: list[str] = []

    def pull(name: str, *, progress: Callable[[Progress], None]) -> None:
        asked.append(name)
        for done in (0, 5, 10):
            progress(Progress("downloading", done, 10))

    monkeypatch.setattr("kvcellar.library.hub.pull", pull)
    allowing = World(tmp_path / "others", allow_pull=True)
    with allowing.serving() as server, connected(server) as client:
        lines = list(client.pull("owner/name", stream=True))
    assert asked == ["owner/name"]
    assert (lines[1].status, lines[1].total, lines[1].completed) == ("downloading", 10, 0)
    assert lines[-1].status == "success"


class Endless(FakeTools):
    """Quantizes until a report raises."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def quantize(self, *args: Any, **options: Any) -> Any:
        try:
            while True:
                report("quantizing", 1, 10)
                time.sleep(0.01)
        finally:
            self.ended.set()


def test_a_client_that_leaves_ends_the_creation(tmp_path: Path, source: Path) -> None:
    tools = Endless()
    world = World(tmp_path / "models", tools)
    made(world.library, "one", f"FROM {source}", source.parent)
    with world.serving() as server:
        body = {"model": "two", "from": "one", "quantize": "int8"}
        with httpx.stream("POST", f"{server.url}/api/create", json=body, timeout=PATIENCE) as response:
            assert any("quantizing" in line for line in response.iter_lines())
        assert tools.ended.wait(PATIENCE)
        other = {"model": "three", "from": "gone", "stream": False}  # runs after what has ended
        assert httpx.post(f"{server.url}/api/create", json=other, timeout=PATIENCE).status_code == 400
    assert list(map(str, world.library.names())) == ["one:latest"]
    world.library.check()


def test_errors_have_no_paths_of_the_server(http: httpx.Client, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> None:
        raise ModelRefused(f"{directory}/config.json has no field 'model_type', see ~/models/notes.txt")

    monkeypatch.setattr(world.tools, "check_model", refused)
    monkeypatch.setattr(world.tools, "check_draft", lambda directory, draft: refused(draft))
    monkeypatch.setattr(world.tools, "find", lambda name: world.library.root.parent / "source")
    monkeypatch.setattr(world.catalogue, "_make", lambda *_: refused(world.library.root))
    bodies: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("create", {"from": "owner/cached"}, "config.json has no field"),
        ("create", {"from": "one", "draft": "two"}, "config.json has no field 'model_type', see notes.txt"),
        ("create", {"from": "one", "draft": "one"}, "DRAFT must not reference the same local path as FROM: one"),
        ("generate", {"model": "one"}, "the model one cannot be loaded: config.json has no field"),
    )
    for route, body, message in bodies:
        response = http.post(f"/api/{route}", json={"model": "new", "stream": False} | body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]
        assert str(world.library.root.parent) not in response.text
        assert "~" not in response.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("FROM one: /var/lib/a/config.json has 5 bytes", "FROM one: config.json has 5 bytes"),
        ("'/srv/x/y': no", "'y': no"),
        ("there is none in ~/models/mine, and /etc/hosts.", "there is none in mine, and hosts."),
        ("/v1/models lists owner/name:small, https://a.b/c/d has more", None),
    ],
)
def test_a_message_keeps_the_names_of_files_and_routes(text: str, shown: str | None) -> None:
    assert without_paths(text) == (text if shown is None else shown)


def damage(world: World, name: str) -> None:
    for file in world.library.manifest(name).files.values():
        world.library.disk.blob(file).unlink()


def test_a_damaged_model_is_refused_without_paths_and_can_be_deleted(http: httpx.Client, world: World) -> None:
    damage(world, "one")
    for route, body in (("/v1/completions", {"prompt": "a"}), ("/api/show", {}), ("/api/generate", {})):
        response = http.post(route, json=body | {"model": "one"})
        assert response.status_code == 400, route
        assert "the model 'one' is damaged or cannot be loaded here; the log of the server has" in response.text
        assert str(world.library.root.parent) not in response.text
    assert http.request("DELETE", "/api/delete", json={"model": "one"}).status_code == 200
    assert list(map(str, world.library.names())) == ["owner/two:small"]


def test_a_model_whose_manifest_is_damaged_can_be_deleted(http: httpx.Client, world: World) -> None:
    path = world.library.root / "manifests/one/latest.json"
    path.chmod(0o600)
    path.write_text("{")
    assert http.post("/api/show", json={"model": "one"}).status_code == 400
    assert http.request("DELETE", "/api/delete", json={"model": "one"}).status_code == 200
    assert list(map(str, world.library.names())) == ["owner/two:small"]


def test_a_model_that_stays_and_is_removed_is_listed_with_its_size(tmp_path: Path, source: Path) -> None:
    world = World(tmp_path / "models")
    made(world.library, "one", f"FROM {source}", source.parent)
    made(world.library, "two", f"FROM {source}\nSYSTEM a", source.parent)
    for name in ("one", "two"):
        world.host.open(replace(world.catalogue.find(name), load=lambda *_, name=name: FakeEngine(FakeModel(name))))
    world.library.remove("one")
    damage(world, "two")
    with world.serving() as server, DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        tags = {one["name"]: one for one in http.get("/api/tags").json()["models"]}
        assert list(tags) == ["fake", "one:latest", "two:latest"]
        assert tags["one:latest"]["size"] > 4_800_000
        assert [one["name"] for one in http.get("/api/ps").json()["models"]] == list(tags)
        assert http.post("/api/show", json={"model": "one"}).status_code == 404
        response = http.post("/api/show", json={"model": "two"})
        assert response.status_code == 400
        assert str(tmp_path) not in response.text


def test_details_are_those_of_the_model_that_is_meant(world: World) -> None:
    details, old = Details(world.library), world.catalogue.find("one")
    world.library.copy("owner/two:small", "one")
    assert details.named(old).details.family == "unknown"
    world.library.copy("one", "three")
    assert details.named(world.catalogue.find("three")).details.family == "llama"
    assert details.named(old).details.family == "unknown"


def comes(condition: Callable[[], bool]) -> bool:
    """Whether it is true in the end."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_response_that_is_sent_refers_to_no_engine(
    http: httpx.Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[weakref.ref[Any]] = []
    make, send = world.catalogue._make, generation.send_json

    def noted(*args: Any) -> Any:
        engine = make(*args)
        engines.append(weakref.ref(engine))
        return engine

    left: list[bool] = []

    async def sent(*args: Any) -> None:
        def gone() -> bool:
            gc.collect()
            return all(engine() is None for engine in engines)

        assert world.host.unload("one")
        left.append(await asyncio.to_thread(comes, gone))
        await send(*args)

    monkeypatch.setattr(world.catalogue, "_make", noted)
    monkeypatch.setattr(generation, "send_json", sent)
    body = {"model": "one", "prompt": "a", "max_tokens": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert engines
    assert left == [True]


def test_a_client_that_leaves_does_not_wait_for_a_load(tmp_path: Path, source: Path) -> None:
    world, begun, go_on = World(tmp_path / "models"), threading.Event(), threading.Event()
    made(world.library, "one", f"FROM {source}", source.parent)
    make = world.make

    def held(*args: Any) -> FakeEngine:
        begun.set()
        assert go_on.wait(PATIENCE)
        return make(*args)

    world.catalogue._make = held
    with world.serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = b'{"model": "one"}'
            client.sendall(
                b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert begun.wait(PATIENCE)
        (wanted,) = world.host._wanted.values()
        assert comes(lambda: not wanted.waiters)
        go_on.set()


@pytest.mark.parametrize("route", ["/v1/completions", "/api/generate"])
def test_files_are_compared_on_the_thread_of_the_library(
    http: httpx.Client, world: World, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    threads: list[str] = []
    resolve = world.library.resolve

    def noted(name: str) -> Any:
        threads.append(threading.current_thread().name)
        return resolve(name)

    monkeypatch.setattr(world.library, "resolve", noted)
    body = {"model": "one"} | ({"prompt": "a", "max_tokens": 1} if route.startswith("/v1") else {})
    for _ in range(2):
        assert http.post(route, json=body).status_code == 200
    (thread,) = threads
    assert thread.startswith("kvcellar-library")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/one", "/api/tags", "/api/show"])
def test_requests_go_on_while_models_are_listed_from_a_slow_disk(
    http: httpx.Client, world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, go_on, resolve = threading.Event(), threading.Event(), world.library.resolve

    def slow(name: str) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return resolve(name)

    monkeypatch.setattr(world.library, "resolve", slow)

    def listed() -> int:
        method, body = ("POST", {"model": "one"}) if path == "/api/show" else ("GET", None)
        return http.request(method, path, json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        lists = [pool.submit(listed) for _ in range(8)]
        try:
            assert begun.wait(PATIENCE)
            body = {"model": "fake", "prompt": "a", "max_tokens": 1}
            assert http.post("/v1/completions", json=body, timeout=PATIENCE).status_code == 200
            assert not any(one.done() for one in lists)
        finally:
            go_on.set()
        assert [one.result() for one in lists] == [200] * 8
