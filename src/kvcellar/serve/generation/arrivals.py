"""arrivals: passes what engines deliver to the requests of an event loop. The loop is woken once for all events that
come until it runs, which is once for each step of an engine, not once for each stream.

Always true:
  * events are passed on in the order in which they were delivered, on the event loop;
  * while an event waits, the loop will pass it on, or was closed; it is woken at most once for that.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from kvcellar.events import Event

Arrive = Callable[[int, Event], None]  # number of the prompt, event


class Arrivals:
    """Of one event loop: that on which `receiver` is called."""

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
