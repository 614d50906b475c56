"""worker: untrusted work in processes of its own, with limits of time and memory. No torch.

Compiled code that follows what a client wrote can end its process, stall, or take all memory, and cannot be stopped.
So such work is done by a process that is started for one module (`python -m MODULE SOCKET`), which calls `serve`: it
reads what all jobs need, once, and forks for each job.

Always true:
  * the process itself does no job, and has one thread; a fork of it does one job at a time: what ends, stalls or fills
    a fork is known to be that job, and reaches no other;
  * a fork ends by itself when the time of its job is over, whether or not the process and its owner are there; and else
    when its owner closes the link to it, or dies;
  * the process ends when its owner does, or closes it. One that has ended is started again for the next job;
  * messages are data (`wire`): a job is what the module expects, and nothing else is done.
"""

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct

from kvcellar.errors import EngineClosed, EngineFailed, Overloaded
from kvcellar.wire import Link, packed

ALONE = 1.0  # seconds after which the process looks whether its owner is there
BUSY = 10  # times its limit of CPU time that a job may take, on a machine that is busy
SPARE = 5.0  # seconds by which a fork may end late
LONG = 2.0  # seconds after which a job gives way to others


class Job(Struct, frozen=True, array_like=True):
    seconds: float  # of CPU time
    what: Raw


class Begun(Struct, frozen=True, array_like=True, tag=True):
    """What ends the fork from here on is the job."""


class Done(Struct, frozen=True, array_like=True, tag=True):
    value: Raw


class Refused(Struct, frozen=True, array_like=True, tag=True):
    error: Exception


class JobEnded(Exception):
    """A job has ended its process. `late`: because its time was over."""

    def __init__(self, *, late: bool) -> None:
        super().__init__("a job has ended its process")
        self.late = late


class Worker:
    """The process of one module, as its owner sees it. Safe to use from several threads."""

    def __init__(self, module: str, setup: Callable[[], object], *, again: bool = False) -> None:
        """The process is started for the first job, with what `setup` returns, and ends with this object. `again`: a
        fork that has done a job does later ones, too; jobs at the same time have forks of their own."""
        self._module, self._setup, self._again, self._owner = module, setup, again, os.getpid()
        self._lock = threading.Lock()  # of what follows
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[Link[Begun | Done | Refused]] = []
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    def run(self, what: object, seconds: float) -> Raw:
        """What the module returns for `what`, as `wire.packed` has it, or what it raises. It may take so many seconds
        of CPU time, so that the load of the machine does not decide what is refused, and `BUSY` times as long in all.
        Raises `JobEnded`, and `Overloaded` where no process can be made."""
        for _ in range(2):
            link, answered = self._lent(), False
            began, begun = time.monotonic(), False
            until = began + BUSY * seconds + SPARE
            try:
                link.send(Job(seconds, packed(what)))
                while link.arrives(max(0.0, until - time.monotonic())):
                    match link.receive():
                        case Begun():
                            begun = True
                        case Done(value):
                            answered = True
                            return value
                        case Refused(error):
                            answered = True
                            raise error
            except (ConnectionError, EOFError):
                self._drop_idle()
            finally:
                self._give_back(link, answered)
            if self._closed:
                raise EngineClosed("the engine is closed")
            late = time.monotonic() >= began + seconds
            if begun or late:
                raise JobEnded(late=late)
        raise Overloaded("the process that had to try this was ended; try again later")

    def close(self) -> None:
        """End the process and its forks. Jobs that run, and later ones, raise `EngineClosed`. Does nothing in a fork of
        the owner."""
        if self._owner == os.getpid():
            self._drop_idle()
            with self._lock:
                self._closed = True
                if self._popen is not None:
                    os.killpg(self._popen.pid, signal.SIGKILL)
                self._end()

    def rest(self) -> None:
        """End the process until the next job. Jobs that run go on. Does nothing in a fork of the owner."""
        if self._owner == os.getpid():
            self._drop_idle()
            with self._lock:
                self._end()

    def _lent(self) -> Link[Begun | Done | Refused]:
        """A link to a new fork."""
        if self._owner != os.getpid():
            raise EngineClosed("a fork of a process cannot use the processes that it has started")
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if self._idle:
                return self._idle.pop()
            if self._control is None:
                self._start()
            try:
                return self._passed()
            except ConnectionError:  # it has ended meanwhile
                self._end()
                self._start()
                return self._passed()

    def _give_back(self, link: Link[Begun | Done | Refused], answered: bool) -> None:
        with self._lock:
            if answered and self._again and not self._closed:
                self._idle.append(link)
                return
        link.close()

    def _drop_idle(self) -> None:
        """A fork has ended, and others may have, too."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:  # a terminal signals its owner only; and a group of processes to end
                self._popen = spawned(self._module, theirs.fileno(), session=True, OPENBLAS_NUM_THREADS="1")
            except OSError as error:
                ours.close()
                raise _no_process(error) from None
        self._control = ours
        self._finalizer = weakref.finalize(self, _ended, self._popen, ours, self._idle, self._owner)
        try:
            with closing(self._passed()) as link:
                link.send(self._setup())
                link.receive()
        except (ConnectionError, EOFError) as error:
            self._end()
            raise EngineFailed(f"the process of {self._module} could not be started; see the log") from error

    def _passed(self) -> Link[Begun | Done | Refused]:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return Link(ours, Begun | Done | Refused)

    def _end(self) -> None:
        if self._popen is not None:
            self._finalizer()
        self._control = self._popen = None


def _ended(process: "subprocess.Popen[bytes]", control: socket.socket, idle: list[Link[Any]], owner: int) -> None:
    if os.getpid() == owner:
        while idle:
            idle.pop().close()
        control.close()
        process.kill()
        process.wait()


def own_python(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of another process of this installation: it finds the package where this one has
    it, and nothing in the directory in which it is started."""
    package = str(Path(__file__).parents[1])
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": paths}


def spawned(
    module: str, link: int, *, folder: str | None = None, session: bool = False, **environment: str
) -> "subprocess.Popen[bytes]":
    """A process that runs a module, with this end of a link. Its standard output is empty: that of this process may be
    a pipe with data."""
    command, inherited = own_python("-m", module, str(link))
    none, env = subprocess.DEVNULL, inherited | environment
    return subprocess.Popen(
        command, stdin=none, stdout=none, pass_fds=(link,), cwd=folder, env=env, start_new_session=session
    )


def lower(thread: threading.Thread) -> None:
    """Let a thread that works for long have what others leave of the CPUs. Only Linux has priorities of threads."""
    if sys.platform == "linux" and thread.is_alive() and (number := thread.native_id) is not None:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, number, 5)  # a third of the share of others


# -- in the process ---------------------------------------------------------------------------------------------------


def serve(setup: Any, opened: Callable[[Any], Callable[[Raw], object]], *, stack: int, memory: int) -> None:
    """Until the owner has gone. `opened` is called with the setup, of this class, and returns what is called with each
    job, on a thread with `stack` bytes of stack, in a fork that may use `memory` bytes more than this process has."""
    owner = os.getppid()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    control.settimeout(ALONE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so a fork that has ended needs no wait
    for number in (signal.SIGPROF, signal.SIGALRM):  # of timers of a fork, which they end
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack)
    work: Callable[[Raw], object] | None = None
    while (lent := _next(control, owner)) is not None:
        link = Link[Any](lent, setup if work is None else Job)
        if work is None:
            work = opened(link.receive())
            gc.freeze()
            with suppress(ConnectionError):  # its owner has gone meanwhile
                link.send(Done(packed(None)))
        else:
            _fork(control, link, work, memory)
        lent.close()  # and not the connection, which the fork has


def _next(control: socket.socket, owner: int) -> socket.socket | None:
    """Its end of the next link; None: the owner has gone. A fork of the owner may have the other end of `control`,
    which stays open when the owner dies: so its death is looked for here, too."""
    while os.getppid() == owner:
        try:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            continue
        if not fds:
            return None
        return socket.socket(fileno=fds[0])
    return None


def _fork(control: socket.socket, link: Link[Job], work: Callable[[Raw], object], memory: int) -> None:
    try:
        if os.fork():
            return
    except OSError as error:
        link.send(Refused(_no_process(error)))
        return
    status = 1
    try:
        control.close()
        base = _addresses()
        _limit(base + memory)
        while _addresses() - base <= memory // 2:  # else what a job has left would be missing in the next one
            _work(link, work)
        status = 0
    except EOFError:
        status = 0
    finally:
        os._exit(status)


def _work(link: Link[Job], work: Callable[[Raw], object]) -> None:
    job = link.receive()
    _limit_time(job.seconds)
    link.send(Begun())
    thread = threading.Thread(target=_answer, args=(link, work, job.what))
    thread.start()
    thread.join(LONG)
    lower(thread)
    thread.join()
    _limit_time(0.0)


def _limit_time(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, BUSY * seconds)


def _answer(link: Link[Job], work: Callable[[Raw], object], what: Raw) -> None:
    try:
        answer: object = Done(packed(work(what)))
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - the owner raises it
        answer = Refused(error)
    with suppress(ConnectionError):  # the owner waits no longer
        link.send(answer)


def _addresses() -> int:
    """Bytes of addresses of this process: what is mapped and not touched counts as well. Only Linux says how many."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(addresses: int) -> None:
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        least = addresses if most == resource.RLIM_INFINITY else min(addresses, most)
        resource.setrlimit(resource.RLIMIT_AS, (least, most))


def _no_process(error: OSError) -> Overloaded:
    return Overloaded(f"there is no memory for a process that tries this ({error.strerror}); try again later")
