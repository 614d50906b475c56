"""A model of the library embeds as the directory that it was made from, and stays loaded for as long as is asked."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvcellar import Engine
from kvcellar.library.library import Library
from kvcellar.library.manifest import is_file_path
from kvcellar.serve import Server, ServeSettings
from tests.engine.embedding_models import saved
from tests.library.made import made
from tests.serve.fake_engine import PATIENCE
from tests.serve.hosted import hosted
from tests.serve.test_several_models import OPTIONS

TEXTS = ["the cat sat on the mat", "a dog"]


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    saved(tmp_path / "embedder")
    return tmp_path / "embedder"


@pytest.fixture
def library(tmp_path: Path, embedder: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    found = Library(tmp_path / "models")
    made(found, "first", f"FROM {embedder}", tmp_path)
    made(found, "second", "FROM first\nPARAMETER top_k 3", tmp_path)  # by links to the files of the first
    return found


@pytest.fixture
def server(library: Library) -> Iterator[Server]:
    with hosted((None,), **OPTIONS) as (host, *_), Server(host, ServeSettings(port=0)) as server:
        yield server


def post(server: Server, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/api/embed", json=body, timeout=PATIENCE)


def test_models_of_the_library_embed_as_their_source(server: Server, embedder: Path, library: Library) -> None:
    with Engine(embedder, dtype=OPTIONS["dtype"], device="cpu", threads=1, cache_bytes=20_000_000) as engine:
        wanted = [one.vector for one in engine.embeddings.of(TEXTS)]
    assert "1_Pooling/config.json" in library.resolve("second").manifest.files
    for name in ("first", "second"):
        response = post(server, model=name, input=TEXTS)
        assert response.status_code == 200, response.text
        for found, own in zip(response.json()["embeddings"], wanted, strict=True):
            assert found == pytest.approx(own, abs=1e-4)


def test_a_model_that_embeds_stays_loaded_as_long_as_is_asked(server: Server) -> None:
    def loaded() -> list[str]:
        return [one["name"] for one in httpx.get(f"{server.url}/api/ps").json()["models"]]

    assert post(server, model="first", input="a", keep_alive="1h").status_code == 200
    assert any("first" in name for name in loaded())
    assert post(server, model="first", input="a", keep_alive=0).status_code == 200
    while any("first" in name for name in loaded()):
        pass
    refused = post(server, model="first", input="a", keep_alive="soon")
    assert refused.status_code == 400
    assert "keep_alive must be a time like 30s" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("config.json", True), ("1_Pooling/config.json", True), ("draft/config.json", False), ("../config.json", False),
        ("1_Pooling/../config.json", False), ("1_a/2_b/config.json", False), ("/config.json", False),
        ("adapters/0/config.json", False), ("1_Pooling/.config", False), ("", False), ("1_Pooling/", False),
    ],
)  # fmt: skip
def test_a_manifest_has_files_in_folders_of_modules_only(path: str, allowed: bool) -> None:
    assert is_file_path(path) is allowed
