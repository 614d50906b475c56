"""The simulation of a fleet: what holds in it by itself, and what the router is held to."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.cluster_sim import (
    GPU,
    MIXES,
    QUICK,
    RULES,
    Fleet,
    Found,
    Ours,
    Rule,
    Session,
    copies,
    ideal,
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


def test_copies_of_a_trace_have_texts_of_their_own() -> None:
    first, second = (copies("chats", number, 16, random.Random(1), scale=0.1) for number in (1, 2))
    assert len(second) == 2 * len(first)
    texts = {turn.blocks[0] for session in second for turn in session if turn.blocks}
    assert len(texts) == 2 * len({turn.blocks[0] for session in first for turn in session if turn.blocks})


def test_the_row_prints_a_line_for_each_rule(tmp_path: Path) -> None:
    lines = [*row(Given(tmp_path, quick=True))]
    for name in RULES:
        assert sum(line.startswith(f"{name:20} ") for line in lines) == len(QUICK)
