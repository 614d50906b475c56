"""Processes of engines that are forks of one process, which has imported torch before: a start takes tenths of a second
in place of the seconds that imports take. And faults in them, at moments that a test names.

A fork is a child of the process of tests: the server forks twice, and the process of tests adopts what has lost its
parent (PR_SET_CHILD_SUBREAPER). So it is waited for, and sees its front end die, as in a process that was started.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
POLL = 0.005  # seconds
HERE = "tests.engine.fork_server"


class Forked:
    """A fork, with the methods of `subprocess.Popen` that an engine's front end uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self._status = pid, None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(["fork"], timeout or 0.0)
            time.sleep(POLL)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts processes of engines. `faults`: those of the next ones, in order, and of all later ones none."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", HERE, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        self.faults: list[Mapping[str, Any]] = []
        self.started: list[int] = []

    def popen(self, command: Sequence[str], *, pass_fds: tuple[int], cwd: str, **streams: Any) -> Forked:
        """In place of `subprocess.Popen`: the environment and the standard streams are those of the server."""
        faults = self.faults.pop(0) if self.faults else {}
        plan = json.dumps({"folder": cwd, "front": os.getpid(), "faults": faults})
        socket.send_fds(self._control, [plan.encode()], list(pass_fds))
        self.started.append(pid := int(self._control.recv(100)))
        while _parent_of(pid) != os.getpid():  # until the process between has ended
            time.sleep(0.001)
        return Forked(pid)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


@contextmanager
def fork_server(patch: Callable[[str, object], None]) -> Iterator[ForkServer]:
    """Within the block, clients of this process start their engines with it. `patch`: as that of `MonkeyPatch`."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    server = ForkServer()
    names = {"Popen": server.popen, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    patch("kvcellar.engine.child_process.subprocess", SimpleNamespace(**names))
    try:
        yield server
    finally:
        server.close()
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- in the server ----------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    from kvcellar.engine import build, engine_process
    from kvcellar.engine.engine import import_needed

    import_needed()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        if (between := os.fork()) == 0:
            if (pid := os.fork()) > 0:
                control.send(str(pid).encode())
                os._exit(0)
            control.close()
            plan = json.loads(data)
            while os.getppid() != plan["front"]:
                time.sleep(0.001)
            os.chdir(plan["folder"])
            build.TORCH = os.getpid()  # no thread of torch has run before
            install(**plan["faults"])
            sys.argv[1:] = [str(fds[0])]
            os._exit(engine_process.main())
        os.waitpid(between, 0)
        os.close(fds[0])


def install(
    *,
    step: int | None = None,
    prompt: int | None = None,
    turn: bool = False,
    grammar: bool = False,
    load: str | None = None,
    version: str | None = None,
    silent: bool = False,
    with_signal: int = signal.SIGKILL,
) -> None:
    """Let this process die of a signal in its step of that number, in a step that has a request whose prompt begins
    with that token, or where a grammar is compiled. `turn`: when `step` is reached, the engine meets an error that ends
    it, in place of a signal. `load`: in its load it dies or hangs. `version`: of its messages. `silent`: it does not
    reply that it has taken in a request."""
    from kvcellar import messages
    from kvcellar.engine import engine_process
    from kvcellar.sample.grammars import Grammars

    def die(*_: object, **__: object) -> Any:
        os.kill(os.getpid(), with_signal)
        time.sleep(600)

    if turn:
        err_after(step)
    else:
        die_in(step, prompt, die)
    if grammar:
        Grammars.matcher = die  # type: ignore[method-assign]
    if load is not None:
        engine_process.build = die if load == "dies" else lambda *_: time.sleep(600)
    if version is not None:
        messages.VERSION = engine_process.VERSION = version
    if silent:
        be_silent()


def die_in(step: int | None, prompt: int | None, die: Callable[[], object]) -> None:
    from kvcellar.engine.runner import Runner

    run, numbers = Runner.step, count(1)

    def one(self: Any, scheduled: Any) -> None:
        if next(numbers) == step or any(each.completion.request.prompt[0] == prompt for each in scheduled):
            die()
        run(self, scheduled)

    Runner.step = one  # type: ignore[method-assign]


def err_after(step: int | None) -> None:
    from kvcellar.engine.loop import Loop

    receive = Loop._receive

    def received(self: Any) -> bool:
        if self.steps == step:
            raise RuntimeError("a defect of the engine itself")
        return receive(self)

    Loop._receive = received  # type: ignore[method-assign]


def be_silent() -> None:
    from kvcellar.engine.engine_process import Outbox
    from kvcellar.messages import Reply
    from kvcellar.wire import packed

    put, nothing = Outbox.put, packed(None)

    def put_some(self: Any, message: object) -> None:
        if not (isinstance(message, Reply) and message.value == nothing):
            put(self, message)

    Outbox.put = put_some  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
