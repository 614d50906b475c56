"""Faults in processes of engines, at moments that a test names, and the processes that one server has forked."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from kvcellar.frontend.fork_server import Fork, ForkServer


class FaultyForks(ForkServer):
    """`faults`: those of the next engines, in order, and of all later ones none. `started`: their processes."""

    module = "tests.engine.fork_server"

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Mapping[str, Any]] = []
        self.started: list[int] = []

    def request(self, folder: str) -> bytes:
        faults = self.faults.pop(0) if self.faults else {}
        return json.dumps({"folder": folder, "faults": faults}).encode()

    def start(self, folder: str, waits: Callable[[], None]) -> tuple[socket.socket, Fork]:
        link, fork = super().start(folder, waits)
        self.started.append(fork.pid)
        return link, fork


def there(pid: int) -> bool:
    """Whether a process runs. One that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children() -> set[int]:
    """Of this process. A file of the children of each thread is not read: threads end meanwhile, and hand theirs on."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if parent_of(int(process.name)) == os.getpid():
                found.add(int(process.name))
    return found


# -- in the server and its forks --------------------------------------------------------------------------------------


def main() -> int:
    from kvcellar.frontend import engine_process
    from kvcellar.frontend.fork_process import ForkProcess

    fork = os.fork

    class Faulty(ForkProcess):
        def _fork(self, request: bytes, link: socket.socket, tells: socket.socket) -> Any:
            if (number := json.loads(request)["faults"].get("errno")) is None:
                os.fork = fork
            else:
                os.fork = lambda: err(number)
            return super()._fork(request, link, tells)

    engine_process.leave_ends_to_front()
    forked = Faulty(socket.socket(fileno=int(sys.argv[1]))).run()
    if forked is None:
        return 0
    request = json.loads(forked.request)
    os.chdir(request["folder"])
    install(**request["faults"])
    return engine_process.run(forked.link)


def err(number: int) -> int:
    raise OSError(number, os.strerror(number))


def install(
    *,
    end: int | None = None,
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
    reply that it has taken in a request. `end`: it ends at once, with that exit code or negated signal."""
    from kvcellar.engine import messages
    from kvcellar.engine.sample.grammars import Grammars
    from kvcellar.frontend import engine_process

    def die(*_: object, **__: object) -> Any:
        os.kill(os.getpid(), with_signal)
        time.sleep(600)

    if end is not None:
        end_with(end)
    if turn:
        err_after(step)
    else:
        die_in(step, prompt, die)
    if grammar:
        Grammars.matcher = die  # type: ignore[method-assign]
    if load is not None:
        engine_process.build = die if load == "dies" else lambda *_, **__: time.sleep(600)
    if version is not None:
        messages.VERSION = engine_process.VERSION = version
    if silent:
        be_silent()


def end_with(status: int) -> None:
    if status >= 0:
        os._exit(status)
    os.kill(os.getpid(), -status)
    time.sleep(600)


def die_in(step: int | None, prompt: int | None, die: Callable[[], object]) -> None:
    from kvcellar.engine.core.runner import Runner

    run, numbers = Runner.step, count(1)

    def one(self: Any, scheduled: Any) -> None:
        if next(numbers) == step or any(each.completion.request.prompt[0] == prompt for each in scheduled):
            die()
        run(self, scheduled)

    Runner.step = one  # type: ignore[method-assign]


def err_after(step: int | None) -> None:
    from kvcellar.engine.core.loop import Loop

    receive = Loop._receive

    def received(self: Any) -> bool:
        if self.steps == step:
            raise RuntimeError("a defect of the engine itself")
        return receive(self)

    Loop._receive = received  # type: ignore[method-assign]


def be_silent() -> None:
    from kvcellar.engine.messages import Reply
    from kvcellar.frontend.engine_process import Outbox
    from kvcellar.wire import packed

    put, nothing = Outbox.put, packed(None)

    def put_some(self: Any, message: object) -> None:
        if not (isinstance(message, Reply) and message.value == nothing):
            put(self, message)

    Outbox.put = put_some  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
