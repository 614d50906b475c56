"""The simulation of a fleet: what holds in it by itself, and what the router is held to."""

import asyncio
import random
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.cluster_sim import (
    GPU,
    LARGE,
    MIXES,
    QUICK,
    RULES,
    STALE,
    Ask,
    Fleet,
    Found,
    Ours,
    PowerOfTwoOfHandles,
    PrefixAffinity,
    Rule,
    Scene,
    Session,
    Turn,
    copies,
    ideal,
    memory,
    published,
    row,
    spread,
)
from benchmarks.row import Given

COSTS = GPU._replace(cells=400_000, block=64)


def requests(replicas: int, rate: float, count: int = 80) -> list[tuple[float, Session]]:
    draw = random.Random(3)
    return spread(draw, published(MIXES["tool and agent"], count * replicas, COSTS.block, draw), rate * replicas / 1.6)


def served(rule: type[Rule], sessions: Sequence[tuple[float, Session]], *, replicas: int = 2) -> tuple[Found, Fleet]:
    fleet = Fleet(COSTS, replicas, rule, gateways=2, store=False)
    return fleet.serve(sessions)._replace(ranks=0.0), fleet


@pytest.mark.parametrize("name", RULES)
def test_every_request_is_answered_and_memory_is_whole_afterwards(name: str) -> None:
    sessions = requests(2, 20)
    found, fleet = served(RULES[name], sessions)
    assert found.asked == sum(turn.prompt for _, session in sessions for turn in session)
    assert fleet.queues == [0, 0]
    for engine in fleet.engines:
        assert engine.load().waiting_tokens == engine.load().running == 0
        assert engine.load().cells_free == COSTS.cells // COSTS.block * COSTS.block


def test_a_run_is_the_same_every_time() -> None:
    sessions = requests(3, 30)
    assert served(Ours, sessions, replicas=3)[0] == served(Ours, sessions, replicas=3)[0]


def test_routers_know_in_the_end_what_engines_have() -> None:
    found, fleet = served(Ours, requests(2, 20))
    assert found.messages > 0
    fleet.world.run(lambda: fleet.world.now > 1e6 or all(rule_knows(fleet)))
    assert all(rule_knows(fleet))


def rule_knows(fleet: Fleet) -> list[bool]:
    """Of each router and engine."""
    known: list[bool] = []
    for rule in fleet.rules:
        assert isinstance(rule, Ours)
        rule.router.check()
        for at, engine in enumerate(fleet.engines):
            blocks = sorted(engine.blocks())
            scores = [rule.router.rank([block], COSTS.block + 1) for block in blocks[:50]]
            have = [next(one.have for one in ranking if one.replica == str(at)) for ranking in scores]
            known.append(have == [COSTS.block] * len(have))
    return known


@pytest.mark.parametrize("rate", [15, 30])
def test_a_fleet_computes_little_more_than_one_engine_with_all_memory_and_waits_less_than_by_queues(
    rate: float,
) -> None:
    sessions = requests(2, rate, 400)
    best = ideal(COSTS, 2, sessions)
    ours, two = served(Ours, sessions)[0], served(RULES["power of two"], sessions)[0]
    assert ours.computed <= 1.10 * best.computed
    assert ours.computed < two.computed
    assert ours.first[1] <= two.first[1]


def test_with_many_hot_prefixes_it_is_no_worse_than_rays_prefix_affinity_that_sees_all_queues() -> None:
    scene = Scene("tool and agent", 16, 1, LARGE, warm=10, seconds=30)
    sessions = scene.sessions()
    ours, *others = (
        Fleet(LARGE, 16, rule, gateways=8, store=False).serve(sessions, warm=10, end=40)
        for rule in (Ours, RULES["affinity, 10"], RULES["affinity"])
    )
    assert ours.share <= 1.10 * ideal(LARGE, 16, sessions, warm=10, end=40).share
    for one in others:
        assert ours.first[0] <= 1.05 * one.first[0]
        assert ours.first[1] <= 1.05 * one.first[1]
        assert ours.whole <= 1.05 * one.whole


def test_copies_of_a_trace_have_texts_of_their_own() -> None:
    first, second = (copies("chats", number, 16, random.Random(1), scale=0.1) for number in (1, 2))
    assert len(second) == 2 * len(first)
    texts = {turn.blocks[0] for session in second for turn in session if turn.blocks}
    assert len(texts) == 2 * len({turn.blocks[0] for session in first for turn in session if turn.blocks})


def test_the_row_prints_a_line_for_each_rule(tmp_path: Path) -> None:
    lines = [*row(Given(tmp_path, quick=True))]
    for name in RULES:
        assert sum(line.startswith(f"{name:20} ") for line in lines) == len(QUICK)


def test_only_requests_between_warm_up_and_end_count() -> None:
    turns = [Turn([at], 64, 1, 1.0) for at in range(10)]
    fleet = Fleet(COSTS, 2, RULES["round robin"], gateways=1, store=False)
    found = fleet.serve([(0.0, turns), (0.5, turns)], warm=3.4, end=6.4)
    assert found.asked == found.computed == 6 * 64  # 4 and 3 before, 3 and 3 counted
    assert fleet.queues == [0, 0]
    assert found.messages == 0


def test_memory_of_a_router_grows_by_what_it_knows() -> None:
    one, two = (served(Ours, requests(replicas, 20), replicas=replicas)[1] for replicas in (1, 4))
    few, many = (sum(len(engine.blocks()) for engine in fleet.engines) for fleet in (one, two))
    assert many > few
    assert 50 < (memory(two) - memory(one)) / (many - few) < 1000  # bytes of a block


# -- beside Ray --------------------------------------------------------------------------------------------------------

PREFIX_AWARE = "ray.llm._internal.serve.routing_policies.prefix_aware"


class Actor:
    """Its methods are called here."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._one, name))


def ray_router(monkeypatch: pytest.MonkeyPatch, replicas: Sequence[Any], lengths: Any, imbalance: float) -> Any:
    """Ray's `PrefixCacheAffinityRouter` without a cluster."""
    trees = pytest.importorskip(f"{PREFIX_AWARE}.prefix_tree", exc_type=ImportError)
    routers = pytest.importorskip(f"{PREFIX_AWARE}.prefix_aware_router", exc_type=ImportError)
    monkeypatch.setattr(routers, "ray", SimpleNamespace(get=lambda reply: reply))
    tree = trees.PrefixTree()
    tree.add_tenants([one.replica_id.to_full_id_str() for one in replicas], 0.0)
    router = object.__new__(routers.PrefixCacheAffinityRouter)
    router.initialize_state(imbalanced_threshold=imbalance, tree_actor=Actor(tree))
    router._replicas = {one.replica_id: one for one in replicas}
    router._use_replica_queue_len_cache, router._replica_queue_len_cache = True, lengths
    return router


@pytest.mark.parametrize("imbalance", [inf, 3])
def test_prefix_affinity_chooses_among_the_replicas_that_rays_router_chooses_among(
    monkeypatch: pytest.MonkeyPatch, imbalance: float
) -> None:
    common = pytest.importorskip("ray.serve._private.common", exc_type=ImportError)
    ids = [common.ReplicaID(str(at), common.DeploymentID("engines")) for at in range(5)]
    replicas = [SimpleNamespace(replica_id=one, max_ongoing_requests=10**6) for one in ids]
    lengths = dict.fromkeys(ids, 0)
    router = ray_router(monkeypatch, replicas, lengths, imbalance)
    fleet = SimpleNamespace(engines=range(5), queues=[0] * 5, tree={}, sizes=[0] * 5, rules=[])
    rule, draw, texts = PrefixAffinity(cast("Any", fleet), 0), random.Random(11), [""]
    rule.imbalance = imbalance
    seen = dict.fromkeys((0, 1, 2, 5), 0)
    for _ in range(1000):
        before = draw.choice(texts[-20:])
        text = before[: draw.randrange(len(before) + 1)] + "".join(draw.choices("abc", k=draw.randrange(1, 20)))
        texts.append(text)
        request = SimpleNamespace(args=[SimpleNamespace(prompt=text)])
        ((*expected,),) = asyncio.run(router._prefix_match_best_replicas(request, replicas))
        prompt = cast("Any", [text[: end + 1] for end in range(len(text))])  # a block is a prefix
        among = rule.among(prompt)
        if expected:
            assert {ids[at] for at in among} == {one.replica_id for one in expected}
        else:
            assert (max(fleet.queues) - min(fleet.queues) > imbalance, len(among)) == (True, 2)
        seen[len(expected)] = seen.get(len(expected), 0) + 1
        at = draw.choice(among)
        rule.insert(prompt, at)
        router.on_request_routed(request, ids[at], None)
        fleet.queues = [draw.randrange(6) for _ in ids]
        lengths.update(zip(ids, fleet.queues, strict=True))
    assert (seen[0] > 0) is (imbalance < inf)
    assert min(seen[1], seen[2]) > 0, "not all cases came"


def test_a_handle_knows_the_queues_that_rays_cache_knows() -> None:
    common = pytest.importorskip("ray.serve._private.request_router.common", exc_type=ImportError)
    world = SimpleNamespace(now=0.0)
    fleet = SimpleNamespace(engines=range(3), queues=[0] * 3, world=world)
    rule, draw = PowerOfTwoOfHandles(cast("Any", fleet), 0), random.Random(2)
    cache = common.ReplicaQueueLengthCache(get_curr_time_s=lambda: world.now)
    asked, running = 0, list[Ask]()
    for number in range(500):
        world.now += draw.choice((0.1, 3.0))
        fleet.queues = [draw.randrange(5) for _ in range(3)]
        if running and draw.random() < 0.4:
            one = running.pop(draw.randrange(len(running)))
            rule.ended(one)
            if (length := cache.get(one.replica)) is not None:
                cache.update(one.replica, max(0, length - 1))
            continue
        missing = [at for at in range(3) if cache.get(at) is None]
        asked += len(missing)
        for at in missing:
            cache.update(at, fleet.queues[at])
        assert rule.lengths(range(3)) == [cache.get(at) for at in range(3)]
        assert rule.calls == asked
        one = Ask(number, 0, Turn([], 1, 1, 0.0), 1, world.now, 0, counts=True)
        one.replica = rule.choose(one)
        cache.update(one.replica, cache.get(one.replica) + 1)
        if draw.random() < 0.5:
            rule.taken(one)
            cache.update(one.replica, fleet.queues[one.replica])
        running.append(one)
    assert 0 < asked < 500
    assert STALE == 10.0
