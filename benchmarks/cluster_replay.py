"""cluster_replay: prompt tokens that live replicas compute on the traces of `replay`, by the rule by which requests go
to them, over those of one engine that has the memory of all.

Replicas are real, on a small network, in this process; two gateways get the turns in turn. Conversations of a trace run
at once, two for each replica, and go on from the tokens that were drawn. The other rules are those of `cluster_sim`:
they see all queues at once, and have one tree for both gateways.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

from benchmarks.cluster_sim import PrefixAffinity, PrefixAffinity10, RoundRobin, Rule
from benchmarks.replay import FIRST, TRACES, Turn, Writer
from benchmarks.row import Given, Lines
from kvcellar.bench.network import TINY, write
from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient, ReplicaLink
from kvcellar.cluster.replica import Replica
from kvcellar.cluster.routing import Router
from kvcellar.engine.messages import VERSION
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.remote_client import Request
from kvcellar.memory.prefix.node import common_prefix

SETTINGS: Mapping[str, Any] = {"threads": 1, "dtype": "float32", "context": 4096, "draft": "none"}
RULES: Mapping[str, type[Rule] | None] = {
    "round robin": RoundRobin, "prefix affinity": PrefixAffinity, "prefix affinity, 10": PrefixAffinity10, "ours": None,
}  # fmt: skip
COPIES = {"agent": 2, "users": 1, "edits": 2, "chats": 1}  # of a trace, for each replica
APART = ("users", "chats")  # traces whose conversations are apart; turns of others follow each other
SCALE = 0.1  # of the lengths of all texts
AT_ONCE, GATEWAYS = 2, 2  # conversations for each replica
MOST = 1.10  # of what one engine computes


class Live:
    """What rules of `cluster_sim` see of a fleet."""

    def __init__(self, replicas: int) -> None:
        self.engines, self.rules = range(replicas), range(GATEWAYS)
        self.tree: dict[int, set[int]] = {}
        self.sizes, self.clients = [0] * replicas, list["Ruled"]()
        self.lock = Lock()

    @property
    def queues(self) -> list[int]:
        return [sum(one.count(at) for one in self.clients) for at in self.engines]


class _Ask(NamedTuple):
    prompt: Sequence[int]  # its blocks


class Ruled(ClusterClient):
    """Requests go where a rule says."""

    def __init__(self, router: Any, live: Live, rule: type[Rule]) -> None:
        super().__init__(router)
        self._rule, self._live = rule(cast("Any", live), len(live.clients)), live
        live.clients.append(self)

    def count(self, at: int) -> int:
        return self._counts.get(f"replica-{at}", 0)

    def _choose(self, request: Request[ReplicaLink] | None) -> ReplicaLink | None:
        if request is None:
            return super()._choose(request)
        with self._live.lock:
            at = self._rule.choose(cast("Any", _Ask(request.blocks)))
        return next(one for one in self._engines if one.name == f"replica-{at}")


def sessions(name: str, copies: int, scale: float) -> list[list[Turn]]:
    """Turns that follow each other, of all conversations."""
    found: list[list[Turn]] = []
    for seed in range(copies):
        apart: dict[int, list[Turn]] = {}
        for turn in TRACES[name](Writer(seed, scale)):
            prompt, answer = ([3 + token % 500 for token in part] for part in (turn.prompt, turn.answer))
            apart.setdefault(turn.conversation if name in APART else 0, []).append(Turn(prompt, answer))
        found += apart.values()
    random.Random(5).shuffle(found)
    return found


def converse(turns: Sequence[Turn], engines: Sequence[Engine]) -> int:
    """Prompt tokens that are computed of a conversation which goes on from what was drawn."""
    texts: list[tuple[list[int], list[int]]] = []  # of each turn, in the trace and here
    computed, gateways = 0, cycle(engines)
    for turn in turns:
        known = ((common_prefix(one, turn.prompt), here) for one, here in texts)
        common, before = max(known, key=lambda one: one[0], default=(0, list[int]()))
        prompt = [*before[:common], *turn.prompt[common:]]
        asked = {"max_tokens": len(turn.answer), "temperature": 0.0, "ignore_eos": True}
        result = next(gateways).generate(prompt, **cast("Any", asked))
        texts.append(([*turn.prompt, *turn.answer], [*prompt, *result.token_ids]))
        computed += result.usage.prompt_tokens - result.usage.cached_tokens
    return computed


def replay(engines: Sequence[Engine], every: Sequence[Sequence[Turn]], at_once: int) -> int:
    with ThreadPoolExecutor(at_once) as pool:
        return sum(pool.map(partial(converse, engines=engines), every))


def live(model: Path, every: Sequence[Sequence[Turn]], replicas: int, rule: type[Rule] | None, cache: int) -> int:
    """Prompt tokens that replicas compute, which have so much memory each."""
    router, seen = partial(Router, most_blocks=1 << 16, clock=time.monotonic), Live(replicas)
    with ExitStack() as opened:
        addresses: list[Address] = []
        for at in range(replicas):
            settings = {**SETTINGS, "cache_bytes": cache}
            one = opened.enter_context(closing(Replica(str(model), settings, "127.0.0.1", time.monotonic())))
            addresses.append(Address(f"replica-{at}", *one.address, one.secret, VERSION, one.weights, one.block))
        engines: list[Engine] = []
        for _ in range(GATEWAYS):
            client = ClusterClient(router) if rule is None else Ruled(router, seen, rule)
            opened.callback(client.close)
            client.found(addresses)
            while {one.state for one in client.replicas} != {"connected"}:
                time.sleep(0.01)
            engines.append(opened.enter_context(closing(Engine.of(client, **cast("Any", SETTINGS)))))
        return replay(engines, every, AT_ONCE * replicas)


def row(given: Given) -> Lines:
    write(TINY, given.directory)
    found: dict[str, dict[str, float]] = {}
    yield f"{'trace, replicas':18} {'tokens':>9} {'one engine':>11} " + " ".join(f"{name:>19}" for name in RULES)
    for name in FIRST:
        for replicas in (2,) if given.quick else (2, 4):
            every = sessions(name, COPIES[name] * replicas, 0.02 if given.quick else SCALE)
            tokens = sum(len(turn.prompt) for turns in every for turn in turns)
            cache = (4 << 20) if given.quick else (64 << 20)
            with Engine(given.directory, **cast("Any", SETTINGS), cache_bytes=replicas * cache) as engine:
                alone = replay([engine], every, AT_ONCE * replicas)
            ratios = {one: live(given.directory, every, replicas, rule, cache) / alone for one, rule in RULES.items()}
            found[f"{name}, {replicas}"] = {"alone": alone, **ratios}
            numbers = " ".join(f"{ratio:19.3f}" for ratio in ratios.values())
            yield f"{name + ', ' + str(replicas):18} {tokens:9} {alone:11} {numbers}   aim {MOST:.2f}"
    return found
