"""child_process: the process of an engine, as the one that has started it sees it. No torch.

Always true: when `end` has returned, the process is gone.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcellar.engine.card import EngineCard
from kvcellar.engine.messages import FromEngine, Hello, Loading, Refusal, Start
from kvcellar.errors import EngineFailed
from kvcellar.frontend.fork_server import AGAIN, Starter, in_words
from kvcellar.frontend.remote_client import RemoteEngine
from kvcellar.progress import Listener, Progress
from kvcellar.wire import decode

LAST_WORDS = 5.0  # seconds in which a process that is to end reads what it was sent
STARTING = Progress("starting the process of the engine")


class ChildProcess(RemoteEngine):
    """One process, from its start to its end."""

    def __init__(
        self,
        starter: Starter,
        start: Start,
        folder: str,
        waits: Callable[[], None],
        unsent: Callable[[object, ValueError], None],
    ) -> None:
        """`folder`: in which relative paths of `start` are. `waits` as `Starter` has it, `unsent` as `Outbox`."""
        end, self._process = starter.start(folder, waits)
        super().__init__(end, unsent)
        self.began = self.beaten  # when its model was loaded
        self.killed = ""  # why this side has killed it
        self.from_outside = False  # at its end: another process has killed it, and not because memory lacked
        self._ooms = _kills_for_memory()
        self._start = start

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def end_sending(self) -> None:
        """Let the process end when it has read what was sent."""
        self.outbox.close(LAST_WORDS)
        self.link.end_sending()

    def hello(self, heard: Listener, take: Callable[[FromEngine], None]) -> EngineCard:
        """Wait until the model is loaded. `heard` is called with what is being done, again every `AGAIN` seconds: what
        it raises ends the wait; `take` with all else that is told. Raises what the load raises, and `EngineFailed` if
        the process ends or is of another version."""
        self.send(self._start)
        progress = STARTING
        while True:
            while not self.link.arrives(AGAIN):
                heard(progress)
            message, self.beaten = self.receive(), time.monotonic()
            match message:
                case Hello(_, card):
                    self.began = time.monotonic()
                    return decode(card, EngineCard)
                case Loading(progress):
                    heard(progress)
                case Refusal(_, error):
                    raise error
                case _:
                    take(message)

    def receive(self) -> FromEngine:
        try:
            return super().receive()
        except EOFError as error:
            raise EngineFailed(f"the process of the engine {self.end(2.0)} while it loaded the model") from error
        except ValueError as error:
            raise EngineFailed(str(error)) from error

    def kill(self, why: str) -> None:
        """With what its threads are doing in the log."""
        self.killed = why
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def end(self, seconds: float) -> str:
        """Close the link, wait until the process has ended, and kill it if it does not. How it has ended, in words."""
        self.outbox.close(0.0)
        self.link.close()
        with self._process:
            try:
                status = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
                self.killed = self.killed or f"it has not ended within {seconds:.0f} seconds"
        how, ooms = in_words(status), _kills_for_memory()
        self.from_outside = status == -signal.SIGKILL and not self.killed and ooms is not None and ooms == self._ooms
        return f"{how} ({self.killed})" if self.killed else how


def _kills_for_memory() -> int | None:
    """How many processes of this machine Linux has killed because memory lacked; None: that is not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(value) for name, value in map(str.split, lines) if name == "oom_kill"), None)
