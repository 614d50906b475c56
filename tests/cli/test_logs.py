"""The log of `kvcellar serve`: records cannot be forged, and writing does not block."""

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cli import logs
from kvcellar.cli.logs import BackgroundHandler, JsonFormat, TextFormat, log_to_stderr
from kvcellar.serve import Server
from tests.cli.command import kvcellar
from tests.serve.fake_engine import FakeEngine

HEAD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+: ")
PATIENCE = 240.0  # seconds; only a test that fails waits so long


def record(message: str, **more: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "kvcellar.test", "levelname": "INFO", "levelno": 20, "msg": message})
    made.__dict__.update(more)
    return made


@given(st.text())
def test_a_message_cannot_look_like_another_record(text):
    shown = TextFormat().format(record(text))
    first, *rest = shown.splitlines()
    assert HEAD.match(first)
    assert all(line.startswith("    ") for line in rest)
    assert all(line.isprintable() for line in [first, *rest])
    written = JsonFormat().format(record(text))
    assert len(written.splitlines()) == 1
    assert written.isascii()
    assert json.loads(written)["message"] == text


def test_both_formats_contain_tracebacks():
    try:
        raise ValueError("wrong\n2026-01-01T00:00:00.000Z INFO kvcellar.serve: forged")
    except ValueError:
        made = record("it failed", exc_info=sys.exc_info())
    text = TextFormat().format(made)
    assert "\n    ValueError: wrong\n    2026-01-01" in text
    assert "forged" in json.loads(JsonFormat().format(made))["message"]


def test_a_blocked_stderr_blocks_nothing_else(monkeypatch):
    monkeypatch.setattr(logs, "MAX_QUEUED", 5)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    reached, never, written = threading.Event(), threading.Event(), []

    def write(data: bytes) -> None:
        reached.set()
        never.wait()
        written.append(data)

    handler = BackgroundHandler(write)
    handler.handle(record("the first"))
    assert reached.wait(PATIENCE)
    for number in range(20):
        handler.handle(record(f"number {number}"))
    handler.close()
    assert not written
    never.set()
    handler._thread.join(PATIENCE)
    assert b"15 lines of the log were dropped" in written[1]
    assert len(written) == 6


def test_dropped_lines_are_counted():
    written, tried = [], threading.Semaphore(0)
    failures = [OSError("no space left"), BrokenPipeError(), ValueError("closed")]

    def write(data: bytes) -> None:
        tried.release()
        if failures:
            raise failures.pop()
        written.append(data.decode())

    handler = BackgroundHandler(write)
    for number in range(3):
        handler.handle(record(f"number {number}"))
        assert tried.acquire(timeout=PATIENCE)
    handler.handle(record("the last"))
    handler.close()
    handler._thread.join(PATIENCE)
    (only,) = written
    note, line, _ = only.split("\n")
    assert "3 lines of the log were dropped" in note
    assert "the last" in line


def test_formatting_errors_are_logged():
    written = []
    handler = BackgroundHandler(written.append)
    handler.setFormatter(TextFormat())
    handler.handle(record("%d", args=("no number",)))
    handler.close()
    handler._thread.join(PATIENCE)
    assert b"could not be formatted" in written[0]


def test_without_stderr_nothing_is_written_anywhere(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with log_to_stderr("debug", "text"):
        logging.getLogger("kvcellar.serve").error("nowhere")


def test_logging_is_restored():
    loggers = [logging.getLogger(name) for name in (None, "kvcellar", "uvicorn.error")]
    before = [(one.level, list(one.handlers)) for one in loggers]
    with log_to_stderr("debug", "json"):
        assert logging.getLogger("kvcellar.serve").isEnabledFor(logging.DEBUG)
    assert [(one.level, list(one.handlers)) for one in loggers] == before


class Served(FakeEngine):
    def capacity(self) -> str:
        return "as many tokens as there are"


@contextmanager
def one_request(monkeypatch, path: str) -> Iterator[None]:
    """`kvcellar serve` with a fake engine; it ends after one completion and one GET of `path`."""

    def run(host, settings, *, listener, load, ready, **others):
        load()
        with Server(host, settings, listener=listener) as server, httpx.Client(base_url=server.url) as client:
            ready(server.url)
            body = {"model": host.default.model.name, "prompt": "my secret prompt", "max_tokens": 4}
            client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
            client.get(path)

    monkeypatch.setattr("kvcellar.cli.hosting.Engine", lambda model, **settings: Served())
    monkeypatch.setattr("kvcellar.serve.http.server.run", run)
    yield


def test_each_request_has_a_line(monkeypatch):
    with one_request(monkeypatch, "/nowhere%0a%1b[31m%20200%20ok"):
        log = kvcellar("serve", "--port", "0").err
    assert "secret" not in log
    refused, served = sorted((line for line in log.splitlines() if HEAD.match(line)), key=lambda line: "POST" in line)
    expected = "mine-1: POST /v1/completions 200 ok model=embedded prompt_tokens=16 cached_tokens=0 "
    assert f"{expected}completion_tokens=4 ms=" in served
    assert ": GET /nowhere%0A%1B%5B31m%20200%20ok 404 not_found ms=" in refused


def test_as_json_each_line_is_an_object(monkeypatch):
    with one_request(monkeypatch, "/nowhere"):
        ran = kvcellar("serve", "--port", "0", "--log-format", "json")
    *opening, one, other = map(json.loads, ran.err.splitlines())
    refused, served = sorted((one, other), key=lambda line: line["route"])  # a line follows its response
    assert ran.code == 0
    assert [line["message"].partition(" ")[0] for line in opening] == [
        *("cellar/fake-1:", "Serving", "OpenAI:", "Chat", "See", "Memory:", "Keys:")
    ]
    assert served.pop("ms") > 0
    assert HEAD.match(f"{served.pop('time')} INFO x: ")
    assert served == {
        "level": "info",
        "logger": "kvcellar.serve",
        "request_id": "mine-1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "model": "embedded",
        "prompt_tokens": 16,
        "cached_tokens": 0,
        "completion_tokens": 4,
    }
    assert refused["route"] == "/nowhere"
    assert "prompt_tokens" not in refused


@pytest.mark.parametrize(("path", "level", "lines"), [("/x", "info", 2), ("/health", "info", 1), ("/x", "warning", 0)])
def test_the_level_decides_whether_requests_are_logged_and_successful_probes_are_not(monkeypatch, path, level, lines):
    with one_request(monkeypatch, path):
        log = kvcellar("serve", "--port", "0", "--log-level", level).err
    assert len([line for line in log.splitlines() if HEAD.match(line)]) == lines
