"""engine_process: the process of an engine that has one of its own: a fork (`fork_process.py`), or
`python -m kvcellar.frontend.engine_process SOCKET`.

It loads a model, and does what its front end tells it over the socket.

Always true:
  * neither the engine's step nor the thread that reads messages waits for the front end: a thread of its own sends;
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
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from kvcellar.collector import settle
from kvcellar.engine.load.build import build
from kvcellar.engine.load.settings import settings_of
from kvcellar.engine.messages import (
    CONTROLS,
    VERSION,
    AddAdapter,
    Admitted,
    Ask,
    Beat,
    Cancel,
    Control,
    ControlInParts,
    ControlWithReply,
    DescribeCapacity,
    DescribeDisk,
    DescribeVariant,
    EndParts,
    EngineEvent,
    EngineSnapshot,
    Fail,
    Given,
    Hello,
    ImportStore,
    ListAdapters,
    Loading,
    Logged,
    NextPart,
    ReadStats,
    Refusal,
    RemoveAdapter,
    Reply,
    ShowEntry,
    ShowWay,
    Start,
    StepEvents,
    Stop,
    Submission,
    TakePicture,
    ToEngine,
    Wanted,
)
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import EngineFailed, KvcellarError
from kvcellar.frontend.fork_server import ENDING_SIGNALS
from kvcellar.frontend.thread_client import ThreadClient
from kvcellar.progress import Progress, listening
from kvcellar.wire import Link, Outbox, decode, packed

log = logging.getLogger("kvcellar.engine")

END_SECONDS = 30.0  # until what is to be written is given up
LAST_WORDS = 5.0  # seconds in which the front end has to read why this process ends
BEAT = 1.0  # seconds
STALLED = 5.0  # seconds by which a wait is too long where the process was stopped meanwhile
COMPILING = 8  # requests whose grammars are compiled at once
READING, CHANGING = 4, 16  # controls that are done at once: those that only look, and those that may wait for others
LOOKING = (
    TakePicture, ShowEntry, ShowWay, ReadStats, DescribeCapacity, ListAdapters, DescribeDisk, DescribeVariant
)  # fmt: skip
FAILED = 70  # exit status: an error has ended the engine (EX_SOFTWARE of sysexits.h)


class SentSource:
    """What an import reads, which the front end has."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self._number, self._outbox = number, outbox
        self.given: SimpleQueue[bytes] = SimpleQueue()

    def read(self, n: int, /) -> bytes:
        self._outbox.put(Wanted(self._number, n))
        return self.given.get()


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
    """The engine of this process, and what its front end asks of it."""

    def __init__(self, link: Link[ToEngine]) -> None:
        self._link, self._outbox = link, Outbox(link, self._unsent)
        self._step: list[tuple[int, EngineEvent]] = []  # events of the running step: the engine's thread alone has them
        self._client: ThreadClient | None = None  # None: the model is being loaded
        self._compiling = ThreadPoolExecutor(COMPILING, "kvcellar-compile")
        self._reading = ThreadPoolExecutor(READING, "kvcellar-look")
        self._changing = ThreadPoolExecutor(CHANGING, "kvcellar-control")
        self._ended = threading.Event()  # the front end has gone
        self._lock = threading.Lock()  # held for what follows
        self._submitting: dict[int, list[Cancel | Fail]] = {}  # by request that waits for a grammar: what ends it
        self._parts: dict[int, Iterator[Any]] = {}  # by the number of the ask
        self._sources: dict[int, SentSource] = {}

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
        self._client = client
        settle(rarely=False)
        self._outbox.put(Hello(VERSION, packed(client.card)))
        self._ended.wait()
        threading.Timer(END_SECONDS, os._exit, (1,)).start()  # a step that never ends must not keep the process
        client.close()
        self._outbox.close(LAST_WORDS)
        os._exit(0)

    def _loaded(self, start: Start) -> ThreadClient:
        def heard(progress: Progress) -> None:
            self._outbox.put(Loading(progress.stage, progress.done, progress.total, progress.unit))

        with listening(heard), ExitStack() as opened:
            client = ThreadClient(build(start.model, settings_of(start.settings), opened, torch_of=os.getpid()))
            opened.callback(client.close)
            client.start(turned=self._turned, counted=self._counted, failed=self._failed)
            for control in start.adapters:
                self._restore_adapter(client, control)
            opened.pop_all()
        return client

    def _restore_adapter(self, client: ThreadClient, control: AddAdapter | RemoveAdapter) -> None:
        """Requests that name an adapter which cannot be loaded any more are refused; others go on."""
        try:
            if isinstance(control, AddAdapter) or control.name in {one.name for one in client.ask(ListAdapters())}:
                client.ask(control)
        except KvcellarError as error:
            log.error("the adapter %s cannot be loaded again: %s", control.name, error)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _tell(self, number: int, event: EngineEvent) -> None:
        """An event of the running step. That a request begins is told before the step ends: if the step is the end of
        this process, the front end knows in which requests it was."""
        if isinstance(event, Admitted):
            self._outbox.put(StepEvents(((number, event),)))
        else:
            self._step.append((number, event))

    def _turned(self) -> None:
        if self._step:
            self._outbox.put(StepEvents(tuple(self._step)))
            self._step.clear()

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
        last = time.monotonic()
        while not self._ended.wait(BEAT):
            now = time.monotonic()
            stopped, last = now - last > BEAT + STALLED, now  # for all of this time, as a debugger does
            if os.getppid() != parent:
                self._link.close()
            if not stopped:
                self._outbox.put(self._beat())

    def _beat(self) -> Beat:
        began = self._client.built.loop.turn_began if self._client is not None else None
        return Beat(time.perf_counter() - began if began is not None else 0.0)

    def _unsent(self, message: object, error: ValueError) -> None:
        """A reply becomes a refusal, and what cannot be told of a request the end of it."""
        log.error("a message to the front end could not be sent: %s", error)
        if isinstance(message, Reply):
            self._outbox.put(Refusal(message.number, error))
        elif isinstance(message, StepEvents) and len(message.events) > 1:
            for event in message.events:
                self._outbox.put(StepEvents((event,)))
        elif isinstance(message, StepEvents) and self._client is not None:
            for number, _ in message.events:
                self._client.fail(number, EngineFailed(str(error)))

    def _end(self) -> None:
        """The front end has gone."""
        if self._client is None:
            os._exit(1)  # the model is being loaded: there is nothing to be written
        self._ended.set()

    # -- on the thread that reads -------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                self._take(self._link.receive())
        except EOFError:
            self._end()
        except BaseException:
            log.exception("the process of the engine cannot do what its front end has sent, and ends")
            self._failed()

    def _take(self, message: ToEngine) -> None:
        client = self._client
        assert client is not None, "the front end sends nothing before the model is loaded"
        match message:
            case Cancel() | Fail():
                self._end_request(client, message)
            case Stop(number, choice, tokens):
                client.stop(number, choice, tokens)
            case Ask():
                self._ask(client, message)
            case NextPart(number, of):
                self._reading.submit(self._reply, number, partial(self._next, of))
            case EndParts(of):
                self._reading.submit(self._end_parts, of)
            case Given(number, data):
                with self._lock:
                    source = self._sources.get(number)
                if source is not None:
                    source.given.put(data)
            case Start():
                raise ValueError("a model is loaded already")

    def _ask(self, client: ThreadClient, ask: Ask) -> None:
        number = ask.number
        try:
            asked: Submission | Control = decode(ask.what, Submission | CONTROLS)
        except ValueError as error:
            self._outbox.put(Refusal(number, error))
            return
        if isinstance(asked, Submission):
            if asked.params.constraint is None:
                self._reply(number, partial(self._submit, client, asked))
                return
            with self._lock:
                self._submitting[asked.number] = []
            self._compiling.submit(self._reply, number, partial(self._submit, client, asked))
        elif isinstance(asked, ControlInParts):
            self._reading.submit(self._reply, number, partial(self._begin_parts, client, number, asked))
        else:
            pool = self._reading if isinstance(asked, LOOKING) else self._changing
            pool.submit(self._reply, number, partial(self._control, client, number, asked))

    def _end_request(self, client: ThreadClient, message: Cancel | Fail) -> None:
        with self._lock:
            if (ends := self._submitting.get(message.number)) is not None:
                ends.append(message)
                return
        if isinstance(message, Fail):
            client.fail(message.number, message.error)
        else:
            client.cancel(message.number)

    # -- on any thread ------------------------------------------------------------------------------------------

    def _reply(self, number: int, work: Callable[[], object]) -> None:
        try:
            answer: object = Reply(number, packed(work()))
        except BaseException as error:  # noqa: BLE001 - the front end raises it; a panic, too
            answer = Refusal(number, error if isinstance(error, Exception) else EngineFailed(repr(error)))
        self._outbox.put(answer)
        del answer  # its error refers to this frame

    def _submit(self, client: ThreadClient, submission: Submission) -> None:
        number = submission.number
        try:
            client.submit(submission, partial(self._tell, number))
        finally:
            with self._lock:
                ends = self._submitting.pop(number, [])
        for message in ends:
            self._end_request(client, message)

    def _control(self, client: ThreadClient, number: int, control: ControlWithReply[Any]) -> object:
        if not isinstance(control, ImportStore):
            return client.ask(control)
        source = SentSource(number, self._outbox)
        with self._lock:
            self._sources[number] = source
        try:
            return client.ask(control, source)
        finally:
            with self._lock:
                del self._sources[number]

    def _begin_parts(self, client: ThreadClient, number: int, control: ControlInParts[Any]) -> None:
        parts = client.parts(control)
        with self._lock:
            self._parts[number] = parts

    def _next(self, of: int) -> list[Any]:
        """The next part in a list; an empty one at the end."""
        with self._lock:
            parts = self._parts.get(of)
        if parts is None:
            raise EngineFailed("these parts belong to an engine that has died; ask again")
        return list(islice(parts, 1))

    def _end_parts(self, of: int) -> None:
        with self._lock:
            parts = self._parts.pop(of, None)
        if isinstance(parts, Generator):
            parts.close()


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
