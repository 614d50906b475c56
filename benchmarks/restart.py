"""restart: the time to the first token of a conversation that an earlier server had computed, after that was killed.

Three engines on one model: one that knows nothing (cold), the one that computed the conversation (warm), and one that
was opened on the store of a process that was killed with SIGKILL once the store had acknowledged everything. The rate
at which the store is read and verified is measured on the same files. The last engine is opened `TIMES` times; the
medians count.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.row import ROOT, Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.errors import KvcellarError
from kvcellar.frontend.engine import Engine
from kvcellar.memory.tiers.transfers import Space, allocated

CACHE_BYTES = 1 << 30
READY = "ready"
TOKENS = 4000
TIMES = 5
NEW = 16  # tokens of the turn after


class Restart(NamedTuple):
    """Seconds to the first token, the bytes that were read back, and the seconds that reading and verifying takes."""

    tokens: int
    cold: float
    warm: float
    restarted: float
    bytes: int
    reading: float

    @property
    def bound(self) -> float:
        """Seconds that the restarted engine may take: a warm turn, the reading, and a fifth more."""
        return 1.2 * (self.warm + self.reading)


def restart(size: Size, directory: Path, *, tokens: int = TOKENS) -> Restart:
    (directory / "model").mkdir()
    write(size, directory / "model")
    with _engine(directory, None) as engine:
        _first_token(engine, _prompt(1, 64))  # what is made once
        cold = _first_token(engine, _prompt(0, tokens))
    _killed_child(directory, tokens)
    restarted, warm, reading = (median(seconds) for seconds in zip(*_restarts(directory, tokens), strict=True))
    read = sum(file.stat().st_size for file in (directory / "store").rglob("data/*"))
    return Restart(tokens, cold, warm, restarted, read, reading)


def _restarts(directory: Path, tokens: int) -> Iterator[tuple[float, float, float]]:
    """Seconds of the first turn, of the next one, and of reading and verifying the store."""
    for _ in range(TIMES):
        copy = directory / "copy"
        shutil.copytree(directory / "store", copy)  # the engine adds to it
        with _engine(directory, copy) as engine:
            _first_token(engine, _prompt(1, 64))
            _stored(engine)
            restarted = _first_token(engine, _prompt(0, tokens + NEW))
            stats = engine.stats()
            if stats.store is None or stats.store.restored < tokens - 1:
                raise KvcellarError(f"the restarted engine did not find the conversation: {stats.store}")
            yield restarted, _first_token(engine, _prompt(0, tokens + 2 * NEW)), _read_all(engine)
        shutil.rmtree(copy)


def _engine(directory: Path, store: Path | None) -> Engine:
    where = None if store is None else str(store)
    return Engine(directory / "model", cache_bytes=CACHE_BYTES, threads=1, store=where)


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 100) for _ in range(tokens)]


def _first_token(engine: Engine, prompt: list[int]) -> float:
    return engine.generate(prompt, max_tokens=1, temperature=0.0).timings.first_token


def _read_all(engine: Engine) -> float:
    """Read and verify every snapshot, into the same memory; returns the seconds."""
    store = engine._loop.manager.store  # pyright: ignore[reportPrivateUsage]
    assert store is not None
    (disk,) = store.transfers.tiers
    snapshots = [entry.snapshot for entry in disk.entries()]
    buffer = allocated(max(snapshot.size for snapshot in snapshots))
    began = time.perf_counter()
    for snapshot in snapshots:
        disk.get(snapshot.key, Space(lambda: buffer))
    return time.perf_counter() - began


def _stored(engine: Engine) -> None:
    """Wait until all that was computed is stored."""
    while (stats := engine.stats().store) is not None and stats.unwritten:
        time.sleep(0.01)


def _killed_child(directory: Path, tokens: int) -> None:
    command = [sys.executable, "-m", "benchmarks.restart", str(directory), str(tokens)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if child.stdout.readline().strip() != READY:
            raise KvcellarError("the process that was to be killed failed")
        os.kill(child.pid, signal.SIGKILL)


def _compute(directory: Path, tokens: int) -> None:
    """In the process that is killed: compute the conversation, and wait until it is stored."""
    engine = _engine(directory, directory / "store")
    engine.generate(_prompt(0, tokens), max_tokens=1, temperature=0.0)
    _stored(engine)
    print(READY, flush=True)
    time.sleep(600)


def row(given: Given) -> Lines:
    found = restart(TINY, given.directory, tokens=400) if given.quick else restart(SMALL, given.directory)
    yield f"{found.tokens} tokens, seconds to the first token of the next turn:"
    yield f"{'cold':30} {found.cold:8.3f}"
    yield f"{'warm, in memory':30} {found.warm:8.3f}"
    yield (
        f"{'after SIGKILL, from the store':30} {found.restarted:8.3f}   {found.restarted / found.bound:.2f} of the "
        f"bound {found.bound:.3f}, cold is {found.cold / found.restarted:.1f} times that"
    )
    rate = found.bytes / found.reading / 1e6
    yield f"{'read and verified':30} {found.bytes / 1e6:8.1f} MB at {rate:.0f} MB/s"
    return found._asdict()


if __name__ == "__main__":
    _compute(Path(sys.argv[1]), int(sys.argv[2]))
