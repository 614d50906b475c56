"""engine_process: the process of an engine that has one of its own: `python -m kvcellar.engine.engine_process SOCKET`.

It loads a model, and does what its front end tells it over the socket, whose number is its only argument.

Always true:
  * neither the engine's step nor the thread that reads messages waits for the front end: a thread of its own sends;
  * the process ends when the socket does, so when the front end closes it or dies: it writes what is to be written,
    for at most `END_SECONDS`;
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
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from kvcellar.engine.build import build
from kvcellar.engine.settings import settings_of
from kvcellar.engine.thread_client import ThreadClient
from kvcellar.errors import EngineFailed
from kvcellar.messages import (
    VERSION,
    AddAdapter,
    Admitted,
    Ask,
    Beat,
    Cancel,
    Control,
    ControlInParts,
    ControlWithReply,
    EndParts,
    EndSession,
    EngineEvent,
    Fail,
    Given,
    Hello,
    ImportStore,
    ListAdapters,
    Loading,
    Logged,
    NextPart,
    Refusal,
    Reply,
    Start,
    StepEvents,
    Stop,
    Submission,
    ToEngine,
    Wanted,
)
from kvcellar.progress import Progress, listening
from kvcellar.wire import Link, decode, packed

log = logging.getLogger("kvcellar.engine")

END_SECONDS = 30.0  # until what is to be written is given up
LAST_WORDS = 5.0  # seconds in which the front end has to read why this process ends
BEAT = 1.0  # seconds
COMPILING, CONTROLS = 8, 4  # requests whose grammars are compiled, and controls that are done, at once
FAILED = 70  # exit status: an error has ended the engine (EX_SOFTWARE of sysexits.h)


class Outbox:
    """Sends messages in order on a thread of its own; those of a step as one."""

    def __init__(self, link: Link[ToEngine]) -> None:
        self._link, self._changed = link, threading.Condition()
        self._messages: deque[object] = deque()
        self._step: list[tuple[int, EngineEvent]] = []  # of the running step: the engine's thread alone has it
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kvcellar-send", daemon=True)
        self._thread.start()

    def tell(self, number: int, event: EngineEvent) -> None:
        """An event of the running step. On the engine's thread. That a request begins is told before the step ends: if
        the step is the end of this process, the front end knows in which requests it was."""
        if isinstance(event, Admitted):
            self.put(StepEvents(((number, event),)))
        else:
            self._step.append((number, event))

    def turned(self) -> None:
        """The step is over. On the engine's thread."""
        if self._step:
            self.put(StepEvents(tuple(self._step)))
            self._step.clear()

    def put(self, message: object) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def close(self, seconds: float = END_SECONDS) -> None:
        """Send what is there still, for at most so long. The front end may be gone."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or not self._open)
                if not self._messages:
                    return
                message = self._messages.popleft()
            try:
                self._link.send(message)
            except ConnectionError:
                return  # the front end has gone: the thread that reads sees it too
            except ValueError as error:
                self._unsent(message, error)

    def _unsent(self, message: object, error: ValueError) -> None:
        """What cannot be sent is an error of the ask that it replies to."""
        log.error("a message to the front end could not be sent: %s", error)
        if isinstance(message, Reply):
            self.put(Refusal(message.number, error))


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
        self._link, self._outbox = link, Outbox(link)
        self._client: ThreadClient | None = None  # None: the model is being loaded
        self._compiling = ThreadPoolExecutor(COMPILING, "kvcellar-compile")
        self._controls = ThreadPoolExecutor(CONTROLS, "kvcellar-control")
        self._ended = threading.Event()  # the front end has gone
        self._lock = threading.Lock()  # held for what follows
        self._submitting: set[int] = set()  # requests that wait for a grammar
        self._cancelled: set[int] = set()  # those of them that were cancelled
        self._parts: dict[int, Iterator[Any]] = {}  # by the number of the ask
        self._sources: dict[int, SentSource] = {}

    def run(self) -> int:
        """Until the front end has gone. Returns the exit status of a process whose model cannot be loaded."""
        front, start = os.getppid(), self._link.receive()
        assert isinstance(start, Start), "the first message says what to load"
        logger = logging.getLogger("kvcellar")
        logger.addHandler(LogSender(self._outbox))
        logger.setLevel(start.log_level)
        logger.propagate = False
        threading.Thread(target=self._read, name="kvcellar-read", daemon=True).start()
        try:
            client = self._loaded(start)
        except BaseException as error:  # noqa: BLE001 - the front end raises it; a panic, too
            self._outbox.put(Refusal(0, error if isinstance(error, Exception) else EngineFailed(repr(error))))
            self._outbox.close()
            return 1
        self._client = client
        self._outbox.put(Hello(VERSION, packed(client.card)))
        # A fork of the front end may have the other end of the link as well: it stays open when the front end dies.
        while not self._ended.wait(BEAT) and os.getppid() == front:
            self._beat(client)
        threading.Timer(END_SECONDS, os._exit, (1,)).start()  # a step that never ends must not keep the process
        client.close()
        self._outbox.close()
        os._exit(0)

    def _loaded(self, start: Start) -> ThreadClient:
        def heard(progress: Progress) -> None:
            self._outbox.put(Loading(progress.stage, progress.done, progress.total, progress.unit))

        with listening(heard), ExitStack() as opened:
            client = ThreadClient(build(start.model, settings_of(start.settings), opened))
            opened.callback(client.close)
            client.start(turned=self._outbox.turned, failed=self._failed)
            for control in start.adapters:
                if isinstance(control, AddAdapter) or control.name in {one.name for one in client.ask(ListAdapters())}:
                    client.ask(control)
            opened.pop_all()
        return client

    def _failed(self) -> None:
        """What the log says of the error is sent before the process ends; the events of the running step are not."""
        self._outbox.close(LAST_WORDS)
        os._exit(FAILED)

    def _beat(self, client: ThreadClient) -> None:
        loop = client.built.loop
        began, scheduler = loop.turn_began, loop.scheduler
        seconds = time.perf_counter() - began if began is not None else 0.0
        self._outbox.put(Beat(seconds, loop.steps, len(scheduler.running), len(scheduler.waiting)))

    # -- on the thread that reads -------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                self._take(self._link.receive())
        except EOFError:
            pass
        except Exception:
            log.exception("the engine's process cannot read what its front end has sent, and ends")
        if self._client is None:
            os._exit(1)  # the model is being loaded: there is nothing to be written
        self._ended.set()

    def _take(self, message: ToEngine) -> None:
        client = self._client
        assert client is not None, "the front end sends nothing before the model is loaded"
        match message:
            case Cancel(number):
                self._cancel(client, number)
            case Stop(number, choice, tokens):
                client.stop(number, choice, tokens)
            case Fail(number, error):
                client.fail(number, error)
            case EndSession(session):
                client.end_session(session)
            case _:
                self._take_ask(client, message)

    def _take_ask(self, client: ThreadClient, message: Ask | NextPart | EndParts | Given | Start) -> None:
        match message:
            case Ask():
                self._ask(client, message)
            case NextPart(number, of):
                self._controls.submit(self._reply, number, partial(self._next, of))
            case EndParts(of):
                self._controls.submit(self._end_parts, of)
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
            asked: Submission | Control = decode(ask.what, Submission | Control)
        except ValueError as error:
            self._outbox.put(Refusal(number, error))
            return
        if isinstance(asked, Submission):
            if asked.params.constraint is None:
                self._reply(number, partial(self._submit, client, asked))
                return
            with self._lock:
                self._submitting.add(asked.number)
            self._compiling.submit(self._reply, number, partial(self._submit, client, asked))
        elif isinstance(asked, ControlInParts):
            self._controls.submit(self._reply, number, partial(self._begin_parts, client, number, asked))
        else:
            self._controls.submit(self._reply, number, partial(self._control, client, number, asked))

    def _cancel(self, client: ThreadClient, number: int) -> None:
        with self._lock:
            if number in self._submitting:
                self._cancelled.add(number)
                return
        client.cancel(number)

    # -- on any thread ------------------------------------------------------------------------------------------

    def _reply(self, number: int, work: Callable[[], object]) -> None:
        try:
            answer: object = Reply(number, packed(work()))
        except BaseException as error:  # noqa: BLE001 - the front end raises it; a panic, too
            answer = Refusal(number, error if isinstance(error, Exception) else EngineFailed(repr(error)))
        self._outbox.put(answer)

    def _submit(self, client: ThreadClient, submission: Submission) -> None:
        number = submission.number
        try:
            client.submit(submission, partial(self._outbox.tell, number))
        finally:
            with self._lock:
                self._submitting.discard(number)
                cancelled = number in self._cancelled
                self._cancelled.discard(number)
        if cancelled:
            client.cancel(number)

    def _control(self, client: ThreadClient, number: int, control: ControlWithReply) -> object:
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

    def _begin_parts(self, client: ThreadClient, number: int, control: ControlInParts) -> None:
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


def main() -> int:
    """Returns only where the model cannot be loaded. A terminal and a supervisor signal the front end, too, which ends
    this process in order: so signals that ask for the end are ignored."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return EngineProcess(Link(socket.socket(fileno=int(sys.argv[1])), ToEngine)).run()


if __name__ == "__main__":
    sys.exit(main())
