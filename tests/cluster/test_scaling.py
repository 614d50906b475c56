"""How many replicas there are: by laws, and in virtual time, where replicas are queues of prompts."""

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, exp
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.cluster.scaling import MEAN_SECONDS, Meter, Report, calmed, policy, wanted
from kvcellar.errors import BadRequest

TICK = 0.5  # seconds of a step
IDLE = 300.0
HOUR = 3600.0


class Replica:
    """Computes one prompt after the other, and keeps streams."""

    def __init__(self, ready: float, start: float) -> None:
        self.ready, self.start = ready, start
        self.left, self.came = 0.0, 0.0  # seconds of prompts: now, and of those that came in this step
        self.streams: list[tuple[float, float]] = []  # when each ends, and which part of the room it has
        self.work, self.seen = 0.0, deque[float](maxlen=int(2 * MEAN_SECONDS / TICK))  # of room

    def pass_tick(self, now: float) -> None:
        self.left = max(0.0, self.left - TICK)
        self.streams = [one for one in self.streams if one[0] > now]
        self.work = self.work * exp(-TICK / MEAN_SECONDS) + self.came / MEAN_SECONDS
        self.came = 0.0
        self.seen.append(sum(part for _, part in self.streams))

    def report(self) -> Report:
        return Report(self.work, self.left, sum(self.seen) / len(self.seen), self.start)


class Fleet:
    """As Serve runs it: more replicas at once, fewer when that has been wanted for `IDLE` seconds."""

    def __init__(self, *, least: int = 1, most: int = 64, start: float = 10.0, seed: int = 1) -> None:
        self.least, self.most, self.start = least, most, start
        self.now, self.random = 0.0, random.Random(seed)
        self.replicas = [Replica(0.0, start)]
        self.fewer_since: float | None = None
        self.peak = 0
        self.counts: list[int] = []  # of each step
        self.waits: list[float] = []

    def run(
        self, seconds: float, load: float, seconds_each: float = 0.2, *, stream: float = 0.0, room: float = 0.0
    ) -> None:
        """`load`: seconds of prompts that come in a second."""
        until = self.now + seconds
        coming = self.now + (self.random.expovariate(load / seconds_each) if load else 2 * seconds)
        while self.now < until:
            self.now += TICK
            while coming <= self.now:
                self._take(self.random.expovariate(1 / seconds_each), stream, room)
                coming += self.random.expovariate(load / seconds_each)
            for one in self.ready:
                one.pass_tick(self.now)
            if self.now % 2 < TICK:
                self._decide()
            self.counts.append(len(self.replicas))

    @property
    def ready(self) -> list[Replica]:
        return [one for one in self.replicas if one.ready <= self.now]

    def _take(self, seconds: float, stream: float, room: float) -> None:
        best = min(self.ready, key=lambda one: (one.left, len(one.streams)))
        self.waits.append(best.left)
        best.left += seconds
        best.came += seconds
        best.streams.append((self.now + best.left + stream, room))

    def _decide(self) -> None:
        target = len(self.replicas)
        reports = [one.report() for one in self.ready if one.seen]
        found, self.peak = calmed(wanted(reports, target), target, self.peak)
        found = min(self.most, max(self.least, found))
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
    fleet.run(60 + 2 * start, load)
    assert ceil(load) <= fleet.counts[-1] <= ceil(load) + 1 + load * start / 15
    fleet.waits.clear()
    fleet.run(120, load)
    assert sorted(fleet.waits)[int(0.99 * len(fleet.waits))] < 2.0


@pytest.mark.parametrize(("seconds_each", "most"), [(0.2, 4), (1.0, 12)])
@pytest.mark.parametrize("load", [0.5, 0.78, 0.97, 1.6, 2.4])
def test_a_constant_load_keeps_a_constant_number(load: float, seconds_each: float, most: int) -> None:
    """A prompt of many seconds is like a change of the load."""
    fleet = Fleet()
    fleet.run(HOUR / 2, load, seconds_each)
    fleet.run(3 * HOUR, load, seconds_each)
    assert fleet.changes(3 * HOUR) <= most
    last = fleet.counts[-int(3 * HOUR / TICK) :]
    assert load < min(last) <= max(last) <= ceil(load / 0.8) + 1 + 2 * seconds_each


def test_they_go_when_the_load_does_one_after_the_other_and_all_only_where_there_may_be_none() -> None:
    for least in (0, 1):
        fleet = Fleet(least=least)
        fleet.run(300, 4.0)
        assert fleet.counts[-1] >= 5
        fleet.run(3 * IDLE, 0.3)
        assert fleet.counts[-1] == 1
        fleet.run(IDLE + MEAN_SECONDS + 10, 0.0)
        assert fleet.counts[-1] == least


def test_there_is_room_for_all_streams() -> None:
    fleet = Fleet()
    for load in (0.05, 0.4, 0.1, 0.02):
        fleet.run(900, load, seconds_each=0.05, stream=60.0, room=1 / 64)
        assert sum(one.seen[-1] for one in fleet.ready) <= len(fleet.replicas)
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
    assert (found == 0) == (not any(one.backlog or one.room for one in reports))


@given(some, st.integers(1, 12), st.floats(0, 1), st.floats(0, 50), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_more_to_do_never_means_fewer(
    reports: list[Report], target: int, work: float, backlog: float, room: float
) -> None:
    first = reports[0]
    more = first._replace(work=min(1.0, first.work + work), backlog=first.backlog + backlog, room=first.room + room)
    assert wanted([more, *reports[1:]], target) >= wanted(reports, target)


def test_before_a_report_nothing_changes() -> None:
    assert wanted([], 3) == 3


# -- what Serve has ----------------------------------------------------------------------------------------------------


def context(
    reports: Sequence[Report], *, replicas: int | None = None, target: int = 1, calls: float = 0.0, **state: int
) -> Any:
    """`room` is a mean, and what is before the last value does not count otherwise."""
    names = [f"r{number}" for number in range(len(reports) if replicas is None else replicas)]
    columns = dict(zip(Report._fields, zip(*reports, strict=True), strict=bool(reports)))
    values = {field: dict(zip(names, column, strict=False)) for field, column in columns.items()}
    series = {
        name: {one: [SimpleNamespace(value=99.0), SimpleNamespace(value=value)] for one, value in column.items()}
        for name, column in values.items()
    }
    return SimpleNamespace(
        aggregated_metrics={"room": values["room"]} if reports else None,
        raw_metrics=series if reports else None,
        running_replicas=names,
        target_num_replicas=target,
        total_num_requests=calls,
        policy_state=state,
    )


BUSY, RESTS = Report(work=1.5, backlog=40.0, room=0.5, start=20.0), Report(0.01, 0.0, 0.0, 20.0)


def test_the_policy_of_serve_is_that_of_the_reports() -> None:
    assert policy(context([BUSY])) == (4, {"peak": 0})
    assert policy(context([BUSY], replicas=2, target=2)) == (4, {"peak": 0})  # the second one has not reported yet
    assert policy(context([], target=1)) == (1, {"peak": 0})
    assert policy(context([RESTS])) == (0, {"peak": 0})
    assert policy(context([RESTS], calls=0.1)) == (0, {"peak": 0})  # gateways meet it


def test_as_many_go_as_were_not_needed_all_the_time() -> None:
    low, more = Report(0.2, 0.0, 0.2, 20.0), Report(0.9, 0.1, 0.2, 20.0)
    found, state = policy(context([low] * 4, target=4))
    assert (found, state) == (1, {"peak": 1})
    assert policy(context([low, more, *[low] * 2], target=4, **state)) == (2, {"peak": 2})
    assert policy(context([low] * 4, target=4, peak=2)) == (2, {"peak": 2})
    assert policy(context([BUSY] * 4, target=4, peak=2))[1] == {"peak": 0}
    assert policy(context([low] * 2, target=2, peak=2)) == (1, {"peak": 1})  # it is that of before


def test_serve_takes_the_policy() -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
    from ray.serve.config import AutoscalingPolicy

    taken = AutoscalingPolicy(policy_function="kvcellar.cluster.scaling:policy").get_policy()
    assert taken(context([BUSY])) == (4, {"peak": 0})


def test_serve_itself_starts_a_replica_for_a_call_where_there_is_none() -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingConfig

    none = context([], target=0, calls=0.1)
    none.current_num_replicas, none.config = 0, AutoscalingConfig(min_replicas=0, max_replicas=2)
    assert policy(none)[0] == 0
    assert _apply_autoscaling_config(policy)(none)[0] == 1


def test_a_description_says_how_many_there_are() -> None:
    pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
    from kvcellar.cluster.application import app, replicas_of

    assert [replicas_of(text) for text in (3, "3", "0..2", "2..2")] == [(3, 3), (3, 3), (0, 2), (2, 2)]
    for wrong in (0, -1, "0", "3..2", "0..0", "1..", "many", "1..2..3"):
        with pytest.raises(BadRequest, match="a number of at least 1, or MIN"):
            app({"replicas": wrong})
    store = {"store_remote": "file:///somewhere"}
    for wrong in (
        {"prefill": 1},
        {"prefill": "0..1", "engine": store},
        {"prefill": 1, "replicas": "0..1", "engine": store},
    ):
        with pytest.raises(BadRequest, match="replicas for prompts need others"):
            app(wrong)


# -- a replica ---------------------------------------------------------------------------------------------------------


def stats(*, come: int = 0, waiting_tokens: int = 0, used: int = 0, running: int = 0, waiting: int = 0) -> Any:
    """`come`: tokens of prompts that were begun with."""
    groups = (SimpleNamespace(cells=100, used=used), SimpleNamespace(cells=0, used=0))
    prefixes = SimpleNamespace(asked=come + 1000, restored=1000)
    counts = {"running": running, "waiting": waiting, "max_sequences": 4, "token_seconds": 0.5}
    return SimpleNamespace(waiting_tokens=waiting_tokens, groups=groups, prefixes=prefixes, **counts)


def test_a_replica_reports_its_work_what_waits_and_mean_room() -> None:
    now = [0.0]
    meter = Meter(start=7.0, clock=lambda: now[0])
    assert meter.read() == {"work": 0.0, "backlog": 0.0, "room": 0.0, "start": 7.0}
    meter.note(stats(waiting_tokens=30, used=50, running=1))
    now[0] = 1.0
    meter.note(stats(come=30, used=20, running=4, waiting=2))  # computed: it has come once
    now[0] = 4.0
    work = 15 / MEAN_SECONDS * exp(-4 / MEAN_SECONDS)
    assert meter.read() == pytest.approx({"work": work, "backlog": 0.0, "room": (0.8 + 3 * 1.5) / 4, "start": 7.0})
    now[0] = 5.0
    meter.note(stats(come=30, waiting_tokens=8, used=20))
    found = meter.read()
    assert (found["backlog"], found["room"]) == (4.0, 1.5)


def test_work_that_comes_all_the_time_is_that_of_a_second() -> None:
    now, rate = [0.0], 0.7
    meter = Meter(start=7.0, clock=lambda: now[0])
    for step in range(1, 400):
        now[0] = 0.25 * step
        meter.note(stats(come=round(step * 0.25 * rate / 0.5 * 1000) // 1000, running=1))
    assert meter.read()["work"] == pytest.approx(rate, abs=0.05)
