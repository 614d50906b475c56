"""front_end: one front end of an engine, as the process that has the engine sees it: does what it sends, and sends it
what is told of its requests.

Always true:
  * neither the engine's step nor the thread that reads messages waits for the front end: a thread of its own sends;
  * a front end knows its requests by its own numbers. The engine has others, as it may have several front ends;
  * what one step tells a front end is one message, but that ends of requests may come behind it (`after`).
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from kvcellar.engine.messages import (
    CONTROLS,
    Admitted,
    Ask,
    Cancel,
    Control,
    ControlInParts,
    ControlWithReply,
    DescribeCapacity,
    DescribeVariant,
    EndParts,
    EngineEvent,
    Fail,
    Given,
    ImportStore,
    ListAdapters,
    NextPart,
    ReadStats,
    Refusal,
    Reply,
    ShowEntry,
    ShowWay,
    StepEvents,
    Stop,
    Submission,
    TakePicture,
    ToEngine,
    Wanted,
)
from kvcellar.errors import BadRequest, EngineFailed
from kvcellar.events import Done, Failed
from kvcellar.frontend.thread_client import ThreadClient
from kvcellar.images.shared import received
from kvcellar.wire import Link, Outbox, decode, packed

log = logging.getLogger("kvcellar.engine")

LAST_WORDS = 5.0  # seconds in which the front end has to read what it was sent last
COMPILING = 8  # requests whose grammars are compiled at once
READING, CHANGING = 4, 16  # controls that are done at once: those that only look, and those that may wait for others
LOOKING = (
    TakePicture, ShowEntry, ShowWay, ReadStats, DescribeCapacity, ListAdapters, DescribeVariant, NextPart
)  # fmt: skip


class SentSource:
    """What an import reads, which the front end has."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self._number, self._outbox = number, outbox
        self.given: SimpleQueue[bytes] = SimpleQueue()

    def read(self, n: int, /) -> bytes:
        self._outbox.put(Wanted(self._number, n))
        return self.given.get()


class Pools:
    """Threads of an engine, which its front ends share."""

    def __init__(self) -> None:
        self.compiling = ThreadPoolExecutor(COMPILING, "kvcellar-compile")
        self.reading = ThreadPoolExecutor(READING, "kvcellar-look")
        self.changing = ThreadPoolExecutor(CHANGING, "kvcellar-control")


class FrontEnd:
    """One front end, at the other end of a link."""

    def __init__(
        self,
        link: Link[ToEngine],
        pools: Pools,
        after: Callable[[Callable[[], None]], None] | None = None,
        *,
        shares_memory: bool = False,
    ) -> None:
        """`after` calls what tells the ends of requests, in their order, when other things were told; None: at once.
        `shares_memory`: it is the process that has started this one, whose images may be in memory of its own."""
        self._link, self._pools, self.outbox = link, pools, Outbox(link, self._unsent)
        self._after, self._shares_memory = after, shares_memory
        self.client: ThreadClient | None = None  # None: the model is being loaded
        # events of the running step, and those that end a request: the engine's thread alone has them
        self._step: list[tuple[int, EngineEvent]] = []
        self._ends = self._step if after is None else list[tuple[int, EngineEvent]]()
        self._lock = threading.Lock()  # held for what follows
        self._numbers: dict[int, int] = {}  # of the engine, by those of the front end, of requests that are not done
        self._submitting: dict[int, list[Cancel | Fail]] = {}  # by request that waits for a grammar: what ends it
        self._parts: dict[int, Iterator[Any]] = {}  # by the number of the ask
        self._sources: dict[int, SentSource] = {}
        self._gone = False

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _tell(self, number: int, event: EngineEvent) -> None:
        """An event of the running step. That a request begins is told before the step ends: if the step is the end of
        this process, the front end knows in which requests it was."""
        if isinstance(event, Done | Failed):
            with self._lock:
                self._numbers.pop(number, None)
            self._ends.append((number, event))
        elif isinstance(event, Admitted):
            self.outbox.put(StepEvents(((number, event),)))
        else:
            self._step.append((number, event))

    def turned(self) -> None:
        """The step has ended."""
        if self._step:
            self.outbox.put(StepEvents(tuple(self._step)))
            self._step.clear()
        if self._ends and self._after is not None:
            self._after(partial(self.outbox.put, StepEvents(tuple(self._ends))))
            self._ends.clear()

    # -- on the thread that reads -------------------------------------------------------------------------------

    def read(self) -> None:
        """Do what the front end sends. Raises `EOFError` when it has gone, and for what it cannot have sent."""
        while True:
            self._take(self._link.receive())

    def _take(self, message: ToEngine) -> None:
        client = self.client
        assert client is not None, "the front end sends nothing before the model is loaded"
        match message:
            case Cancel() | Fail():
                self._end_request(client, message)
            case Stop(number, choice, tokens):
                if (ours := self._numbers.get(number)) is not None:
                    client.stop(ours, choice, tokens)
            case Ask():
                self._ask(client, message)
            case EndParts(of):
                self._pools.reading.submit(self._end_parts, of)
            case Given(number, data):
                with self._lock:
                    source = self._sources.get(number)
                if source is not None:
                    source.given.put(data)
            case _:
                raise ValueError("a model is loaded already")

    def _ask(self, client: ThreadClient, ask: Ask) -> None:
        number = ask.number
        try:
            asked: Submission | Control = decode(ask.what, Submission | CONTROLS)
        except ValueError as error:
            self.outbox.put(Refusal(number, error))
            return
        if isinstance(asked, Submission):
            if asked.params.constraint is None:
                self._reply(number, partial(self._submit, client, asked))
                return
            with self._lock:
                self._submitting[asked.number] = []
            self._pools.compiling.submit(self._reply, number, partial(self._submit, client, asked))
        elif isinstance(asked, ControlInParts):
            self._pools.reading.submit(self._reply, number, partial(self._begin_parts, client, number, asked))
        else:
            pool = self._pools.reading if isinstance(asked, LOOKING) else self._pools.changing
            pool.submit(self._reply, number, partial(self._control, client, number, asked))

    def _end_request(self, client: ThreadClient, message: Cancel | Fail) -> None:
        with self._lock:
            if (ends := self._submitting.get(message.number)) is not None:
                ends.append(message)
                return
            ours = self._numbers.get(message.number)
        if ours is None:
            return
        if isinstance(message, Fail):
            client.fail(ours, message.error)
        else:
            client.cancel(ours)

    # -- on any thread ------------------------------------------------------------------------------------------

    def _unsent(self, message: object, error: ValueError) -> None:
        """A reply becomes a refusal, and what cannot be told of a request the end of it."""
        log.error("a message to the front end could not be sent: %s", error)
        if isinstance(message, Reply):
            self.outbox.put(Refusal(message.number, error))
        elif isinstance(message, StepEvents) and len(message.events) > 1:
            for event in message.events:
                self.outbox.put(StepEvents((event,)))
        elif isinstance(message, StepEvents) and self.client is not None:
            for number, _ in message.events:
                self._end_request(self.client, Fail(number, EngineFailed(str(error))))

    def _reply(self, number: int, work: Callable[[], object]) -> None:
        try:
            answer: object = Reply(number, packed(work()))
        except BaseException as error:  # noqa: BLE001 - the front end raises it; a panic, too
            answer = Refusal(number, error if isinstance(error, Exception) else EngineFailed(repr(error)))
        self.outbox.put(answer)
        del answer  # its error refers to this frame

    def _submit(self, client: ThreadClient, submission: Submission) -> None:
        number, ours = submission.number, client.number()
        with self._lock:
            self._numbers[number] = ours
        try:
            images = submission.images
            if self._shares_memory:
                images = tuple(map(received, images))
            elif any(one.place is not None for one in images):
                raise BadRequest("the arrays of an image are not in the message")
            client.submit(replace(submission, number=ours, images=images), partial(self._tell, number))
        except BaseException:
            with self._lock:
                self._numbers.pop(number, None)
            raise
        finally:
            with self._lock:
                ends = self._submitting.pop(number, [])
        for message in ends:
            self._end_request(client, message)

    def _control(self, client: ThreadClient, number: int, control: ControlWithReply[Any]) -> object:
        if isinstance(control, NextPart):
            return self._next(control.of)
        if not isinstance(control, ImportStore):
            return client.ask(control)
        source = SentSource(number, self.outbox)
        with self._lock:
            self._sources[number] = source
            if self._gone:
                source.given.put(b"")
        try:
            return client.ask(control, source)
        finally:
            with self._lock:
                del self._sources[number]

    def _begin_parts(self, client: ThreadClient, number: int, control: ControlInParts[Any]) -> None:
        parts = client.parts(control)
        with self._lock:
            self._parts[number] = parts
            gone = self._gone
        if gone:
            self._end_parts(number)

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

    def hang_up(self) -> None:
        """Send what was told, and close the link."""
        self.outbox.close(LAST_WORDS)
        self._link.close()

    def end(self) -> None:
        """The front end has gone, and the engine goes on: end all that it has asked for. May be called again."""
        self._link.close()
        self.outbox.close(0.0)
        with self._lock:
            self._gone = True
            numbers, parts, sources = list(self._numbers.values()), list(self._parts), list(self._sources.values())
            for number, ends in self._submitting.items():
                ends.append(Cancel(number))
        for source in sources:
            source.given.put(b"")
        if self.client is not None:
            for ours in numbers:
                self.client.cancel(ours)
        for one in parts:
            self._end_parts(one)
