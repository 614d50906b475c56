"""A round from drafts to the report; a drafter that fails costs its drafts, never a request."""

import logging
from collections.abc import Sequence

import pytest
import torch

from kvcellar.engine.speculate.chain import Chain, Key, verify
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.speculator import FAILURES, IDLE, SHORTEST, Speculator, Tally
from tests.speculate.chains import Model, chain, sampler

TARGET = Model(1)


class Oracle:
    """Proposes the greedy text of the target."""

    name = "oracle"
    deepest = 4
    catches_up = False
    reads_hidden = True

    def __init__(self) -> None:
        self.fails = False
        self.closed: list[Key] = []
        self.kept: list[Key] = []
        self.forgotten: list[tuple[str | None, list[int]]] = []
        self.news: list[Committed] = []

    def propose(self, chains: Sequence[Chain]) -> None:
        for one in chains:
            while one.left > 0:
                one.add(int(TARGET([one.tokens[-1] if one.drafts else one.text[-1]]).argmax()))
        if self.fails:
            raise RuntimeError("the draft model is gone")

    def committed(self, news: Sequence[Committed]) -> None:
        self.news += news
        if self.fails:
            raise RuntimeError("the draft model is gone")

    def close(self, key: Key, *, keep: bool) -> None:
        self.closed.append(key)
        self.kept += [key] if keep else []

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        self.forgotten.append((namespace, list(tokens)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rounds(speculator: Speculator, clock: Clock, count: int, *, sequences: int = 2, alone: bool = True) -> list[int]:
    """Depths of the rounds. A step takes 1 s and 0.01 s for each row."""
    found: list[int] = []
    for _ in range(count):
        chains = [chain(sampler(temperature=0.0), 6, number=i) for i in range(sequences)]
        speculator.draft(chains)
        clock.now += 1 + 0.01 * sum(one.rows for one in chains)
        logits = torch.cat([TARGET([0, *one.tokens]) for one in chains])
        speculator.learn(chains, verify(chains, logits), alone=alone)
        found += [len(one.drafts) for one in chains]
    return found


def test_rounds_reach_the_depth_of_the_drafter_and_are_reported() -> None:
    clock = Clock()
    speculator = Speculator(Oracle(), clock=clock)
    depths = rounds(speculator, clock, 200)
    assert max(depths) == 4
    assert sum(depths[-40:]) > 120
    report = speculator.report(0)
    assert report is not None
    assert report.rounds == 200
    assert report.drafted == report.accepted == sum(depths[::2])
    assert report.tried_at == report.accepted_at
    assert len(report.depths) == 8
    assert report.depths[0][0] < report.depths[-1][0] <= report.depths[-1][1] <= 4
    plain = speculator.depth.plain_seconds(2)
    assert plain == pytest.approx(1.02, rel=0.01)
    pairs = zip(depths[::2], depths[1::2], strict=True)
    expected = sum((one + 1) * 1.02 - 1.02 - 0.01 * (one + other) for one, other in pairs if one)
    assert report.seconds_saved == pytest.approx(expected, rel=0.02)
    speculator.conclude(0)
    assert speculator.report(0) is None
    assert speculator.report(7) is None


def test_the_time_of_a_step_with_other_rows_is_not_measured() -> None:
    clock = Clock()
    speculator = Speculator(Oracle(), clock=clock)
    assert set(rounds(speculator, clock, 20, alone=False)) == {0}
    assert speculator.depth.plain_seconds(2) is None


def test_a_drafter_that_raises_has_no_drafts_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    clock, oracle = Clock(), Oracle()
    speculator = Speculator(oracle, clock=clock)
    rounds(speculator, clock, 50)
    oracle.fails = True
    failed = 0
    with caplog.at_level(logging.ERROR):
        while speculator.refused is None:
            assert set(rounds(speculator, clock, 1)) == {0}
            failed += 1
            assert failed < 50
    assert oracle.closed.count((0, 0)) == oracle.closed.count((1, 0)) == FAILURES
    assert "the draft model is gone" in speculator.refused
    assert any("is not used any more" in record.message for record in caplog.records)
    oracle.fails = False
    assert set(rounds(speculator, clock, 20)) == {0}
    speculator.committed([])


def test_a_single_failure_is_forgiven() -> None:
    clock, oracle = Clock(), Oracle()
    speculator = Speculator(oracle, clock=clock)
    rounds(speculator, clock, 50)
    for _ in range(3 * FAILURES):
        oracle.fails = True
        rounds(speculator, clock, 1)
        oracle.fails = False
        rounds(speculator, clock, 3)
    assert speculator.refused is None
    assert sum(rounds(speculator, clock, 10)) > 40


def test_hidden_states_reach_the_drafter_and_its_failure_drops_what_it_has() -> None:
    oracle = Oracle()
    speculator = Speculator(oracle)
    new = Committed((3, 0), "", (1, 2, 3), 0, (1, 2), torch.zeros(2, 4))
    speculator.committed([new])
    assert oracle.news == [new]
    oracle.fails = True
    speculator.committed([new])
    assert oracle.closed == [(3, 0)]
    speculator.close((3, 0))
    assert oracle.closed == [(3, 0)] * 2


def test_a_step_that_fails_leaves_no_trace() -> None:
    clock = Clock()
    speculator, other = Speculator(Oracle(), clock=clock), Speculator(Oracle(), clock=clock)
    rounds(speculator, clock, 60)
    rounds(other, clock, 60)
    sampling = sampler(temperature=0.0)
    other.draft([chain(sampling, 6)])
    assert sampling.produced == 0
    assert rounds(speculator, clock, 10) == rounds(other, clock, 10)


def test_a_tally_without_rounds_is_empty() -> None:
    report = Tally().report()
    assert (report.rounds, report.drafted, report.tried_at, report.depths) == (0, 0, (), ())


def test_a_tally_counts_by_position_and_over_time() -> None:
    tally = Tally()
    for depth in (0, 3, 3, 1):
        tally.add(depth, min(depth, 2), min(depth, 1), 0.5)
    report = tally.report()
    assert (report.rounds, report.drafted, report.accepted, report.seconds_saved) == (4, 7, 3, 2.0)
    assert (report.tried_at, report.accepted_at) == ((3, 2), (3, 0))
    assert report.depths == ((0.0, 0), (3.0, 3), (3.0, 3), (1.0, 1))


def test_a_drafter_that_cannot_read_what_was_committed_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    oracle = Oracle()
    speculator = Speculator(oracle, fixed=2)
    with caplog.at_level(logging.CRITICAL):
        for _ in range(FAILURES):
            assert speculator.refused is None
            one = chain(sampler(temperature=0.0), 6)
            speculator.draft([one])
            assert one.drafts, "a round with drafts does not make up for the failure in it"
            oracle.fails = True
            speculator.committed([Committed((3, 0), "", (1, 2, 3), 0, (1, 2), torch.zeros(2, 4))])
            oracle.fails = False
            speculator.learn([one], verify([one], TARGET([one.text[-1], *one.tokens])))
    assert speculator.refused is not None


def test_a_drafter_whose_drafts_make_steps_fail_is_given_up() -> None:
    speculator = Speculator(Oracle(), fixed=2)
    for _ in range(FAILURES):
        assert speculator.refused is None
        one = chain(sampler(temperature=0.0), 6)
        speculator.draft([one])
        assert one.drafts
        speculator.step_failed(RuntimeError("too many rows"))
        one.cut(0)
        speculator.learn([one], verify([one], TARGET([0])))
    assert speculator.refused is not None
    assert "too many rows" in speculator.refused


def test_weights_of_another_shape_or_type_are_refused_where_they_are_added() -> None:
    one = chain(sampler(temperature=0.8), 3)
    size = one.samplers[0].vocab_size
    for weights in (torch.zeros(size + 1, dtype=torch.int64), torch.zeros(size)):
        with pytest.raises(ValueError, match="int64"):
            one.add(1, weights)
    assert not one.drafts


def parked(speculator: Speculator, clock: Clock) -> None:
    """Let it find out that drafts do not pay."""
    for _ in range(IDLE + 8):
        if not speculator.parked:
            chains = [chain(sampler(temperature=0.0), 6)]
            speculator.draft(chains)
            clock.now += 1 + 5 * len(chains[0].drafts)
            speculator.learn(chains, verify(chains, torch.cat([TARGET([0, *one.tokens]) for one in chains])))
    assert speculator.parked


def test_a_drafter_that_does_not_pay_reads_nothing_until_a_trial() -> None:
    clock, oracle = Clock(), Oracle()
    speculator = Speculator(oracle, clock=clock)
    new = Committed((0, 0), "", (1, 2, 3), 0, (1, 2), torch.zeros(2, 4))
    speculator.committed([new])
    parked(speculator, clock)
    assert oracle.closed == [(0, 0)], "what it has read is not dropped"
    assert not oracle.kept
    assert not speculator.reads_hidden
    rounds = 0
    while speculator.parked:
        speculator.committed([new])
        speculator.rest([(0, 0), (1, 0)])
        rounds += 1
    assert oracle.news == [new]
    assert rounds >= SHORTEST
    assert speculator.reads_hidden
    report = speculator.report(1)
    assert report is not None
    assert (report.rounds, report.drafted) == (rounds, 0)


def test_what_the_drafter_takes_to_read_and_to_end_texts_counts() -> None:
    """Rounds with drafts are twice as fast as plain ones, but each text costs ten plain steps to read and to end."""
    for costs, pays in ((10.0, False), (0.1, True)):
        clock, oracle = Clock(), Oracle()
        speculator = Speculator(oracle, clock=clock)

        def slow(*_: object, clock: Clock = clock, costs: float = costs, **__: object) -> None:
            clock.now += costs / 2

        oracle.committed = oracle.close = slow  # type: ignore[method-assign]
        for number in range(60):
            if speculator.parked:
                break
            speculator.committed([Committed((number, 0), "", (1, 2, 3), 0, (1, 2), torch.zeros(2, 4))])
            for _ in range(4):
                chains = [chain(sampler(temperature=0.0), 6, number=number)]
                speculator.draft(chains)
                clock.now += 1 + 0.01 * chains[0].rows
                speculator.learn(chains, verify(chains, torch.cat([TARGET([0, *one.tokens]) for one in chains])))
            speculator.close((number, 0))
        assert speculator.parked != pays


def test_a_set_depth_is_drafted_whether_it_pays_or_not() -> None:
    clock = Clock()
    speculator = Speculator(Oracle(), clock=clock)
    parked(speculator, clock)
    speculator._fixed = 2
    assert not speculator.parked
    assert set(rounds(speculator, clock, 5)) == {2}
