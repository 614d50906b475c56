"""Shutdown: running requests finish or get an error; a second signal aborts them; nothing is left running."""

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from kvcellar.serve import Server, ServeSettings, run
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import (
    COMPLETIONS,
    PING,
    Wire,
    completion,
    connected,
    read_response,
    read_to_end,
    read_until,
    request,
)

ROOT = Path(__file__).parents[2]

ALONE = """
from kvcellar.serve import ServeSettings, run
from tests.serve.fake_engine import PATIENCE, FakeEngine, Script

with FakeEngine() as engine:
    engine.script = Script(output=b"x" * {tokens}, delay=0.01)
    run(engine, ServeSettings(port=0), ready=lambda url: print(url, flush=True))
    print("left", engine.running, flush=True)
"""


class Alone:
    """A server in a new process, whose completions have `tokens` tokens, one per 10 ms."""

    def __init__(self, tokens: int) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        command = [sys.executable, "-c", ALONE.format(tokens=tokens)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])

    def post(self, *, stream: bool) -> Wire:
        wire = Wire(self.port)
        wire.sendall(request(COMPLETIONS, completion(stream=stream, max_tokens=10_000)))
        return wire

    def end(self) -> tuple[int, str, str]:
        """Wait for its end. Returns exit code, output and errors."""
        output, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output, errors


def knock_for_ever(port: int) -> NoReturn:
    while True:
        Wire(port).close()
        time.sleep(0.01)


@pytest.fixture
def alone() -> Iterator[type[Alone]]:
    made: list[Alone] = []

    class Counted(Alone):
        def __init__(self, tokens: int) -> None:
            super().__init__(tokens)
            made.append(self)

    yield Counted
    for server in made:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_running_requests_and_refuses_new_ones(alone, number):
    server = alone(tokens=60)
    streaming, waiting, idle = server.post(stream=True), server.post(stream=False), Wire(server.port)
    read_until(streaming, b'"text":"x"')
    server.process.send_signal(number)
    assert read_to_end(idle) == b""
    with pytest.raises(ConnectionRefusedError):
        knock_for_ever(server.port)
    rest = read_to_end(streaming)
    assert rest.count(b'"text":"x"') == 59
    assert b"data: [DONE]" in rest
    assert json.loads(read_response(waiting)[1])["choices"][0]["text"] == "x" * 60
    assert server.end() == (0, "left 0\n", "")
    for wire in (streaming, waiting, idle):
        wire.close()


def test_the_second_signal_aborts_connections(alone):
    server = alone(tokens=5000)
    wire = server.post(stream=True)
    read_until(wire, b'"text":"x"')
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert b"[DONE]" not in read_to_end(wire)
    wire.close()
    code, output, errors = server.end()
    assert (code, output.split()[0]) == (0, "left")
    assert "Traceback" not in errors


def test_requests_that_outlast_the_drain_get_an_error(engine, shared_engine):
    with engine.scripted(gate=threading.Event()):
        server = Server(shared_engine, ServeSettings(port=0, drain_seconds=0, ping_seconds=0.05))
        with server, connected(server) as streaming, connected(server) as waiting:
            streaming.sendall(request(COMPLETIONS, completion(stream=True)))
            read_until(streaming, PING)
            waiting.sendall(request(COMPLETIONS, completion()))
            while engine.running < 2:
                time.sleep(0.01)
            server.stop()
            last = read_to_end(streaming)
            status, body = read_response(waiting)
        assert engine.rest()
    assert b'"code":"shutting_down"' in last
    assert last.endswith(b"0\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
    assert engine.cancels == 2


WAITS = {
    "drain_seconds": 1000.0,
    "body_seconds": 1000.0,
    "header_seconds": 1000.0,
}  # only a test that fails takes so long


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_is_refused_at_once_and_a_running_one_continues(engine, shared_engine, stream):
    gate = threading.Event()
    with Server(shared_engine, ServeSettings(port=0, **WAITS)) as server:
        with connected(server) as running, connected(server) as waiting:
            with engine.scripted(gate=gate):
                running.sendall(request(COMPLETIONS, completion("running")))
                while engine.running < 1:
                    time.sleep(0.01)
            with engine.scripted(gate=threading.Event(), queued=True):
                waiting.sendall(request(COMPLETIONS, completion("waiting", stream=stream)))
                while engine.running < 2:
                    time.sleep(0.01)
            server.stop()
            status, body = read_response(waiting)
            assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
            assert read_to_end(waiting) == b""
            gate.set()
            status, body = read_response(running)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "running")
    assert engine.rest()
    assert engine.cancels == 1


def test_a_request_with_an_incomplete_body_is_refused_at_once(engine, shared_engine):
    with Server(shared_engine, ServeSettings(port=0, **WAITS)) as server, connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion(), "Expect: 100-continue")[:-3])
        read_until(wire, b"100 Continue\r\n\r\n")  # the server has begun to read it
        server.stop()
        status, body = read_response(wire)
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
    assert not engine.seen


def test_a_client_that_does_not_read_does_not_delay_the_drain(engine, shared_engine):
    with engine.scripted(output=b"x" * 19_000):
        settings = ServeSettings(port=0, drain_seconds=0, write_seconds=1000, max_backlog_events=100_000)
        with Server(shared_engine, settings) as server, connected(server) as wire:
            body = completion(stream=True, n=8, logprobs=5, max_tokens=19_000)
            wire.sendall(request(COMPLETIONS, body))
            while not engine.seen:
                time.sleep(0.01)
    assert engine.rest()


def test_stop_now_does_not_wait(engine, shared_engine):
    with engine.scripted(gate=threading.Event()), Server(shared_engine, ServeSettings(port=0)) as server:
        with connected(server) as wire:
            wire.sendall(request(COMPLETIONS, completion(stream=True)))
            while not engine.running:
                time.sleep(0.01)
            server.stop(now=True)
            assert read_to_end(wire) == b""
    assert engine.rest()
    assert engine.cancels == 1


def test_requests_to_a_closed_engine_get_status_503():
    engine = FakeEngine()
    with Server(engine, ServeSettings(port=0)) as server, connected(server) as wire, connected(server) as late:
        with engine.scripted(gate=threading.Event()):
            wire.sendall(request(COMPLETIONS, completion()))
            while not engine.running:
                time.sleep(0.01)
            engine.close()
        late.sendall(request(COMPLETIONS, completion()))
        for response in (read_response(wire), read_response(late)):
            assert response[0] == 503


def test_a_server_can_be_stopped_twice_and_before_it_starts(shared_engine):
    server = Server(shared_engine, ServeSettings(port=0))
    server.stop()
    with server:
        server.stop()
        server.stop(now=True)
    server.stop(now=True)


def test_run_gives_the_server_all_that_it_is_given(monkeypatch):
    given: dict[str, object] = {}

    class Recorded:
        def __init__(self, models: object, settings: object, **options: object) -> None:
            given.update(options)

        def serve(self, *_: object) -> None: ...

    monkeypatch.setattr("kvcellar.serve.http.server.Server", Recorded)
    names = set(inspect.signature(Server.__init__).parameters) - {"self", "models", "settings"}
    wanted = {name: object() for name in names}
    run(None, None, **wanted)
    assert given == wanted
