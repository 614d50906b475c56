"""What Ollama's API shows of a model is the same whether it is loaded or not, and every model has all of it."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from kvcellar import Engine
from kvcellar.frontend import capabilities
from kvcellar.library.library import Library
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.ollama import details
from tests.engine.embedding_models import END, saved
from tests.library.made import made
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE
from tests.serve.hosted import hosted
from tests.text.templates import THINKER

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
OPTIONS: dict[str, Any] = {
    "quiet": True, "memory": 10**9, "max_models": 3, "keep_alive": 300.0, "cache_bytes": 8_000_000, "device": "cpu",
    "dtype": "float32", "threads": 1, "max_sequences": 4, "draft": None,
}  # fmt: skip
ABLE = ["completion", "tools", "thinking", "embedding"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has everything: a template with tools and reasoning, and pooling."""
    folder = tmp_path_factory.mktemp("models") / "able"
    saved(folder, "llama")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": THINKER}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("library")
    library = Library(root)
    made(library, "same", f"FROM {folder}", folder.parent)
    made(library, "plain", f'FROM {folder}\nTEMPLATE """{PLAIN}"""', folder.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_MODELS", str(root))
        with (
            hosted((str(folder),), **OPTIONS) as (host, *_),
            Server(host, ServeSettings(port=0), library=library) as server,
        ):
            yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def shown(http: httpx.Client, name: str) -> dict[str, Any]:
    response = http.post("/api/show", json={"model": name})
    assert response.status_code == 200, response.text
    return response.json()


def loaded(http: httpx.Client) -> list[str]:
    return [one["name"] for one in http.get("/api/ps").json()["models"]]


@pytest.mark.parametrize(("name", "able"), [("same", ABLE), ("plain", ["completion", "embedding"])])
def test_a_model_is_shown_alike_before_and_after_it_is_loaded(
    http: httpx.Client, name: str, able: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reads the tokenizer of one of them, for seconds."""
    if name == "same":
        monkeypatch.setattr(details, "capabilities_of", capabilities.read)
    assert f"{name}:latest" not in loaded(http)
    before = shown(http, name)
    assert before["capabilities"] == able
    assert http.post("/api/generate", json={"model": name}).json()["done_reason"] == "load"
    assert f"{name}:latest" in loaded(http)
    assert shown(http, name) == before
    http.post("/api/generate", json={"model": name, "keep_alive": 0})


def test_every_model_has_a_digest_a_time_a_family_a_size_and_a_type(http: httpx.Client, server: Server) -> None:
    """Those of the command line, too; loaded or not."""
    tags = {one["name"]: one for one in http.get("/api/tags").json()["models"]}
    running = {one["name"]: one for one in http.get("/api/ps").json()["models"]}
    assert list(tags) == ["able", "plain:latest", "same:latest"]
    for name, one in tags.items():
        assert len(one["digest"]) == 64
        assert int(one["digest"], 16) > 0
        assert datetime.now(UTC) - datetime.fromisoformat(one["modified_at"]) < timedelta(days=1)
        about = one["details"]
        assert (about["family"], about["families"], about["quantization_level"]) == ("llama", ["llama"], "F32")
        assert about["parameter_size"][-1] == "K"
        found = shown(http, name)
        assert (found["details"], found["modified_at"]) == (about, one["modified_at"])
        assert found["model_info"]["llama.context_length"] > 0
        assert found["template"]
    assert len({one["digest"] for one in tags.values()}) == 3
    assert [running["able"][part] for part in ("digest", "details")] == [tags["able"][p] for p in ("digest", "details")]
    with ollama.Client(host=server.url, trust_env=False) as client:
        for one in client.list().models:  # as its command line does
            assert len(f"{one.digest or ''}"[:12]) == 12
            assert one.modified_at is not None
            assert one.modified_at.year > 2000
        assert client.show("able").capabilities == ABLE


def test_the_digest_of_a_directory_follows_its_files(http: httpx.Client, folder: Path) -> None:
    def now() -> tuple[str, str]:
        (one,) = (one for one in http.get("/api/tags").json()["models"] if one["name"] == "able")
        return one["digest"], one["modified_at"]

    before = now()
    assert now() == before
    note = folder / "NOTES.md"
    note.write_text("a")
    later = now()
    assert later[0] != before[0]
    os.utime(note, (2e9, 2e9))
    assert now()[0] not in (before[0], later[0])
    assert datetime.fromisoformat(now()[1]).timestamp() == 2e9
    note.unlink()
    assert now()[0] == before[0]


def test_a_model_without_files_has_a_digest_and_a_time(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder)
    with Engine(network, cache_bytes=8_000_000, threads=1) as engine, Server(engine, ServeSettings(port=0)) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
            (one,) = http.get("/api/tags").json()["models"]
            assert len(one["digest"]) == 64
            assert datetime.now(UTC) - datetime.fromisoformat(one["modified_at"]) < timedelta(days=1)
            assert shown(http, engine.model.name)["capabilities"] == ["completion"]


def test_the_embedded_model_is_shown_with_its_files() -> None:
    with Engine(cache_bytes=8_000_000, threads=1) as engine, Server(engine, ServeSettings(port=0)) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
            (one,) = http.get("/api/tags").json()["models"]
            assert one["details"]["parameter_size"].endswith("M")
            assert one["details"]["quantization_level"]
            assert one["size"] > 1_000_000
            found = shown(http, engine.model.name)
            assert found["model_info"][f"{one['details']['family']}.context_length"] == engine.model.context
