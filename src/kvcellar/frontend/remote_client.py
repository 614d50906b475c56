"""remote_client: engines in other processes, as their front end sees them: one that is started again when it dies
(`process_client.py`), or replicas (`cluster/client.py`). No torch.

Requests of an engine that has died go on at another one from the last token that was told: their noise depends on the
position only, so that they get the text that they would have got.

Always true:
  * `_running` are the requests that are not done, by number, with all that was told of each: what another engine needs
    to go on with it;
  * a request is at one of `_engines`, or at none, and then it waits for one, or is held until a subclass lets it go on;
    what another one tells of it is dropped;
  * what engines are sent of requests is sent while `_changed` is held: so it arrives in the order of what was decided;
  * events of a request are delivered in order, by the thread that reads what its engine sends, or, of one that ends at
    none, that watches; none after `Done` or `Failed`;
  * after a death, its requests go on one after the other: the next one when the one before was told something, or after
    `UNPROVEN_SECONDS`. So where an engine dies again, it is known which request it had just begun with: one that had
    `DEATHS` of these, in a row, has failed.
"""

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from functools import partial
from itertools import count
from math import inf
from queue import SimpleQueue
from typing import Generic, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from kvcellar.engine.card import EngineCard
from kvcellar.engine.control_replies import AdapterInfo
from kvcellar.engine.messages import (
    AddAdapter,
    Admitted,
    Ask,
    Beat,
    Cancel,
    ClearCache,
    ClearCacheAndStore,
    Control,
    ControlInParts,
    ControlWithReply,
    Drawn,
    Ended,
    EndParts,
    EngineEvent,
    EngineSnapshot,
    Fail,
    FromEngine,
    Given,
    ListAdapters,
    Logged,
    NextPart,
    Produced,
    Refusal,
    RemoveAdapter,
    RemoveEntries,
    Reply,
    StepEvents,
    Stop,
    Submission,
    Wanted,
    reply_type,
)
from kvcellar.engine.request_options import timings_of
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import BadRequest, EngineClosed, EngineDied, EngineFailed, Overloaded, WrongStage, forked_from
from kvcellar.events import Done, Embedded, Failed, Placement, PromptScored, Score, Timings, Usage
from kvcellar.memory.prefix.node import ids_of
from kvcellar.memory.tiers.upkeep import Readable
from kvcellar.wire import Link, Outbox, decode, packed

R = TypeVar("R")
log = logging.getLogger("kvcellar.engine")

DEATHS = 2  # of engines in a row that had begun with a request, and died before they told anything of it
UNPROVEN_SECONDS = 2.0
WAIT_SECONDS = 60.0  # that a call waits while no engine is there
NO_ENGINE = "no engine runs now, and one that is being started is not ready; try again later"
PLACEMENTS = 4  # of a request that are told: one can go on at any number of replicas
PINS = 256  # prompts, the last ones, that are pinned again at another engine


class RemoteEngine:
    """An engine that runs in another process. `beaten`: when it was heard of last; `stats` are packed."""

    def __init__(self, end: socket.socket, unsent: Callable[[object, ValueError], None]) -> None:
        """`unsent` as `Outbox` has it."""
        self.link: Link[FromEngine] = Link(end, FromEngine)
        self.outbox = Outbox(self.link, unsent)
        self.beat, self.beaten = Beat(0.0), time.monotonic()
        self.stats: Raw | None = None

    def send(self, message: object) -> None:
        """Returns at once. What is sent to an engine that has died is dropped: what another one has to know is in
        `RemoteClient`."""
        self.outbox.put(message)

    def receive(self) -> FromEngine:
        """What it tells before it is used."""
        return self.link.receive()


E = TypeVar("E", bound=RemoteEngine)


@dataclass(eq=False, slots=True)
class _Choice:
    token_ids: "array[int]" = field(default_factory=partial(array, "q"))  # of all its `Drawn`
    ended: int | None = None  # with how many tokens; None: it goes on


@dataclass(eq=False, slots=True)
class Request(Generic[E]):
    """A request that is not done, and what was told of it."""

    submission: Submission
    deliver: Callable[[EngineEvent], None]
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    choices: dict[int, _Choice] = field(default_factory=dict[int, _Choice])
    cached: int = 0  # tokens of the prompt that came from memory, in the first engine
    prompt_told: bool = False
    engine: E | None = None  # where it is
    since: float = field(default_factory=time.monotonic)  # it came, or its engine, or the last one, left
    here: bool = False  # this engine has begun with it
    proven: bool = False  # this engine has told something of it
    alone: bool = False  # it goes on after a death: others go on when it is proven
    deaths: float = 0.0  # of engines that had begun with it, and told nothing, in a row
    went_on: bool = False  # more than one engine had it
    considered: tuple[Score, ...] = ()  # engines, when the last one was chosen
    placements: list[Placement] = field(default_factory=list[Placement])  # the last `PLACEMENTS` of replicas
    cancelled: bool = False
    failed: Exception | None = None  # its text
    ask: int | None = None  # by which engines get it, while there is no reply
    blocks: Sequence[int] = ()  # hashes of those of its prompt, of replicas
    weights: str = ""  # of the replicas that have told something of it
    handed: float | None = None  # since when it is handed over, while nothing was told since
    ending: E | None = None  # which replica ends it still, as it is handed over

    def tell(self, event: EngineEvent) -> None:
        """Raises what the receiver raises."""
        if not isinstance(event, Admitted):
            self.deaths, self.proven = 0.0, True
        match event:
            case Drawn():
                event = self._drawn(event)
            case Admitted():
                self.here, self.admitted = True, self.admitted or time.perf_counter()
            case PromptScored() | Embedded():
                self.prompt_told = True
            case Ended():
                choice = self.choices.setdefault(event.choice, _Choice())
                choice.ended = event.tokens if choice.ended is None else choice.ended
            case Done():
                event = self._done(event)
            case _:
                pass
        self.deliver(event)

    def _drawn(self, event: Drawn) -> Drawn:
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token, self.cached = self.last_token, event.cached_tokens
        if (choice := self.choices.get(event.choice)) is None:
            choice = self.choices[event.choice] = _Choice()
        choice.token_ids.extend(event.token_ids)
        return event if event.cached_tokens == self.cached else replace(event, cached_tokens=self.cached)

    def _done(self, event: Done) -> Done:
        if self.went_on:
            cached = event.usage.cached_tokens if self.first_token is None else self.cached
            usage = with_fields(event.usage, cached_tokens=cached)
            event = replace(event, usage=usage, timings=self._timings())
        return replace(event, placements=tuple(self.placements)) if self.placements else event

    def waits_in_vain(self, patience: float) -> bool:
        """A prompt that is pinned again waits for as long as it takes."""
        seconds = patience if self.went_on else WAIT_SECONDS
        return self.deliver is not dropped and time.monotonic() - self.since > seconds

    def end(self) -> Generator[EngineEvent]:
        """What is told of one that was cancelled, or has failed, and is at no engine."""
        if self.failed is not None:
            yield Failed(self.failed)
            return
        for index, one in list(self.choices.items()):
            if one.ended is None:
                yield Ended(index, "cancelled", len(one.token_ids))
        tokens = sum(one.ended or 0 for one in self.choices.values())
        usage = Usage(len(ids_of(self.submission.prompt)), self.cached, tokens)
        yield Done(usage, self._timings())

    def placed(self, replica: str) -> None:
        """It is sent to a replica, which was chosen now."""
        self.placements = [*self.placements, Placement(replica, self.considered)][-PLACEMENTS:]

    def _timings(self) -> Timings:
        return timings_of(self.submitted, self.admitted, self.first_token, self.last_token)

    def leave(self, how: str) -> None:
        """It goes on at another engine. `how`: what its engine has done, for `placements`."""
        self.alone = self.alone and not self.proven
        self.engine, self.here, self.proven, self.went_on, self.since = None, False, False, True, time.monotonic()
        if self.placements:
            self.placements[-1] = with_fields(self.placements[-1], left=how)

    @property
    def length(self) -> int:
        """Tokens that another engine has to compute before it draws one, at most."""
        return len(ids_of(self.submission.prompt)) + max(
            (len(one.token_ids) for one in self.choices.values()), default=0
        )

    def rest(self) -> Submission:
        """What is left of it, for another engine."""
        produced = tuple(
            Produced(index, tuple(one.token_ids), one.ended)
            for index, one in sorted(self.choices.items())
            if one.token_ids or one.ended is not None
        )
        goes_on = self.went_on or self.submission.goes_on
        return replace(self.submission, produced=produced, prompt_told=self.prompt_told, goes_on=goes_on)


@dataclass(eq=False, slots=True)
class _Call(Generic[E]):
    """An ask without a reply."""

    request: Request[E] | None  # that it submits
    engine: E | None
    resumed: bool = False  # the request goes on, and no caller waits for the reply
    answers: SimpleQueue[Reply | Refusal | Wanted] = field(default_factory=SimpleQueue[Reply | Refusal | Wanted])


def dropped(event: EngineEvent) -> None:
    """Of a prompt that is pinned again, no caller waits for events."""


def _ask(number: int, what: Submission | Control) -> Ask:
    """Raises `BadRequest` for what is too large."""
    try:
        return Ask(number, packed(what))
    except ValueError as error:
        raise BadRequest(str(error)) from error


class RemoteClient(ABC, Generic[E]):
    """An `EngineClient` of engines in other processes. Subclasses find engines (`_joined`), read what they send
    (`_take`) on threads of their own (`_readers`), and say when they are not used any more (`_left`)."""

    card: EngineCard

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._numbers, self._asks = count(), count(1)
        self._readers: set[threading.Thread] = set()
        self._changed = threading.Condition()  # held for what follows
        self._engines: list[E] = []  # that can be told everything
        self._running: dict[int, Request[E]] = {}
        self._waiting: dict[int, _Call[E]] = {}  # by the number of the ask
        self._to_go_on: deque[int] = deque()  # requests that are at no engine
        self._held: set[int] = set()  # requests that are at none, and do not go on yet
        self._unproven: tuple[int, E, float] | None = None  # the last one that goes on alone, and since when
        self._adapters: dict[str, AddAdapter | RemoveAdapter] = {}  # what engines were told last of each name
        self._pins: dict[tuple[str, str | None, bytes], tuple[Request[E], float, E]] = {}  # pinned, when and where
        self._closing, self._given_up = False, ""

    def _choose(self, request: Request[E] | None) -> E | None:
        """Of `_engines`, the one for a request, or for what is asked of one; None: there is none. While `_changed` is
        held."""
        return self._engines[0] if self._engines else None

    def _request(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> Request[E]:
        return Request[E](submission, deliver)

    def _to_send(self, submission: Submission) -> Submission:
        """As engines get it."""
        return submission

    def _sent(self, request: Request[E], engine: E) -> None:
        """An engine gets a request. While `_changed` is held."""

    def _able(self, request: Request[E] | None) -> list[E]:
        """Engines that may get a request, or what is asked of one. While `_changed` is held."""
        return self._engines

    def _hopeless(self, request: Request[E] | None = None) -> str:
        """Why a wait for one of these is of no use; "": it is of use, or one is there. While `_changed` is held."""
        return ""

    # -- from any thread ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Also while no engine is there, as long as one is expected."""
        return not self._closing and not self._given_up and self._owner == os.getpid()

    @property
    def starting(self) -> bool:
        """Whether no engine is there, and one is expected."""
        return self.alive and not self._engines

    @property
    @abstractmethod
    def last_stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> bool: ...

    def number(self) -> int:
        return next(self._numbers)

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        self.check_caller()
        number, request = submission.number, self._request(submission, deliver)
        try:
            self._asked(submission, request=request)
        except BaseException as error:
            with self._changed:
                self._remove(number)
                engine = request.engine
            if not isinstance(error, Exception) and engine is not None:  # an interrupt: it may have been taken in
                engine.send(Cancel(number))
            raise

    def cancel(self, number: int) -> None:
        if self._owner == os.getpid():
            self._tell_engine(number, Cancel(number), lambda request: setattr(request, "cancelled", True))

    def stop(self, number: int, choice: int, tokens: int) -> None:
        def stopped(request: Request[E]) -> None:
            request.choices.setdefault(choice, _Choice()).ended = tokens

        self._tell_engine(number, Stop(number, choice, tokens), stopped)

    def fail(self, number: int, error: Exception) -> None:
        self._tell_engine(number, Fail(number, error), lambda request: setattr(request, "failed", error))

    def ask(self, control: ControlWithReply[R], source: Readable | None = None) -> R:
        self.check_caller()
        found = decode(self._asked(control, source), reply_type(control))
        self._noted(control)
        return found

    def parts(self, control: ControlInParts[R]) -> Generator[R]:
        self.check_caller()
        yield from self._parts_of(control, self._ready_engine())

    def _parts_of(self, control: ControlInParts[R], engine: E) -> Generator[R]:
        number, kind = next(self._asks), reply_type(control)
        self._asked(control, number=number, engine=engine)
        try:
            while some := decode(self._asked(NextPart(number), engine=engine), list[kind]):
                yield from some
        finally:
            engine.send(EndParts(number))

    def check_caller(self) -> None:
        if threading.current_thread() in self._readers:
            raise WrongStage("an event's receiver runs on the thread of events; it cannot wait for the engine")

    # -- asking -------------------------------------------------------------------------------------------------

    def _tell_engine(self, number: int, message: object, note: Callable[[Request[E]], None]) -> None:
        """Of a request that is not done. What an engine is not told that has died is noted: the next one is told."""
        with self._changed:
            if (request := self._running.get(number)) is None:
                return
            note(request)
            if request.engine is not None:
                request.engine.send(message)

    def _noted(self, control: Control) -> None:
        """An engine has done it: later ones have to know."""
        with self._changed:
            if isinstance(control, AddAdapter | RemoveAdapter):
                self._adapters[control.name] = control
            elif isinstance(control, ClearCache | ClearCacheAndStore | RemoveEntries):
                self._pins.clear()  # what was removed must not come back

    def _unsent(self, message: object, error: ValueError) -> None:
        """Of an `Outbox`."""
        log.error("a message to the engine could not be sent: %s", error)
        if not isinstance(message, Ask):
            return
        with self._changed:
            call = self._waiting.get(message.number)
        if call is not None and call.engine is not None:
            self._answered(call.engine, Refusal(message.number, BadRequest(str(error))))

    def _check_owner(self) -> None:
        """Before a lock is acquired, which may be held for ever in a fork."""
        if self._owner != os.getpid():
            raise EngineClosed(f"the engine belongs to {forked_from(self._owner)}; make a new one after the fork")

    def _ready_engine(self, request: Request[E] | None = None) -> E:
        """Waits for one. Raises `EngineClosed`, `EngineFailed` and `Overloaded`."""
        self._check_owner()
        with self._changed:
            self._changed.wait_for(
                lambda: self._able(request) or not self.alive or self._hopeless(request), WAIT_SECONDS
            )
            if self._closing:
                raise EngineClosed("the engine is closed; open a new one")
            if self._given_up:
                raise EngineFailed(self._given_up)
            if (engine := self._choose(request)) is None:
                raise Overloaded(self._hopeless(request) or NO_ENGINE)
            return engine

    def _asked(
        self,
        what: Submission | Control,
        source: Readable | None = None,
        *,
        number: int | None = None,
        request: Request[E] | None = None,
        engine: E | None = None,
    ) -> Raw:
        """The reply; of what has parts, that there will be some. Raises the refusal. A `request` is sent to each engine
        once: by this method to the one that it begins at, and by `_go_on` to those that replace it before it has
        replied."""
        what = self._to_send(what) if isinstance(what, Submission) else what
        message = _ask(next(self._asks) if number is None else number, what)
        try:
            call = self._called(message, request, engine)
            engine = call.engine
            while True:
                match call.answers.get():
                    case Reply(_, value):
                        return value
                    case Refusal(_, error):
                        raise error
                    case Wanted(_, size):
                        assert source is not None and engine is not None, "only what has a source reads one"
                        engine.send(Given(message.number, source.read(size)))
        except BaseException:
            if source is not None and engine is not None:
                engine.send(Given(message.number, b""))  # it must not wait for more
            raise
        finally:
            with self._changed:
                self._waiting.pop(message.number, None)
                if request is not None and request.ask == message.number:
                    request.ask = None

    def _called(self, message: Ask, request: Request[E] | None, engine: E | None) -> _Call[E]:
        """Send a message, whose caller waits, to an engine, or to the one that is chosen. A request for which none is
        there yet waits for one, and its caller does not: what becomes of it is told by events."""
        self._check_owner()
        with self._changed:
            if request is not None and self.alive and not self._able(request) and not self._hopeless(request):
                return self._queued(message.number, request)
            if engine is None:
                engine = self._ready_engine(request)
            elif engine not in self._engines:
                raise EngineDied("this was asked of an engine that has died; ask again")
            call = self._waiting[message.number] = _Call(request, engine)
            if request is not None:
                self._running[request.submission.number], request.ask, request.engine = request, message.number, engine
                self._sent(request, engine)
            engine.send(message)
            return call

    def _queued(self, number: int, request: Request[E]) -> _Call[E]:
        """While `_changed` is held."""
        self._running[request.submission.number] = request
        self._to_go_on.append(request.submission.number)
        call = _Call(request, None)
        call.answers.put(Reply(number, packed(None)))
        return call

    # -- on the threads that read -------------------------------------------------------------------------------

    def _take(self, engine: E, message: FromEngine) -> None:
        match message:
            case StepEvents(events):
                for number, event in events:
                    self._tell(engine, number, event)
            case Reply() | Refusal() | Wanted():
                self._answered(engine, message)
            case Beat():
                engine.beat = message
            case EngineSnapshot(stats):
                engine.stats = stats
            case Logged(logger, level, text):
                logging.getLogger(logger).log(level, "%s", text)
            case _:
                pass
        engine.beaten = time.monotonic()

    def _tell(self, engine: E | None, number: int, event: EngineEvent) -> None:
        """What an engine tells of a request; None: what this process does."""
        with self._changed:
            if (request := self._running.get(number)) is None or request.engine is not engine:
                return
            if request.ask is not None:  # it was taken in, and the engine may die before it replies that
                self._reply(Reply(request.ask, packed(None)))
            if isinstance(event, Done | Failed):
                self._remove(number)
            if isinstance(event, Done) and engine is not None and event.pinned:
                self._pinned(request, engine)
            news = isinstance(event, Failed) if engine is None else not isinstance(event, Admitted)
            proven = news and self._proved(number)
            if engine is not None:
                self._heard(request, event)
        try:
            request.tell(event)
        except BaseException:  # noqa: BLE001 - an error of one receiver (a closed event loop) must not affect others
            with self._changed:
                self._remove(number)
            if engine is not None:
                engine.send(Cancel(number))
        if proven:
            self._go_on()

    def _remove(self, number: int) -> None:
        """A request is done. While `_changed` is held."""
        if (request := self._running.pop(number, None)) is not None:
            self._ended(request)

    def _heard(self, request: Request[E], event: EngineEvent) -> None:
        """An engine tells something of a request. While `_changed` is held."""

    def _ended(self, request: Request[E]) -> None:
        """While `_changed` is held."""

    def _forgotten(self, engine: E) -> None:
        """An engine is not used any more. While `_changed` is held."""

    def _proved(self, number: int) -> bool:
        """More than that it was taken in is told of a request. Whether that lets others go on. While `_changed` is
        held."""
        if self._unproven is None or self._unproven[0] != number:
            return False
        self._unproven = None
        return True

    def _pinned(self, request: Request[E], engine: E) -> None:
        one, again = request.submission, Request[E](request.submission, dropped, blocks=request.blocks)
        self._pins[one.namespace, one.adapter, one.prompt] = again, time.monotonic(), engine
        while len(self._pins) > PINS:
            del self._pins[next(iter(self._pins))]

    def _answered(self, engine: E, message: Reply | Refusal | Wanted) -> None:
        """An engine that a request has left is not heard any more."""
        with self._changed:
            call = self._waiting.get(message.number)
            if isinstance(message, Wanted):
                if call is not None:
                    call.answers.put(message)
                else:
                    engine.send(Given(message.number, b""))  # its caller has gone
                return
            if call is None or call.engine is not engine:
                return
            self._reply(message)
        if call.resumed and call.request is not None and isinstance(message, Refusal):
            self._tell(engine, call.request.submission.number, Failed(message.error))

    def _reply(self, answer: Reply | Refusal) -> None:
        """To the caller, if there is one. While `_changed` is held."""
        if (call := self._waiting.pop(answer.number, None)) is None:
            return
        if call.request is not None:
            call.request.ask = None
            if isinstance(answer, Refusal) and not call.resumed:
                self._remove(call.request.submission.number)
        call.answers.put(answer)

    # -- engines that come and go -------------------------------------------------------------------------------

    def _agree(self, engine: E, adapters: Iterable[AddAdapter | RemoveAdapter]) -> list[AdapterInfo]:
        """Let an engine that comes have the adapters that others were told of, on the thread that reads what it sends.
        Returns which it has. Requests that name one which cannot be loaded there are refused."""
        asks = {next(self._asks): control for control in (*adapters, ListAdapters())}
        for number, control in asks.items():
            engine.send(Ask(number, packed(control)))
        found: list[AdapterInfo] = []
        while asks:
            message = engine.receive()
            if not isinstance(message, Reply | Refusal):
                self._take(engine, message)
                continue
            control = asks.pop(message.number)
            if isinstance(message, Reply) and isinstance(control, ListAdapters):
                found = decode(message.value, list[AdapterInfo])
            elif isinstance(message, Refusal) and isinstance(control, AddAdapter):
                log.error("the adapter %s cannot be loaded again: %s", control.name, message.error)
        return found

    def _joined(self, engine: E) -> None:
        """An engine is there: let it go on with what waits for one."""
        with self._changed:
            self._engines.append(engine)
            self._changed.notify_all()
        self._go_on()

    def _left(self, engine: E, how: str, *, blame: Callable[[Request[E]], float] | None) -> list[int]:
        """An engine is not used any more, and `how` it has ended. Its requests, whose numbers are returned, wait for
        another one, and all else that was asked of it is refused. If it has died, `blame` is how much of a death that
        is for one that it had begun with; None: it has not."""
        died = EngineDied(f"the engine {how}. Send this again")
        with self._changed:
            if engine in self._engines:
                self._engines.remove(engine)
            mine = {number: one for number, one in self._running.items() if one.engine is engine}
            begun = {number for number, one in mine.items() if one.here or one.ask is not None}
            if self._unproven is not None and self._unproven[1] is engine:
                begun.add(self._unproven[0])
                self._unproven = None
            calls = [(number, call) for number, call in self._waiting.items() if call.engine is engine]
            for number in [number for number, call in calls if call.request is None or call.resumed]:
                self._reply(Refusal(number, died))
            # Where it has told of none that it began with it, it may have died in the first step of any.
            unknown = not any(one.here for one in mine.values())
            guilty: list[int] = []
            for number, one in mine.items():
                if blame is not None and (number in begun or unknown) and not one.proven:
                    one.deaths += blame(one)
                one.leave(how)
                one.alone = one.alone or blame is not None
                if one.deaths >= DEATHS:
                    guilty.append(number)
            if not self._engines:
                for one in self._running.values():
                    one.since = time.monotonic()
            moved = [number for number in mine if number not in guilty]
            self._to_go_on.extend(moved)
            self._forgotten(engine)
        why = f"{DEATHS} engines in a row have died when they had begun with this request: the last {how}"
        for number in guilty:
            self._refuse(number, EngineDied(why))
        return moved

    def _refuse(self, number: int, error: Exception) -> None:
        """Fail a request that is at no engine."""
        with self._changed:
            request = self._running.get(number)
            if request is not None and request.engine is None and request.ask is not None:
                self._reply(Refusal(request.ask, error))
                return
        self._tell(None, number, Failed(error))

    def _go_on(self) -> None:
        """Let engines go on with requests that wait for one: those first that are the least likely to end it, and that
        are told something soon. One that goes on alone is the last one for now."""
        with self._changed:
            self._to_go_on = deque(sorted((one for one in self._to_go_on if one in self._running), key=self._order))
        while self._next():
            pass

    def _order(self, number: int) -> tuple[bool, bool, bool, int]:
        request = self._running[number]
        return request.alone, request.deliver is dropped, request.ask is not None, request.length

    def _next(self) -> bool:
        """Send the next request to an engine. Whether another one may follow."""
        with self._changed:
            for number in self._to_go_on:
                request = self._running.get(number)
                if request is None or (request.alone and self._unproven is not None):
                    continue
                if (engine := self._choose(request)) is not None:
                    break
            else:
                return False
            self._to_go_on.remove(number)
            if (ask := request.ask) is None:
                ask = request.ask = next(self._asks)
                self._waiting[ask] = _Call(request, engine, resumed=True)
            self._waiting[ask].engine = request.engine = engine
            if request.alone:
                self._unproven = number, engine, time.monotonic()
            self._sent(request, engine)
            engine.send(Ask(ask, packed(self._to_send(request.rest()))))
            if request.cancelled:
                engine.send(Cancel(number))
            if request.failed is not None:
                engine.send(Fail(number, request.failed))
            return not request.alone

    def _pin_again(self, lost: Iterable[E] | None = None) -> None:
        """What was pinned at engines that are lost, or, None, at any."""
        with self._changed:
            now, gone = time.monotonic(), None if lost is None else list(lost)
            for one, at, where in self._pins.values():
                if now - at < (one.submission.retention.ttl or inf) and (gone is None or where in gone):
                    again = replace(one.submission, number=self.number(), goes_on=True)
                    self._running[again.number] = Request[E](again, dropped, alone=True, blocks=one.blocks)
                    self._to_go_on.append(again.number)

    def _over(self, error: Exception) -> None:
        """There will be no other engine: fail all requests."""
        with self._changed:
            if not self._closing:
                self._given_up = str(error)
            self._changed.notify_all()
            for number in list(self._waiting):
                self._reply(Refusal(number, error))
            for request in self._running.values():
                request.engine = None
        for number in list(self._running):
            self._tell(None, number, Failed(error))

    def _look(self, patience: float = inf) -> None:
        """On a thread that watches: go on with the next request where one takes long, or was refused; end those at no
        engine that are cancelled, have failed, or wait for one that will not come. `patience`: for how many seconds
        those wait that have lost theirs, while none is there."""
        with self._changed:
            waiting = [
                (one, self._hopeless(one), not self._able(one)) for one in self._running.values() if one.engine is None
            ]
            late = self._unproven is not None and (
                self._unproven[0] not in self._running or time.monotonic() - self._unproven[2] > UNPROVEN_SECONDS
            )
            if late:
                self._unproven = None
        if late:
            self._go_on()
        for one, why, none_is_there in waiting:
            if one.cancelled or one.failed is not None:
                for event in one.end():
                    self._tell(None, one.submission.number, event)
            elif why or (none_is_there and one.waits_in_vain(patience)):
                self._refuse(one.submission.number, Overloaded(why or NO_ENGINE))

    def check(self) -> None:
        """Assert what is always true."""
        with self._changed:
            for ask, call in self._waiting.items():
                assert call.request is None or call.request.ask == ask
                assert not call.resumed or call.engine is not None
            for number, request in self._running.items():
                assert number == request.submission.number
                assert request.ask is None or self._waiting[request.ask].request is request
                assert request.deaths < DEATHS
                assert all(0 <= index < request.submission.params.n for index in request.choices)
                assert [request.engine is not None, number in self._to_go_on, number in self._held].count(True) == 1
