"""fork_process: the process that engines are forked from: `python -m kvcellar.frontend.fork_process SOCKET`.

It imports what engines need, once. Then it forks a process for each request of its front end, which come over the
socket of that number, and tells the front end how each has ended.

Always true:
  * it has started no thread of torch, has asked for no GPU and has loaded no model: a fork is as a process that has
    just imported the same. Threads that libraries start when they are imported (OpenBLAS) end before a fork;
  * a fork has no open file of this process but its link and where its end is told, and none of another fork;
  * it ends when its front end does. A fork ends then, too: it sees that its link or this process has ended.
"""

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

from kvcellar.frontend import engine_process

LOOK = 1.0  # seconds between two looks at the front end: a fork of it may have the other end of the socket
MOST = 1 << 16  # bytes of a request
LOADS = (  # import transformers and what traces steps, as each fork that loads a model would
    "kvcellar.engine.load.open_drafts",
    "kvcellar.engine.models.build_guest",
    "kvcellar.engine.recording.record",
)


@dataclass(frozen=True, slots=True)
class Forked:
    """What a fork was made for."""

    request: bytes
    link: socket.socket
    _tells: socket.socket  # open for as long as the fork lives: the front end waits for its end


class ForkProcess:
    """The forks of this process."""

    def __init__(self, control: socket.socket) -> None:
        self._front, self._control = os.getppid(), control
        self._tells: dict[int, socket.socket] = {}  # by process: where its end is told
        self._woken, self._wakes = socket.socketpair()  # something arrives when a fork has ended
        for one in (self._woken, self._wakes):
            one.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written there

    def run(self) -> Forked | None:
        """Returns in each fork, and None in this process when the front end has gone."""
        for name in LOADS:
            import_module(name)
        gc.freeze()  # a collection in a fork does not write into the pages of what was imported: they stay shared
        waiting = select.poll()
        for one in (self._control, self._woken):
            waiting.register(one, select.POLLIN)
        with suppress(ConnectionError):  # the front end has gone meanwhile
            self._control.send(b"ready")
        while os.getppid() == self._front:
            arrived = [number for number, _ in waiting.poll(1000 * LOOK)]
            if self._woken.fileno() in arrived:
                self._woken.recv(MOST)
                self._reap()
            if self._control.fileno() in arrived:
                request, numbers, _, _ = socket.recv_fds(self._control, MOST, 2)
                if not request:
                    return None
                if (forked := self._fork(request, *map(_owned, numbers))) is not None:
                    return forked
        return None

    def _fork(self, request: bytes, link: socket.socket, tells: socket.socket) -> Forked | None:
        try:
            pid = os.fork()
        except OSError as error:
            with link, tells:
                _tell(tells, -(error.errno or 0))
            return None
        if pid == 0:
            self._rest()
            return Forked(request, link, tells)
        link.close()
        self._tells[pid] = tells
        _tell(tells, pid)
        return None

    def _rest(self) -> None:
        """In a fork: close what is of this process and of other forks."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._control, self._woken, self._wakes, *self._tells.values()):
            one.close()

    def _reap(self) -> None:
        while self._tells:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._tells.pop(pid) as tells:
                _tell(tells, os.waitstatus_to_exitcode(status))


def _owned(number: int) -> socket.socket:
    """The socket of this number, which no program has that is started later."""
    found = socket.socket(fileno=number)
    found.set_inheritable(False)
    return found


def _tell(tells: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # the front end does not wait for it any more
        tells.send(b"%d" % number)


def main() -> int:
    """In the fork server, and in each fork."""
    engine_process.leave_ends_to_front()
    forked = ForkProcess(_owned(int(sys.argv[1]))).run()
    if forked is None:
        return 0
    os.chdir(os.fsdecode(forked.request))
    return engine_process.run(forked.link)


if __name__ == "__main__":
    sys.exit(main())
