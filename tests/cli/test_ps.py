"""`kvcellar ps` and `stop` ask a running server."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from kvcellar.cli.client import models_table
from kvcellar.serve import key_digest
from tests.cli.command import kvcellar
from tests.library.made import made
from tests.serve.fake_engine import PATIENCE
from tests.serve.fake_library import World, source_in


@pytest.fixture
def world(tmp_path: Path) -> World:
    world, source = World(tmp_path / "models"), source_in(tmp_path)
    made(world.library, "one", f"FROM {source}", source.parent)
    return world


def test_models_are_listed_and_stopped(world: World) -> None:
    with world.serving() as server:
        httpx.post(f"{server.url}/api/generate", json={"model": "one", "keep_alive": "2h"}, timeout=PATIENCE)
        ran = kvcellar("ps", "--url", server.url)
        assert (ran.code, ran.err) == (0, "")
        header, fake, one = ran.out.splitlines()
        assert header.split() == ["NAME", "ID", "SIZE", "SHARED", "PROCESSOR", "CONTEXT", "UNTIL"]
        assert fake.split()[0] == "fake"
        assert fake.endswith("forever")
        assert one.split()[:2] == ["one:latest", world.library.manifest("one").id[:12]]
        assert "100% CPU" in one
        found = json.loads(kvcellar("ps", "--json", "--url", server.url).out)
        assert [model["name"] for model in found["models"]] == ["fake", "one:latest"]
        assert kvcellar("stop", "one", "--url", server.url).code == 0
        for name, message in (("none", "model 'none' not found"), ("fake", "and stays loaded")):
            ran = kvcellar("stop", name, "--url", server.url)
            assert ran.code == 1
            assert message in ran.err
            assert "admin" not in ran.err


def test_a_server_with_keys_is_asked_with_the_admin_key(tmp_path: Path) -> None:
    settings = {"key_digests": (key_digest("client-1"),), "admin_digests": (key_digest("operator-1"),)}
    (tmp_path / "admin.txt").write_text("operator-1\n")
    with World(tmp_path / "models", **settings).serving() as server:
        assert kvcellar("ps", "--url", server.url).code == 1
        assert kvcellar("ps", "--url", server.url, "--admin-key-file", str(tmp_path / "admin.txt")).code == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "now"), (59, "59 s"), (300, "5 min"), (3660, "1 h 1 min"), (9e9, "forever"), (-5, "now")]
)
def test_the_time_left_is_written_in_words(seconds: float, text: str) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    model = {
        "name": "a", "digest": "", "size": 5_000_000, "size_vram": 5, "context_length": 8,
        "expires_at": (now + timedelta(seconds=seconds)).isoformat(),
    }  # fmt: skip
    row = models_table([model], now).splitlines()[1]
    assert row.split("  ")[0] == "a"
    assert row.endswith(text)
    assert "100% GPU" in row
