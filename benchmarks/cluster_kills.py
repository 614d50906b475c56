"""cluster_kills: what clients see of the deaths of engine replicas, of nodes and of gateways, under load.

Sampled streams with seeds run over HTTP through two gateways while replicas are killed with SIGKILL, at moments that
are drawn: one, or both of a node at once; others are started in their place. Each text is compared with that of one
engine. Then gateways are killed: streams of theirs end with them, and what was kept before (responses, and turns of a
conversation) has to be found through the other one. Processes are those of `cluster`, without Ray.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.cluster import OF_NODE, Fleet
from benchmarks.cluster_ray import RayFleet
from benchmarks.row import Given, Lines
from kvcellar.cli.cluster import free_ports
from kvcellar.frontend.engine import Engine

SETTINGS: Mapping[str, Any] = {"threads": 1, "record": "off", "cache_bytes": 64_000_000, "max_sequences": 16}
NODES, ON_NODES = 2, 3  # and engines, where nodes are those of Ray
NODE_SHARE = 0.2  # of kills that are those of a node
STREAMS = 6
MODEL = "embedded"
PROMPTS = [f"def part_{number}(cellar):\n    " for number in range(12)]
TIMEOUT = 120.0
CUT = ("failed", "refused: 500 b'Internal Server Error'")  # the second one is HAProxy's, for one that had not begun


class Extent(NamedTuple):
    kills: int = 200
    gateways: int = 20
    tokens: int = 150  # of a stream
    pause: float = 1.0  # seconds between two kills, on the mean


QUICK = Extent(kills=3, gateways=1, tokens=80, pause=0.3)
ON_RAY = Extent(kills=40, gateways=5, pause=2.0)


class Killed(Protocol):
    """What is killed: each call waits until another one runs."""

    @property
    def ports(self) -> list[int]: ...
    def kill_engine(self) -> None: ...
    def kill_node(self) -> None: ...
    def kill_gateway(self, at: int) -> None: ...
    def settle(self) -> None:
        """Until what was killed is replaced."""
        ...

    def close(self) -> None: ...


class Stream(NamedTuple):
    """How one has ended. `gap`: seconds without a part of it, at most; `why`: "" for one that is as it should be, else
    begins with how it is not: refused, failed or wrong."""

    why: str
    gap: float
    port: int


def body_of(model: str, prompt: str, seed: int, tokens: int) -> dict[str, Any]:
    options = {"max_tokens": tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    return {"model": model, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **options}


def streamed(port: int, body: Mapping[str, Any], expected: str) -> Stream:
    began = last = time.monotonic()
    text, used, gap, whole = "", 0, 0.0, False
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                return Stream(f"refused: {response.status} {response.read()[:200]!r}", 0.0, port)
            for line in response:
                whole = whole or line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    part = json.loads(line[6:])
                    if "error" in part:
                        return Stream(f"failed: {part['error']}", 0.0, port)
                    now = time.monotonic()
                    last, gap = now, max(gap, now - last)
                    text += "".join(choice["text"] for choice in part["choices"])
                    used = (part.get("usage") or {}).get("completion_tokens", used)
    except (OSError, http.client.HTTPException) as error:
        return Stream(f"failed: {error!r} after {time.monotonic() - began:.1f} s", 0.0, port)
    if not whole:
        return Stream("failed: its connection ended within it", gap, port)
    right = text == expected and used == body["max_tokens"]
    return Stream("" if right else f"wrong: {used} tokens, {text[-40:]!r}, not {expected[-40:]!r}", gap, port)


class Load:
    """Streams, one after the other on each of `STREAMS` threads, until its end."""

    def __init__(self, fleet: Killed, expected: Mapping[tuple[str, int], str], tokens: int) -> None:
        self._fleet, self._expected, self._tokens = fleet, expected, tokens
        self._end, self.streams = threading.Event(), list[Stream]()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(STREAMS)]

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._end.is_set():
            prompt, seed = draw.choice([*self._expected])
            body = body_of(MODEL, prompt, seed, self._tokens)
            self.streams.append(streamed(draw.choice(self._fleet.ports), body, self._expected[prompt, seed]))

    @contextmanager
    def running(self) -> Iterator[None]:
        for one in self._threads:
            one.start()
        try:
            yield
        finally:
            self._end.set()
            for one in self._threads:
                one.join()


def kill_engines(fleet: Killed, extent: Extent, draw: random.Random) -> int:
    """Returns how many nodes were among what was killed. One replica stays alive."""
    nodes = 0
    for _ in range(extent.kills):
        time.sleep(draw.expovariate(1 / extent.pause))
        node = draw.random() < NODE_SHARE
        fleet.kill_node() if node else fleet.kill_engine()
        nodes += node
    fleet.settle()
    return nodes


class Kept:
    """What clients were told is kept: responses, each behind the one before, and turns of a named conversation."""

    def __init__(self, fleet: Killed) -> None:
        self._fleet, self._responses, self._turns = fleet, list[tuple[str, str]](), list[str]()
        self.lost = 0
        self._asked("POST", "/kvcellar/conversations", {"name": "line"}, at=0)

    def _asked(self, method: str, path: str, body: Any = None, *, at: int) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self._fleet.ports[at], timeout=TIMEOUT)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status >= 500:
                raise ConnectionError(f"{response.status}: {response.read()[:200]!r}")
            return json.loads(response.read())

    def _got(self, path: str, *, at: int) -> Any:
        """Asked again where the gateway that was asked is killed meanwhile."""
        until = time.monotonic() + TIMEOUT
        while True:
            try:
                return self._asked("GET", path, at=at)
            except (OSError, http.client.HTTPException):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def add(self, number: int, *, at: int) -> None:
        more = {"previous_response_id": self._responses[-1][0]} if number % 8 else {}
        more["model"] = MODEL
        asked = {"input": f"def kept_{number}():", "max_output_tokens": 8, "temperature": 0, **more}
        made = self._asked("POST", "/v1/responses", asked, at=at)
        self._responses.append((made["id"], _text(made)))
        message = {"role": "user", "content": f"def turn_{number}():"}
        turn = {"model": MODEL, "messages": [message], "max_tokens": 8, "conversation": "line"}
        said = self._asked("POST", "/v1/chat/completions", turn, at=at)
        self._turns.append(said["choices"][0]["message"]["content"])

    def look(self, *, at: int) -> None:
        """Count what is not found."""
        for name, text in self._responses:
            found = self._got(f"/v1/responses/{name}", at=at)
            self.lost += found.get("id") != name or _text(found) != text
        line = self._got("/kvcellar/conversations/line", at=at).get("messages", [])
        said = [one["content"] for one in line if one["role"] == "assistant"]
        self.lost += sum(at >= len(said) or said[at] != text for at, text in enumerate(self._turns))

    def __len__(self) -> int:
        return len(self._responses) + len(self._turns)


def _text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response.get("output", ()) for part in item["content"])


def kill_gateways(fleet: Killed, extent: Extent, draw: random.Random, kept: Kept) -> set[int]:
    """Returns the ports of those that were killed."""
    killed: set[int] = set()
    for number in range(extent.gateways):
        at = draw.randrange(len(fleet.ports))
        kept.add(number, at=at)
        time.sleep(draw.expovariate(1 / extent.pause))
        killed.add(fleet.ports[at])
        fleet.kill_gateway(at)
        kept.look(at=draw.randrange(len(fleet.ports)))
    return killed


class Found(NamedTuple):
    kills: int
    nodes: int
    streams: int
    failed: Sequence[str]
    wrong: Sequence[str]
    gap: float  # seconds without a part of a stream, at most
    gap_p99: float
    gap_p50: float
    gateways: int
    cut: int  # streams that ended with their gateway
    kept: int
    lost: int


def measure(extent: Extent, made: Callable[[], Killed]) -> Found:
    draw = random.Random(7)
    asked = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    options: Any = {"max_tokens": extent.tokens, "temperature": 1.0, "ignore_eos": True}
    with Engine(**SETTINGS) as engine:
        expected = {(prompt, seed): engine.generate(prompt, seed=seed, **options).text for prompt, seed in asked}
    with closing(made()) as fleet:
        fleet.settle()
        first = Load(fleet, expected, extent.tokens)
        with first.running():
            nodes = kill_engines(fleet, extent, draw)
        second, kept = Load(fleet, expected, extent.tokens), Kept(fleet)
        with second.running():
            killed = kill_gateways(fleet, extent, draw, kept)
    cut = [one.why.startswith(CUT) and one.port in killed for one in second.streams]
    every = [*first.streams, *(one for one, was_cut in zip(second.streams, cut, strict=True) if not was_cut)]
    gaps = sorted(one.gap for one in first.streams)
    return Found(
        kills=extent.kills,
        nodes=nodes,
        streams=len(every),
        failed=[one.why for one in every if one.why.startswith(("failed", "refused"))],
        wrong=[one.why for one in every if one.why.startswith("wrong")],
        gap=gaps[-1],
        gap_p99=gaps[int(0.99 * len(gaps))],
        gap_p50=gaps[len(gaps) // 2],
        gateways=extent.gateways,
        cut=sum(cut),
        kept=len(kept),
        lost=kept.lost,
    )


def processes(documents: Path) -> Killed:
    return Fleet(None, SETTINGS, str(documents), replicas=NODES * OF_NODE, gateways=2)


def on_ray(documents: Path) -> Killed:
    described = {"replicas": ON_NODES, "gateways": 2, "engine": {**SETTINGS, "store_remote": f"file://{documents}"}}
    return RayFleet(described, port=free_ports(1)[0], nodes=NODES, of_node=OF_NODE)


def row(given: Given) -> Lines:
    return printed(measure(QUICK if given.quick else Extent(), partial(processes, given.directory)))


def ray_row(given: Given) -> Lines:
    return printed(measure(QUICK if given.quick else ON_RAY, partial(on_ray, given.directory)))


def printed(one: Found) -> Lines:
    yield (
        f"{one.kills} kills of engines, {one.nodes} of them of a node, under {STREAMS} sampled streams: "
        f"of {one.streams} streams {len(one.failed)} failed and {len(one.wrong)} had another text than of one engine"
    )
    yield (
        f"pauses of streams: {one.gap_p50:.2f} s on the median, in 99 of a hundred at most {one.gap_p99:.2f} s, "
        f"{one.gap:.2f} s at most"
    )
    yield (
        f"{one.gateways} kills of gateways: of {one.kept} responses and turns {one.lost} lost; {one.cut} streams "
        f"ended with their gateway"
    )
    yield from one.failed[:5]
    yield from one.wrong[:5]
    return one._asdict()
