"""What serving costs beside the engine: tokens per CPU second of a server, over those of an engine alone.

    python -m scripts.served_cost [--streams 1,8,32] [--tokens 256] [--rounds 5] [--model DIRECTORY]

Three rows for each number of streams: an engine that a program calls, `kvcellar serve` in one process, and with the
engine in a process of its own; the CPU time of all processes counts. The clients, of the openai package, run in this
process, whose time is not counted. All three are there at the same time and take turns, as the speed of a machine
changes: the ratio is the median of those of the rounds. Prints also tokens per second of the wall clock, the time to
the first token, and the memory of each process.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import openai

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 300.0
PROMPT = "def main():\n    "


class Run(NamedTuple):
    """`cpu` and `seconds` are of all tokens; `first`: the median of seconds until a stream had one."""

    tokens: int
    cpu: float
    seconds: float
    first: float

    @property
    def efficiency(self) -> float:
        """Tokens per CPU second."""
        return self.tokens / self.cpu


def cpu_of(pids: list[int]) -> float:
    """Seconds of CPU that processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / TICKS


def memory_of(pid: int) -> int:
    """MB that are resident, divided by the number of processes that share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("Pss:"))


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=False).stdout.split()
    return [pid, *(one for child in found for one in family(int(child)))]


def measured(pids: list[int], streams: int, stream: Callable[[int], tuple[int, float]]) -> Run:
    """`stream` returns how many tokens a client got, and after how many seconds the first."""
    found: list[tuple[int, float]] = []
    threads = [threading.Thread(target=lambda at=at: found.append(stream(at))) for at in range(streams)]
    before, began = cpu_of(pids), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return Run(sum(one[0] for one in found), cpu_of(pids) - before, seconds, median(one[1] for one in found))


@contextmanager
def served(model: str | None, mode: str) -> Iterator[tuple[int, int]]:
    """Process and port of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvcellar", "serve", "--port", str(port), "--engine-process", mode]
    command += ["--threads", "1", "--no-store", "--quiet", *([model] if model else [])]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with suppress(openai.APIError):
                client.get("/ready", cast_to=object)
                break
            time.sleep(0.1)
        try:
            yield process.pid, port
        finally:
            process.terminate()


def over_http(port: int, tokens: int) -> Callable[[int], tuple[int, float]]:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    name = next(iter(client.models.list())).id

    def stream(at: int) -> tuple[int, float]:
        began, first, usage = time.perf_counter(), 0.0, None
        more: Any = {"ignore_eos": True}
        create: Any = client.completions.create
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens, "seed": at}
        for chunk in create(model=name, prompt=PROMPT, extra_body=more, **options):
            first = first or time.perf_counter() - began
            usage = chunk.usage or usage
        return usage.completion_tokens, first  # type: ignore[union-attr]

    return stream


def serve_alone(model: str | None, tokens: int) -> None:
    """In a process of its own: an engine that streams to threads of a program. For each line, a number of streams, it
    writes a run."""
    from kvcellar import Engine

    with Engine(model, threads=1) as engine:

        def stream(at: int) -> tuple[int, float]:
            began, first, count = time.perf_counter(), 0.0, 0
            for delta in engine.stream(PROMPT, max_tokens=tokens, seed=at, ignore_eos=True):
                first = first or time.perf_counter() - began
                count += len(delta.token_ids)
            return count, first

        for line in sys.stdin:
            print(json.dumps(measured([os.getpid()], int(line), stream)), flush=True)


@contextmanager
def alone(model: str | None, tokens: int) -> Iterator[Callable[[int], Run]]:
    """Calls of an engine alone, by number of streams."""
    command = [sys.executable, "-m", "scripts.served_cost", "--alone", "--tokens", str(tokens)]
    command += ["--model", model] if model else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        asked, told = process.stdin, process.stdout

        def run(streams: int) -> Run:
            print(streams, file=asked, flush=True)
            assert told is not None
            return Run(*json.loads(told.readline()))

        yield run
        asked.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=None)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        serve_alone(given.model, given.tokens)
        return
    with ExitStack() as opened:
        runs = {"alone": opened.enter_context(alone(given.model, given.tokens))}
        for mode in ("no", "yes"):
            pid, port = opened.enter_context(served(given.model, mode))
            pids, stream = family(pid), over_http(port, given.tokens)
            runs[mode] = partial(measured, pids, stream=stream)
            print(f"--engine-process {mode}: {[memory_of(one) for one in pids]} MB", flush=True)
        for streams in map(int, given.streams.split(",")):
            rounds = [{mode: run(streams) for mode, run in runs.items()} for _ in range(given.rounds + 1)][1:]
            for mode in runs:
                of = [one[mode] for one in rounds]
                ratio = median(one[mode].efficiency / one["alone"].efficiency for one in rounds)
                print(
                    f"{streams} streams, {mode}: {median(one.efficiency for one in of):.0f} tokens per CPU second "
                    f"({ratio:.2f}), {median(one.tokens / one.seconds for one in of):.0f} per second, first after "
                    f"{median(one.first for one in of) * 1000:.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
