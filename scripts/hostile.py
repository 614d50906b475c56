"""Measure how hostile requests affect other clients of `kvcellar serve`, and its memory.

    python -m scripts.hostile [--only NAME] [--copies 4] [--seconds 60]

Prints for each attack: the longest response time of /health, the longest time between two tokens of another client's
stream, the growth of the memory of all processes of the server, the time that the attack took and the statuses of its
responses; then the same as lines of JSON. An attack that is not over after `--seconds` is left: its clients go away.
Times are wall time: compare with the row `quiet`, without an attack. What attacks and what probes are processes of
their own on the same machine; attacks have a lower priority there, as they would come from others. With PYTHONPATH set
to another checkout, its server is measured.

The server has the embedded model, whose chat template loops without an end, and whose tokenizer has an expression that
backtracks, on certain texts; and a small random model of 131 072 positions.
"""

import argparse
import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvcellar.engine.models import embedded
from tests.sample.hostile import LARK, SCHEMAS

QUIET = 3.0  # seconds of the row without an attack
START_SECONDS = 300.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = "{% if 'loop' in messages[-1].content %}" + FOREVER + "{% endif %}"
TEMPLATE = LOOPS + "{% for m in messages %}{{ m.content }}\n{% endfor %}"
BACKTRACKS, SLOW = "(zq|zq)+!", "zq" * 22 + "\u2603"  # a third of a second for each of these texts
LONG, LONG_PROMPT = "long", 130_000
_LONG_IDS = [3 + at % 900 for at in range(LONG_PROMPT)]
NODES = 50_000
NICE = 10


@dataclass(frozen=True)
class Request:
    path: str
    body: bytes = b""
    chunk: int | None = None  # bytes per chunk of a chunked body; None: not chunked
    method: str = "POST"

    def data(self) -> bytes:
        head = f"{self.method} {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        if self.chunk is None:
            return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body
        parts = (self.body[at : at + self.chunk] for at in range(0, len(self.body), self.chunk))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


Make = Callable[[], Request]
HEALTH = Request("/health", method="GET").data()


def completion(path: str = COMPLETIONS, /, **fields: object) -> Request:
    return Request(path, json.dumps({"max_tokens": 1, **fields}).encode())


def chat(*contents: object, **fields: object) -> Request:
    return completion(CHAT, messages=[{"role": "user", "content": content} for content in contents], **fields)


BODIES: Mapping[str, Make] = {  # of about 8 MB, the default limit of a server
    "newlines": lambda: completion(prompt="\n" * 4_000_000),
    "one word": lambda: completion(prompt="a" * 8_000_000),
    "code": lambda: completion(prompt="def f(x): return x + 1\n" * 330_000),
    "256 texts": lambda: completion(prompt=["\n" * 15_000] * 256),
    "ids": lambda: completion(prompt=[7] * 2_700_000),
    "256 lists of ids": lambda: completion(prompt=[[7] * 8_000] * 256),
    "empty objects": lambda: completion(prompt=[{}] * 2_000_000),
    "deep lists": lambda: completion(prompt=[[[[[[[[[[]]]]]]]]]] * 350_000),
    "unknown fields": lambda: completion(**{f"x{n}": 1 for n in range(550_000)}),
    "biases": lambda: completion(prompt="a", logit_bias={str(n): 1 for n in range(550_000)}),
    "wrong stop ids": lambda: completion(prompt="a", stop_token_ids=["x"] * 1_500_000),
    "stops": lambda: completion(prompt="a", stop=["b" * 1000] * 8000),
    "messages": lambda: chat(*["\n" * 900] * 4096),
    "one message": lambda: chat("<|" * 4_000_000),
    "parts": lambda: chat([{"type": "text", "text": "a"}] * 200_000),
    "logprobs of many": lambda: completion(prompt=["a"] * 16, n=4, logprobs=20, max_tokens=32, ignore_eos=True),
    "many completions": lambda: completion(prompt=["a"] * 256, n=16, stream=True, max_tokens=1),
    "small chunks": lambda: Request(COMPLETIONS, completion(prompt="a" * 100_000).body, 1),
    "looping template": lambda: chat("loop"),
    "slow expression": lambda: completion(prompt=SLOW * 1000),
    "deep schemas": lambda: chat("a", response_format=_schema(SCHEMAS["properties"](20_000))),
    "deep grammars": lambda: completion(prompt="a", grammar=LARK["groups"](20_000)),
    "cyclic grammars": lambda: completion(prompt="a", grammar=LARK["cycles"](4_000)),
    "ambiguous grammars": lambda: completion(prompt="a", n=63, max_tokens=4, grammar=_ambiguous()),
}
MANY: dict[str, tuple[int, Make]] = {  # with the number of connections
    "512 bodies": (512, BODIES["ids"]),
    "63 prompts of 130k": (63, lambda: completion(model=LONG, prompt=_LONG_IDS, ignore_eos=True, max_tokens=8)),
}


def _schema(source: str) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": json.loads(source)}}


def _ambiguous() -> str:
    """A mask of it takes long."""
    parts = range(300)
    rules = "\n".join(f"part{number}: /[a-z ]{{1,{number + 1}}}/" for number in parts)
    return f'start: some\nsome: {" | ".join(f"some part{n}" for n in parts)} | ""\n{rules}'


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
    memory_mb: float  # growth of the memory of all processes
    seconds: float  # that the attack took
    responses: Mapping[int, int]  # number by status; 0: the connection was closed, by one of both


class Probes:
    """Threads that request /health, read streams and sample memory until `close`."""

    def __init__(self, server: int, port: int) -> None:
        self._server, self._port = server, port
        self._over, self._begun = threading.Event(), threading.Event()
        self.health, self.tokens = Waits(), Waits()
        self.memory = self.before = memory(server)
        works = (self._request_health, self._read_streams, self._sample_memory)
        self._threads = [threading.Thread(target=work) for work in works]
        for thread in self._threads:
            thread.start()
        self._begun.wait()
        self.tokens = Waits()

    def _read_streams(self) -> None:
        """One after the other: of each, the time between the first token and the last."""
        asked = completion(prompt="import os\n", max_tokens=1000, ignore_eos=True, temperature=0.0, stream=True)
        while not self._over.is_set():
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(asked.data())
                while not self._over.is_set() and (got := connection.recv(1 << 16)):
                    if b"data: {" in got:
                        self.tokens.now()
                        self._begun.set()

    def _request_health(self) -> None:
        while not self._over.wait(0.005):
            self.health.since = time.perf_counter()
            status = sent(HEALTH, self._port)
            self.health.now()
            assert status == 200, status

    def _sample_memory(self) -> None:
        while not self._over.wait(0.1):
            self.memory = max(self.memory, memory(self._server))

    def close(self) -> None:
        self._over.set()
        self.tokens.now()
        for thread in self._threads:
            thread.join()


def memory(process: int) -> float:
    """Of a process and all that it has started, in MB, what they share counted once (Linux)."""
    found, rest = 0.0, [process]
    while rest:
        one = rest.pop()
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            found += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1e3
            for task in Path(f"/proc/{one}/task").iterdir():
                rest += map(int, (task / "children").read_text().split())
    return found


def sent(request: bytes, port: int, left: threading.Event | None = None) -> int:
    """The status of the complete response; 0 if the connection was closed before its end."""
    first, data = b"", memoryview(request)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.2)
        while True:
            if left is not None and left.is_set():
                return 0
            try:
                if data:
                    data = data[connection.send(data[: 1 << 16]) :]
                elif got := connection.recv(1 << 20):
                    first = first or got
                else:
                    return int(first.split()[1]) if first else 0
            except TimeoutError:
                pass
            except ConnectionError:
                return int(first.split()[1]) if first else 0


def attack(request: bytes, port: int, copies: int, seconds: float) -> Counter[int]:
    """How many responses of each status there were."""
    left = threading.Event()
    timer = threading.Timer(seconds, left.set)
    timer.start()
    try:
        with ThreadPoolExecutor(copies) as senders:
            return Counter(senders.map(lambda _: sent(request, port, left), range(copies)))
    finally:
        timer.cancel()


def fill(port: int) -> None:
    """Give the prefix tree `NODES` entries."""
    rng = random.Random(0)
    with ThreadPoolExecutor(8) as senders:
        prompts = [[[rng.randrange(256, 400) for _ in range(4)] for _ in range(200)] for _ in range(NODES // 200)]
        list(senders.map(lambda some: sent(completion(prompt=some).data(), port), prompts))


def look_at(port: int, seconds: float) -> Counter[int]:
    """The pictures of the inspector, one after the other."""
    found, over = Counter[int](), time.monotonic() + seconds
    while time.monotonic() < over:
        found[sent(Request("/inspector/api/snapshot", method="GET").data(), port)] += 1
    return found


def measured(name: str, server: int, port: int, act: Callable[[], Mapping[int, int]]) -> Row:
    probes, began = Probes(server, port), time.perf_counter()
    try:
        responses = act()
    finally:
        took = time.perf_counter() - began
        probes.close()
    grown = probes.memory - probes.before
    return Row(name, 1e3 * probes.health.worst, 1e3 * probes.tokens.worst, grown, took, dict(sorted(responses.items())))


def written(into: Path) -> tuple[Path, Path]:
    """The directories of both models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    paths = into / "hostile", into / LONG
    for path in paths:
        shutil.copytree(embedded.path(), path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (paths[0] / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((paths[0] / "tokenizer.json").read_text())
    own = {"type": "Split", "pattern": {"Regex": BACKTRACKS}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [own, tokenizer["pre_tokenizer"]]}
    (paths[0] / "tokenizer.json").write_text(json.dumps(tokenizer))
    config: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**config, max_position_embeddings=LONG_PROMPT + 1000)).save_pretrained(paths[1])
    return paths


@contextmanager
def served(*models: Path) -> Iterator[tuple[int, int]]:
    """The process of a server, and its port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "kvcellar", "serve", *map(str, models), "--port", str(port)]
    command += [
        "--config",
        os.devnull,
        "--threads",
        "1",
        "--no-store",
        "--log-level",
        "error",
        "--cache-bytes",
        "512MB",
    ]
    with subprocess.Popen(command) as process:
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                with suppress(OSError):
                    if sent(Request("/ready", method="GET").data(), port) == 200:
                        break
                assert time.monotonic() < until, "the server is not ready"
                time.sleep(0.1)
            yield process.pid, port
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="measure only this attack; may be repeated")
    parser.add_argument("--copies", type=int, default=1, help="simultaneous requests of attacks without a number")
    parser.add_argument("--seconds", type=float, default=60.0, help="that an attack takes at most")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'attack':18} {'/health ms':>11} {'token ms':>9} {'memory MB':>10} {'seconds':>8}  responses")

    def show(name: str, server: int, port: int, act: Callable[[], Mapping[int, int]]) -> None:
        if options.only and name not in (*options.only, "quiet"):
            return
        row = measured(name, server, port, act)
        times = f"{row.health_ms:11.0f} {row.token_ms:9.0f} {row.memory_mb:10.0f} {row.seconds:8.1f}"
        print(f"{name:18} {times}  {dict(row.responses)}", flush=True)
        rows.append(row)

    def quiet() -> Mapping[int, int]:
        time.sleep(QUIET)
        return {}

    with (
        tempfile.TemporaryDirectory() as folder,
        served(*written(Path(folder))) as (server, port),
        ProcessPoolExecutor(1, get_context("spawn"), os.nice, (NICE,)) as attackers,
    ):
        attackers.submit(len, "").result()
        gc.collect()
        gc.freeze()
        gc.disable()  # collections of this process would be measured as gaps

        def attacked(*given: Any) -> Counter[int]:
            return attackers.submit(attack, *given).result()

        show("quiet", server, port, quiet)
        one = {name: (options.copies, make) for name, make in BODIES.items()}
        for name, (copies, make) in (one | MANY).items():
            if not options.only or name in options.only:
                show(name, server, port, partial(attacked, make().data(), port, copies, options.seconds))
        if not options.only or "inspector" in options.only:
            attackers.submit(fill, port).result()
            show("inspector", server, port, lambda: attackers.submit(look_at, port, options.seconds).result())
    for row in rows:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
