"""gaps: how long an innocent stream waits for its next token while others use the same engine, or attack it.

The network is small and has a vocabulary of 128 thousand: what is measured is what a step costs beside its forward. The
stream is of one request; what runs beside it is a function in `BESIDE`, which returns when it is over. The settings of
the engine are the default ones, and those in `SETTINGS`.
"""

import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.row import Given, Lines, settled
from benchmarks.structured import write_tokenizer
from kvcellar.bench.network import TINY, Size, write
from kvcellar.constraint import Constraint
from kvcellar.engine.load.settings import EngineOptions
from kvcellar.errors import ConstraintFailed
from kvcellar.events import Delta, Event
from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import SamplingOptions
from kvcellar.serve import Server, ServeSettings

LARGE_VOCABULARY = Size(256, 4, 4, 2, 64, 512, 128_256, 16_384)
CACHE_BYTES = 2 << 30
AIM = 100.0  # milliseconds
FIRST = 60.0  # seconds that the first token may take


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured. `part` divides the lengths of prompts and the numbers of requests."""

    size: Size = LARGE_VOCABULARY
    part: int = 1
    alone: float = 2.0  # seconds


SMALLEST = Extent(TINY, part=16, alone=0.05)  # to test the bench


class Gap(NamedTuple):
    """The longest time between two tokens of the stream, the CPU time of the engine's thread in the gap in which that
    was longest, how many tokens arrived meanwhile, and for how long."""

    gap_ms: float
    cpu_ms: float
    tokens: int
    seconds: float


class Beside:
    """An engine, beside whose stream something runs."""

    def __init__(self, engine: Engine, extent: Extent) -> None:
        self.engine, self.part, self._size = engine, extent.part, extent.size
        self.alone = extent.alone
        self._draw = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that were not used before."""
        return [self._draw.randrange(self._size.vocabulary) for _ in range(max(2, tokens // self.part))]

    def generate(self, *prompts: list[int], **options: object) -> None:
        sampling: SamplingOptions = {"max_tokens": 1, "ignore_eos": True, **options}  # pyright: ignore[reportAssignmentType]
        self.engine.generate(list(prompts), **sampling)


def _share(beside: Beside) -> None:
    """63 requests, which wait for a prompt that another one reads."""
    prompt, count = beside.prompt(8000), 63 // min(beside.part, 8)
    beside.generate(*([*prompt, number] for number in range(count)))


def _read(beside: Beside) -> None:
    """The cache is listed and shown as on a page, with many entries that begin in the same place."""
    beside.generate(*([number, *beside.prompt(32)] for number in range(2000 // beside.part)))
    for _ in range(3):
        beside.engine.cache.picture()
        list(beside.engine.cache.listed("device"))
        beside.engine.stats()


def _ambiguous(beside: Beside) -> None:
    """Requests whose masks take 0.1 to 0.4 s each: 63 outputs of one, and then twelve of one output."""
    parts = range(300 // beside.part)
    rules = "\n".join(f"part{number}: /[a-z ]{{1,{number + 1}}}/" for number in parts)
    ambiguous = Constraint.grammar(f'start: some\nsome: {" | ".join(f"some part{n}" for n in parts)} | ""\n{rules}')
    for prompts, n in (1, 63), (12, 1):
        with suppress(ConstraintFailed):  # its masks take more time than a request has for them
            beside.generate(
                *(beside.prompt(32) for _ in range(prompts)), n=n, max_tokens=4, ignore_eos=False, constraint=ambiguous
            )


def _silent(beside: Beside) -> None:
    """512 connections to a server of the engine, which have sent a part of a request."""
    with Server(beside.engine, ServeSettings(port=0)) as server, ExitStack() as connections:
        for _ in range(512 // beside.part):
            one = connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(beside.alone)


BESIDE: Mapping[str, Callable[[Beside], None]] = MappingProxyType(
    {
        "alone": lambda beside: time.sleep(beside.alone),
        "prompt of 1200": lambda beside: beside.generate(beside.prompt(1200)),
        "prompt of 8000": lambda beside: beside.generate(beside.prompt(8000)),
        "prompt logprobs": lambda beside: beside.generate(beside.prompt(1000), prompt_logprobs=5),
        "penalties": lambda beside: beside.generate(
            beside.prompt(3500), max_tokens=32, repetition_penalty=1.1, frequency_penalty=0.5, no_repeat_ngram_size=3
        ),
        "n of 63": lambda beside: beside.generate(beside.prompt(1000), n=63, max_tokens=16),
        "63 sharing": _share,
        "readers": _read,
        "grammars": _ambiguous,
        "silent clients": _silent,
        "kv events": lambda beside: beside.generate(beside.prompt(12_000)),
    }
)
SETTINGS: Mapping[str, EngineOptions] = MappingProxyType({"kv events": {"kv_events": "tcp://127.0.0.1:*"}})


def measure(extent: Extent, *, threads: int = 1, names: Sequence[str] = tuple(BESIDE)) -> Iterator[tuple[str, Gap]]:
    """Of each of `names`. Those that follow each other with the same settings have one engine."""
    with tempfile.TemporaryDirectory() as directory:
        write(extent.size, Path(directory))
        write_tokenizer(extent.size.vocabulary, Path(directory))
        for settings, some in groupby(names, lambda name: SETTINGS.get(name, {})):
            options: EngineOptions = {"cache_bytes": CACHE_BYTES, "threads": threads, **settings}
            with Engine(directory, **options) as engine, settled():
                beside = Beside(engine, extent)
                for name in some:
                    yield name, _gap(beside, BESIDE[name])


def _gap(beside: Beside, act: Callable[[Beside], None]) -> Gap:
    engine, times, begun = beside.engine, list[tuple[float, float]](), threading.Event()

    def deliver(event: Event) -> None:
        if isinstance(event, Delta):
            times.append((time.perf_counter(), time.thread_time()))
            begun.set()

    params = engine.params(max_tokens=1 << 20, temperature=0.0, ignore_eos=True, shift=True)
    ticket = engine.submit(beside.prompt(16 * beside.part), params, deliver=deliver)
    try:
        if not begun.wait(FIRST):
            raise TimeoutError("the stream did not begin")
        time.sleep(beside.alone)  # what the first steps prepare is no gap
        began = time.perf_counter()
        act(beside)
        ended = time.perf_counter()
        time.sleep(beside.alone / 10)
    finally:
        ticket.cancel()
    within = [(a, b) for a, b in pairwise(times) if b[0] > began and a[0] < ended]
    wall = max((b[0] - a[0] for a, b in within), default=ended - began)
    cpu = max((b[1] - a[1] for a, b in within), default=0.0)
    return Gap(1e3 * wall, 1e3 * cpu, len(within), ended - began)


def row(given: Given) -> Lines:
    found = dict[str, dict[str, object]]()
    for name, gap in measure(SMALLEST if given.quick else Extent(), threads=given.threads):
        met = "ok" if gap.gap_ms <= AIM else f"over the aim of {AIM:.0f}"
        yield (
            f"{name:16} {gap.gap_ms:8.1f} ms at most, {gap.cpu_ms:8.1f} ms of CPU; {gap.tokens:5} tokens "
            f"in {gap.seconds:5.1f} s: {met}"
        )
        found[name] = gap._asdict()
    return found
