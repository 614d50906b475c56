"""decoding: the CPU time of some steps of a running engine, on its thread. Other load on the machine changes it less
than the time that passes."""

import math
import time
from collections.abc import Sequence
from threading import Semaphore
from typing import NamedTuple

from kvcellar.events import Delta, Event, Failed, Finished
from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import SamplingParams

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
    """Receives the events of all requests on the engine's thread."""

    def __init__(self, engine: Engine, requests: int, steps: int, tokens: float) -> None:
        self._loop = engine._loop  # pyright: ignore[reportPrivateUsage]
        self._left = set(range(requests))  # have no token yet
        self._most_steps, self._most_tokens = steps, tokens
        self._start = self._end = 0  # steps: the last one before the burst, and the last one of it so far
        self._began = self._ended = 0.0  # at the last token of these
        self._tokens = 0
        self.error: Exception | None = None
        self.done = Semaphore(0)

    def on_event(self, request: int, event: Event) -> None:
        if isinstance(event, Failed):
            self._fail(event.error)
        if isinstance(event, Finished) and event.reason != "cancelled":
            self._fail(RuntimeError(f"a text ended with {event.reason} before all steps were measured"))
        if isinstance(event, Delta):
            self._count(request, self._loop.steps, len(event.token_ids))

    def _count(self, request: int, step: int, tokens: int) -> None:
        if self._left or step == self._start:
            self._left.discard(request)
            self._start = self._end = step
            self._began = self._ended = time.thread_time()
        elif step > self._end and (self._end - self._start >= self._most_steps or self._tokens >= self._most_tokens):
            self.done.release()
        else:
            self._end, self._ended = step, time.thread_time()
            self._tokens += tokens

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.done.release()

    def burst(self) -> Burst:
        return Burst(self._ended - self._began, self._end - self._start, self._tokens)


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    steps: int,
    params: SamplingParams = PARAMS,
    *,
    tokens: float = math.inf,
) -> Burst:
    """The first steps that give every prompt a token, after those that compute the prompts; fewer where these have so
    many `tokens` together."""
    listener = _Listener(engine, len(prompts), steps, tokens)
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
