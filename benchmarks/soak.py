"""soak: sends random requests for minutes, cancels a third of them, and fails if the memory of the process grows.

`make soak`, or `python -m benchmarks.soak --minutes 3`, tests three models at once, each in a new process:
the embedded model, and a network with random weights in float32 and in bfloat16. After the first two minutes the
resident set (RSS) of each may grow by at most 5 %. Prints a table and one line of JSON; exit code 1 if one grew more.

Cells take no memory before their first use, so all cells are used once before the measurement starts.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.row import ROOT
from kvcellar.bench.network import Size, write
from kvcellar.frontend.engine import Engine

MODELS = ("embedded", "float32", "bfloat16")
MINUTES = 20.0
WARM = 2.0  # minutes, at most half of all, in which memory may grow
MAX_GROWTH = 0.05
EVERY = 5.0  # seconds between two samples
CLIENTS = 6
CACHE_BYTES = 24 << 20
NETWORK = Size(256, 4, 4, 2, 64, 704, 2000, 1024)


@dataclass(frozen=True, slots=True)
class Sample:
    """RSS of a process, and its counts, `seconds` after the start of the measurement."""

    seconds: float
    rss: int  # bytes
    finished: int
    cancelled: int
    steps: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """The result for one model. `warm` is the RSS after the first minutes; `least` and `most` are those after it."""

    model: str
    warm: int
    least: int
    most: int
    finished: int
    cancelled: int
    steps: int

    @property
    def growth(self) -> float:
        return self.most / self.warm - 1

    @property
    def passed(self) -> bool:
        grew = self.most - self.warm
        return grew <= MAX_GROWTH * self.warm and self.finished > 0 and self.cancelled > 0


def judged(model: str, samples: Sequence[Sample], warm: float) -> Soaked:
    """Compares the samples after `warm` seconds with the median of the last ones before, so that a step running during
    one sample does not count. Raises `ValueError` without samples on both sides."""
    before = [sample.rss for sample in samples if sample.seconds <= warm]
    after = [sample.rss for sample in samples if sample.seconds > warm]
    if not before or not after:
        raise ValueError(f"{len(samples)} samples are not on both sides of {warm} seconds")
    last = samples[-1]
    return Soaked(model, int(median(before[-6:])), min(after), max(after), last.finished, last.cancelled, last.steps)


def resident(root: Path = Path("/")) -> int:
    """The resident set of this process, in bytes. Raises `OSError` on other systems than Linux."""
    return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(engine: Engine, seconds: float, seed: int, *, every: float = EVERY) -> Iterator[Sample]:
    """Run clients for `seconds`, and yield a sample of the process every `every` seconds."""
    fill(engine, seed)
    stop, counts = threading.Event(), [[0, 0] for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(send_requests, engine, random.Random(f"{seed} {i}"), count, stop.is_set)
            for i, count in enumerate(counts)
        ]
        began = time.perf_counter()
        try:
            while (passed := time.perf_counter() - began) < seconds and not any(client.done() for client in clients):
                time.sleep(min(every, seconds - passed))
                finished, cancelled = (sum(of) for of in zip(*counts, strict=True))
                yield Sample(time.perf_counter() - began, resident(), finished, cancelled, engine.stats().steps)
        finally:
            stop.set()
    for client in clients:
        client.result()  # raises the error of a client that has failed
    engine.check()


def fill(engine: Engine, seed: int) -> None:
    """Use every cell once."""
    draw, length = random.Random(seed), longest(engine)
    count = max(group.cells for group in engine.stats().groups) // length + 1
    prompts = [_ids(draw, engine.model.vocab_size, length) for _ in range(count)]
    engine.generate(prompts, max_tokens=1, temperature=0.0, ignore_eos=True)


def longest(engine: Engine) -> int:
    """Tokens of the longest prompt that fits every group with one new token."""
    return min(engine.model.context, *(group.cells for group in engine.stats().groups)) - 1


def send_requests(engine: Engine, draw: random.Random, counts: list[int], stopped: Callable[[], bool]) -> None:
    """Send one request after another, short ones more often than long ones. A third is cancelled, after a random time
    or a random number of tokens. `counts` has the numbers of finished and of cancelled requests."""
    most = longest(engine) // 2
    while not stopped():
        ids, tokens = _ids(draw, engine.model.vocab_size, int(most ** draw.random())), int(64 ** draw.random())
        options, kind = _options(draw, tokens), draw.randrange(6)
        if kind == 0:
            ticket = engine.submit(ids, engine.params(**options), deliver=lambda _: None)
            time.sleep(draw.random())
            ticket.cancel()
        else:
            stream = engine.stream(ids, **options)
            for index, _ in enumerate(stream):
                if stopped() or (kind == 1 and index >= tokens // 2):
                    break
            stream.close()
        counts[kind < 2] += 1
        if draw.random() < 0.1:  # so that the number of concurrent requests varies
            time.sleep(draw.random())


def _options(draw: random.Random, tokens: int) -> dict[str, Any]:
    return {
        "max_tokens": tokens,
        "n": draw.choice((1, 1, 1, 2, 3)),
        "temperature": draw.choice((0.0, 1.0)),
        "top_k": draw.choice((0, 40)),
        "logprobs": draw.choice((None, None, 3)),
        "seed": draw.randrange(1 << 30),
        "ignore_eos": True,
    }


def _ids(draw: random.Random, vocabulary: int, n: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(n)]


# -- processes ---------------------------------------------------------------------------------------------------------


def run_one(model: str, minutes: float, seed: int) -> None:
    """Test one model in this process, and print a line of JSON for each sample."""
    settings: dict[str, Any] = {"cache_bytes": CACHE_BYTES, "threads": 1, "max_sequences": 16, "device": "cpu"}
    with tempfile.TemporaryDirectory() as directory:
        if model == "embedded":
            engine = Engine(**settings)
        else:
            write(NETWORK, Path(directory))
            settings["dtype"] = model
            engine = Engine(directory, **settings)
        with engine:
            for sample in soak(engine, 60 * minutes, seed):
                print(json.dumps(asdict(sample)), flush=True)


def watch(model: str, minutes: float, seed: int) -> list[Sample]:
    """Test one model in a new process. Raises `RuntimeError` if that fails."""
    command = [sys.executable, "-m", "benchmarks.soak", "--model", model]
    command += ["--minutes", str(minutes), "--seed", str(seed)]
    samples: list[Sample] = []
    printed = 0.0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(sample := Sample(**json.loads(line)))
            if sample.seconds >= printed:
                printed += 60
                print(f"{sample.seconds / 60:5.1f} min  {model:9} {sample.rss / 1e6:7.1f} MB", flush=True)
    if process.returncode:
        raise RuntimeError(f"the soak of {model} ended with {process.returncode}")
    return samples


def table(found: Sequence[Soaked]) -> list[str]:
    names = ("warm, MB", "least", "most", "growth", "steps", "finished", "cancelled")
    head = f"{'model':9} " + " ".join(f"{name:>9}" for name in names)
    rows = (
        f"{one.model:9} {one.warm / 1e6:9.1f} {one.least / 1e6:9.1f} {one.most / 1e6:9.1f} {one.growth:9.1%} "
        f"{one.steps:9} {one.finished:9} {one.cancelled:9}{'' if one.passed else '  FAILED'}"
        for one in found
    )
    return [head, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"duration ({MINUTES:g})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (0)")
    parser.add_argument("--model", choices=MODELS, help="only this model, in this process; prints samples")
    given = parser.parse_args()
    if given.model is not None:
        run_one(given.model, given.minutes, given.seed)
        return
    warm = min(WARM, given.minutes / 2)
    with ThreadPoolExecutor(len(MODELS)) as threads:
        every = list(threads.map(lambda model: watch(model, given.minutes, given.seed), MODELS))
    found = [judged(model, samples, 60 * warm) for model, samples in zip(MODELS, every, strict=True)]
    print("\n".join(table(found)))
    results = {one.model: {**asdict(one), "growth": round(one.growth, 4), "passed": one.passed} for one in found}
    print(json.dumps({"minutes": given.minutes, "warm_minutes": warm, "max_growth": MAX_GROWTH, "results": results}))
    sys.exit(not all(one.passed for one in found))


if __name__ == "__main__":
    main()
