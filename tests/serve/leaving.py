"""Clients that send random requests and leave at random moments, several at the same time, and what a server holds when
they have left: what it held before."""

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.shared import Mounted, Shared
from tests.serve.every_api import CONVERSATIONS
from tests.serve.fake_engine import PATIENCE
from tests.serve.random_requests import Act, Leaves
from tests.serve.wire import Wire

CLIENTS = 8  # at the same time
MOMENT = 0.03  # seconds: the longest that a client waits before it leaves, where it does not wait for an answer
TASKS = "/tasks-of-the-event-loop"


@dataclass
class Tally:
    """What became of requests: how many were answered to the end with which status, and how many clients left when."""

    answered: Counter[int] = field(default_factory=Counter[int])
    left: Counter[str] = field(default_factory=Counter[str])

    @property
    def requests(self) -> int:
        return self.answered.total() + self.left.total()

    def add(self, act: Act, answer: bytes | None) -> None:
        """Raises `AssertionError` for an answer that no client may get."""
        if answer is None:
            self.left[act.leaves.name] += 1
            return
        status = int(answer.split()[1])
        self.answered[status] += 1
        about = f"{act}\n{answer!r}"
        assert b"unexpected error" not in answer, about
        assert status < 500 or (status == 503 and b"retry-after" in answer.lower()), about
        assert not act.valid or status in (200, 201, 503), about


def visit(port: int, act: Act) -> bytes | None:
    """Do what the act says. Returns an answer that was read to its end."""
    wire = Wire(port)
    try:
        return _visited(wire, act)
    except ConnectionError:  # the request was refused before it was sent to the end
        return None
    except TimeoutError as error:
        raise AssertionError(f"no answer: {act}") from error
    finally:
        wire.close(reset=act.reset)


def _visited(wire: Wire, act: Act) -> bytes | None:
    head = act.sent.index(b"\r\n\r\n") + 4
    parts = range(act.reads)
    match act.leaves:
        case Leaves.BEFORE_HEADERS:
            wire.sendall(act.sent[: int(head * act.cut)])
            return None
        case Leaves.IN_BODY:
            wire.sendall(act.sent[: head + int((len(act.sent) - head) * act.cut)])
            return None
        case Leaves.AT_ONCE | Leaves.SOON:
            wire.sendall(act.sent)
            time.sleep(act.cut * MOMENT * (act.leaves is Leaves.SOON))
            return None
        case Leaves.IN_STREAM | Leaves.AT_END:
            wire.sendall(act.sent)
            found = b""
            for _ in count() if act.leaves is Leaves.AT_END else parts:
                if not (part := wire.recv()):
                    return found or None
                found += part
            return None


SERVING = ("kvcellar.serve.", "uvicorn.", "h11.", "starlette.", "asyncio.", "_asyncio.", "anyio.")
KEPT = {"Kept", "Turn"}  # responses that clients asked to be kept, and what they continue: limited by their store


@dataclass(frozen=True)
class Held:
    """What a process holds at rest. `objects`: those of the server and of the event loop, by type."""

    files: int  # that are open, without
    links: int  # Unix sockets: to forks that render templates, as many as have done so at the same time
    bytes: int  # of memory
    objects: Counter[str]

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        with suppress(AttributeError):  # of glibc: gives back what its heaps do not use
            ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # asyncio forgets cancelled timers once they are more than half of a hundred or more
        kept = (one for one in gc.get_objects() if type(one) is not asyncio.TimerHandle or not one.cancelled())
        kinds = map(type, kept)
        objects = Counter(one.__name__ for one in kinds if f"{one.__module__}.".startswith(SERVING))
        files, links = _open_files()
        return cls(files, links, resident, Counter({k: objects[k] for k in objects.keys() - KEPT}))


def _open_files() -> tuple[int, int]:
    """How many this process has, and how many Unix sockets beside them."""
    local = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    links = sum(one in local for one in found)
    return len(found) - links, links


OF_ENGINES = ("kvcellar-tokenize", "kvcellar-compile", "kvcellar-look", "kvcellar-control", "kvcellar-replies")


def threads() -> set[threading.Thread]:
    """Those that run, but for those that engines and replicas have once something was asked of them."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith(OF_ENGINES)}


class Crowd:
    """A server, and clients that leave it. `at_rest` says whether no request is left in the engine."""

    def __init__(self, engine: Any, at_rest: Callable[[], bool], **settings: Any) -> None:
        self.tally, self._at_rest = Tally(), at_rest
        self._server = Server(engine, ServeSettings(port=0, **settings), mount=self._mount)

    @contextmanager
    def serving(self) -> Iterator["Crowd"]:
        others = threads()
        with self._server, httpx.Client(base_url=self._server.url, timeout=PATIENCE) as self._http:
            self._tasks = self._count_tasks()
            yield self
        for thread in threads() - others:  # those that read bodies end by themselves
            thread.join(PATIENCE)
        assert threads() <= others

    def send(self, acts: Sequence[Act], *, check: Callable[[], object] = lambda: None, every: int = 250) -> Held:
        """Do all acts, and check between so many of them. Returns what is held at rest."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for start in range(0, len(acts), every):
                some = acts[start : start + every]
                for act, answer in zip(some, pool.map(lambda act: visit(self._server.port, act), some), strict=True):
                    self.tally.add(act, answer)
                check()
        self._rest()
        return Held.now()

    def _rest(self) -> None:
        """Wait until nothing is left of the clients, and remove what they asked to be kept."""
        end = time.monotonic() + PATIENCE
        while not (self._at_rest() and self._count_tasks() == self._tasks and self._shared.bodies.used == 0):
            assert time.monotonic() < end, (self._at_rest(), self._count_tasks(), self._tasks, self._shared.bodies.used)
            time.sleep(0.01)
        for one in self._http.get(CONVERSATIONS).json()["data"]:
            assert self._http.delete(f"{CONVERSATIONS}/{one['name']}").status_code == 200
        self._shared.host.check()

    def _mount(self, shared: Shared) -> Mounted:
        self._shared = shared

        async def tasks(request: Request) -> Response:
            return PlainTextResponse(str(len(asyncio.all_tasks())))

        return Mounted([Route(TASKS, tasks)])

    def _count_tasks(self) -> int:
        return int(self._http.get(TASKS).text)
