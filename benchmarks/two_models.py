"""two_models: how long a stream of one model stalls while another model is loaded in the same process."""

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.engine.core.device import DeviceThread
from kvcellar.engine.load.settings import EngineOptions
from kvcellar.frontend.engine import Engine

CACHE, ALONE = 64 << 20, 3.0  # bytes of each cache; seconds of a stream alone
NAMES = ("one", "two")
PROMPT = list(range(10, 26))


@dataclass(frozen=True, slots=True)
class Stall:
    """Milliseconds between two tokens of a stream: `median` and `worst` alone, `worst_loading` while the other model is
    loaded, which takes `load_seconds`, and in which `tokens` arrive."""

    median: float
    worst: float
    worst_loading: float
    load_seconds: float
    tokens: int


def two_models(directory: Path, *, quick: bool, threads: int) -> Stall:
    for name in NAMES:
        (directory / name).mkdir()
        write(TINY if quick else SMALL, directory / name)
    device = DeviceThread()

    def engine(name: str) -> Engine:
        settings: EngineOptions = {"threads": threads, "cache_bytes": CACHE, "max_sequences": 4}
        return Engine(directory / name, thread=device, **settings)

    times: list[float] = []
    ended = threading.Event()
    with engine(NAMES[0]) as first:
        stream = threading.Thread(target=lambda: times.extend(arrivals(first, ended)), name="bench-stream")
        stream.start()
        try:
            time.sleep(0.2 if quick else ALONE)
            began = time.perf_counter()
            with engine(NAMES[1]):
                until = time.perf_counter()
        finally:
            ended.set()
            stream.join()
    alone, loading = gaps(times, 0.0, began), gaps(times, began, until)
    middle = sorted(alone)[len(alone) // 2]
    return Stall(1e3 * middle, 1e3 * max(alone), 1e3 * max(loading), until - began, len(loading))


def arrivals(engine: Engine, ended: threading.Event) -> Iterator[float]:
    """The times of tokens, of one stream after the other."""
    while not ended.is_set():
        for _ in engine.stream(PROMPT, max_tokens=100, temperature=0.0, ignore_eos=True):
            yield time.perf_counter()
            if ended.is_set():
                return


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Seconds between two tokens, of which the second arrives within the span or is the first one after it."""
    return [later - earlier for earlier, later in pairwise(times) if later > begin and earlier < end] or [end - begin]


def row(given: Given) -> Lines:
    found = two_models(given.directory, quick=given.quick, threads=given.threads)
    yield f"a stream alone: {found.median:.1f} ms between two tokens, at most {found.worst:.1f} ms"
    yield f"while another model is loaded, in {found.load_seconds:.2f} s: at most {found.worst_loading:.1f} ms"
    yield f"  {found.tokens} tokens arrived meanwhile"
    return asdict(found)
