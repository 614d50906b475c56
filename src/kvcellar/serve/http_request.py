"""http_request: one HTTP request on its way through the engine.

Always true, on the event loop:
  * a run is open until its `Done` or `Failed` has come; when the request has ended, every run is over or was cancelled,
    one that is just being submitted as soon as it has been;
  * no more than `limit` events are added to those that wait while a client holds their taker up;
  * after a failure nothing more is taken in, and it is raised only when all that came before has been handed over.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType

from kvcellar.errors import EngineClosed
from kvcellar.events import Done, Event, Failed, Finished
from kvcellar.sample.params import SamplingParams
from kvcellar.serve.failures import ApiError, shutting_down
from kvcellar.serve.protocols import ServedEngine, Ticket

BATCH = 64  # events that are handed over at once; the loop then turns to others


class HttpRequest:
    """Runs of one request, one for each prompt. A context manager: who leaves it, however, leaves nothing running."""

    def __init__(self, engine: ServedEngine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[int, Ticket] = {}
        self._gate = threading.Lock()  # between a run that has just been submitted and the end of its HTTP request
        self._open: set[int] = set()  # runs that may still say something
        self._events: deque[tuple[int, Event]] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._held: int | None = None  # events that waited when the client began to hold their taker up
        self._closed = False  # nothing is submitted any more
        self._ended = False

    def launch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Submit all of them, or none: an error of one ends the request. Raises what `submit` raises.

        On any thread but the event loop's: checking a long prompt takes its time. The request may end meanwhile.
        """
        with self._gate:
            if self._closed:
                return
            self._open.update(range(len(prompts)))
        for run, prompt in enumerate(prompts):
            if self._closed:
                return
            ticket = self._engine.submit(prompt, params, deliver=partial(self._deliver, run))
            with self._gate:
                self._tickets[run] = ticket
                if not self._closed:
                    continue
            ticket.cancel()

    @property
    def over(self) -> bool:
        """Every run is done, and everything it said has been handed over."""
        return not self._open and not self._events and self._failure is None

    async def next_batch(self, patience: float | None = None) -> list[tuple[int, Event]]:
        """(run, event) in the order of arrival; empty when nothing came for `patience` seconds.

        Raises the error of the first run that failed, in its turn.
        """
        try:
            async with asyncio.timeout(patience):
                await asyncio.sleep(0)  # whoever always finds news must still let others have their turn
                await self._news.wait()
        except TimeoutError:
            return []
        if self._failure is not None and not self._events:
            raise self._failure
        batch = [self._events.popleft() for _ in range(min(BATCH, len(self._events)))]
        if not self._events and self._failure is None:
            self._news.clear()
        return batch

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Around every wait for the client."""
        self._held = len(self._events)
        try:
            yield
        finally:
            self._held = None

    def __enter__(self) -> "HttpRequest":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended = True
        self._cancel()
        self.check()

    def check(self) -> None:
        assert self._held is None or len(self._events) <= self._held + self._limit
        assert self._news.is_set() == bool(self._events or self._failure)
        assert not self._ended or not self._open, "a run was left behind"

    def refuse_queued(self) -> None:
        """The server stops: where the engine has begun none of the runs, none is going to be."""
        if self._open and self._failure is None and not any(ticket.begun for ticket in self._tickets.values()):
            self._fail(shutting_down())

    def _cancel(self) -> None:
        with self._gate:
            self._closed = True
            tickets = [self._tickets[run] for run in self._open if run in self._tickets]
        for ticket in tickets:
            ticket.cancel()
        self._open.clear()

    def _deliver(self, run: int, event: Event) -> None:
        """On the engine's thread. A loop that has been closed has nobody left to tell."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrive, run, event)

    def _arrive(self, run: int, event: Event) -> None:
        if self._ended or self._failure is not None:
            return
        match event:
            case Failed(error=error):
                self._open.discard(run)
                self._fail(error)
            case Finished(reason="cancelled"):
                self._fail(EngineClosed("the engine gave this request up"))
            case _ if self._held is not None and len(self._events) >= self._held + self._limit:
                message = f"the stream was not read in time: {self._limit} events were waiting"
                self._fail(ApiError(503, message, code="too_slow"))
            case _:
                if isinstance(event, Done):
                    self._open.discard(run)
                self._events.append((run, event))
                self._news.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._news.set()
        self._cancel()
