"""Clients that disconnect, stall or send invalid HTTP, on raw sockets. Their memory is freed, and others are served."""

import contextlib
import json
import logging
import socket
import threading
import time

import pytest

from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.http.event_loop import SOCKETS
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import (
    CHAT,
    COMPLETIONS,
    PING,
    Wire,
    chat,
    completion,
    connected,
    read_response,
    read_to_end,
    read_until,
    request,
)

LIMIT_SECONDS = 0.5  # seconds of all time limits; a busy machine may delay a client by half of that


@pytest.fixture(scope="module")
def short_limits(shared_engine: FakeEngine):
    settings = ServeSettings(
        port=0,
        max_body_bytes=2**20,
        max_backlog_events=64,
        header_seconds=LIMIT_SECONDS,
        body_seconds=LIMIT_SECONDS,
        write_seconds=LIMIT_SECONDS,
        ping_seconds=0.05,
    )
    with Server(shared_engine, settings) as server:
        yield server


@pytest.fixture(autouse=True)
def still_serves(server: Server, engine: FakeEngine):
    yield
    assert engine.rest()
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion("fine")))
        status, body = read_response(wire)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "fine")


def shape(status_and_body: tuple[int, bytes]) -> tuple[int, str]:
    status, body = status_and_body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cut", [1, 15, 60, -1])
def test_disconnect_before_the_request_is_complete(server, engine, cut, reset):
    wire = Wire(server.port)
    wire.sendall(request(COMPLETIONS, completion())[:cut])
    wire.close(reset=reset)
    assert not engine.seen


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_disconnect_before_the_first_token(server, engine, stream, reset, prompts):
    with engine.scripted(gate=threading.Event()):
        wire = Wire(server.port)
        wire.sendall(request(COMPLETIONS, completion(["x"] * prompts, n=2, stream=stream)))
        while engine.running < prompts:
            time.sleep(0.005)
        wire.close(reset=reset)
        assert engine.rest()
    assert engine.cancels == prompts


@pytest.mark.parametrize("reset", [False, True])
def test_disconnect_during_a_stream(server, engine, reset):
    with engine.scripted(delay=0.005, output=b"x" * 5000):
        wire = Wire(server.port)
        wire.sendall(request(COMPLETIONS, completion(stream=True, max_tokens=5000)))
        assert read_until(wire, b'"text":"x"').startswith(b"HTTP/1.1 200")
        wire.close(reset=reset)
        assert engine.rest()
    assert engine.cancels == 1


def test_disconnect_between_two_events(server, engine):
    gate = threading.Event()
    gate.set()
    with engine.scripted(delay=0.01, output=b"x" * 5000, gate=gate):
        wire = Wire(server.port)
        wire.sendall(request(COMPLETIONS, completion(stream=True, max_tokens=5000)))
        read_until(wire, b'"text":"x"')
        gate.clear()
        read_until(wire, PING)
        wire.close()
        assert engine.rest()
    assert engine.cancels == 1


def test_disconnect_after_the_last_token_cancels_nothing(server, engine):
    wire = Wire(server.port)
    wire.sendall(request(COMPLETIONS, completion(stream=True)))
    read_until(wire, b"[DONE]")
    wire.close()
    assert engine.rest()
    assert engine.cancels == 0


def test_a_client_that_does_not_read_is_disconnected_its_request_cancelled_and_logged(short_limits, engine, caplog):
    caplog.set_level(logging.INFO, "kvcellar.serve")
    response = bytes(range(32, 127)) * 30
    body = completion(["x"] * 20, stream=True, max_tokens=len(response), logprobs=20)
    with engine.scripted(output=response, delay=0.001), socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", short_limits.port))
        wire.sendall(request(COMPLETIONS, body))
        assert engine.cancelled(20)
        time.sleep(3 * LIMIT_SECONDS)  # by then the server has aborted the connection
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while got := wire.recv(65536):
                found += got
        assert found.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in found
    while not (requests := [vars(one)["request"] for one in caplog.records if "request" in vars(one)]):
        time.sleep(0.01)  # it is written once the application has ended
    assert [(one["status"], one["outcome"]) for one in requests] == [(200, "client_too_slow")]


def test_a_client_that_reads_slowly_gets_the_whole_stream(server, engine):
    response = bytes(range(32, 127)) * 5
    with engine.scripted(output=response), socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.settimeout(PATIENCE)
        wire.connect(("127.0.0.1", server.port))
        wire.sendall(request(COMPLETIONS, completion(stream=True, max_tokens=len(response)), "Connection: close"))
        time.sleep(0.1)
        found = b""
        while b"[DONE]" not in found:
            found += wire.recv(2048)
    assert found.count(b'"text":') == len(response) + 1
    assert engine.cancels == 0


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_an_incomplete_request_times_out(short_limits, sent):
    with connected(short_limits) as wire:
        wire.sendall(sent)
        assert shape(read_response(wire)) == (408, "request_timeout")
        assert read_to_end(wire) == b""


def drip(wire: Wire, data: bytes) -> None:
    for byte in data:
        wire.sendall(bytes([byte]))
        time.sleep(LIMIT_SECONDS / 20)


def test_a_request_sent_byte_by_byte_times_out(short_limits):
    with connected(short_limits) as wire, pytest.raises(OSError, match=r"Broken pipe|reset"):
        drip(wire, request("/health", None, "X-Long: " + "x" * 1000))


def test_the_second_request_of_a_connection_has_its_own_time_limit(short_limits):
    for _ in range(20):  # a busy machine may delay the first request of a connection until it is refused
        with connected(short_limits) as wire:
            wire.sendall(request("/health"))
            if read_response(wire)[0] != 200:
                continue
            time.sleep(2 * LIMIT_SECONDS)
            wire.sendall(b"GET /health")
            assert shape(read_response(wire)) == (408, "request_timeout")
            return
    pytest.fail("no request arrived in time, in 20 connections")


def test_requests_that_arrive_while_the_server_is_late_are_answered(short_limits):
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connected(short_limits)) for _ in range(4 * SOCKETS)]
        wires[0].sendall(request("/health"))
        assert read_response(wires[0])[0] == 200  # the others were accepted before it was read
        short_limits._uvicorn._loop.call_soon_threadsafe(time.sleep, 3 * LIMIT_SECONDS)
        for wire in wires[1:]:
            wire.sendall(request("/health"))
        assert [read_response(wire)[0] for wire in wires[1:]] == [200] * (len(wires) - 1)


def test_an_error_of_a_connection_has_its_reason_phrase(short_limits):
    with connected(short_limits) as wire:
        wire.sendall(b"P")
        assert read_until(wire, b"\r\n") == b"HTTP/1.1 408 Request Timeout\r\n"


def test_an_idle_connection_is_closed(shared_engine):
    with Server(shared_engine, ServeSettings(port=0, idle_seconds=1)) as server, connected(server) as wire:
        wire.sendall(request("/health"))
        assert read_response(wire)[0] == 200
        assert read_to_end(wire) == b""


@pytest.mark.parametrize(
    "framing", [("Content-Length: 100000",), ("Content-Length: 60",), ("Transfer-Encoding: chunked", "Content-Length:")]
)
def test_an_incomplete_body_times_out(short_limits, engine, framing):
    body = json.dumps(completion()).encode()
    data = body if framing[0].startswith("Content") else b"%x\r\n%s\r\n" % (len(body), body)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing[0]}\r\n\r\n"
    with connected(short_limits) as wire:
        wire.sendall(head.encode() + data[:50])
        assert shape(read_response(wire)) == (408, "request_timeout")
        assert read_to_end(wire) == b""
    assert not engine.seen


def test_a_chunked_body_is_accepted(server):
    body = json.dumps(completion("hello")).encode()
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, {}, "Transfer-Encoding: chunked").replace(b"Content-Length: 2\r\n", b"")[:-2])
        for at in range(0, len(body), 7):
            part = body[at : at + 7]
            wire.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        wire.sendall(b"0\r\n\r\n")
        assert json.loads(read_response(wire)[1])["choices"][0]["text"] == "hello"


def test_bytes_beyond_the_content_length_are_parsed_as_the_next_request(server):
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion("one")) + b'{"prompt": "two"}\r\n\r\n')
        assert json.loads(read_response(wire)[1])["choices"][0]["text"] == "one"
        assert shape(read_response(wire)) == (400, "invalid_http")


def test_a_body_shorter_than_its_content_length_includes_the_next_request(server, engine):
    data = request(COMPLETIONS, completion("one"))
    length = len(data.partition(b"\r\n\r\n")[2])
    with connected(server) as wire:
        wire.sendall(data.replace(b"Content-Length: %d" % length, b"Content-Length: %d" % (length + 10)))
        wire.sendall(request("/health"))
        status, body = read_response(wire)
        assert shape((status, body)) == (400, "invalid_json")
    assert not engine.seen


@pytest.mark.parametrize("length", ["2147483648", "9" * 30])
def test_a_content_length_over_the_limit_is_refused_before_the_body_arrives(server, length):
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, {}, f"Content-Length: {length}")[:-2])
        assert shape(read_response(wire))[0] in (400, 413)


def test_a_client_reads_the_error_for_a_huge_body_and_can_reuse_the_connection(server):
    size = 4 * 2**20
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, {}, f"Content-Length: {size}")[:-2])
        for _ in range(64):
            wire.sendall(b" " * (size // 64))
        assert shape(read_response(wire)) == (413, "request_too_large")
        wire.sendall(request("/health"))
        assert read_response(wire)[0] == 200


def test_a_huge_body_that_does_not_arrive_does_not_keep_the_connection(short_limits):
    with connected(short_limits) as wire:
        wire.sendall(request(COMPLETIONS, {}, "Content-Length: 5000000")[:-2] + b"   ")
        assert shape(read_response(wire))[0] == 413
        wire.sendall(b"  ")
        assert b"200 OK" not in read_to_end(wire)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n", 431),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 101 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"x" * 2**20 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /" + b"x" * 2**20, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX A: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\x00b\r\n\r\n", 400),
        (b"GET /he alth HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 2\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\r\n\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
    ],
    ids=lambda value: value if isinstance(value, int) else repr(value[:30]),
)
def test_invalid_http_gets_an_error_in_the_api_format(server, head, status):
    with connected(server) as wire:
        with contextlib.suppress(OSError):  # it may be refused before it was sent completely
            wire.sendall(head)
        assert shape(read_response(wire))[0] == status


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (COMPLETIONS, {"error": {"message", "type", "param", "code"}}),
        ("/v1/messages", {"type": None, "error": {"type", "message"}}),
        ("/v1/messages/count_tokens", {"type": None, "error": {"type", "message"}}),
        ("/api/chat", {"error": None}),
    ],
)
def test_errors_before_the_body_is_read_have_the_form_of_the_api(server, path, form):
    """Also those of the connection, once its path is known: a chunk that is none."""
    head = request(path, {}, "Transfer-Encoding: chunked").replace(b"Content-Length: 2\r\n", b"")[:-2]
    sent = (
        (head + b'2\r\n{"\r\nzz\r\n', 400),
        (request(path, {}, "Content-Length: 5000000")[:-2], 413),
        (b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode(), 405),
        (request(path + "/nothing", {}), 404),
    )
    for data, status in sent:
        with connected(server) as wire:
            wire.sendall(data)
            found, body = read_response(wire)
            assert found == status
            error = json.loads(body)
            assert error.keys() == form.keys(), error
            assert all(set(error[name]) == keys for name, keys in form.items() if keys), error


def test_an_invalid_chunk_is_refused(server, engine):
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, {}, "Transfer-Encoding: chunked").replace(b"Content-Length: 2\r\n", b"")[:-2])
        wire.sendall(b'2\r\n{"\r\nzz\r\n')
        assert shape(read_response(wire)) == (400, "invalid_http")
        assert read_to_end(wire) == b""
    assert not engine.seen


def test_garbage_after_a_running_request_does_not_affect_its_response(server, engine):
    with engine.scripted(delay=0.005):
        with connected(server) as wire:
            wire.sendall(request(COMPLETIONS, completion("hello", stream=True)) + b"\x00garbage\r\n\r\n")
            assert b"[DONE]" in read_until(wire, b"[DONE]")


def test_pipelined_requests_get_responses_in_order(server):
    with connected(server) as wire:
        wire.sendall(b"".join(request(COMPLETIONS, completion(text)) for text in ("one", "two", "three")))
        texts = [json.loads(read_response(wire)[1])["choices"][0]["text"] for _ in range(3)]
    assert texts == ["one", "two", "three"]


def test_http_1_0_gets_a_response_and_the_connection_is_closed(server):
    data = request(COMPLETIONS, completion("hi", stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(server) as wire:
        wire.sendall(data)
        response = read_to_end(wire)
    assert response.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in response
    assert response.endswith(b"data: [DONE]\n\n")


def test_expect_100_continue_gets_continue_or_the_error(server):
    with connected(server) as wire:
        head, _, body = request(COMPLETIONS, completion("hi"), "Expect: 100-continue").partition(b"\r\n\r\n")
        wire.sendall(head + b"\r\n\r\n")
        assert read_until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        wire.sendall(body)
        assert read_response(wire)[0] == 200
    with connected(server) as wire:
        wire.sendall(head.replace(b"Content-Length: ", b"Content-Length: 9999999") + b"\r\n\r\n")
        assert shape(read_response(wire))[0] == 413


def test_an_upgrade_header_is_ignored(server):
    with connected(server) as wire:
        wire.sendall(request("/health", None, "Connection: Upgrade", "Upgrade: websocket"))
        assert read_response(wire)[0] == 200


@pytest.mark.parametrize("slow", ["encode", "render", "submit"])
def test_slow_preparation_of_a_request_does_not_block_others(server, http, engine, monkeypatch, slow):
    """Other requests get responses while one is prepared."""
    entered, go_on = threading.Event(), threading.Event()
    real = getattr(engine, slow)

    def held(given, *args, **kwargs):
        if not entered.is_set():
            entered.set()
            assert go_on.wait(PATIENCE), "no other request got a response meanwhile"
        return real(given, *args, **kwargs)

    monkeypatch.setattr(engine, slow, held)
    route, body = (CHAT, chat("hi")) if slow == "render" else (COMPLETIONS, completion("hi"))
    with connected(server) as wire:
        wire.sendall(request(route, body))
        assert entered.wait(PATIENCE)
        assert http.get("/health").status_code == 200
        assert http.post(COMPLETIONS, json=completion("others")).json()["choices"][0]["text"] == "others"
        assert not go_on.is_set()
        go_on.set()
        assert read_response(wire)[0] == 200


def test_disconnect_during_preparation_cancels_the_request(server, engine, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    submit = engine.submit

    def held(*args, **kwargs):
        entered.set()
        assert go_on.wait(PATIENCE)
        return submit(*args, **kwargs)

    with monkeypatch.context() as patch, engine.scripted(gate=threading.Event()):
        patch.setattr(engine, "submit", held)
        wire = Wire(server.port)
        wire.sendall(request(COMPLETIONS, completion("hi")))
        assert entered.wait(PATIENCE)
        wire.close(reset=True)
        with connected(server) as other:
            other.sendall(request("/health"))
            assert read_response(other)[0] == 200
        go_on.set()
        assert engine.cancelled(1)
