"""Files are uploaded, and models created from them, with Ollama's package and plain HTTP."""

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar.library.disk import KEEP
from kvcellar.serve import Server, key_digest
from tests.library.made import FakeTools, adapter, files, made, tree
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE
from tests.serve.fake_library import World, source_in

ollama: Any = pytest.importorskip("ollama")

MOST = 8_000_000  # bytes of uploads


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return source_in(tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "models", max_upload_bytes=MOST)
    yield world
    world.host.close()


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    with world.serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with ollama.Client(host=server.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def uploaded(client: Any, folder: Path) -> dict[str, str]:
    return {file.name: client.create_blob(file) for file in sorted(folder.iterdir())}


def comes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def places(world: World) -> dict[str, list[str]]:
    """The files that are being received, and those that were."""
    root = world.library.root
    return {
        folder: sorted(path.name for path in (root / folder).iterdir()) if (root / folder).is_dir() else []
        for folder in ("tmp", "uploads")
    }


def test_a_model_is_created_from_safetensors_files(client: Any, world: World, source: Path, tmp_path: Path) -> None:
    assert list(client.create("new", files=uploaded(client, source), system="Be new.", stream=True))[-1].status == (
        "success"
    )
    manifest = world.library.manifest("new")
    other = made(world.library, "other", f"FROM {source}", tmp_path).model.manifest
    assert (manifest.model, manifest.system, manifest.source) == (other.model, "Be new.", "uploaded files")
    world.library.check()
    (weights,) = [file for file in manifest.model.files if file.path == "model.safetensors"]
    assert os.stat(world.library.disk.blob(weights)).st_nlink == 2, "it was copied"
    assert client.generate("new").done_reason == "load"
    client.create("both", from_="new", adapters=uploaded(client, adapter(tmp_path / "adapter")), stream=False)
    (part,) = world.library.manifest("both").adapters
    assert [file.path for file in part.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert world.library.manifest("both").base_id == manifest.base_id


def test_a_model_is_created_from_a_gguf_file(client: Any, world: World, tmp_path: Path) -> None:
    files(tmp_path / "gguf", {"a.GGUF": b"12345"})
    client.create("new", files=uploaded(client, tmp_path / "gguf"), quantize="int8", stream=False)
    found = world.library.resolve("new")
    assert (found.directory / "model.safetensors").read_bytes() == bytes([250]) * 1000
    assert found.manifest.quantized == "int8"


def test_a_file_is_there_once_it_is_whole(http: httpx.Client, world: World) -> None:
    content = bytes(3_000_000)
    digest = digest_of(content)
    assert http.head(f"/api/blobs/{digest}").status_code == 404
    wrong = http.post(f"/api/blobs/{digest}", content=content[:-1])
    assert (wrong.status_code, "the content that arrived has the digest" in wrong.json()["error"]) == (400, True)
    assert http.head(f"/api/blobs/{digest}").status_code == 404
    for status in (201, 200):
        assert http.post(f"/api/blobs/{digest}", content=content).status_code == status
        assert http.head(f"/api/blobs/{digest}").status_code == 200
    path = world.library.root / "uploads" / digest.replace(":", "-")
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o400
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert comes(lambda: places(world) == {"tmp": [], "uploads": [path.name]})


def test_what_a_client_has_not_sent_is_removed(server: Server, http: httpx.Client, world: World) -> None:
    digest = digest_of(bytes(5000))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /api/blobs/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
        client.sendall(head.encode() + bytes(100))
        assert comes(lambda: len(places(world)["tmp"]) == 1)
    assert comes(lambda: places(world) == {"tmp": [], "uploads": []})
    assert http.post(f"/api/blobs/{digest}", content=bytes(5000)).status_code == 201


def test_uploads_are_capped_and_models_are_not_counted(
    http: httpx.Client, client: Any, world: World, source: Path
) -> None:
    (source / "notes.txt").write_bytes(bytes(3_000_000))
    given = uploaded(client, source)
    content = bytes([1]) * 1_500_000
    for body in (content, iter([content[:300_000]] * 5)):  # announced, and in parts
        found = http.post(f"/api/blobs/{digest_of(content)}", content=body)
        assert found.status_code == 413
        assert f"may take {MOST} bytes on this server" in found.json()["error"]
    assert comes(lambda: not places(world)["tmp"])
    client.create("new", files=given, stream=False)
    assert http.post(f"/api/blobs/{digest_of(content)}", content=content).status_code == 201


def test_what_is_not_used_for_a_day_is_removed(client: Any, http: httpx.Client, world: World, source: Path) -> None:
    given = uploaded(client, source)
    client.create("new", files=given, stream=False)
    folder, old = world.library.root / "uploads", time.time() - KEEP - 60
    assert comes(lambda: not places(world)["tmp"])
    before = tree(world.library)
    for path in folder.iterdir():
        os.utime(path, (old, path.stat().st_mtime if path.name.endswith("0") else old))
    assert http.post(f"/api/blobs/{digest_of(b'a')}", content=b"a").status_code == 201
    assert comes(lambda: not places(world)["tmp"])  # what it was received in is removed after the response
    left = {digest_of(b"a").replace(":", "-")} | {name for name in os.listdir(folder) if name.endswith("0")}
    assert set(os.listdir(folder)) == left
    world.library.check()
    kept = {name: content for name, content in before.items() if name.startswith("blobs")}
    assert comes(lambda: not places(world)["tmp"])
    assert {name: content for name, content in tree(world.library).items() if name.startswith("blobs")} == kept
    client.create("again", files=given, stream=False)  # from the files of the model
    assert http.head(f"/api/blobs/{given['model.safetensors']}").status_code == 200


NAMES = ("../a.json", "a/b.json", ".hidden", "", "a\0b", "x" * 300, "a b", "/etc/passwd", "-a", "..")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["files", "adapters"])
def test_names_of_files_are_checked(http: httpx.Client, world: World, name: str, field: str) -> None:
    body = {"model": "new", "stream": False, field: {name: digest_of(b"")}}
    found = http.post("/api/create", json=body | ({"from": "one"} if field == "adapters" else {}))
    assert found.status_code == 400
    assert "the name of a file has up to 200 letters" in found.json()["error"]
    assert not world.library.names()


DIGEST, NONE = digest_of(b"{ }"), digest_of(b"none")
CREATIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "either from is required"),
    ({"files": {"a.json": "sha256:0"}}, "a digest is sha256: and 64 digits"),
    ({"files": {"a.json": NONE}}, f"the file a.json was not uploaded; send it to /api/blobs/{NONE} first"),
    ({"files": {"a.json": DIGEST}}, "neither model.safetensors nor"),
    ({"files": {"a.gguf": DIGEST, "b.gguf": DIGEST}}, "a model in a GGUF file has no other files"),
    ({"from": "one", "adapters": {"a.gguf": DIGEST}}, "has no adapter_config.json, so it is no adapter of peft"),
    ({"files": {f"a{i}": digest_of(b"") for i in range(1025)}}, "a model has at most 1024 files, not 1025"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), CREATIONS, ids=[message for _, message in CREATIONS])
def test_what_no_model_can_be_created_from_is_refused(
    http: httpx.Client, world: World, source: Path, body: dict[str, Any], message: str
) -> None:
    made(world.library, "one", f"FROM {source}", source.parent)
    assert http.post(f"/api/blobs/{DIGEST}", content=b"{ }").status_code == 201
    found = http.post("/api/create", json={"model": "new", "stream": False} | body)
    assert found.status_code == 400
    assert message in json.loads(found.text)["error"]
    assert str(world.library.root) not in found.text
    assert list(map(str, world.library.names())) == ["one:latest"]
    assert comes(lambda: not places(world)["tmp"])
    world.library.check()


def test_only_an_operator_uploads_and_no_web_page(tmp_path: Path, http: httpx.Client) -> None:
    path = f"/api/blobs/{digest_of(b'a')}"
    assert http.post(path, content=b"a", headers={"origin": "https://example.org"}).status_code == 403
    keys = {"key_digests": (key_digest("client-1"),), "admin_digests": (key_digest("operator-1"),)}
    with World(tmp_path / "others", FakeTools(), **keys).serving() as server:
        for key, status in (("client-1", 401), ("operator-1", 201)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}{path}", content=b"a", headers=headers).status_code == status


def test_a_full_disk_is_an_error_that_leaves_nothing(
    http: httpx.Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(opened: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(world.library.root))

    monkeypatch.setattr(world.library.disk.files, "write", full)
    found = http.post(f"/api/blobs/{digest_of(b'a')}", content=b"a")
    assert (found.status_code, found.json()["error"]) == (
        507,
        "the file cannot be stored now; the log of the server has the reason",
    )
    assert comes(lambda: places(world) == {"tmp": [], "uploads": []})
