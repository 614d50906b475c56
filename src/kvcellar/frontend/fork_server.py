"""fork_server: starts processes of engines. No torch.

On Linux each is a fork of one process that has imported what engines need (`fork_process.py`): its start takes tenths
of a second in place of the seconds that imports take. On other systems each is a program of its own: on macOS, a
process that has used libraries of the system must not go on in a fork.

Always true:
  * how a process has ended is known exactly, except where the fork server was killed before it ended;
  * a process inherits standard error, its ends of sockets and no other open file: its standard input and output are
    empty.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from kvcellar.errors import EngineFailed
from kvcellar.worker import spawned

log = logging.getLogger("kvcellar.engine")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of a terminal and of supervisors
AGAIN = 0.2  # seconds
LOST = 256  # in place of an exit code, where none is known
MOST = 100  # bytes of what the fork server tells


class Fork:
    """The process of an engine that the fork server has forked, with the methods of `subprocess.Popen` that its front
    end uses."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        """`told`: where the fork server tells how the process ends. Its other end is open until both have ended."""
        self.pid, self._told, self._number = pid, told, told.fileno()
        self._lock = threading.Lock()
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._told.close()

    def poll(self) -> int | None:
        """As that of `Popen`; `LOST` where the fork server has ended before."""
        with self._lock:
            if self._status is None and _arrives(self._number, 0.0):
                told = self._told.recv(MOST)
                self._status = int(told) if told else LOST
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            _arrives(self._number, timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(["fork"], timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(slots=True)
class _Running:
    """The process that engines are forked from."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket
    ready: bool = False  # all is imported


class ForkServer:
    """Starts engines as forks, from any thread. The process that they are forked from is started with the first one,
    and again if it has died: engines end with it."""

    module = "kvcellar.frontend.fork_process"

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._lock = threading.Lock()  # held for what follows
        self._running: _Running | None = None

    def request(self, folder: str) -> bytes:
        """What a fork is told."""
        return os.fsencode(folder)

    def start(self, folder: str, waits: Callable[[], None]) -> tuple[socket.socket, Fork]:
        """This end of its link, and the process, in which relative paths are of `folder`. `waits` is called every
        `AGAIN` seconds until it is there: what it raises ends the wait. Raises `EngineFailed`."""
        with ExitStack() as opened:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            told, tells = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            while not self._lock.acquire(timeout=AGAIN):
                waits()
            try:
                control = self._ready(waits)
                socket.send_fds(control, [self.request(folder)], [theirs.fileno(), tells.fileno()])
            except OSError as error:
                raise EngineFailed(f"the process that engines are forked from cannot be reached: {error}") from error
            finally:
                self._lock.release()
            theirs.close()
            tells.close()
            while not _arrives(told.fileno(), AGAIN):
                waits()
            if not (number := told.recv(MOST)):
                raise EngineFailed("the process that engines are forked from has ended before it has forked one")
            if (pid := int(number)) <= 0:
                raise EngineFailed(f"the process of the engine could not be forked: {os.strerror(-pid)}")
            opened.pop_all()
        return ours, Fork(pid, told)

    def _ready(self, waits: Callable[[], None]) -> socket.socket:
        """Where requests are sent, when all is imported."""
        running = self._running
        if running is not None and (status := running.process.poll()) is not None:
            log.error("the process that engines are forked from %s; it is started again", in_words(status))
            self._end()
            running = None
        if running is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, ExitStack() as opened:
                opened.enter_context(ours)
                running = self._running = _Running(_spawned(self.module, theirs.fileno(), self._folder), ours)
                opened.pop_all()
        while not running.ready:
            if not _arrives(running.control.fileno(), AGAIN):
                waits()
            elif running.control.recv(MOST):
                running.ready = True
            else:
                how = in_words(running.process.wait())
                raise EngineFailed(f"the process that engines are forked from {how}, before it has forked one")
        return running.control

    def _end(self) -> None:
        if self._running is not None:
            self._running.control.close()
            with self._running.process as process:
                process.kill()  # it has nothing to write
        self._running = None

    def close(self) -> None:
        """When all of its processes have ended."""
        with self._lock:
            self._end()


class Spawner:
    """Starts engines as programs, with the methods of `ForkServer`."""

    def start(self, folder: str, waits: Callable[[], None]) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as opened:
            opened.enter_context(ours)
            process = _spawned("kvcellar.frontend.engine_process", theirs.fileno(), folder)
            opened.pop_all()
        return ours, process

    def close(self) -> None:
        pass


Starter = ForkServer | Spawner


def starter_for(platform: str) -> Starter:
    """`platform`: `sys.platform`."""
    return ForkServer() if platform == "linux" else Spawner()


def _arrives(number: int, seconds: float | None) -> bool:
    """Whether something arrives at a socket, or its end. None: wait for ever."""
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1000 * seconds))


def _spawned(module: str, link: int, folder: str) -> "subprocess.Popen[bytes]":
    """A process that runs a module, with this end of a link. Signals that end a process are blocked in it until it
    ignores them, which it does once its modules are imported."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        return spawned(module, link, folder=folder)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_words(status: int) -> str:
    """How a process has ended. `status`: an exit code, `LOST`, or a negated number of a signal."""
    if status == LOST:
        return "has ended after the process that it was forked from"
    if status >= 0:
        return f"has ended with exit code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
