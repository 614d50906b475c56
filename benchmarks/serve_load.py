"""serve_load: what the event loop of a server costs while it streams to many clients, and what they wait for.

The server runs in this process with the network of the other workloads, the clients in another (`load_client`). CPU
time is counted from the moment that every stream has a token until the first one ends: of the engine's thread, which
computes the steps on one thread, and of the thread of the event loop, each read on the thread itself. A token waits
from its delivery by the engine until a client has read it; the steps that begin to deliver meanwhile are counted.
Requests of /health are timed from before the first token of the first stream to the end of the last one.

Always true of `LoadedEngine`, on the engine's thread:
  * `steps` are the times of the first delivery of each step, ascending;
  * a delivery has the number of its step in `steps`, and has text.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Unpack

from tokenizers import Tokenizer, decoders, models

from benchmarks.row import ROOT, Given, Lines, settled
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.engine.request_options import SubmitOptions
from kvcellar.errors import KvcellarError
from kvcellar.events import Delta, Event, Finished
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.result import Ticket
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve import Server, ServeSettings

MAX_SHARE, MAX_STEPS, MAX_HEALTH = 0.05, 1, 50.0  # aims: of the steps' CPU time; steps; milliseconds
SECONDS = 240.0  # after which the clients give up


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size = SMALL
    connections: int = 200
    streams: int = 64
    asking: int = 16  # connections that ask /health in turn, every `pause` seconds; the rest is idle
    pause: float = 0.2
    prompt: int = 32
    tokens: int = 96  # of each stream
    cache_bytes: int = 1 << 30


SMALLEST = Extent(TINY, connections=12, streams=4, asking=2, pause=0.01, prompt=8, tokens=12, cache_bytes=8 << 20)


class Found(NamedTuple):
    """What one run has shown. CPU times are per step, while all streams run."""

    connections: int
    streams: int
    steps: int
    step_cpu_ms: float
    loop_cpu_ms: float
    loop_share: float  # of the steps' CPU time
    tokens_per_second: float
    delay_p50_ms: float  # of a token, from the engine to the client
    delay_p99_ms: float
    delay_steps: int  # that began to deliver while a token waited, at most
    late: float  # share of tokens that waited for more than `MAX_STEPS`
    asked: int
    health_p50_ms: float
    health_p99_ms: float


class Clients(NamedTuple):
    """What the clients have measured, in nanoseconds."""

    arrivals: Sequence[Sequence[int]]  # of tokens, by stream: times of `time.monotonic_ns`
    health: Sequence[int]  # each time that it took


class Delivery(NamedTuple):
    """A token was delivered at `time`, in `step`."""

    time: int
    step: int


class Mark(NamedTuple):
    """Nanoseconds: of the clock, and of CPU time of the engine's thread."""

    time: int
    cpu: int
    step: int


@dataclass(slots=True)
class Watch:
    """What was delivered. Used on the engine's thread only, until all requests have ended."""

    streams: int
    on_mark: Callable[[], None]  # called at the begin and at the end of the time that counts
    steps: list[int] = field(default_factory=list[int])
    deliveries: dict[int, list[Delivery]] = field(default_factory=dict[int, list[Delivery]])  # by stream
    marks: list[Mark] = field(default_factory=list[Mark])
    _last: int = -1

    def delivered(self, stream: int, event: Event, step: int) -> None:
        now = time.monotonic_ns()
        if step != self._last:
            self._last = step
            self.steps.append(now)
            if not self.marks and len(self.deliveries) == self.streams:
                self._mark(now)
        if isinstance(event, Delta) and event.text:
            self.deliveries.setdefault(stream, []).append(Delivery(now, len(self.steps) - 1))
        if isinstance(event, Finished) and len(self.marks) == 1:
            self._mark(now)

    def _mark(self, now: int) -> None:
        self.marks.append(Mark(now, time.thread_time_ns(), len(self.steps)))
        self.on_mark()


class LoadedEngine(Engine):
    """An engine whose deliveries are watched. `watch` is set before the first request."""

    watch: Watch

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        stream, watch, loop = prompt_ids[0], self.watch, self._loop

        def watched(event: Event) -> None:
            watch.delivered(stream, event, loop.steps)
            deliver(event)

        return super().submit(prompt_ids, params, deliver=watched, **how)


def serve_load(extent: Extent, directory: Path) -> Found:
    write(extent.size, directory)
    write_tokenizer(extent.size.vocabulary, directory)
    settings = ServeSettings(port=0, max_connections=extent.connections + 8)
    with LoadedEngine(
        directory,
        device="cpu",
        threads=1,
        draft="none",
        context=1024,
        max_sequences=extent.streams,
        cache_bytes=extent.cache_bytes,
    ) as engine:
        server, cpu = Server(engine, settings), list[int]()
        with settled(), _serving(server) as loop:
            engine.watch = Watch(extent.streams, lambda: _on_loop(loop, lambda: cpu.append(time.thread_time_ns())))
            read = clients(extent, server.port, engine.model.name)
        return found(extent, engine.watch, cpu, read.arrivals, read.health)


def found(
    extent: Extent, watch: Watch, cpu: Sequence[int], arrivals: Sequence[Sequence[int]], health: Sequence[int]
) -> Found:
    """`cpu` are CPU nanoseconds of the event loop at both marks, `arrivals` are times by stream, and `health`
    nanoseconds. Raises `KvcellarError` if clients have read other tokens than the engine delivered."""
    begin, end = watch.marks
    waits, late = list[int](), list[int]()
    for stream, times in enumerate(arrivals):
        deliveries = watch.deliveries[stream]
        if len(times) != len(deliveries):
            raise KvcellarError(f"stream {stream} has {len(deliveries)} tokens, and its client has read {len(times)}")
        for delivery, arrived in zip(deliveries, times, strict=True):
            waits.append(arrived - delivery.time)
            late.append(bisect_right(watch.steps, arrived) - 1 - delivery.step)
    steps = end.step - begin.step
    engine, loop = end.cpu - begin.cpu, cpu[1] - cpu[0]
    within = sum(begin.time <= one.time < end.time for by_stream in watch.deliveries.values() for one in by_stream)
    return Found(
        connections=extent.connections,
        streams=extent.streams,
        steps=steps,
        step_cpu_ms=engine / steps / 1e6,
        loop_cpu_ms=loop / steps / 1e6,
        loop_share=loop / engine,
        tokens_per_second=within / (end.time - begin.time) * 1e9,
        delay_p50_ms=percentile(waits, 0.5) / 1e6,
        delay_p99_ms=percentile(waits, 0.99) / 1e6,
        delay_steps=max(late),
        late=sum(one > MAX_STEPS for one in late) / len(late),
        asked=len(health),
        health_p50_ms=percentile(health, 0.5) / 1e6,
        health_p99_ms=percentile(health, 0.99) / 1e6,
    )


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return next(value for number, value in enumerate(ordered, 1) if number >= share * len(ordered))


# -- the server and its clients ----------------------------------------------------------------------------------------


@contextmanager
def _serving(server: Server) -> Iterator[asyncio.AbstractEventLoop]:
    """Run the server in a thread. Yields its event loop."""
    ready: Future[asyncio.AbstractEventLoop] = Future()

    def serve() -> None:
        try:
            server.serve(lambda url: ready.set_result(asyncio.get_running_loop()))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=serve, name="bench-serve")
    thread.start()
    try:
        yield ready.result()
    finally:
        server.stop()
        thread.join()


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


def clients(extent: Extent, port: int, model: str) -> Clients:
    """Run the clients until all streams have ended. Raises `KvcellarError` if they fail."""
    options = {
        "model": model,
        "port": port,
        "connections": extent.connections,
        "streams": extent.streams,
        "asking": extent.asking,
        "prompt": extent.prompt,
        "tokens": extent.tokens,
        "pause": extent.pause,
        "seconds": SECONDS,
    }
    command = [sys.executable, "-m", "benchmarks.load_client"]
    command += [f"--{name}={value}" for name, value in options.items()]
    ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise KvcellarError(f"the clients of serve-load failed: {ran.stderr.strip()[-2000:]}")
    return Clients(**json.loads(ran.stdout.splitlines()[-1]))


def write_tokenizer(vocabulary: int, directory: Path) -> None:
    """A tokenizer whose every token is a word, so that each delivery has text."""
    made = Tokenizer(models.BPE({f"Ġw{index}": index for index in range(vocabulary)}, []))
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


# -- the row -----------------------------------------------------------------------------------------------------------


def row(given: Given) -> Lines:
    one = serve_load(SMALLEST if given.quick else Extent(), given.directory)
    yield (
        f"event loop    {one.loop_share:6.1%}  of the CPU time of {one.steps} steps with {one.streams} streams, of "
        f"{one.connections} connections: {one.loop_cpu_ms:.2f} of {one.step_cpu_ms:.2f} ms; aim below {MAX_SHARE:.0%}"
    )
    yield (
        f"tokens        {one.delay_steps:6}  steps were delivered while a token was on its way to its client, at most; "
        f"aim {MAX_STEPS}; {one.late:.2%} waited longer; p50 {one.delay_p50_ms:.1f} ms, p99 {one.delay_p99_ms:.1f} ms"
    )
    yield (
        f"/health       {one.health_p99_ms:6.1f}  ms at p99 of {one.asked} requests, p50 {one.health_p50_ms:.1f} ms; "
        f"aim below {MAX_HEALTH:.0f} ms"
    )
    yield f"throughput    {one.tokens_per_second:6.0f}  tokens/s"
    return one._asdict()
