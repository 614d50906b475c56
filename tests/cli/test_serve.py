"""`kvcellar serve` as a process: it serves requests, and stops on a signal."""

import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from kvcellar.cli.options import OF_OTHERS
from kvcellar.cli.serve import command as serve
from tests.cli.command import kvcellar, started

ENGINE = ("--cache-bytes", "16M", "--threads", "1", "--max-sequences", "4")


@pytest.mark.parametrize("word", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_serve_prints_its_address_and_ends_on_a_signal(tmp_path, word):
    process = started(tmp_path, "serve", "--port", "0", *ENGINE)
    assert process.stderr is not None
    try:
        output = ""
        while not (found := re.search(r"Serving embedded at (http://127\.0\.0\.1:\d+)/v1", output)):
            line = process.stderr.readline()
            assert line, output
            output += line
        assert re.search(r"(?m)^embedded: \d+ tokens in [\d.]+ MB; with .+ of .+ MB\n  limit: ", output)
        with httpx.Client(base_url=found[1], trust_env=False, timeout=240) as client:
            assert client.get("/health").status_code == 200
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["embedded"]
            body = {"model": "embedded", "prompt": "import os", "max_tokens": 3}
            response = client.post("/v1/completions", json=body).json()
            assert response["usage"]["completion_tokens"] == 3
        if (maps := Path(f"/proc/{process.pid}/maps")).exists():
            assert "libtorch" not in maps.read_text(), "only the process of the engine imports torch"
        process.send_signal(word)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err


def test_a_signal_while_the_model_is_loaded_ends_the_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = started(tmp_path, "serve", "--port", port, *ENGINE)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, transport=httpx.HTTPTransport(), timeout=240
        ) as client:
            while not answers(client):
                assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "Traceback" not in err


def answers(client: httpx.Client) -> bool:
    """While it loads the model, too."""
    try:
        return client.get("/health").status_code in (200, 503)
    except httpx.ConnectError:
        return False


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    process = started(tmp_path, "serve", str(tmp_path / "broken"), "--port", "0", *ENGINE)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (1, "")
    assert "broken" in err
    assert "Traceback" not in err


def refused_before_a_model_is_loaded(monkeypatch, *words: str) -> str:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvcellar.cli.hosting.Engine", load)
    ran = kvcellar("serve", *words)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    return ran.err


def test_a_port_in_use_is_refused_before_a_model_is_loaded(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        output = refused_before_a_model_is_loaded(monkeypatch, "--port", port)
    assert "Invalid value for '--port': cannot listen on 127.0.0.1" in output
    assert "Address already in use" in output


def test_threads_of_a_server_take_turns_more_often(monkeypatch):
    """So that its event loop, which waits for one turn of each busy thread, does not wait for long."""
    turns = list[float]()
    monkeypatch.setattr(sys, "setswitchinterval", turns.append)
    refused_before_a_model_is_loaded(monkeypatch, "--host", "256.0.0.1")
    assert turns == [0.001]


def test_a_key_file_without_keys_is_refused_before_a_model_is_loaded(monkeypatch, tmp_path):
    (tmp_path / "keys.txt").write_text("\n  \n")
    output = refused_before_a_model_is_loaded(monkeypatch, "--port", "0", "--api-key-file", str(tmp_path / "keys.txt"))
    assert "keys.txt has no key" in " ".join(output.split())
    monkeypatch.setenv("KVCELLAR_API_KEY", "")
    assert "is set but empty" in refused_before_a_model_is_loaded(monkeypatch, "--port", "0")


def test_an_open_address_is_refused_with_the_option_that_allows_it(monkeypatch):
    monkeypatch.delenv("KVCELLAR_API_KEY", raising=False)
    output = refused_before_a_model_is_loaded(monkeypatch, "--host", "0.0.0.0", "--port", "0")
    assert "or set --allow-open to serve every client" in output


def test_options_of_other_servers_are_refused_with_ours(monkeypatch):
    ours = {name for one in serve.params for name in one.opts}
    for option, instead in OF_OTHERS.items():
        output = refused_before_a_model_is_loaded(monkeypatch, option, "1")
        assert f"No such option '{option}'. {instead}." in output
        assert {*re.findall(r"--[a-z-]+", instead)} <= ours
        assert option not in ours


def test_memory_that_is_too_small_is_refused_with_its_option():
    ran = kvcellar("serve", "--memory", "10M", "--port", "0")
    assert ran.code == 1
    assert "this server has 10000000 bytes for at most 3 models. A larger --memory or --max-models" in ran.err
