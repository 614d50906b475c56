"""Random engines answer as plain transformers do, and games of them find what is broken."""

import os
from collections import Counter
from pathlib import Path

import pytest

from kvcellar.engine import restore_plan, store
from tests.engine.drafting import always_restored
from tests.engine.games import play
from tests.own_cache import own_cache
from tests.zoo import ARCHS

EVERY_DAY, ALL = 20, 1000  # games


def seeds(config: pytest.Config) -> range:
    """`KVCELLAR_GAMES` is how many games there are with `--long`, or the first one and the one after the last: `7:9`."""
    if not config.getoption("--long"):
        return range(EVERY_DAY)
    start, _, end = os.environ.get("KVCELLAR_GAMES", str(ALL)).rpartition(":")
    return range(int(start or 0), int(end))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            ARCHS[name].build().save_pretrained(found[name])
        return found[name]

    return path


@pytest.fixture(autouse=True)
def reads_back(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is stored is read back, also a few tokens of it."""
    always_restored(monkeypatch)
    for module in (restore_plan, store):
        monkeypatch.setattr(module, "LEAST", 8)
    monkeypatch.setattr(store, "SEGMENT", 16)


def test_random_engines_answer_as_plain_transformers_do(seed: int, tmp_path: Path, saved) -> None:
    done = play(seed, tmp_path, saved)
    print(seed, dict(done))
    assert done["tokens"] > 0
