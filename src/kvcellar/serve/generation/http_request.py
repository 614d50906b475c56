"""http_request: submits the prompts of one HTTP request to the engine, and passes its events to the event loop.

Always true, on the event loop:
  * a prompt is open until its `Done` or `Failed` has arrived; when the HTTP request has ended, every prompt has ended
    or was cancelled, and one that is just being submitted is cancelled as soon as that returns;
  * while the server waits for the client, at most `limit` events are added to the queue;
  * after a failure no event is added, and the failure is raised after all earlier events were returned;
  * while `next_batch` waits, nothing is there to return; a request has one timer at most, however many times it waits.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from kvcellar.errors import EngineClosed
from kvcellar.events import Done, Event, Failed, Finished
from kvcellar.frontend.result import Ticket
from kvcellar.serve.http.api_errors import ApiError, shutting_down

Arrive = Callable[[int, Event], None]  # number of the prompt, event


class Arrivals:
    """Passes what engines deliver to the requests of one event loop: that on which `receiver` is called. The loop is
    woken once for all events that come until it runs, which is once for each step of an engine, not for each stream.

    Always true:
      * events are passed on in the order in which they were delivered, on the event loop;
      * while an event waits, the loop will pass it on, or was closed; it is woken at most once for that.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[Arrive, int, Event]] = deque()
        self._woken = False

    def receiver(self, arrive: Arrive) -> Arrive:
        """A function for any thread, after whose calls the event loop calls `arrive`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        assert self._loop is asyncio.get_running_loop(), "the requests of one server have one event loop"
        return partial(self._deliver, arrive)

    def check(self) -> None:
        """On the event loop, between two deliveries."""
        assert self._woken or not self._waiting, "events wait, and the loop was not woken"

    def _deliver(self, arrive: Arrive, number: int, event: Event) -> None:
        """On an engine's thread. Two threads may both wake the loop, which does no harm. The event is added before
        `_woken` is read, and `_pass_on` clears it before it reads the events, so none is left behind."""
        self._waiting.append((arrive, number, event))
        if not self._woken:
            self._wake()

    def _wake(self) -> None:
        assert self._loop is not None
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._pass_on)
        except RuntimeError:  # the loop has been closed, and with it every request
            self._woken = False
            self._waiting.clear()

    def _pass_on(self) -> None:
        """What has come until now; other work of the loop goes before what comes meanwhile."""
        self._woken = False
        try:
            for _ in range(len(self._waiting)):
                arrive, number, event = self._waiting.popleft()
                arrive(number, event)
        finally:
            if self._waiting and not self._woken:
                self._wake()  # a receiver has raised


Batch = list[tuple[int, Event]]  # number of the prompt, event
Submit = Callable[[Sequence[int], Callable[[Event], None]], Ticket]  # a prompt, and what is called with its events

NEVER = float("inf")
BATCH = 64  # events returned at once; then other tasks of the event loop run


class HttpRequest(AbstractContextManager["HttpRequest"]):
    """A context manager: leaving it, normally or by an exception, cancels every prompt that is still open."""

    def __init__(self, limit: int, arrivals: Arrivals) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._receive = arrivals.receiver(self._arrive)
        self._tickets: dict[int, Ticket] = {}  # by number of the prompt
        self._lock = threading.Lock()  # orders the end of this request and the return of `submit` in a thread
        self._open: set[int] = set()  # prompts
        self._events: deque[tuple[int, Event]] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None  # of `next_batch`: True when there is something to return
        self._deadline = NEVER  # of the loop's clock, when the wait ends
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_from: int | None = None  # queued events when the server began to wait for the client
        self._cancelled = False  # nothing is submitted any more
        self._ended = False

    def submit(self, prompts: Sequence[Sequence[int]], submit: Submit) -> None:
        """Submit all prompts. Raises what `submit` raises, which ends the request.

        Not for the event loop, because it checks long prompts. The request may end meanwhile.
        """
        with self._lock:
            if self._cancelled:
                return
            self._open.update(range(len(prompts)))
        for number, prompt in enumerate(prompts):
            if self._cancelled:
                return
            ticket = submit(prompt, partial(self._receive, number))
            with self._lock:
                self._tickets[number] = ticket
                if not self._cancelled:
                    continue
            ticket.cancel()

    @property
    def finished(self) -> bool:
        """Whether every prompt has ended and all its events were returned."""
        return not self._open and not self._events and self._failure is None

    async def next_batch(self, timeout: float | None = None) -> Batch:
        """Events in order of arrival; empty after `timeout` seconds without an event.

        Raises the error of the first prompt that failed, after the events before it.
        """
        if self._ready:
            await asyncio.sleep(0)  # other tasks run even if events are always available
        elif not await self._wait(timeout):
            return []
        if self._failure is not None and not self._events:
            raise self._failure
        return [self._events.popleft() for _ in range(min(BATCH, len(self._events)))]

    @property
    def _ready(self) -> bool:
        return bool(self._events) or self._failure is not None

    async def _wait(self, timeout: float | None) -> bool:
        """Until there is something to return. False after `timeout` seconds.

        The timer goes on from one wait to the next, and is set again only when it expires: one for each token would
        cost the event loop more than the token's JSON.
        """
        self._waiter = self._loop.create_future()
        self._deadline = NEVER if timeout is None else self._loop.time() + timeout
        if self._timer is not None and self._deadline < self._timer.when():
            self._stop_timer()
        if self._timer is None and timeout is not None:
            self._timer = self._loop.call_at(self._deadline, self._expire)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _expire(self) -> None:
        self._timer = None
        if self._waiter is None or self._deadline == NEVER:
            return  # the next wait with a limit sets the timer
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._expire)
        else:
            self._wake(False)

    def _wake(self, ready: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(ready)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def waiting_for_client(self) -> Iterator[None]:
        """Around every wait for the client: limits the events that are queued meanwhile."""
        self._waiting_from = len(self._events)
        try:
            yield
        finally:
            self._waiting_from = None

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._stop_timer()
        self._cancel()
        self.check()

    def check(self) -> None:
        assert self._waiting_from is None or len(self._events) <= self._waiting_from + self._limit
        assert self._waiter is None or self._waiter.done() or not self._ready
        assert not self._ended or self._timer is None
        assert not self._ended or not self._open, "a prompt was not cancelled"

    def refuse_if_queued(self) -> None:
        """At shutdown: fail the request if the engine has begun none of its prompts."""
        with self._lock:
            tickets = [*self._tickets.values()]
        if self._open and self._failure is None and not any(ticket.begun for ticket in tickets):
            self._fail(shutting_down())

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            tickets = [self._tickets[number] for number in self._open if number in self._tickets]
        for ticket in tickets:
            ticket.cancel()
        self._open.clear()

    def _arrive(self, number: int, event: Event) -> None:
        if self._ended or self._failure is not None:
            return
        match event:
            case Failed(error=error):
                self._open.discard(number)
                self._fail(error)
            case Finished(reason="cancelled"):
                self._fail(EngineClosed("the engine cancelled this request"))
            case _ if self._waiting_from is not None and len(self._events) >= self._waiting_from + self._limit:
                message = f"the stream was not read in time: {self._limit} events were waiting"
                self._fail(ApiError(503, message, code="too_slow"))
            case _:
                if isinstance(event, Done):
                    self._open.discard(number)
                self._events.append((number, event))
                self._wake(True)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._wake(True)
        self._cancel()
