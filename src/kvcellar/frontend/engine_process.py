"""engine_process: the process of an engine that has one of its own: a fork (`fork_process.py`), or
`python -m kvcellar.frontend.engine_process SOCKET`.

It loads a model, and does what its front end tells it over the socket.

Always true:
  * the process ends when the socket does, so when the front end closes it or dies, and when its parent does: it writes
    what is to be written, for at most `END_SECONDS`;
  * an error that ends the engine ends the process before a request is told, so that requests can go on in another one.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack

from kvcellar.collector import settle
from kvcellar.engine.load.build import build
from kvcellar.engine.load.settings import settings_of
from kvcellar.engine.messages import (
    VERSION,
    Beat,
    EngineSnapshot,
    Hello,
    Loading,
    Logged,
    Refusal,
    Start,
    ToEngine,
)
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import EngineFailed
from kvcellar.frontend.fork_server import ENDING_SIGNALS
from kvcellar.frontend.front_end import LAST_WORDS, FrontEnd, Pools
from kvcellar.frontend.thread_client import ThreadClient
from kvcellar.progress import listening
from kvcellar.wire import Link, Outbox, packed, ticks

log = logging.getLogger("kvcellar.engine")

END_SECONDS = 30.0  # until what is to be written is given up
BEAT = 1.0  # seconds
FAILED = 70  # exit status: an error has ended the engine (EX_SOFTWARE of sysexits.h)


class LogSender(logging.Handler):
    """Sends records of the log to the front end, whose log they are in."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - a formatting error must not reach the code that logs
            text = f"a record of {record.name} could not be formatted"
        self._outbox.put(Logged(record.name, record.levelno, text))


class EngineProcess:
    """The engine of this process, and its front end."""

    def __init__(self, link: Link[ToEngine]) -> None:
        self._link, self._front = link, FrontEnd(link, Pools(), shares_memory=True)
        self._outbox = self._front.outbox
        self._ended = threading.Event()  # the front end has gone

    def run(self) -> int:
        """Until the front end has gone. Returns the exit status of a process whose model cannot be loaded."""
        parent, start = os.getppid(), self._link.receive()
        assert isinstance(start, Start), "the first message says what to load"
        logger = logging.getLogger("kvcellar")
        logger.addHandler(LogSender(self._outbox))
        logger.setLevel(start.log_level)
        logger.propagate = False
        threading.Thread(target=self._read, name="kvcellar-read", daemon=True).start()
        threading.Thread(target=self._beats, args=(parent,), name="kvcellar-beat", daemon=True).start()
        try:
            client = self._loaded(start)
        except BaseException as error:  # noqa: BLE001 - the front end raises it; a panic, too
            self._outbox.put(Refusal(0, error if isinstance(error, Exception) else EngineFailed(repr(error))))
            self._outbox.close(LAST_WORDS)
            return 1
        self._front.client = client
        settle(rarely=False)
        self._outbox.put(Hello(VERSION, packed(client.card)))
        self._ended.wait()
        threading.Timer(END_SECONDS, os._exit, (1,)).start()  # a step that never ends must not keep the process
        client.close()
        self._outbox.close(LAST_WORDS)
        os._exit(0)

    def _loaded(self, start: Start) -> ThreadClient:
        with listening(lambda progress: self._outbox.put(Loading(progress))), ExitStack() as opened:
            client = ThreadClient(build(start.model, settings_of(start.settings), opened, torch_of=os.getpid()))
            opened.callback(client.close)
            client.start(turned=self._front.turned, counted=self._counted, failed=self._failed)
            opened.pop_all()
        return client

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _counted(self, stats: EngineStats) -> None:
        self._outbox.put(EngineSnapshot(packed(stats)))

    def _failed(self) -> None:
        """What the log says of the error is sent before the process ends; the events of the running step are not."""
        self._outbox.close(LAST_WORDS)
        os._exit(FAILED)

    # -- on threads of their own --------------------------------------------------------------------------------

    def _beats(self, parent: int) -> None:
        """A fork of the front end may have the other end of the link as well, which stays open when the front end dies:
        so the death of the parent is looked for here, too. That is the front end, or ends with it. Where it is not, no
        request is told of the end: it goes on in another engine."""
        for stopped in ticks(self._ended, BEAT):
            if os.getppid() != parent:
                self._link.close()
            if not stopped:
                client = self._front.client
                self._outbox.put(client.beat if client is not None else Beat(0.0))

    def _read(self) -> None:
        try:
            self._front.read()
        except EOFError:
            if self._front.client is None:
                os._exit(1)  # the model is being loaded: there is nothing to be written
            self._ended.set()
        except BaseException:
            log.exception("the process of the engine cannot do what its front end has sent, and ends")
            self._failed()


def leave_ends_to_front() -> None:
    """A terminal and a supervisor signal the front end, too, which ends this process in order: so signals that ask for
    the end, which it has blocked until now, are ignored."""
    faulthandler.enable()
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def run(link: socket.socket) -> int:
    """The engine of a process that has just begun. Returns only where the model cannot be loaded."""
    link.set_inheritable(False)  # a process that this one starts must not keep the link open
    return EngineProcess(Link(link, ToEngine)).run()


def main() -> int:
    leave_ends_to_front()
    return run(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
