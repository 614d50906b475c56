"""Keys that are read again while the server runs: no connection is dropped, and a wrong file changes nothing."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvcellar.errors import BadRequest
from kvcellar.memory.retention import NO_OPTIONS
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.http.key_ring import KeyRing, Keys
from kvcellar.serve.http.keys import named_keys, read_keys
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import COMPLETIONS, completion, connected, error_of, read_to_end, read_until, request


@dataclass
class Files:
    """The key files of a server."""

    api: Path
    admin: Path

    def read(self) -> Keys:
        return read_keys(self.api, self.admin, None, {})


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path / "keys.txt", tmp_path / "admin.txt")
    found.api.write_text("# name: alice\nsk-alice-1\n\nsk-second-1\n")
    found.admin.write_text("sk-admin-1\n")
    return found


@pytest.fixture
def serving(files: Files, shared_engine: FakeEngine, engine: FakeEngine) -> Iterator[Server]:
    settings = ServeSettings(port=0, drain_seconds=PATIENCE)
    with Server(shared_engine, settings_of(settings, files), read_keys=files.read) as server:
        yield server


def settings_of(settings: ServeSettings, files: Files) -> ServeSettings:
    return ServeSettings(port=0, drain_seconds=settings.drain_seconds, **files.read().fields())


def status(server: Server, key: str, path: str = "/v1/models", header: str = "authorization") -> int:
    value = f"Bearer {key}" if header == "authorization" else key
    return httpx.get(f"{server.url}{path}", headers={header: value}).status_code


def reload(server: Server, key: str = "sk-admin-1") -> httpx.Response:
    return httpx.post(f"{server.url}/admin/keys/reload", headers={"authorization": f"Bearer {key}"})


def test_names_of_keys_are_those_of_comments_or_their_lines(files):
    assert list(read_keys(files.api, files.admin, None, {}).api.values()) == ["alice", "keys.txt:4"]
    files.api.write_text(
        "# name: not a name\nsk-alice-1\n#name:b_2.c@d\nsk-second-1\n# name: lost\n# other\nsk-third-1\n"
    )
    assert list(named_keys(files.api, {}).values()) == ["keys.txt:2", "b_2.c@d", "keys.txt:7"]
    assert named_keys(None, {"KVCELLAR_API_KEY": "sk-alice-1"}) == {key_digest("sk-alice-1"): "$KVCELLAR_API_KEY"}


def test_weights_of_keys_are_those_of_the_comments_above_them(files):
    first, third = "# weight: 2\n# name: a\nsk-alice-1\nsk-second-1\n", "# weight: 3\n\nsk-third-1\n"
    files.api.write_text(f"{first}{third}#weight:0.5\nsk-fourth-1\n")
    read = read_keys(files.api, files.admin, None, {})
    assert list(read.weights.values()) == [2.0, 1.0, 1.0, 0.5]
    assert next(iter(read.api.values())) == "a"


@pytest.mark.parametrize("stated", ["", "two", "0", "-1", "1e3", "nan", "101"])
def test_a_weight_that_is_none_is_refused_with_its_line(files, stated):
    files.api.write_text(f"sk-alice-1\n# weight: {stated}\nsk-second-1\n")
    with pytest.raises(BadRequest, match=r"keys.txt, line 2: the weight of a key is a number from 0.01 to 100"):
        read_keys(files.api, files.admin, None, {})


def test_a_request_has_the_owner_and_the_weight_of_its_key(files):
    files.api.write_text("# weight: 2\nsk-alice-1\nsk-second-1\n")
    ring = KeyRing(settings_of(ServeSettings(port=0), files), files.read)
    found = {}
    for key in ("sk-alice-1", "sk-second-1"):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers}
        ring.check(scope)
        found[key] = Caller(scope, ServeSettings(port=0)).retention(NO_OPTIONS)
    assert [one.weight for one in found.values()] == [2.0, 1.0]
    assert len({one.owner for one in found.values()}) == 2


def test_a_stream_goes_on_while_its_key_is_replaced(serving, engine, files):
    gate = threading.Event()
    with engine.scripted(gate=gate, output=b"abc"), connected(serving) as wire:
        wire.sendall(request(COMPLETIONS, completion(stream=True), "Authorization: Bearer sk-alice-1"))
        while not engine.running:
            gate.wait(0.01)
        files.api.write_text("sk-other-1\n")
        assert reload(serving).json() == {"keys": {"api": 1, "admin": 1, "metrics": 0}}
        assert (status(serving, "sk-alice-1"), status(serving, "sk-other-1")) == (401, 200)
        gate.set()
        assert b"[DONE]" in read_until(wire, b"[DONE]")
        wire.sendall(request("/v1/models", None, "Authorization: Bearer sk-alice-1", "Connection: close"))
        assert b" 401 " in read_to_end(wire), "the connection is still open, its key is not accepted any more"


WRONG: dict[str, Callable[[Files], object]] = {
    "a line that is no key": lambda files: files.api.write_text("sk-alice-1\nno key at all\n"),
    "no key": lambda files: files.api.write_text("# sk-alice-1\n"),
    "no file": lambda files: files.api.unlink(),
    "a directory": lambda files: (files.api.unlink(), files.api.mkdir()),
    "not UTF-8": lambda files: files.api.write_bytes(b"\xff\xfe"),
    "an admin key that is an API key": lambda files: files.admin.write_text("sk-alice-1\n"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_file_changes_nothing_and_the_log_says_why(serving, files, change, caplog):
    change(files)
    response = reload(serving)
    assert (response.status_code, error_of(response)["code"]) == (409, "keys_not_changed")
    assert str(files.api.parent) not in response.text
    assert [status(serving, key) for key in ("sk-alice-1", "sk-second-1", "no")] == [200, 200, 401]
    (line,) = [one.getMessage() for one in caplog.records if "not changed" in one.getMessage()]
    assert "sk-" not in line


def test_no_kind_of_keys_appears_or_disappears(files):
    read = [files.read()]
    ring = KeyRing(settings_of(ServeSettings(), files), lambda: read[0])
    for kinds in ({"metrics": {key_digest("sk-metrics-1"): "m"}}, {"admin": {}}, {"api": {}}):
        kept = ring.now
        read[0] = Keys(**{"api": kept.api, "admin": kept.admin, "metrics": kept.metrics} | kinds)
        with pytest.raises(BadRequest, match="start it again"):
            ring.reload()
        assert ring.now is kept


def test_a_server_whose_keys_are_settings_has_nothing_to_read(shared_engine, engine):
    keys = {"key_digests": (key_digest("sk-alice-1"),), "admin_digests": (key_digest("sk-admin-1"),)}
    with Server(shared_engine, ServeSettings(port=0, **keys)) as server:
        assert reload(server).status_code == 409
        assert reload(server, "sk-alice-1").status_code == 401


def test_a_hang_up_reads_the_files_again(serving, files):
    files.api.write_text("sk-other-1\n")
    serving._uvicorn._hung_up(signal.SIGHUP, None)
    while status(serving, "sk-other-1") != 200:
        pass
    assert status(serving, "sk-alice-1") == 401


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_may_be_sent_in_either_header(serving, header):
    assert [status(serving, key, header=header) for key in ("sk-alice-1", "sk-admin-1", "sk")] == [200, 401, 401]
    assert status(serving, "sk-admin-1", "/admin/requests", header) == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer sk-wrong-1"), ("x-api-key", "sk-second-1")],
        [("x-api-key", "sk-alice-1"), ("x-api-key", "sk-alice-1")],
        [("authorization", "Basic sk-alice-1"), ("x-api-key", "sk-alice-1")],
        [("x-api-key", "Bearer sk-alice-1")],
    ],
)
def test_what_is_not_one_key_is_none(serving, headers):
    assert httpx.get(f"{serving.url}/v1/models", headers=headers).status_code == 401


def test_the_log_names_the_key_and_never_has_it(serving, caplog):
    with caplog.at_level("INFO", "kvcellar.serve"):
        status(serving, "sk-alice-1")
        status(serving, "sk-wrong-key")
        while len(found := [vars(one)["request"] for one in list(caplog.records) if "request" in vars(one)]) < 2:
            pass
    assert [one.get("key") for one in found] == ["alice", None]
    assert "sk-" not in caplog.text


def test_every_request_is_checked_with_one_reading_of_the_keys(serving, files):
    """Two generations of keys; a request with a key of both is never refused, one with a key of none never accepted."""
    rng, stop, wrong = random.Random(4), threading.Event(), list[int]()

    def client() -> None:
        with DeclaredClient(base_url=serving.url, timeout=PATIENCE) as http:
            while not stop.is_set():
                kept = http.get("/v1/models", headers={"x-api-key": "sk-alice-1"}).status_code
                never = http.get("/v1/models", headers={"x-api-key": "sk-never-1"}).status_code
                wrong.extend(one for one, expected in ((kept, 200), (never, 401)) if one != expected)

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(20):
        temporary = files.api.with_suffix(".new")
        temporary.write_text("\n".join(rng.sample(["sk-alice-1", f"sk-new-{number}-key"], 2)) + "\n")
        os.replace(temporary, files.api)
        assert reload(serving).status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
