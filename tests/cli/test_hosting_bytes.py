"""What the command line adds to a model counts under the cap on bytes: a draft, and adapters, which are wider in memory
than in files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.cli import hosting
from kvcellar.engine.models.weights.weights_bytes import bytes_in_memory
from kvcellar.library.library import Library
from kvcellar.serve.models.model_spec import Caches, LibraryModels, engine_key
from tests.library.made import made
from tests.serve.fake_library import source_in

CACHES = Caches(10**9, 0.5)


def options(**given: Any) -> Any:
    return SimpleNamespace(options={"dtype": "float32", "draft": None} | given, of_command=[])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return source_in(tmp_path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
    return folder


def test_a_draft_and_adapters_count_for_the_first_model_of_files(source: Path, adapter: Path) -> None:
    plain = bytes_in_memory(source, dtype="float32")
    adapters = {"a": [str(adapter)], "b": [str(adapter), str(adapter)]}
    given = options(draft=str(source), adapters=adapters)
    spec = hosting._spec(str(source), None, given, CACHES)
    assert spec.weights == 2 * plain + 3 * 2 * 1000
    assert (spec.least_cache, spec.cache) == CACHES.of(spec.weights)
    given.of_command.append("the first")
    assert hosting._spec(str(source), None, given, CACHES).weights == 2 * plain
    assert hosting._spec(str(source), None, options(draft="ngram"), CACHES).weights == plain


def test_they_count_for_a_model_of_the_library(
    tmp_path: Path, source: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    library = Library(tmp_path / "models")
    made(library, "one", f"FROM {source}", tmp_path)
    catalogue: Any = LibraryModels(library, lambda *_: None, lambda *_: None, CACHES, dtype="float32")  # type: ignore[arg-type,return-value]
    plain = catalogue.find("one").weights
    given = options(draft=str(source), adapters={"a": [str(adapter)]})
    spec = hosting._spec("one", catalogue, given, CACHES)
    assert spec.weights == plain + bytes_in_memory(source, dtype="float32") + 2 * 1000
    assert (spec.least_cache, spec.cache) == CACHES.of(spec.weights)


def test_models_share_an_engine_if_weights_draft_and_its_settings_are_the_same(tmp_path: Path, source: Path) -> None:
    library, draft = Library(tmp_path / "models"), source_in(tmp_path / "draft")
    (draft / "config.json").write_text((draft / "config.json").read_text() + " ")
    drafted = f"FROM {source}\nDRAFT {draft}"
    texts = {
        "plain": f"FROM {source}",
        "other": "FROM plain\nSYSTEM a\nTEMPLATE {{ messages }}\nPARAMETER top_k 3",
        "drafted": drafted,
        "drafted too": f"{drafted}\nSYSTEM b",
        "deeper": f"{drafted}\nPARAMETER draft_num_predict 3",
        "short": f"FROM {source}\nPARAMETER num_ctx 64",
    }
    for name, text in texts.items():
        made(library, name.replace(" ", "-"), text, tmp_path)
    keys = {name: engine_key(library.resolve(name.replace(" ", "-"))) for name in texts}
    assert keys["plain"] == keys["other"]
    assert keys["drafted"] == keys["drafted too"]
    assert len(set(keys.values())) == 4
    found = library.resolve("plain")
    assert engine_key(found, draft=None) == keys["plain"] != engine_key(found, draft="ngram")


def test_the_embedded_model_can_be_a_draft(source: Path) -> None:
    plain = hosting._spec(str(source), None, options(), CACHES).weights
    drafted = hosting._spec(str(source), None, options(draft="embedded"), CACHES).weights
    assert drafted - plain == hosting._spec(None, None, options(), CACHES).weights > 0
