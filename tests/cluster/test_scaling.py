"""How many replicas there are: by laws, and in virtual time, where replicas are queues of prompts."""

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.cluster.scaling import Meter, Report, policy, wanted

TICK = 0.25  # seconds of a step
MEAN = 30.0  # seconds of which means are taken
IDLE = 300.0
HOUR = 3600.0


class Replica:
    """Computes one prompt after the other, and keeps streams."""

    def __init__(self, ready: float, start: float) -> None:
        self.ready, self.start = ready, start
        self.left = 0.0  # seconds of prompts
        self.streams: list[tuple[float, float]] = []  # when each ends, and which part of the room it has
        self.seen: deque[Report] = deque(maxlen=int(MEAN / TICK))

    def pass_tick(self, now: float) -> None:
        busy = min(self.left, TICK)
        backlog = (self.left - busy / 2) * busy / TICK
        self.left -= busy
        self.streams = [one for one in self.streams if one[0] > now]
        self.seen.append(Report(busy / TICK, backlog, sum(part for _, part in self.streams), self.start))

    def report(self) -> Report:
        return Report(*(sum(values) / len(self.seen) for values in zip(*self.seen, strict=True)))


class Fleet:
    """As Serve runs it: more replicas at once, fewer when that has been wanted for `IDLE` seconds."""

    def __init__(self, *, least: int = 1, most: int = 64, start: float = 10.0, seed: int = 1) -> None:
        self.least, self.most, self.start = least, most, start
        self.now, self.random = 0.0, random.Random(seed)
        self.replicas = [Replica(0.0, start)]
        self.fewer_since: float | None = None
        self.counts: list[int] = []  # of each step
        self.waits: list[float] = []

    def run(
        self, seconds: float, load: float, seconds_each: float = 0.2, *, stream: float = 0.0, room: float = 0.0
    ) -> None:
        """`load`: seconds of prompts that come in a second."""
        until = self.now + seconds
        coming = self.now + (self.random.expovariate(load / seconds_each) if load else seconds)
        while self.now < until:
            self.now += TICK
            while coming <= self.now:
                self._take(self.random.expovariate(1 / seconds_each), stream, room)
                coming += self.random.expovariate(load / seconds_each) if load else seconds
            for one in self.ready:
                one.pass_tick(self.now)
            self._decide()
            self.counts.append(len(self.replicas))

    @property
    def ready(self) -> list[Replica]:
        return [one for one in self.replicas if one.ready <= self.now]

    def _take(self, seconds: float, stream: float, room: float) -> None:
        best = min(self.ready, key=lambda one: (one.left, len(one.streams)))
        self.waits.append(best.left)
        best.left += seconds
        best.streams.append((self.now + best.left + stream, room))

    def _decide(self) -> None:
        target = len(self.replicas)
        found = min(self.most, max(self.least, wanted([one.report() for one in self.ready if one.seen], target)))
        if found >= target:
            self.fewer_since = None
        elif self.fewer_since is None:
            self.fewer_since = self.now
        if found > target:
            self.replicas += [Replica(self.now + self.start, self.start) for _ in range(found - target)]
        elif self.fewer_since is not None and self.now - self.fewer_since >= IDLE:
            self.fewer_since = None
            for one in sorted(self.ready, key=lambda one: len(one.streams))[: target - max(found, target > 1)]:
                self.replicas.remove(one)
                for end, part in one.streams:  # they go on elsewhere
                    min(self.ready, key=lambda other: len(other.streams)).streams.append((end, part))

    def changes(self, seconds: float) -> int:
        last = self.counts[-int(seconds / TICK) :]
        return sum(one != other for one, other in pairwise(last))


# -- in virtual time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [3.0, 20.0])
@pytest.mark.parametrize("load", [1.5, 4.0])
def test_more_replicas_come_when_more_prompts_do(load: float, start: float) -> None:
    fleet = Fleet(start=start)
    fleet.run(120, 0.2)
    assert fleet.counts[-1] == 1
    fleet.run(120 + 2 * start, load)
    assert fleet.counts[-1] >= ceil(load)
    fleet.waits.clear()
    fleet.run(120, load)
    assert sorted(fleet.waits)[int(0.99 * len(fleet.waits))] < 5.0


@pytest.mark.parametrize("seconds_each", [0.05, 1.0])
@pytest.mark.parametrize("load", [0.1, 0.5, 0.78, 0.9, 0.97, 1.3, 1.6, 2.0, 2.4, 3.1, 5.5])
def test_a_constant_load_keeps_a_constant_number(load: float, seconds_each: float) -> None:
    fleet = Fleet()
    fleet.run(HOUR, load, seconds_each)
    fleet.run(3 * HOUR, load, seconds_each)
    assert fleet.changes(3 * HOUR) <= 2
    assert load < fleet.counts[-1] <= ceil(load / 0.8) + 2


def test_they_go_when_the_load_does_one_after_the_other_and_all_only_where_there_may_be_none() -> None:
    for least in (0, 1):
        fleet = Fleet(least=least)
        fleet.run(600, 4.0)
        assert fleet.counts[-1] >= 5
        fleet.run(600, 0.3)
        assert fleet.counts[-1] == 1
        fleet.run(IDLE + MEAN + 10, 0.0)
        assert fleet.counts[-1] == least


def test_there_is_room_for_all_streams() -> None:
    fleet = Fleet()
    for load in (0.05, 0.4, 0.1, 0.02):
        fleet.run(900, load, seconds_each=0.05, stream=60.0, room=1 / 64)
        assert sum(one.seen[-1].room for one in fleet.ready) <= len(fleet.replicas)
    most = max(fleet.counts)
    assert most >= 0.4 / 0.05 * 60 / 64
    fleet.run(1500, 0.02, seconds_each=0.05, stream=60.0, room=1 / 64)
    assert fleet.counts[-1] == 1


# -- laws --------------------------------------------------------------------------------------------------------------

part = st.floats(0, 1)
seconds = st.floats(0, 100)
one_report = st.builds(Report, work=part, backlog=seconds, room=st.floats(0, 3), start=st.floats(0.1, 60))
some = st.lists(one_report, min_size=1, max_size=6)


@given(some, st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_they_are_enough_and_the_same_reports_do_not_change_them_again(reports: Sequence[Report], target: int) -> None:
    found = wanted(reports, target)
    assert found >= sum(one.room for one in reports) - 1e-9
    assert found > sum(one.work for one in reports) or found == 0
    assert found == wanted(reports, found) or found == 0
    assert (found == 0) == (not any(one.work or one.backlog or one.room for one in reports))


@given(some, st.integers(1, 12), st.floats(0, 1), st.floats(0, 50), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_more_to_do_never_means_fewer(
    reports: list[Report], target: int, work: float, backlog: float, room: float
) -> None:
    first = reports[0]
    more = first._replace(work=min(1.0, first.work + work), backlog=first.backlog + backlog, room=first.room + room)
    assert wanted([more, *reports[1:]], target) >= wanted(reports, target) or not sum(map(sum, reports))


def test_before_a_report_nothing_changes() -> None:
    assert wanted([], 3) == 3


# -- what Serve has ----------------------------------------------------------------------------------------------------


def context(reports: Sequence[Report], *, replicas: int | None = None, target: int = 1, calls: float = 0.0) -> Any:
    names = [f"r{number}" for number in range(len(reports) if replicas is None else replicas)]
    metrics = {
        field: {name: one[at] for name, one in zip(names, reports, strict=False)}
        for at, field in enumerate(Report._fields)
    }
    return SimpleNamespace(
        aggregated_metrics=metrics if reports else None,
        running_replicas=names,
        target_num_replicas=target,
        total_num_requests=calls,
    )


def test_the_policy_of_serve_is_that_of_the_reports() -> None:
    busy = Report(work=1.0, backlog=30.0, room=0.5, start=10.0)
    assert policy(context([busy])) == (4, {})
    assert policy(context([busy], replicas=2, target=2)) == (4, {})  # the second one has not reported yet
    assert policy(context([], target=1)) == (1, {})
    idle = Report(0.0, 0.0, 0.0, 10.0)
    assert policy(context([idle])) == (0, {})
    assert policy(context([idle], calls=0.1)) == (1, {})  # a gateway has asked for one


def test_serve_takes_the_policy() -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
    from ray.serve.config import AutoscalingPolicy

    taken = AutoscalingPolicy(policy_function="kvcellar.cluster.scaling:policy").get_policy()
    assert taken(context([Report(1.0, 30.0, 0.5, 10.0)])) == (4, {})


# -- a replica ---------------------------------------------------------------------------------------------------------


def stats(*, tokens: int = 0, used: int = 0, running: int = 0, waiting: int = 0) -> Any:
    groups = (SimpleNamespace(cells=100, used=used), SimpleNamespace(cells=0, used=0))
    counts = {"running": running, "waiting": waiting, "max_sequences": 4}
    return SimpleNamespace(waiting_tokens=tokens, token_seconds=0.5, groups=groups, **counts)


def test_a_replica_reports_means_over_time() -> None:
    now = [0.0]
    meter = Meter(start=7.0, clock=lambda: now[0])
    assert meter.read() == {"work": 0.0, "backlog": 0.0, "room": 0.0, "start": 7.0}
    meter.note(stats(tokens=8, used=50, running=1))
    now[0] = 1.0
    meter.note(stats(used=20, running=4, waiting=2))
    now[0] = 4.0
    found = meter.read()
    assert found == pytest.approx({"work": 0.25, "backlog": 1.0, "room": (0.58 + 3 * 1.5) / 4, "start": 7.0})
    now[0] = 5.0
    assert meter.read() == {"work": 0.0, "backlog": 0.0, "room": 1.5, "start": 7.0}
