"""What the command line adds to a model counts under the cap on bytes: a draft, and adapters, which are wider in memory
than in files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.cli import hosting
from kvcellar.library.library import Library
from kvcellar.models.weights_bytes import bytes_in_memory
from kvcellar.serve.library_models import Caches, LibraryModels
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
    servable = hosting._of_files(str(source), given, CACHES)
    assert servable.weights == 2 * plain + 3 * 2 * 1000
    assert (servable.least_cache, servable.cache) == CACHES.of(servable.weights)
    given.of_command.append("the first")
    assert hosting._of_files(str(source), given, CACHES).weights == 2 * plain
    assert hosting._of_files(str(source), options(draft="ngram"), CACHES).weights == plain


def test_they_count_for_a_model_of_the_library(
    tmp_path: Path, source: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    library = Library(tmp_path / "models")
    made(library, "one", f"FROM {source}", tmp_path)
    catalogue: Any = LibraryModels(library, lambda *_: None, lambda *_: None, CACHES, dtype="float32")  # type: ignore[arg-type,return-value]
    plain = catalogue.find("one").weights
    given = options(draft=str(source), adapters={"a": [str(adapter)]})
    servable = hosting._of_library("one", catalogue, given, CACHES)
    assert servable is not None
    assert servable.weights == plain + bytes_in_memory(source, dtype="float32") + 2 * 1000
    assert (servable.least_cache, servable.cache) == CACHES.of(servable.weights)
