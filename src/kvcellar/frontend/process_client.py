"""process_client: an engine in a process of its own, as its front end sees it. No torch.

The process is started with its front end, and again when it dies: by a signal, for want of memory, or in a step that
takes longer than `STEP_SECONDS`. Requests go on from the last token that was told: their noise depends on the position
only, so that they get the text that they would have got.

Always true:
  * `_running` are the requests that are not done, by number, with all that was told of each: what another engine needs
    to go on with it;
  * events are delivered by one thread, the one that reads messages, and no event after `Done` or `Failed`;
  * after a death, requests go on one after the other: the next one when the one before was told something, or after
    `UNPROVEN_SECONDS`. So where an engine dies again, it is known which request it had just begun with: one with which
    `DEATHS` engines in a row had begun, and died before they told anything of it, has failed. An engine that another
    process has killed, though memory did not lack, counts `OUTSIDE`;
  * the process is gone when `close` has returned, and ends by itself if this one dies.
"""

import logging
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.structs import replace

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
    Hello,
    Loading,
    Logged,
    NextPart,
    Produced,
    Refusal,
    RemoveAdapter,
    RemoveEntries,
    Reply,
    Start,
    StepEvents,
    Stop,
    Submission,
    Wanted,
    reply_type,
)
from kvcellar.engine.request_options import timings_of
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import BadRequest, EngineClosed, EngineDied, EngineFailed, Overloaded, WrongStage, forked_from
from kvcellar.events import Done, Embedded, Failed, PromptScored, Timings
from kvcellar.frontend.child_process import STARTING, ChildProcess, logged
from kvcellar.frontend.fork_server import Starter, starter_for
from kvcellar.memory.prefix.node import ids_of
from kvcellar.memory.tiers.upkeep import Readable
from kvcellar.progress import report
from kvcellar.wire import decode, packed

R = TypeVar("R")
log = logging.getLogger("kvcellar.engine")

DEATHS = 2  # of engines in a row that had begun with a request, and died before they told anything of it
OUTSIDE = 0.125  # of a death: a guard of memory that is not Linux itself kills, too, and a request may be the reason
FRUITLESS, SOON = 5, 60.0  # engines in a row that died so soon, in seconds, and had told nothing: then it is given up
UNPROVEN_SECONDS = 2.0
STEP_SECONDS = 600.0  # that a step may take, and that may pass without a beat
STALLED = 5.0  # seconds by which a wait is too long where this process was stopped meanwhile
CLOSE_SECONDS = 40.0  # until a process that does not end is killed
WAIT_SECONDS = 60.0  # that a call waits while the engine is started again
STARTS = 3  # in a row that fail before the engine is given up
TICK = 0.5  # seconds between two looks at the process
PINS = 256  # prompts, the last ones, that are pinned again in an engine that replaces another one
PAUSE = 1.0  # seconds before a start that follows one that has failed, and twice as many before each further one


@dataclass(eq=False, slots=True)
class _Choice:
    token_ids: "array[int]" = field(default_factory=partial(array, "q"))  # of all its `Drawn`
    ended: int | None = None  # with how many tokens; None: it goes on


@dataclass(eq=False, slots=True)
class _Request:
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
    here: bool = False  # the running engine has begun with it
    proven: bool = False  # the running engine has told something of it
    deaths: float = 0.0  # of engines that had begun with it, and told nothing, in a row
    went_on: bool = False  # more than one engine had it
    cancelled: bool = False
    failed: Exception | None = None  # its text
    ask: int | None = None  # by which it is submitted, while the caller of `submit` waits for the reply

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
            case Done() if self.went_on:
                cached = event.usage.cached_tokens if self.first_token is None else self.cached
                usage = with_fields(event.usage, cached_tokens=cached)
                event = replace(event, usage=usage, timings=self._timings())
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

    def _timings(self) -> Timings:
        return timings_of(self.submitted, self.admitted, self.first_token, self.last_token)

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
        return replace(self.submission, produced=produced, prompt_told=self.prompt_told, goes_on=True)


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """A caller that waits for the reply to an ask."""

    request: _Request | None  # that it submits
    answers: SimpleQueue[Reply | Refusal | Wanted] = field(default_factory=SimpleQueue[Reply | Refusal | Wanted])


def _dropped(event: EngineEvent) -> None:
    """Of a prompt that is pinned again, no caller waits for events."""


def plain_settings(model: object, given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """A model and the settings of its engine, as another process can have them. Raises `BadRequest` for objects of this
    one."""
    if not isinstance(model, str | Path | None):
        raise BadRequest("an engine in a process of its own loads a directory or a name, not a network", "model")
    draft = given.get("draft")
    if not isinstance(draft, str | Path | None):
        raise BadRequest("an engine in a process of its own makes its drafter by name, not by a function", "draft")
    plain = dict(given)
    if draft is not None:
        plain["draft"] = str(draft)
    if (adapters := given.get("adapters")) is not None:
        plain["adapters"] = {
            name: [str(path)] if isinstance(path, str | Path) else [str(one) for one in path]
            for name, path in adapters.items()
        }
    return None if model is None else str(model), plain


class ProcessClient:
    """An engine in a process of its own."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], starter: Starter | None = None) -> None:
        """Blocks until the model is loaded, and reports that. Raises what the load raises. `starter`: that of several
        engines; None: one of its own, which it closes."""
        self._start = Start(model, dict(settings), (), logging.getLogger("kvcellar").getEffectiveLevel())
        self._owner, self._folder = os.getpid(), os.getcwd()
        self._numbers, self._asks = count(), count(1)
        self._changed = threading.Condition()  # held for what follows
        self._running: dict[int, _Request] = {}
        self._waiting: dict[int, _Call] = {}  # by the number of the ask
        self._resumed: dict[int, int] = {}  # requests, by the number of the ask by which they go on
        self._to_go_on: deque[int] = deque()  # requests that the running engine has not been sent yet
        self._unproven: tuple[int, float] | None = None  # the last one that it was sent, and when; None: it was told
        self._fruitless = 0  # engines in a row that have died before they told anything
        self._adapters: dict[str, AddAdapter | RemoveAdapter] = {}  # what the engine was told last of each name
        self._pins: dict[tuple[str, str | None, bytes], tuple[Submission, float]] = {}  # pinned, and when
        self._closing, self._given_up = False, ""
        self._ready = False  # an engine runs, and is told everything
        with ExitStack() as opened:
            if starter is None:
                starter = opened.enter_context(closing(starter_for(sys.platform)))
            self._starter = starter
            self._process = self._started(lambda loading: report(loading.stage, loading.done, loading.total))
            self._at_end = opened.pop_all()  # closed by the thread that reads
        self._ready = True
        self._watching = threading.Event()  # set at the end
        self._reader = threading.Thread(target=self._read, name="kvcellar-engine", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="kvcellar-watch", daemon=True).start()

    def _started(self, heard: Callable[[Loading], None]) -> ChildProcess:
        def waits() -> None:
            if self._closing:
                raise EngineClosed("the engine is closed; open a new one")
            heard(STARTING)

        start = replace(self._start, adapters=tuple(self._adapters.values()))
        process = ChildProcess(self._starter, start, self._folder, waits, self._unsent)
        try:
            with self._changed:
                if self._closing:
                    raise EngineClosed("the engine is closed; open a new one")
                self._process = process
            self.card = process.hello(heard)
            assert process.stats is not None, "it tells its statistics first"
            self._stats = process.stats
        except BaseException:
            process.end(0.0)
            raise
        return process

    # -- from any thread ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Also while the engine is started again."""
        return not self._closing and not self._given_up and self._owner == os.getpid()

    @property
    def last_stats(self) -> EngineStats:
        """While an engine is started, those of the one that it replaces."""
        return decode(self._stats, EngineStats)

    @property
    def starting(self) -> bool:
        """Whether the engine has died and is started again."""
        return self.alive and not self._ready

    @property
    def pid(self) -> int:
        """Of the process of the engine."""
        return self._process.pid

    def number(self) -> int:
        return next(self._numbers)

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        self.check_caller()
        number, request = submission.number, _Request(submission, deliver)
        try:
            self._asked(submission, request=request)
        except BaseException as error:
            with self._changed:
                self._running.pop(number, None)
            if not isinstance(error, Exception):  # an interrupt: it may have been taken in
                self._send(Cancel(number))
            raise

    def cancel(self, number: int) -> None:
        if self._owner != os.getpid():
            return
        with self._changed:
            if (request := self._running.get(number)) is None:
                return
            request.cancelled = True
        self._send(Cancel(number))

    def stop(self, number: int, choice: int, tokens: int) -> None:
        with self._changed:
            if (request := self._running.get(number)) is None:
                return
            request.choices.setdefault(choice, _Choice()).ended = tokens
        self._send(Stop(number, choice, tokens))

    def fail(self, number: int, error: Exception) -> None:
        with self._changed:
            if (request := self._running.get(number)) is None:
                return
            request.failed = error
        self._send(Fail(number, error))

    def end_session(self, session: int) -> None:
        if self._owner != os.getpid():
            return
        with self._changed:
            every = [number for number, one in self._running.items() if one.submission.session == session]
        for number in every:
            self.cancel(number)

    def ask(self, control: ControlWithReply[R], source: Readable | None = None) -> R:
        self.check_caller()
        found = decode(self._asked(control, source), reply_type(control))
        with self._changed:
            if isinstance(control, AddAdapter | RemoveAdapter):
                self._adapters[control.name] = control
            elif isinstance(control, ClearCache | ClearCacheAndStore | RemoveEntries):
                self._pins.clear()  # what was removed must not come back
        return found

    def parts(self, control: ControlInParts[R]) -> Generator[R]:
        self.check_caller()
        number, kind = next(self._asks), reply_type(control)
        self._asked(control, number=number)
        try:
            while some := decode(self._part(number), list[kind]):
                yield from some
        finally:
            self._send(EndParts(number))

    def check_caller(self) -> None:
        if threading.current_thread() is self._reader:
            raise WrongStage("an event's receiver runs on the thread of events; it cannot wait for the engine")

    def close(self) -> bool:
        if self._owner != os.getpid():
            return False
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            process = self._process
        self._watching.set()
        process.end_sending()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_SECONDS)
            if self._reader.is_alive():
                process.kill(f"it has not ended within {CLOSE_SECONDS:.0f} seconds")
                self._reader.join()
        return True

    # -- asking -------------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        """What an engine is not told that has died, or is started, is in `_running`: the next one is told then."""
        with self._changed:
            process = self._process if self._ready else None
        if process is not None:
            process.send(message)

    def _unsent(self, message: object, error: ValueError) -> None:
        log.error("a message to the engine could not be sent: %s", error)
        if isinstance(message, Ask | NextPart):
            self._answered(Refusal(message.number, BadRequest(str(error))))

    def _check_owner(self) -> None:
        """Before a lock is acquired, which may be held for ever in a fork."""
        if self._owner != os.getpid():
            raise EngineClosed(f"the engine belongs to {forked_from(self._owner)}; make a new one after the fork")

    def _wait_until_ready(self) -> None:
        """While `_changed` is held. Raises `EngineClosed`, `EngineFailed` and `Overloaded`."""
        self._changed.wait_for(lambda: self._ready or not self.alive, WAIT_SECONDS)
        if self._closing:
            raise EngineClosed("the engine is closed; open a new one")
        if self._given_up:
            raise EngineFailed(self._given_up)
        if not self._ready:
            raise Overloaded("the engine has died and is started again; try again later")

    def _asked(
        self,
        what: Submission | Control,
        source: Readable | None = None,
        *,
        number: int | None = None,
        request: _Request | None = None,
    ) -> Raw:
        """The reply, which may be in parts. Raises the refusal."""
        number = next(self._asks) if number is None else number
        try:
            message = Ask(number, packed(what))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return self._answer(number, message, source, request)

    def _part(self, of: int) -> Raw:
        number = next(self._asks)
        return self._answer(number, NextPart(number, of))

    def _answer(
        self, number: int, message: Ask | NextPart, source: Readable | None = None, request: _Request | None = None
    ) -> Raw:
        """The reply to a message. One that takes in a `request` is sent to each engine once: by this method to the one
        that runs now, and by `_go_on` to those that replace it before it has replied."""
        self._check_owner()
        call = _Call(request)
        with self._changed:
            self._wait_until_ready()
            self._waiting[number], process = call, self._process
            if request is not None:
                self._running[request.submission.number], request.ask = request, number
        try:
            process.send(message)
            while True:
                match call.answers.get():
                    case Reply(_, value):
                        return value
                    case Refusal(_, error):
                        raise error
                    case Wanted(_, size):
                        assert source is not None, "only what has a source reads one"
                        self._send(Given(number, source.read(size)))
        except BaseException:
            if source is not None:
                self._send(Given(number, b""))  # it must not wait for more
            raise
        finally:
            with self._changed:
                self._waiting.pop(number, None)
                if request is not None:
                    request.ask = None

    # -- on the thread that reads -------------------------------------------------------------------------------

    def _read(self) -> None:
        with self._at_end:
            while True:
                try:
                    while True:
                        self._take(self._process.link.receive())
                except EOFError:
                    pass
                except Exception:
                    log.exception("what the process of the engine has sent cannot be read; it is started again")
                try:
                    if not self._replaced():
                        return
                except BaseException as error:
                    log.exception("the engine has died, and starting it again has failed")
                    self._over(EngineFailed(f"the engine has died, and starting it again has failed: {error}"))
                    return

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepEvents(events):
                for number, event in events:
                    self._tell(number, event)
            case Reply() | Refusal() | Wanted():
                self._answered(message)
            case Beat():
                self._process.beat, self._process.beaten = message, time.monotonic()
            case EngineSnapshot(stats):
                self._stats = stats
            case Logged():
                logged(message)
            case Hello() | Loading():
                pass

    def _tell(self, number: int, event: EngineEvent) -> None:
        with self._changed:
            if (request := self._running.get(number)) is None:
                return
            if request.ask is not None:  # it was taken in, and the engine may die before it replies that
                self._reply(Reply(request.ask, packed(None)))
            if isinstance(event, Done | Failed):
                del self._running[number]
            if isinstance(event, Done) and request.submission.retention.pinned:
                asked = request.submission
                self._pins[asked.namespace, asked.adapter, asked.prompt] = asked, time.monotonic()
                while len(self._pins) > PINS:
                    del self._pins[next(iter(self._pins))]
            proven = not isinstance(event, Admitted)
            self._fruitless = 0 if proven else self._fruitless
            proven = proven and self._unproven is not None and self._unproven[0] == number
        try:
            request.tell(event)
        except BaseException:  # noqa: BLE001 - an error of one receiver (a closed event loop) must not affect others
            with self._changed:
                self._running.pop(number, None)
            self._send(Cancel(number))
        if proven:
            self._go_on_with_next()

    def _answered(self, message: Reply | Refusal | Wanted) -> None:
        with self._changed:
            resumed = self._resumed.pop(message.number, None)
            if isinstance(message, Wanted):
                if (call := self._waiting.get(message.number)) is not None:
                    call.answers.put(message)
                else:
                    self._send(Given(message.number, b""))  # its caller has gone
            else:
                self._reply(message)
        if resumed is not None and isinstance(message, Refusal):
            self._tell(resumed, Failed(message.error))

    def _reply(self, answer: Reply | Refusal) -> None:
        """To the caller, if there is one. While `_changed` is held."""
        if (call := self._waiting.pop(answer.number, None)) is None:
            return
        if call.request is not None:
            call.request.ask = None
            if isinstance(answer, Refusal):
                self._running.pop(call.request.submission.number, None)
        call.answers.put(answer)

    def _replaced(self) -> bool:
        """The engine has died: start another one, which goes on with what ran. False at the end."""
        process = self._process
        with self._changed:
            self._ready = False
        how = process.end(CLOSE_SECONDS if self._closing else 2.0)
        with self._changed:
            suspects = {*self._resumed.values(), *([self._unproven[0]] if self._unproven is not None else ())}
            unsent = set(self._to_go_on)
            self._resumed.clear()
            self._to_go_on.clear()
            self._unproven = None
            if self._closing:
                return self._over(EngineClosed("the engine was closed before the answer was complete"))
            died = EngineDied(f"the process of the engine {how}; it is started again. Send this again")
            for number in [number for number, call in self._waiting.items() if call.request is None]:
                self._reply(Refusal(number, died))
        self._report_death(process, how)
        # Where it has told of none that it began with it, it may have died in the first step of any.
        unknown = not any(request.here for request in self._running.values())
        for number, request in list(self._running.items()):
            begun = request.here or request.ask is not None or number in suspects or unknown
            if begun and not request.proven and number not in unsent:
                request.deaths += OUTSIDE if process.from_outside else 1.0
            request.here, request.proven, request.went_on = False, False, True
            if request.deaths >= DEATHS:
                self._refuse(number, request, how)
        self._fruitless = self._fruitless + 1 if time.monotonic() - process.began < SOON else 1
        if self._fruitless > FRUITLESS:
            return self._over(EngineFailed(f"{self._fruitless} engines in a row have died at once: the last {how}"))
        return self._start_again()

    def _report_death(self, process: ChildProcess, how: str) -> None:
        stats = self.last_stats
        log.error(
            "the process %d of the engine %s, with %d requests; %.1f s before, it had made %d steps, %d completions "
            "ran and %d waited. It is started again, and they go on",
            *(process.pid, how, len(self._running), max(0.0, time.time() - stats.at)),
            *(stats.steps, stats.running, stats.waiting),
        )

    def _refuse(self, number: int, request: _Request, how: str) -> None:
        """Fail a request that may be the reason why engines die."""
        error = EngineDied(f"{DEATHS} engines in a row have died when they had begun with this request: the last {how}")
        with self._changed:
            if request.ask is not None:
                self._reply(Refusal(request.ask, error))
                return
        self._tell(number, Failed(error))

    def _start_again(self) -> bool:
        card, why = self.card, ""
        for attempt in range(STARTS):
            if self._watching.wait(PAUSE * 2**attempt if attempt else PAUSE * (self._fruitless - 1)):
                break
            began = time.monotonic()
            try:
                process = self._started(lambda loading: None)
            except Exception as error:  # noqa: BLE001 - what a load raises
                if not self._closing:
                    log.error("the engine could not be started again: %s", error)
                why = str(error)
                continue
            if self.card.model != card.model:
                process.end(0.0)
                return self._over(EngineFailed("the files of the model have changed; start the server again"))
            log.warning("the engine was started again in %.1f s", time.monotonic() - began)
            return self._go_on()
        if self._closing:
            return self._over(EngineClosed("the engine was closed before the answer was complete"))
        return self._over(EngineFailed(f"the engine has died, and could not be started again: {why}"))

    def _go_on(self) -> bool:
        """Let a new engine go on with all requests: those first that are the least likely to end it, and that are told
        something soon."""
        with self._changed:
            order = sorted(self._running.items(), key=lambda one: (one[1].ask is not None, one[1].length))
            self._to_go_on.extend(number for number, _ in order)
            pins = [one for one, at in self._pins.values() if time.monotonic() - at < (one.retention.ttl or inf)]
            self._ready = True
            self._changed.notify_all()
        self._go_on_with_next()
        for submission in pins:
            self._pin_again(submission)
        return True

    def _go_on_with_next(self) -> None:
        with self._changed:
            self._unproven = None
            request = None
            while self._to_go_on and request is None:
                number = self._to_go_on.popleft()
                request = self._running.get(number)
            if request is None or not self._ready:
                return
            number, process = request.submission.number, self._process
            if (ask := request.ask) is None:
                ask = next(self._asks)
                self._resumed[ask] = number
            self._unproven = number, time.monotonic()
        process.send(Ask(ask, packed(request.rest())))
        if request.cancelled:
            process.send(Cancel(number))
        if request.failed is not None:
            process.send(Fail(number, request.failed))

    def _pin_again(self, submission: Submission) -> None:
        again = replace(submission, number=self.number(), goes_on=True)
        with self._changed:
            ask = next(self._asks)
            self._running[again.number], self._resumed[ask] = _Request(again, _dropped), again.number
        self._send(Ask(ask, packed(again)))

    def _over(self, error: Exception) -> bool:
        """There will be no other engine: fail all requests."""
        with self._changed:
            if not self._closing:
                self._given_up = str(error)
            self._changed.notify_all()
            for number in list(self._waiting):
                self._reply(Refusal(number, error))
        for number in list(self._running):
            self._tell(number, Failed(error))
        self._watching.set()
        return False

    # -- on a thread of its own ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Kill a process that does not answer, or whose step does not end; and go on with the next request where one
        takes long."""
        last, gone = time.monotonic(), None
        while not self._watching.wait(TICK):
            process, now = self._process, time.monotonic()
            if now - last > TICK + STALLED:  # this process was stopped, and all with it
                process.beaten = now
            last = now
            with self._changed:
                late = self._unproven is not None and now - self._unproven[1] > UNPROVEN_SECONDS
            if late:
                self._go_on_with_next()
            if process.exited:
                if gone is process:  # and what it has sent was read meanwhile
                    process.link.close()  # a process that it has started may have its end
                gone = process
                continue
            silent = now - process.beaten
            if not process.killed and max(silent, process.beat.seconds) > STEP_SECONDS:
                process.kill(f"it was silent for {silent:.0f} s, or in one step for {process.beat.seconds:.0f} s")

    def check(self) -> None:
        """Assert what is always true."""
        with self._changed:
            for ask, call in self._waiting.items():
                assert call.request is None or call.request.ask == ask
            for number, request in self._running.items():
                assert number == request.submission.number
                assert request.ask is None or self._waiting[request.ask].request is request
                assert request.deaths < DEATHS
                assert all(0 <= index < request.submission.params.n for index in request.choices)
