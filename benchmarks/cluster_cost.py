"""cluster_cost: what a gateway of a cluster costs over the front end of a single server: CPU time and messages of a
token, time until the first token; and how long it takes until a second replica gets requests.

Both have the engine in a process of its own, and the same streams, of clients in another process (`load_client`); CPU
time is that of the front end's process alone. The processes of the cluster are those of `cluster`, without Ray.
"""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any, NamedTuple

from benchmarks.cluster import Cost, Fleet, Place, server
from benchmarks.row import Given, Lines
from benchmarks.serve_load import Extent, clients, write_tokenizer
from kvcellar.bench.network import TINY, write

SETTINGS: Mapping[str, Any] = {"threads": 1, "cache_bytes": 64 << 20, "max_sequences": 32, "context": 4096}
MOST = 0.1  # milliseconds of CPU time of a gateway for a token, with 32 streams
MOST_FIRST = 5.0  # milliseconds that a gateway adds until the first token


class Costs(NamedTuple):
    """Of a token: microseconds of CPU time of the front end, and messages that it got."""

    cpu: float
    messages: float


class Found(NamedTuple):
    single: Mapping[int, Costs]  # by number of streams
    cluster: Mapping[int, Costs]
    first: tuple[float, float]  # milliseconds until the first token, of both: medians
    start: float  # seconds until a second replica gets requests


def streaming(place: Place, streams: int, tokens: int) -> Costs:
    port, model = place.ready
    extent = Extent(TINY, connections=streams + 1, streams=streams, asking=1, pause=1.0, prompt=16, tokens=tokens)
    before = place.cost()
    clients(extent, port, model)
    after: Cost = place.cost()
    every = streams * tokens
    return Costs((after.cpu - before.cpu) / every / 1e3, (after.messages - before.messages) / every)


def first_token(place: Place, prompt: Sequence[int]) -> float:
    """Milliseconds."""
    port, model = place.ready
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)) as connection:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        response = connection.getresponse()
        while not response.readline().startswith(b"data: {"):
            pass
        return 1e3 * (time.perf_counter() - began)


def measure(given: Given) -> Found:
    model, documents = given.directory / "model", given.directory / "documents"
    model.mkdir()
    write(TINY, model)
    write_tokenizer(TINY.vocabulary, model)
    tokens, rounds, times = (40, 1, 3) if given.quick else (600, 2, 100)
    with closing(Fleet(str(model), SETTINGS, str(documents), replicas=1, gateways=1)) as fleet:
        both = (single := Place(server, str(model), SETTINGS)), fleet.gateways[0]
        with closing(single):
            costs: list[dict[int, Costs]] = [{}, {}]
            for streams in (1, 8, 32):
                for into, place in zip(costs, both, strict=True):
                    every = [streaming(place, streams, tokens // (1 if streams < 32 else 2)) for _ in range(rounds)]
                    into[streams] = min(every)
            prompts = [[3 + at % 500, 3 + at // 500, *range(5, 40)] for at in range(times)]
            asked = [[first_token(place, prompt) for place in both] for prompt in prompts]
        first = median(one for one, _ in asked), median(other for _, other in asked)
        began = time.perf_counter()
        fleet.add(fresh=True)
        return Found(costs[0], costs[1], first, time.perf_counter() - began)


def row(given: Given) -> Lines:
    found = measure(given)
    names = ("streams", "server µs", "gateway µs", "messages", "")
    yield "{:>10} {:>10} {:>11} {:>9} {:>9}".format(*names) + f"   of a token; aim {1e3 * MOST:g} µs"
    for streams, one in found.single.items():
        other = found.cluster[streams]
        yield f"{streams:10} {one.cpu:10.1f} {other.cpu:11.1f} {one.messages:9.3f} {other.messages:9.3f}"
    one, other = found.first
    yield f"first token: {one:.2f} ms, and {other:.2f} of a gateway, {other - one:+.2f}; aim {MOST_FIRST:+g}"
    yield f"a second replica gets requests {found.start:.2f} s after the start of its process"
    return found._asdict()
