"""`kvcellar top`: the state of a running server at a terminal, and in a pipe."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import Engine
from kvcellar.cli.client import AdminClient, ServerLoading
from kvcellar.cli.top import FREE, Watched, view
from kvcellar.errors import KvcellarError
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.server import hosting
from tests.cli.command import PATIENCE, Terminal, kvcellar


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", cache_bytes=16_000_000, max_sequences=4, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0), mount=inspector) as server:
        for prompt in ("def main():", "def main(): pass # and more"):
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        yield server


@pytest.fixture(scope="module")
def found(server: Server) -> dict[str, Any]:
    """The state when both requests have ended: a picture is up to a second old."""
    while True:
        found = httpx.get(f"{server.url}/inspector/api/snapshot", timeout=PATIENCE).raise_for_status().json()
        if len(found["requests"]["ended"]) == 2:
            return found


def test_a_state_is_printed_once_where_there_is_no_terminal(server: Server, found: dict[str, Any]) -> None:
    ran = kvcellar("top", "--url", server.url)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("embedded: 0 running, 0 waiting, ")
    ended = next(at for at, line in enumerate(lines) if line.startswith("ENDED"))
    second, first = lines[ended + 1 : ended + 3]
    recall = found["requests"]["ended"][0]["recall"]
    assert recall["restored"] > 0
    assert f"{recall['restored']} of {recall['asked'] + 1}; {recall['reason']}" in second
    assert "█" in second
    assert first.endswith("new")
    for name in ("causal", "device", "last step", "steps"):
        assert any(line.startswith(name) for line in lines)


def test_json_is_what_the_inspector_returns(server: Server, found: dict[str, Any]) -> None:
    printed = json.loads(kvcellar("top", "embedded", "--json", "--url", server.url).out)
    assert printed.keys() == found.keys()
    assert printed["model"] == found["model"]
    ran = kvcellar("top", "none", "--url", server.url)
    assert ran.code == 1
    assert "none" in ran.err


def test_a_server_with_keys_is_asked_with_the_admin_key(engine: Engine, tmp_path: Path) -> None:
    settings = {"key_digests": (key_digest("client-1"),), "admin_digests": (key_digest("operator-1"),)}
    (tmp_path / "admin.txt").write_text("operator-1\n")
    with Server(engine, ServeSettings(port=0, **settings), mount=inspector) as server:
        assert kvcellar("top", "--url", server.url).code == 1
        assert kvcellar("top", "--url", server.url, "--admin-key-file", str(tmp_path / "admin.txt")).code == 0


def test_a_terminal_shows_the_state_until_q(server: Server, found: dict[str, Any], tmp_path: Path) -> None:
    with Terminal(tmp_path, ("top", "--url", server.url)) as terminal:
        terminal.until("embedded: ")
        terminal.until("q ends")
        terminal.press("q")
        assert terminal.end() == 0


def test_the_last_state_stays_visible_while_a_server_is_away(found: dict[str, Any]) -> None:
    client, watched = mock.Mock(), Watched(found)
    before = watched.text(80, 20)
    client.get.side_effect = KvcellarError("connection refused")
    watched.ask(client, "/")
    assert watched.text(80, 20) == before.replace("q ends", "not connected: connection refused")
    client.get.side_effect = None
    client.get.return_value = found
    watched.ask(client, "/")
    assert watched.text(80, 20) == before


@given(width=st.integers(20, 200), height=st.integers(1, 60), many=st.integers(0, 80))
def test_a_view_fits_its_terminal(found: dict[str, Any], width: int, height: int, many: int) -> None:
    one = {
        "number": 9, "status": "running", "completions": 1, "prompt": 7, "computed": 3, "produced": 1, "seconds": 1.0,
        "tokens_per_second": 2.0, "restored": None,
    }  # fmt: skip
    requests = found["requests"] | {"live": [one] * many, "more_live": 0}
    lines = view(found | {"requests": requests}, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_map_shows_every_run_that_is_in_use(found: dict[str, Any]) -> None:
    """One cell among thousands has a character, too."""
    group = found["groups"][0] | {"runs": [[5000, "free", None], [1, "kept", 0], [5000, "free", None]]}
    (line,) = [line for line in view(found | {"groups": [group]}, 100, 60) if line.startswith(group["name"])]
    assert line.count("▓") >= 1
    assert line.count(FREE) > 40


def test_it_waits_for_a_server_that_loads_its_models_and_says_so(monkeypatch, found: dict[str, Any]) -> None:
    states = [ServerLoading("the server is loading the model a"), ServerLoading("the server is loading the model a")]
    states += [ServerLoading("the server is loading the model b"), found]
    monkeypatch.setattr("kvcellar.cli.top.EVERY", 0.0)
    monkeypatch.setattr("kvcellar.cli.client.AdminClient.get", mock.Mock(side_effect=states))
    ran = kvcellar("top", "--once")
    assert ran.code == 0
    assert ran.err == "the server is loading the model a; waiting\nthe server is loading the model b; waiting\n"
    assert ran.out.startswith("embedded: ")


def test_the_error_of_a_server_that_loads_is_told_from_others(engine: Engine) -> None:
    host = hosting(engine)
    with Server(host, ServeSettings(port=0), mount=inspector) as server:
        client = AdminClient(server.url, None)
        host.startup.begin()
        with pytest.raises(ServerLoading, match="loading the model"):
            client.get("/inspector/api/snapshot")
