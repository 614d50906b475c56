"""`kvcellar serve` as a process: it answers, and it stops when it is told to."""

import re
import signal

import httpx
import pytest

from tests.cli.command import started

ENGINE = ("--cache-bytes", "16M", "--threads", "1", "--max-sequences", "4")


@pytest.mark.parametrize("word", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_says_where_it_is_answers_and_ends_when_told(tmp_path, word):
    process = started(tmp_path, "serve", "--port", "0", *ENGINE)
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"Serving embedded at (http://127\.0\.0\.1:\d+)/v1", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        assert re.match(r"embedded: \d+ tokens in \d+ bytes", said)
        with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
            assert client.get("/health").status_code == 200
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["embedded"]
            asked = {"model": "embedded", "prompt": "import os", "max_tokens": 3}
            answer = client.post("/v1/completions", json=asked).json()
            assert answer["usage"]["completion_tokens"] == 3
        process.send_signal(word)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
