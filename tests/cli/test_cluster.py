"""`kvcellar cluster serve`, as far as it goes without Ray; with it: tests/cluster/test_ray.py."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvcellar import BadRequest, ModelNotFound
from kvcellar.cli.cluster import (
    PORTS,
    RANGES,
    _check_address,
    _check_authentication,
    _engine,
    _engines,
    _own_ports,
    _url,
    command,
)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


def test_a_model_that_is_not_found_is_named_before_anything_is_started() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        CliRunner().invoke(command, ["serve", "no-such-model", "--no-store"], catch_exceptions=False)


def test_without_ray_it_says_what_to_install_and_sets_no_variables() -> None:
    before = dict(os.environ)
    with pytest.raises(BadRequest, match=r"pip install 'kvcellar\[cluster\]'"):
        CliRunner().invoke(command, ["serve", "--no-store"], catch_exceptions=False)
    assert dict(os.environ) == before


def test_ray_that_runs_what_anyone_asks_is_refused_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the variable where it has found a token."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(BadRequest, match="Ray at auto has no token authentication here"):
        _check_authentication("auto")
    for mode in ("token", "disabled"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        _check_authentication("auto")


def test_two_clusters_of_a_machine_have_ports_of_their_own() -> None:
    for _ in range(20):
        *others, first, last = map(int, _own_ports().values())
        assert len({*others}) == len(PORTS)
        assert (last - first, first % RANGES.step) == (RANGES.step, 0)
        assert not {*others} & {*range(first, last)}
    assert len({tuple(_own_ports().values())[-1] for _ in range(20)}) > 1


def test_paths_are_those_of_the_directory_in_which_it_was_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "style").mkdir()
    options = {"store": "kept", "draft": "ngram", "adapters": {"style": ["style"]}, "adapter": "style", "threads": None}
    expected = {"store": str(tmp_path / "kept"), "draft": "ngram", "adapters": {"style": [str(tmp_path / "style")]}}
    assert _engine(options) == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--roles", "2"], "they are PREFILL:DECODE, as 2:2 or 1:1..4, not 2"),
        (["--roles", "2:"], "they are PREFILL:DECODE"),
        (["--roles", ":2"], "they are PREFILL:DECODE"),
        (["--roles", "2:2", "--replicas", "2"], "they are in place of --replicas"),
    ],
)
def test_roles_that_are_none_or_beside_replicas_are_refused(given: list[str], why: str) -> None:
    result = CliRunner().invoke(command, ["serve", *given, "--no-store"], catch_exceptions=False)
    assert result.exit_code == 2
    assert f"Invalid value for '--roles': {why}" in result.output


def test_secrets_of_the_store_are_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_STORE_KEY", "ab" * 32)
    result = CliRunner().invoke(command, ["serve", "--no-store"])
    assert "Invalid value for '--store-key-file': engines do not see $KVCELLAR_STORE_KEY" in result.output


def test_gateways_on_several_machines_need_a_place_that_all_share(tmp_path: Path) -> None:
    """The default directory is one of each machine."""
    result = CliRunner().invoke(command, ["serve", "--ray", "auto", "--gateways", "2"])
    assert "Invalid value for '--gateways': what one remembers, others must find" in result.output
    with pytest.raises(BadRequest, match="a cluster needs the extra cluster"):
        CliRunner().invoke(
            command, ["serve", "--ray", "auto", "--gateways", "2", "--store", str(tmp_path)], catch_exceptions=False
        )


@pytest.mark.parametrize("there", [("127.0.0.1", 8080), ("0.0.0.0", 8000), ("127.0.0.1", 8000)])
def test_serve_that_listens_elsewhere_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, there: Any) -> None:
    client = SimpleNamespace(http_config=SimpleNamespace(host=there[0], port=there[1]))
    monkeypatch.setattr(
        "kvcellar.cli.cluster.import_module", lambda name: SimpleNamespace(_get_global_client=lambda: client)
    )
    if there == ("127.0.0.1", 8080):
        _check_address("127.0.0.1", 8080)
        return
    with pytest.raises(BadRequest, match=f"listens elsewhere: give --host {there[0]} --port {there[1]}") as caught:
        _check_address("127.0.0.1", 8080)
    assert caught.value.param == "port"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("cellar.example.com", "http://cellar.example.com:80"),
    ],
)
def test_the_url_can_be_used_on_this_machine(host: str, url: str) -> None:
    assert _url(host, 80) == url


def test_engines_are_two_of_a_model_or_those_that_are_named() -> None:
    assert _engines(None, None) == {"replicas": "2"}
    assert _engines("0..4", None) == {"replicas": "0..4"}
    assert _engines(None, "1:1..4") == {"prefill": "1", "replicas": "1..4"}
