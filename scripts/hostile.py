"""Plays hostile requests against a server of the embedded model while /health is asked and another request streams.

    python -m scripts.hostile [--only NAME] [--copies 4]

For each attack: the longest wait for /health, the longest time between two tokens of the stream, how much memory the
process took at most, and how the attack was answered; last, the same as a line of JSON. Everything is in one process,
so what the clients take of the interpreter counts, too. Times are the wall's: compare with the row `quiet`, which has
no attack.
"""

import argparse
import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcellar import Engine
from kvcellar.events import Delta, Event
from kvcellar.serve import Server, ServeSettings

QUIET = 3.0  # seconds of the row without an attack
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Attack:
    """`bodies` are sent at the same time, each on a connection of its own, `copies` times."""

    path: str
    body: bytes
    chunk: int | None = None  # sent in chunks of so many bytes; None: with its length


def attacks() -> Iterator[tuple[str, Callable[[], Attack]]]:
    """About 8 MB each: the most that a server took by default when this was written."""

    def body(**fields: object) -> bytes:
        return json.dumps({"max_tokens": 1, **fields}).encode()

    def chat(*contents: str) -> bytes:
        return body(messages=[{"role": "user", "content": content} for content in contents])

    yield "newlines", lambda: Attack(COMPLETIONS, body(prompt="\n" * 4_000_000))
    yield "one word", lambda: Attack(COMPLETIONS, body(prompt="a" * 8_000_000))
    yield "code", lambda: Attack(COMPLETIONS, body(prompt="def f(x): return x + 1\n" * 330_000))
    yield "256 texts", lambda: Attack(COMPLETIONS, body(prompt=["\n" * 15_000] * 256))
    yield "ids", lambda: Attack(COMPLETIONS, body(prompt=[7] * 2_700_000))
    yield "256 lists of ids", lambda: Attack(COMPLETIONS, body(prompt=[[7] * 8_000] * 256))
    yield "empty objects", lambda: Attack(COMPLETIONS, body(prompt=[{}] * 2_000_000))
    yield "deep lists", lambda: Attack(COMPLETIONS, body(prompt=[[[[[[[[[[]]]]]]]]]] * 350_000))
    yield "unknown fields", lambda: Attack(COMPLETIONS, body(**{f"x{n}": 1 for n in range(550_000)}))
    yield "biases", lambda: Attack(COMPLETIONS, body(prompt="a", logit_bias={str(n): 1 for n in range(550_000)}))
    yield "wrong stop ids", lambda: Attack(COMPLETIONS, body(prompt="a", stop_token_ids=["x"] * 1_500_000))
    yield "stops", lambda: Attack(COMPLETIONS, body(prompt="a", stop=["b" * 1000] * 8000))
    yield "messages", lambda: Attack(CHAT, chat(*["\n" * 900] * 4096))
    yield "one message", lambda: Attack(CHAT, chat("<|" * 4_000_000))
    yield (
        "parts",
        lambda: Attack(CHAT, body(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}])),
    )
    yield (
        "logprobs of many",
        lambda: Attack(COMPLETIONS, body(prompt=["a"] * 16, n=4, logprobs=20, max_tokens=32, ignore_eos=True)),
    )
    yield "many answers", lambda: Attack(COMPLETIONS, body(prompt=["a"] * 256, n=16, stream=True, max_tokens=1))
    yield "small chunks", lambda: Attack(COMPLETIONS, body(prompt="a" * 100_000), 1)


@dataclass
class Waits:
    """Moments of something that should keep happening, and the longest time between two of them."""

    worst: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def now(self) -> None:
        moment = time.perf_counter()
        self.worst = max(self.worst, moment - self.since)
        self.since = moment


@dataclass(frozen=True)
class Row:
    name: str
    health_ms: float  # the longest from asking to the answer
    token_ms: float  # the longest between two tokens of the stream
    memory_mb: float  # the most resident memory, less what it was before
    seconds: float  # until the attack was answered
    answers: Mapping[int, int]  # by status; 0: the connection was closed


class Probes:
    """Asks /health, streams from the engine and looks at memory, on threads, until it is closed."""

    def __init__(self, engine: Engine, port: int) -> None:
        self._over = threading.Event()
        self.health, self.tokens = Waits(), Waits()
        self.memory = 0.0
        self._engine, self._port = engine, port
        params = engine.params(max_tokens=10**6, shift=True, ignore_eos=True, temperature=0.0)
        self._begun = threading.Event()
        self._ticket = engine.submit(engine.encode("import os\n"), params, deliver=self._token)
        self._begun.wait()
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._look)]
        for thread in self._threads:
            thread.start()

    def _token(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.tokens.now()
            if not self._begun.is_set():
                self.tokens = Waits()
                self._begun.set()

    def _ask(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            while not self._over.wait(0.005):
                self.health.since = time.perf_counter()
                connection.request("GET", "/health")
                with connection.getresponse() as answer:
                    assert answer.status == 200
                    answer.read()
                self.health.now()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.memory = max(self.memory, resident())

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.tokens.now()
        self._ticket.cancel()


def resident() -> float:
    """Resident memory of this process, in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def send(attack: Attack, port: int) -> int:
    """The status of the answer, when all of it is there; 0 if the connection was closed without one."""
    head = f"POST {attack.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if attack.chunk is None:
        data = f"{head}Content-Length: {len(attack.body)}\r\n\r\n".encode() + attack.body
    else:
        parts = (attack.body[at : at + attack.chunk] for at in range(0, len(attack.body), attack.chunk))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        data = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"
    first = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        try:
            connection.sendall(data)
            while got := connection.recv(1 << 20):
                first = first or got
        except ConnectionError:
            pass
    return int(first.split()[1]) if first else 0


def measured(name: str, engine: Engine, port: int, attack: Attack | None, copies: int) -> Row:
    probes = Probes(engine, port)
    before = probes.memory = resident()
    began = time.perf_counter()
    answers: list[int] = []
    try:
        if attack is None:
            time.sleep(QUIET)
        else:
            with ThreadPoolExecutor(copies) as senders:
                answers = list(senders.map(lambda _: send(attack, port), range(copies)))
    finally:
        took = time.perf_counter() - began
        probes.close()
    counted = {status: answers.count(status) for status in sorted(set(answers))}
    return Row(name, 1e3 * probes.health.worst, 1e3 * probes.tokens.worst, probes.memory - before, took, counted)


@contextmanager
def served(threads: int) -> Iterator[tuple[Engine, int]]:
    with (
        Engine(device="cpu", cache_bytes=64_000_000, threads=threads) as engine,
        Server(engine, ServeSettings(port=0)) as server,
    ):
        gc.collect()
        gc.freeze()  # as `kvcellar serve` does
        yield engine, server.port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="One attack, by the name that its row has. May be repeated.")
    parser.add_argument("--copies", type=int, default=1, help="How often each is sent at the same time.")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'attack':18} {'/health ms':>11} {'token ms':>9} {'memory MB':>10} {'seconds':>8}  answers")
    with served(threads=1) as (engine, port):
        for name, make in [("quiet", None), *attacks()]:
            if options.only and name not in (*options.only, "quiet"):
                continue
            attack = None if make is None else make()
            row = measured(name, engine, port, attack, options.copies)
            print(
                f"{name:18} {row.health_ms:11.0f} {row.token_ms:9.0f} {row.memory_mb:10.0f} {row.seconds:8.1f}"
                f"  {dict(row.answers)}",
                flush=True,
            )
            rows.append(row)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
