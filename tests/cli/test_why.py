"""`kvcellar why` prints what a running server has recorded of a request."""

import json
import random

import httpx
import pytest

from kvcellar.serve import Server, ServeSettings, key_digest
from tests.cli.command import kvcellar
from tests.engine.mixes import small_engine, tokens

ADMIN = "an-admin-key-of-the-server"


@pytest.fixture(scope="module")
def server():
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    with small_engine("llama") as engine, Server(engine, settings) as server:
        yield server


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "admin.txt"
    file.write_text(f"# the operator\n{ADMIN}\n")
    return str(file)


def asked(server, prompt: list[int], **fields: object) -> str:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).json()["id"]


def test_it_prints_the_reason_and_both_sides_of_a_divergence(server, key) -> None:
    text = list(tokens(random.Random(1), 80))
    asked(server, text)
    request = asked(server, [*text[:50], 9 if text[50] != 9 else 10, *text[51:]], cache_salt=None)
    ran = kvcellar("why", request, "--url", server.url, "--admin-key-file", key)
    assert (ran.code, ran.err) == (0, "")
    assert f"{request}: /v1/completions, ok" in ran.out
    assert "50 of 80 tokens came from memory: 50 from device" in ran.out
    assert "30 were computed" in ran.out
    assert "diverged: at token 50" in ran.out
    assert f"goes on with {text[50:66]}" in ran.out
    as_json = kvcellar("why", request, "--url", server.url, "--admin-key-file", key, "--json")
    assert json.loads(as_json.out)["prompts"][0]["recall"]["reason"] == "diverged"
    listed = kvcellar("why", "--url", server.url, "--admin-key-file", key, "--limit", "1")
    assert f"{request}: 50 of 80 prompt tokens from memory; diverged" in listed.out


def test_the_key_may_be_in_the_environment(server, monkeypatch) -> None:
    monkeypatch.setenv("KVCELLAR_ADMIN_KEY", ADMIN)
    assert kvcellar("why", "--url", server.url).code == 0


def test_errors_say_what_to_do(server, key, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("# none\n")
    refused = {
        ("--url", server.url): (1, "--admin-key-file"),
        ("none", "--url", server.url, "--admin-key-file", key): (1, "no request 'none' is recorded"),
        ("--url", "http://127.0.0.1:1", "--admin-key-file", key): (
            1,
            "Is the server running there (--url, $KVCELLAR_URL)? Records of requests are in its memory only",
        ),
        ("--url", "ftp://127.0.0.1", "--admin-key-file", key): (2, "is not an address like http://127.0.0.1:8080"),
        ("--url", server.url, "--admin-key-file", str(tmp_path / "empty.txt")): (2, "has no key"),
    }
    for words, (code, message) in refused.items():
        ran = kvcellar("why", *words)
        assert (ran.code, ran.out) == (code, ""), words
        assert message in ran.err
        assert "Traceback" not in ran.err
