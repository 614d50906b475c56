"""A hub and an empty cache for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.library.fake_hub import FakeHub, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """The hub that this process uses unless told otherwise, with no token of its user."""
    with serving(FakeHub()) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Hugging Face cache."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
