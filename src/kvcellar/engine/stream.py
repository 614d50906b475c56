"""stream: the pieces of one request as they come, for whoever waits in a thread and for whoever waits on an event loop.

Always true:
  * a stream is gone through once, in one of the two ways;
  * who stops before the end, by leaving the loop, by an error or by a cancelled task, has the request cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator

from kvcellar.engine.result import Collector, Result, Ticket
from kvcellar.errors import WrongStage
from kvcellar.events import Delta, Event

Submit = Callable[[Callable[[Event], None]], Ticket]


class Stream(Iterator[Delta]):
    """Made by `Engine.stream`. `for` waits in this thread; `async for` waits on the event loop and never holds it up.

    The request begins with the first step of the loop, and so do its errors. `result` is there after the last.
    """

    def __init__(self, submit: Submit, n: int) -> None:
        self._submit = submit
        self._collector = Collector(n)
        self._pieces: Generator[Delta] | AsyncGenerator[Delta] | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        if self._pieces is None:
            self._pieces = _waited(self._submit, self._collector)
        if not isinstance(self._pieces, Generator):
            raise WrongStage("this stream is gone through with `async for` already")
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what has begun with `for` and is not at its end. May be called again."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()

    def __aiter__(self) -> AsyncGenerator[Delta]:
        if self._pieces is not None:
            raise WrongStage("a stream is gone through once; ask for another one")
        self._pieces = pieces = _listened(self._submit, self._collector)
        return pieces

    @property
    def result(self) -> Result:
        """All of it. Raises `WrongStage` before the end."""
        return self._collector.collected()


# Neither of the two holds its stream: whoever lets go of a stream ends it at once, and not when cycles are looked for.


def _waited(submit: Submit, collector: Collector) -> Generator[Delta]:
    ticket = submit(collector.deliver)
    try:
        yield from collector.pieces()
    finally:
        ticket.cancel()


async def _listened(submit: Submit, collector: Collector) -> AsyncGenerator[Delta]:
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def deliver(event: Event) -> None:
        collector.deliver(event)
        loop.call_soon_threadsafe(news.set)  # raises once the loop is closed; the request is cancelled then

    # Reading and checking a long prompt takes its time, on a thread of its own, which nobody can stop.
    submitting = loop.run_in_executor(None, submit, deliver)
    try:
        ticket = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel)
        raise
    try:
        while not collector.over:
            await news.wait()
            news.clear()
            for piece in collector.arrived():
                yield piece
    finally:
        ticket.cancel()


def _cancel(submitting: "asyncio.Future[Ticket]") -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
