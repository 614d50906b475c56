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
from typing import Any, NamedTuple

from benchmarks.cluster import Fleet
from benchmarks.row import Given, Lines
from kvcellar.frontend.engine import Engine

SETTINGS: Mapping[str, Any] = {"threads": 1, "record": "off", "cache_bytes": 64_000_000, "max_sequences": 16}
NODES, OF_NODE = 2, 2  # and replicas of each
NODE_SHARE = 0.2  # of kills that are those of a node
STREAMS = 6
PROMPTS = [f"def part_{number}(cellar):\n    " for number in range(12)]
TIMEOUT = 120.0


class Extent(NamedTuple):
    kills: int = 200
    gateways: int = 20
    tokens: int = 150  # of a stream
    pause: float = 1.0  # seconds between two kills, on the mean


QUICK = Extent(kills=3, gateways=1, tokens=80, pause=0.3)


class Stream(NamedTuple):
    """How one has ended. `gap`: seconds without a part of it, at most; `why`: "" for one that is as it should be."""

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
                return Stream(f"failed: {response.status} {response.read()[:200]!r}", 0.0, port)
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

    def __init__(self, fleet: Fleet, expected: Mapping[tuple[str, int], str], tokens: int) -> None:
        self._fleet, self._expected, self._tokens = fleet, expected, tokens
        self._end, self.streams = threading.Event(), list[Stream]()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(STREAMS)]

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._end.is_set():
            prompt, seed = draw.choice([*self._expected])
            body = body_of(self._fleet.model, prompt, seed, self._tokens)
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


def kill_engines(fleet: Fleet, extent: Extent, draw: random.Random) -> int:
    """Returns how many nodes were among what was killed. One replica stays alive."""
    nodes = 0
    for _ in range(extent.kills):
        time.sleep(draw.expovariate(1 / extent.pause))
        node = draw.random() < NODE_SHARE
        while len(fleet.replicas) <= (OF_NODE if node else 1):
            time.sleep(0.05)
        fleet.kill(draw.sample(sorted(fleet.replicas), OF_NODE if node else 1))
        nodes += node
    fleet.settle()
    return nodes


class Kept:
    """What clients were told is kept: responses, each behind the one before, and turns of a named conversation."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._responses, self._turns = fleet, list[tuple[str, str]](), list[str]()
        self.lost = 0
        self._asked("POST", "/kvcellar/conversations", {"name": "line"}, at=0)

    def _asked(self, method: str, path: str, body: Any = None, *, at: int) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self._fleet.ports[at], timeout=TIMEOUT)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            return json.loads(connection.getresponse().read())

    def add(self, number: int, *, at: int) -> None:
        more = {"previous_response_id": self._responses[-1][0]} if number % 8 else {}
        more["model"] = self._fleet.model
        asked = {"input": f"def kept_{number}():", "max_output_tokens": 8, "temperature": 0, **more}
        made = self._asked("POST", "/v1/responses", asked, at=at)
        self._responses.append((made["id"], _text(made)))
        message = {"role": "user", "content": f"def turn_{number}():"}
        turn = {"model": self._fleet.model, "messages": [message], "max_tokens": 8, "conversation": "line"}
        said = self._asked("POST", "/v1/chat/completions", turn, at=at)
        self._turns.append(said["choices"][0]["message"]["content"])

    def look(self, *, at: int) -> None:
        """Count what is not found."""
        for name, text in self._responses:
            found = self._asked("GET", f"/v1/responses/{name}", at=at)
            self.lost += found.get("id") != name or _text(found) != text
        line = self._asked("GET", "/kvcellar/conversations/line", at=at).get("messages", [])
        said = [one["content"] for one in line if one["role"] == "assistant"]
        self.lost += sum(at >= len(said) or said[at] != text for at, text in enumerate(self._turns))

    def __len__(self) -> int:
        return len(self._responses) + len(self._turns)


def _text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response.get("output", ()) for part in item["content"])


def kill_gateways(fleet: Fleet, extent: Extent, draw: random.Random, kept: Kept) -> set[int]:
    """Returns the ports of those that were killed."""
    killed: set[int] = set()
    for number in range(extent.gateways):
        at = draw.randrange(len(fleet.gateways))
        kept.add(number, at=at)
        time.sleep(draw.expovariate(1 / extent.pause))
        killed.add(fleet.ports[at])
        fleet.kill_gateway(at)
        kept.look(at=draw.randrange(len(fleet.gateways)))
    return killed


class Found(NamedTuple):
    kills: int
    nodes: int
    streams: int
    failed: Sequence[str]
    wrong: Sequence[str]
    gap: float  # seconds without a part of a stream, at most
    gap_p99: float
    gateways: int
    cut: int  # streams that ended with their gateway
    kept: int
    lost: int


def measure(extent: Extent, documents: str, progress: Callable[[str], None] = lambda line: None) -> Found:
    draw = random.Random(7)
    asked = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    options: Any = {"max_tokens": extent.tokens, "temperature": 1.0, "ignore_eos": True}
    with Engine(**SETTINGS) as engine:
        expected = {(prompt, seed): engine.generate(prompt, seed=seed, **options).text for prompt, seed in asked}
    with closing(Fleet(None, SETTINGS, documents, replicas=NODES * OF_NODE, gateways=2)) as fleet:
        first = Load(fleet, expected, extent.tokens)
        with first.running():
            nodes = kill_engines(fleet, extent, draw)
        second, kept = Load(fleet, expected, extent.tokens), Kept(fleet)
        with second.running():
            killed = kill_gateways(fleet, extent, draw, kept)
    cut = [one.why.startswith("failed") and one.port in killed for one in second.streams]
    every = [*first.streams, *(one for one, was_cut in zip(second.streams, cut, strict=True) if not was_cut)]
    gaps = sorted(one.gap for one in first.streams)
    return Found(
        kills=extent.kills,
        nodes=nodes,
        streams=len(every),
        failed=[one.why for one in every if one.why.startswith("failed")],
        wrong=[one.why for one in every if one.why.startswith("wrong")],
        gap=gaps[-1],
        gap_p99=gaps[int(0.99 * len(gaps))],
        gateways=extent.gateways,
        cut=sum(cut),
        kept=len(kept),
        lost=kept.lost,
    )


def row(given: Given) -> Lines:
    one = measure(QUICK if given.quick else Extent(), str(given.directory))
    yield (
        f"{one.kills} kills of replicas, {one.nodes} of them of a node of {OF_NODE}, under {STREAMS} sampled streams: "
        f"of {one.streams} streams {len(one.failed)} failed and {len(one.wrong)} had another text than of one engine"
    )
    yield f"longest pause of a stream: {one.gap:.2f} s; of 99 in a hundred streams at most {one.gap_p99:.2f} s"
    yield (
        f"{one.gateways} kills of gateways: of {one.kept} responses and turns {one.lost} lost; {one.cut} streams "
        f"ended with their gateway"
    )
    yield from one.failed[:5]
    yield from one.wrong[:5]
    return one._asdict()
