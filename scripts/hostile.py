"""Measure how hostile requests affect other clients of a server with the embedded model.

    python -m scripts.hostile [--only NAME] [--copies 4]

Prints for each attack: the longest response time of /health, the longest time between two tokens of another stream, the
growth of memory, and the status of the response; then the same as a line of JSON. The engine has a process of its own,
as in `kvcellar serve`. Server and clients run in one process, so the clients' use of the interpreter counts too. Times
are wall time: compare with the row `quiet`, without an attack.
"""

import argparse
import gc
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcellar import Engine
from kvcellar.cli.serve import SWITCH
from kvcellar.events import Delta, Event
from kvcellar.serve import Server, ServeSettings

QUIET = 3.0  # seconds of the row without an attack
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Attack:
    """One request, which is sent on `copies` connections at the same time."""

    path: str
    body: bytes
    chunk: int | None = None  # bytes per chunk of a chunked body; None: not chunked


def attacks() -> Iterator[tuple[str, Callable[[], Attack]]]:
    """Requests of about 8 MB, the default limit of a server."""

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
    yield "many completions", lambda: Attack(COMPLETIONS, body(prompt=["a"] * 256, n=16, stream=True, max_tokens=1))
    yield "small chunks", lambda: Attack(COMPLETIONS, body(prompt="a" * 100_000), 1)


@dataclass
class Waits:
    """The longest time between two calls of `now`."""

    worst: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def now(self) -> None:
        moment = time.perf_counter()
        self.worst = max(self.worst, moment - self.since)
        self.since = moment


@dataclass(frozen=True)
class Row:
    name: str
    health_ms: float  # longest response time
    token_ms: float  # longest time between two tokens
    memory_mb: float  # growth of the resident set
    seconds: float  # until the response to the attack
    responses: Mapping[int, int]  # number by status; 0: the connection was closed


class Probes:
    """Threads that request /health, read a stream and sample memory until `close`."""

    def __init__(self, engine: Engine, port: int) -> None:
        self._over = threading.Event()
        self.health, self.tokens = Waits(), Waits()
        self.memory = 0.0
        self._engine, self._port = engine, port
        params = engine.params(max_tokens=10**6, shift=True, ignore_eos=True, temperature=0.0)
        self._begun = threading.Event()
        self._ticket = engine.submit(engine.encode("import os\n"), params, deliver=self._token)
        self._begun.wait()
        self._threads = [threading.Thread(target=work) for work in (self._request_health, self._sample_memory)]
        for thread in self._threads:
            thread.start()

    def _token(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.tokens.now()
            if not self._begun.is_set():
                self.tokens = Waits()
                self._begun.set()

    def _request_health(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            while not self._over.wait(0.005):
                self.health.since = time.perf_counter()
                connection.request("GET", "/health")
                with connection.getresponse() as response:
                    assert response.status == 200
                    response.read()
                self.health.now()

    def _sample_memory(self) -> None:
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
    """The status of the complete response; 0 if the connection was closed without one."""
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
    responses: list[int] = []
    try:
        if attack is None:
            time.sleep(QUIET)
        else:
            with ThreadPoolExecutor(copies) as senders:
                responses = list(senders.map(lambda _: send(attack, port), range(copies)))
    finally:
        took = time.perf_counter() - began
        probes.close()
    counted = {status: responses.count(status) for status in sorted(set(responses))}
    return Row(name, 1e3 * probes.health.worst, 1e3 * probes.tokens.worst, probes.memory - before, took, counted)


@contextmanager
def served(threads: int) -> Iterator[tuple[Engine, int]]:
    with (
        Engine(device="cpu", cache_bytes=64_000_000, threads=threads, process=True) as engine,
        Server(engine, ServeSettings(port=0)) as server,
    ):
        gc.collect()  # this and the next two as `kvcellar serve` does
        gc.freeze()
        sys.setswitchinterval(SWITCH)
        yield engine, server.port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="Run only this attack. May be repeated.")
    parser.add_argument("--copies", type=int, default=1, help="Number of simultaneous requests of each attack.")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'attack':18} {'/health ms':>11} {'token ms':>9} {'memory MB':>10} {'seconds':>8}  responses")
    with served(threads=1) as (engine, port):
        for name, make in [("quiet", None), *attacks()]:
            if options.only and name not in (*options.only, "quiet"):
                continue
            attack = None if make is None else make()
            row = measured(name, engine, port, attack, options.copies)
            print(
                f"{name:18} {row.health_ms:11.0f} {row.token_ms:9.0f} {row.memory_mb:10.0f} {row.seconds:8.1f}"
                f"  {dict(row.responses)}",
                flush=True,
            )
            rows.append(row)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
