"""decoding: the CPU time of some steps of a running engine, on its thread. Other load on the machine changes it less
than the time that passes."""

import time
from collections.abc import Sequence
from threading import Semaphore
from typing import NamedTuple

from kvcellar.engine.engine import Engine
from kvcellar.events import Delta, Event, Failed, Finished
from kvcellar.sample.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Burst(NamedTuple):
    """Consecutive steps of decoding."""

    seconds: float
    steps: int
    tokens: int  # of all completions

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


def together(bursts: Sequence[Burst]) -> Burst:
    return Burst(
        sum(one.seconds for one in bursts), sum(one.steps for one in bursts), sum(one.tokens for one in bursts)
    )


class _Listener:
    """Receives the events of all requests on the engine's thread: the number of the step, the time, and the request of
    every token."""

    def __init__(self, engine: Engine, requests: int, steps: int) -> None:
        self._loop = engine._loop  # pyright: ignore[reportPrivateUsage]
        self._left, self._most = set(range(requests)), steps
        self._start = 0
        self._times: dict[int, float] = {}  # at the last token of each step
        self._tokens: dict[int, int] = {}
        self.error: Exception | None = None
        self.done = Semaphore(0)

    def on_event(self, request: int, event: Event) -> None:
        if isinstance(event, Failed):
            self._fail(event.error)
        if isinstance(event, Finished) and event.reason != "cancelled":
            self._fail(RuntimeError(f"a text ended with {event.reason} before all steps were measured"))
        if not isinstance(event, Delta):
            return
        step = self._loop.steps
        if self._left:
            self._left.discard(request)
            self._start = step
        elif step > self._start + self._most:
            self.done.release()
        if step >= self._start:
            self._times[step] = time.thread_time()
            self._tokens[step] = self._tokens.get(step, 0) + len(event.token_ids)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.done.release()

    def burst(self) -> Burst:
        start, end = self._start, self._start + self._most
        assert {start, end} <= self._times.keys(), "steps without a token"
        return Burst(
            self._times[end] - self._times[start],
            self._most,
            sum(self._tokens.get(step, 0) for step in range(start + 1, end + 1)),
        )


def decode(engine: Engine, prompts: Sequence[Sequence[int]], steps: int, params: SamplingParams = PARAMS) -> Burst:
    """The first steps that give every prompt a token, after those that compute the prompts."""
    listener = _Listener(engine, len(prompts), steps)
    tickets = [
        engine.submit(prompt, params, deliver=lambda event, number=number: listener.on_event(number, event))
        for number, prompt in enumerate(prompts)
    ]
    listener.done.acquire()
    for ticket in tickets:
        ticket.cancel()
    if listener.error is not None:
        raise listener.error
    engine.stats()  # waits until the engine's thread has cancelled them
    return listener.burst()
