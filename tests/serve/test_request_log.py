"""Each request has one record in the log, with its token counts and without its text."""

import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest

from kvcellar.errors import CacheFull
from kvcellar.events import Speculation
from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.wire import COMPLETIONS, PING, completion, connected, read_response, read_to_end, read_until, request


class Log:
    """The `request` fields of log records, in order."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._taken = 0

    def next(self, count: int = 1) -> list[dict[str, object]]:
        """The next records. The last may be written after the client has read the response."""
        while len(found := self._all()[self._taken :]) < count:
            time.sleep(0.01)
        self._taken += len(found)
        assert len(found) == count, "a request was logged twice"
        return found

    def _all(self) -> list[dict[str, object]]:
        return [vars(one)["request"] for one in list(self._caplog.records) if "request" in vars(one)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    with caplog.at_level(logging.INFO, "kvcellar.serve"):
        yield Log(caplog)


def outcome(record: dict[str, object]) -> tuple[object, object]:
    return record["status"], record["outcome"]


def tokens(record: dict[str, object]) -> list[object]:
    return [record.get(f"{kind}_tokens") for kind in ("prompt", "cached", "completion")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_response_is_logged_with_its_tokens(http, engine, log, stream):
    with engine.scripted(cached=3):
        http.post(COMPLETIONS, json=completion(["hello", "you"], stream=stream, max_tokens=4))
    (record,) = log.next()
    assert (record["method"], record["route"], *outcome(record)) == ("POST", COMPLETIONS, 200, "ok")
    assert tokens(record) == [8, 6, 7]
    assert record["ms"] > 0


def test_drafts_are_logged_with_how_many_were_accepted(http, engine, log, caplog):
    found = Speculation(7, 20, 9, (6, 5, 3), (5, 3, 1), ((2.5, 4),), 0.125)
    with engine.scripted(speculation=found):
        http.post(COMPLETIONS, json=completion(["hello", "you"]))
    (record,) = log.next()
    assert (record["draft_tokens"], record["accepted_tokens"]) == (40, 18)
    http.post(COMPLETIONS, json=completion("hello"))
    (record,) = log.next()
    assert (record.get("draft_tokens"), record.get("accepted_tokens")) == (None, None)
    lines = [one.getMessage() for one in caplog.records if "request" in vars(one)]
    assert ["draft_tokens=40 accepted_tokens=18" in lines[0], "draft_tokens" not in lines[1]] == [
        True,
        True,
    ]


JSON = {"content-type": "application/json"}
REFUSED = {
    "unknown route": ("GET", "/nowhere", {}, (404, "not_found")),
    "method": ("DELETE", "/v1/models", {}, (405, "method_not_allowed")),
    "host": ("GET", "/health", {"headers": {"host": "evil.com"}}, (403, "host_not_allowed")),
    "no JSON": ("POST", COMPLETIONS, {"content": b"{"}, (415, "unsupported_media_type")),
    "bad JSON": ("POST", COMPLETIONS, {"content": b"{", "headers": JSON}, (400, "invalid_json")),
    "too large": ("POST", COMPLETIONS, {"json": completion("x" * 2**20)}, (413, "request_too_large")),
    "unknown field": ("POST", COMPLETIONS, {"json": completion(frob=1)}, (400, "unknown_parameter")),
    "empty prompt": ("POST", COMPLETIONS, {"json": completion([])}, (400, None)),
    "too long": ("POST", COMPLETIONS, {"json": completion("x" * 20_000)}, (400, "context_length_exceeded")),
    "another model": ("POST", COMPLETIONS, {"json": completion() | {"model": "x"}}, (404, "model_not_found")),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path", "sent", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_refused_request_is_logged_with_the_code_of_its_error(http, log, method, path, sent, expected):
    http.request(method, path, **sent)
    (record,) = log.next()
    status, code = expected
    assert outcome(record) == (status, code or record["outcome"])
    assert record["outcome"] != "ok"


@pytest.mark.parametrize(
    ("scripted", "expected"),
    [
        ({"fail": ValueError("a secret")}, (500, "internal_error")),
        ({"reject": CacheFull("full", 9, 2)}, (503, "overloaded")),
    ],
)
def test_engine_failures_are_logged(http, engine, log, scripted, expected, caplog):
    with engine.scripted(**scripted):
        http.post(COMPLETIONS, json=completion("my secret prompt"))
    assert outcome(*log.next()) == expected
    assert "secret" not in caplog.text


def test_a_failed_stream_is_logged_with_status_outcome_and_tokens(http, engine, log):
    with engine.scripted(fail=ValueError("a secret"), fail_at=2):
        http.post(COMPLETIONS, json=completion(stream=True, max_tokens=5))
    (record,) = log.next()
    assert outcome(record) == (200, "internal_error")
    assert tokens(record) == [5, None, 2]


def test_a_disconnect_is_logged(server, engine, log):
    with engine.scripted(gate=threading.Event()), connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion()))
        while not engine.running:
            time.sleep(0.01)
    assert outcome(*log.next()) == (499, "client_gone")


def test_a_request_cancelled_by_the_drain_is_logged(shared_engine, engine, log):
    with engine.scripted(gate=threading.Event()):
        with Server(shared_engine, ServeSettings(port=0, drain_seconds=0, ping_seconds=0.05)) as server:
            with connected(server) as wire:
                wire.sendall(request(COMPLETIONS, completion(stream=True)))
                read_until(wire, PING)
                server.stop()
                read_to_end(wire)
    assert outcome(*log.next()) == (200, "shutting_down")


BROKEN = {
    "no HTTP": (b"\x16\x03\x01\x02\r\n\r\n", (400, "invalid_http")),
    "a forged line": (b"GET / HTTP/1.1 200 ok\r\nforged: x\r\n\r\n", (400, "invalid_http")),
    "headers too long": (b"GET / HTTP/1.1\r\nx: " + b"x" * 70_000, (431, "headers_too_large")),
    "too many headers": (request("/health", None, *(f"x-{i}: 1" for i in range(200))), (431, "headers_too_large")),
    "a chunk that is none": (
        request(COMPLETIONS, None, "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST")
        + b"zz\r\n",
        (400, "invalid_http"),
    ),
}


@pytest.mark.parametrize(("data", "expected"), BROKEN.values(), ids=BROKEN)
def test_an_invalid_request_is_logged_with_the_id_in_its_response(server, engine, log, data, expected):
    with connected(server) as wire:
        wire.sendall(data)
        head = read_to_end(wire) if expected[0] == 400 else read_until(wire, b"\r\n\r\n")
        (record,) = log.next()
    assert outcome(record) == expected
    assert f"x-request-id: {record['request_id']}".encode() in head.lower()


def test_a_request_timeout_is_logged(shared_engine, engine, log):
    settings = ServeSettings(port=0, header_seconds=0.05, body_seconds=0.05)
    with Server(shared_engine, settings) as server:
        with connected(server) as wire:
            wire.sendall(b"GET / HT")
            read_to_end(wire)
            assert outcome(*log.next()) == (408, "request_timeout")
        with connected(server) as wire:
            wire.sendall(request(COMPLETIONS, completion())[:-3])
            read_response(wire)
            assert outcome(*log.next()) == (408, "request_timeout")


def test_a_connection_over_the_limit_is_logged(shared_engine, engine, log):
    with Server(shared_engine, ServeSettings(port=0, max_connections=1)) as server:
        with connected(server) as first:
            with connected(server):
                read_to_end(first)
                assert outcome(*log.next()) == (503, "overloaded")


@pytest.mark.parametrize("name", ["a", "7", "req-1", "550e8400-e29b-41d4-a716-446655440000", "a.b_c:d-9", "x" * 128])
def test_a_valid_id_of_the_client_is_used_in_log_and_response(http, log, name):
    assert http.get("/v1/models", headers={"x-request-id": name}).headers["x-request-id"] == name
    assert log.next()[0]["request_id"] == name


ODD = ["", " ", "a b", "a\tb", "-a", "x" * 129, "a=b", 'a"b', "a\x1b[31m", "h\u00e9", "a,b", "${jndi}", "<b>"]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_an_invalid_id_of_the_client_is_replaced(server, engine, log, name):
    with connected(server) as wire:
        wire.sendall(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n\r\n".encode("latin-1"))
        head = read_until(wire, b"\r\n\r\n").decode("latin-1")
    (record,) = log.next()
    if record["status"] == 200:
        assert f"x-request-id: {record['request_id']}" in head
    assert record["request_id"].startswith("req-")


def test_two_id_headers_are_ignored(http, log):
    response = http.get("/v1/models", headers=[("x-request-id", "a"), ("x-request-id", "b")])
    assert response.headers["x-request-id"].startswith("req-")


def test_the_path_in_the_log_is_escaped_and_cut(http, log):
    http.get("/v1/models/a%0aINFO%20forged%1b[31m%00%e2%80%a8" + "x" * 5000)
    (record,) = log.next()
    route = record["route"]
    assert isinstance(route, str)
    assert route.startswith("/v1/models/a%0AINFO%20forged%1B%5B31m%00%E2%80%A8xxx")
    assert route.isascii()
    assert " " not in route
    assert len(route) < 250


def test_concurrent_requests_have_a_line_each(server, engine, log):
    with DeclaredClient(base_url=server.url, timeout=120) as client:
        threads = [threading.Thread(target=client.get, args=("/v1/models",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({record["request_id"] for record in log.next(8)}) == 8


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/ping", "/metrics"])
def test_a_probe_is_logged_only_if_it_fails(http, engine, log, path):
    assert http.get(path).status_code == 200
    assert http.get(path, headers={"host": "evil.com"}).status_code == 403
    (record,) = log.next()
    assert (record["route"], *outcome(record)) == (path, 403, "host_not_allowed")


def test_a_line_has_only_the_fields_that_are_known(http, engine, log, caplog):
    http.get("/nowhere")
    (record,) = log.next()
    assert record.keys() == {"request_id", "method", "route", "status", "outcome", "ms"}
    line = next(one.getMessage() for one in caplog.records if "request" in vars(one))
    assert re.fullmatch(r"req-\w+: GET /nowhere 404 not_found ms=[\d.]+", line)
