"""Extras are what only some need: without their packages everything else works, and what needs them names the extra."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcellar import Engine
from kvcellar.cli.cluster import command
from kvcellar.errors import BadRequest
from kvcellar.serve.http.traces import open_traces

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
FOR_MAINTAINERS = {"dev", "release", "site"}
EXTRAS = {  # what they are imported by
    "cluster": ("ray",),
    "encryption": ("cryptography",),
    "events": ("zmq",),
    "images": ("torchvision", "timm", "scipy"),
    "otel": ("opentelemetry",),
    "remote": ("redis", "fsspec"),
}
SERVER = ("kvcellar.serve", "pydantic", "prometheus_client", "starlette", "uvicorn")
PROMPT = "def add(one, other):"
WITHOUT = f"""
import sys
extras, server = {[name for names in EXTRAS.values() for name in names]}, {SERVER}
sys.modules.update(dict.fromkeys([*extras, *server]))  # as if they were not installed
from kvcellar import Engine
with Engine(device="cpu", cache_bytes=16_000_000, max_sequences=2, threads=1) as engine:
    print(len(engine.generate({PROMPT!r}, max_tokens=4).token_ids))
    for name in server:
        del sys.modules[name]
    import json
    from urllib.request import Request, urlopen
    from kvcellar.inspector.routes import inspector
    from kvcellar.serve import Server, ServeSettings
    with Server(engine, ServeSettings(port=0), mount=inspector) as server:
        body = json.dumps({{"prompt": {PROMPT!r}, "max_tokens": 4}}).encode()
        request = Request(server.url + "/v1/completions", body, {{"content-type": "application/json"}})
        with urlopen(request) as answer:
            print(json.load(answer)["usage"]["completion_tokens"])
"""


def test_every_extra_is_tried_here():
    assert set(PROJECT["optional-dependencies"]) - FOR_MAINTAINERS == set(EXTRAS)


def test_a_prompt_needs_neither_an_extra_nor_a_server_and_a_server_needs_no_extra():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.split()) == (0, ["4", "4"]), run.stderr


def opened(**settings: object) -> Callable[[], object]:
    return lambda: Engine(device="cpu", cache_bytes=16_000_000, max_sequences=2, threads=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("extra", "package", "use"),
    [
        ("cluster", "ray", lambda: CliRunner().invoke(command, ["serve", "--no-store"], catch_exceptions=False)),
        ("encryption", "cryptography", opened(store_key=bytes(32))),
        ("events", "zmq", opened(kv_events="tcp://127.0.0.1:0")),
        ("otel", "opentelemetry", open_traces),
        ("remote", "redis", opened(store_remote="redis://127.0.0.1:1")),
        ("remote", "fsspec", opened(store_remote="memory://somewhere")),
    ],
)
def test_what_needs_an_extra_that_is_missing_says_how_to_install_it(extra, package, use, monkeypatch, tmp_path):
    """Image processors are tried in `tests/images`."""
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(BadRequest) as refused:
        use()
    assert f"needs the extra {extra}: pip install 'kvcellar[{extra}]' (" in str(refused.value)
    assert package in str(refused.value)
