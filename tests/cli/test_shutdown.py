"""The process of `kvcellar serve` ends when its engine is stuck, and at a second signal."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcellar.cli.shutdown import ShutdownTimer
from tests.cli.command import PATIENCE, ordinary_interrupts

ROOT = Path(__file__).parents[2]

# An engine whose last step never ends, behind the command itself.
STUCK = """
import threading
from kvcellar.cli import hosting, main
from tests.serve.fake_engine import FakeEngine

class Stuck(FakeEngine):
    def capacity(self):
        return "all"

    def close(self):
        print("closing", flush=True)
        threading.Event().wait()

hosting.Engine = lambda model, **settings: Stuck()
main.main()
"""


def stuck(*words: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    return subprocess.Popen(
        [sys.executable, "-c", STUCK, "serve", "--port", "0", *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ordinary_interrupts,
    )


def until_it_serves(process: subprocess.Popen[str]) -> int:
    """Wait until the server is ready. Returns its port."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Serving "):
            return int(line.rpartition(":")[2].removesuffix("/v1\n"))
    raise AssertionError("it does not serve")


def test_the_process_ends_without_waiting_for_a_stuck_step():
    with stuck("--drain-timeout", "0") as process:
        until_it_serves(process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "closing\n")
    assert "ERROR kvcellar.serve: the engine did not end its step within 3 seconds of the signal" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_process_at_once(number):
    with stuck("--drain-timeout", "1000") as process:
        port = until_it_serves(process)
        with socket.create_connection(("127.0.0.1", port)) as running:
            body = b'{"model":"cellar/fake-1","prompt":"x","max_tokens":19000,"ignore_eos":true,"stream":true}'
            running.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            running.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert running.recv(1)
            process.send_signal(number)
            while listens(port):
                time.sleep(0.01)
            assert process.poll() is None
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_engines_are_closed_ends_the_process_with_its_code(number):
    with stuck("--drain-timeout", "1000") as process:
        until_it_serves(process)
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == "closing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert "Traceback" not in err


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_the_timer_does_nothing_without_a_signal_or_after_the_end():
    left: list[int] = []
    with ShutdownTimer(0.0, flush=lambda: None, leave=left.append) as timer:
        pass
    timer._thread.join(PATIENCE)
    with ShutdownTimer(1000.0, flush=lambda: None, leave=left.append) as timer:
        timer.signalled(signal.SIGTERM)
    timer._thread.join(PATIENCE)
    assert not timer._thread.is_alive()
    assert left == []


def test_a_signal_before_the_server_runs_does_what_it_did_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    left: list[int] = []
    with ShutdownTimer(1000.0, flush=lambda: None, leave=left.append) as timer:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        timer.signalled(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_the_log_is_flushed_before_the_process_exits():
    happened: list[object] = []
    over = threading.Event()

    def leave(code: int) -> None:
        happened.append(code)
        over.set()

    with ShutdownTimer(0.0, flush=lambda: happened.append("flush"), leave=leave) as timer:
        timer.signalled(signal.SIGTERM)
        assert over.wait(PATIENCE)
    assert happened == ["flush", 1]
