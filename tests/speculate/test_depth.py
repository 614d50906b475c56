"""The controller finds a good depth on simulated machines, is never much slower than plain decoding, and limits what it
loses to probes."""

import math
from collections.abc import Callable

import pytest

from kvcellar.engine.speculate.cost import Curve, rounded
from kvcellar.engine.speculate.depth import DepthController, Limit, Outcome, Rates
from tests.speculate.simulated import Machine, play


def flat(rows: int) -> float:
    return 1 + 0.02 * (rows - 1)


def medium(rows: int) -> float:
    return 1 + 0.15 * (rows - 1)


def steep(rows: int) -> float:
    return 1 + 0.9 * (rows - 1)


def knee(rows: int) -> float:
    return 1.0 if rows <= 4 else 2.0


def tiles(rows: int) -> float:
    return -(-rows // 4) * 0.6 + 0.4


COSTS = [flat, medium, steep, knee, tiles]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("sequences", [1, 6])
def test_never_much_below_plain_decoding(cost: Callable[[int], float], sequences: int) -> None:
    for accept in ([0.0], [0.3], [0.6], [0.9, 0.6, 0.2]):
        machine = Machine(cost, accept)
        run = play(DepthController(catches_up=False), machine, 300, sequences=sequences)
        assert run.rate > 0.965 * machine.plain(sequences), accept


@pytest.mark.parametrize("cost", COSTS)
def test_never_much_below_plain_decoding_with_noise_and_pauses(cost: Callable[[int], float]) -> None:
    for accept in ([0.0], [0.6], [0.9, 0.6, 0.2]):
        machine = Machine(cost, accept, noise=0.15, pauses=0.01)
        run = play(DepthController(catches_up=False), machine, 700)
        assert run.rate > 0.955 * machine.plain(1), accept


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("accept", [[0.6], [0.9], [0.9, 0.7, 0.5, 0.3, 0.1]])
def test_finds_a_depth_nearly_as_good_as_the_best(cost: Callable[[int], float], accept: list[float]) -> None:
    machine = Machine(cost, accept)
    controller = DepthController(catches_up=False)
    play(controller, machine, 700)
    settled = play(controller, machine, 300)
    assert settled.rate > 0.94 * machine.best(1, 8)


def test_drafts_of_a_batch_go_where_they_are_accepted() -> None:
    machine = Machine(medium, [0.0])
    controller = DepthController(catches_up=False)
    limits = [Limit((number, 0), 4) for number in range(4)]
    for _ in range(400):
        depths = controller.choose(limits)
        outcomes = [
            Outcome(limit.key, depth, min(1, depth) if number else depth, 0 if number else depth)
            for number, (limit, depth) in enumerate(zip(limits, depths, strict=True))
        ]
        controller.observe(outcomes, machine.seconds(depths))
    chosen = [controller.choose(limits) for _ in range(20)]
    assert sum(depths[0] for depths in chosen) >= 60
    assert sum(sum(depths[1:]) for depths in chosen) <= 20


def test_what_was_learnt_serves_the_next_request() -> None:
    machine = Machine(flat, [0.95])
    controller = DepthController(catches_up=False)
    play(controller, machine, 400)
    controller.forget((0, 0))
    run = play(controller, machine, 20, first=1)
    assert run.rate > 0.85 * machine.best(1, 8)


@pytest.mark.parametrize("accept", [[0.9], [0.0]])
def test_follows_a_change_of_cost(accept: list[float]) -> None:
    controller = DepthController(catches_up=False)
    play(controller, Machine(flat, accept), 300)
    play(controller, Machine(steep, accept), 150)
    settled, machine = play(controller, Machine(steep, accept), 200), Machine(steep, accept)
    assert settled.rate > 0.95 * machine.best(1, 8)


def test_follows_a_change_of_acceptance_in_both_directions() -> None:
    controller = DepthController(catches_up=False)
    good, bad = Machine(medium, [0.9]), Machine(medium, [0.05])
    play(controller, good, 300)
    play(controller, bad, 80)
    assert play(controller, bad, 200).rate > 0.95 * bad.plain(1)
    play(controller, good, 300)
    assert play(controller, good, 200).rate > 0.85 * good.best(1, 8)


def test_plain_decoding_that_becomes_cheaper_is_noticed() -> None:
    """A step of one row alone becomes faster: drafting goes on until a probe has measured that."""
    controller = DepthController(catches_up=False)
    play(controller, Machine(flat, [0.5]), 300)

    def cheap(rows: int) -> float:
        return 0.3 if rows == 1 else flat(rows)

    machine = Machine(cheap, [0.5])
    play(controller, machine, 300)
    assert play(controller, machine, 200).rate > 0.95 * machine.plain(1)


@pytest.mark.parametrize("cost", COSTS)
def test_probes_lose_little(cost: Callable[[int], float]) -> None:
    """With drafts that are never accepted, every drafted step is a loss, apart from the first choice of depth."""
    machine = Machine(cost, [0.0])
    run = play(DepthController(catches_up=False), machine, 1000)
    assert run.seconds - 1000 * cost(1) < 0.012 * run.seconds + 4 * cost(1)


def test_a_drafter_that_seldom_has_drafts_is_used_where_it_has() -> None:
    controller = DepthController(catches_up=False)
    machine = Machine(flat, [0.9], offered=0.1)
    play(controller, machine, 1200)
    asked = [controller.choose([Limit((0, 0), 8)])[0] for _ in range(3)]
    assert max(asked) >= 3


def test_the_first_round_after_a_pause_is_not_representative() -> None:
    """A drafter computes what it has missed: 1 s for each round without drafts."""
    for catches_up in (False, True):
        controller = DepthController(catches_up=catches_up)
        missed, rounds, drafted = 0, 400, 0
        for _ in range(rounds):
            depth = controller.choose([Limit((0, 0), 4)])[0]
            seconds = flat(1 + depth) + (0.3 * min(missed, 50) if depth else 0)
            missed = 0 if depth else missed + 1
            controller.observe([Outcome((0, 0), depth, depth, depth)], seconds)
            drafted += depth > 0
        if catches_up:
            assert drafted > 0.9 * rounds


def test_steps_with_other_rows_teach_acceptance_but_not_cost() -> None:
    controller = DepthController(catches_up=False)
    machine = Machine(flat, [0.5])
    play(controller, machine, 50)
    before = controller.plain_seconds(1)
    for _ in range(50):
        controller.observe([Outcome((0, 0), 2, 2, 2)], None)
    assert controller.plain_seconds(1) == before
    assert controller.acceptance()[0] > 0.9


def test_nothing_is_drafted_where_nothing_may_be() -> None:
    controller = DepthController(catches_up=False)
    play(controller, Machine(flat, [1.0]), 100)
    assert controller.choose([Limit((0, 0), 0), Limit((1, 0), 0)]) == [0, 0]
    for most in (1, 3):
        assert all(controller.choose([Limit((0, 0), most)])[0] <= most for _ in range(10))


def test_large_batches_have_small_depths() -> None:
    """Rows are free up to 64: one request can have many drafts, 64 requests can have none."""

    def bound(rows: int) -> float:
        return 1.0 if rows <= 64 else rows / 64

    controller = DepthController(catches_up=False)
    alone = Machine(bound, [0.8])
    play(controller, alone, 300)
    assert play(controller, alone, 50).rate > 0.85 * alone.best(1, 8)
    crowd = Machine(bound, [0.3])
    controller = DepthController(catches_up=False)
    run = play(controller, crowd, 60, sequences=64)
    assert run.rate > 0.96 * crowd.plain(64)


def test_a_curve_never_falls_and_a_pause_changes_it_little() -> None:
    curve = Curve()
    for rows, seconds in ((1, 2.0), (3, 1.0), (5, 4.0), (300, 9.0)):
        for _ in range(6):
            curve.add(rows, seconds)
    curve.check()
    assert curve.seconds(1) == curve.seconds(3) == pytest.approx(1.5)
    assert curve.seconds(4) == pytest.approx((1.5 + 4) / 2)
    assert curve.seconds(0) == curve.seconds(1)
    assert curve.seconds(400) > curve.seconds(300)
    before = curve.seconds(5)
    curve.add(5, 1000.0)
    assert curve.seconds(5) <= before * 1.06


def test_the_first_step_of_a_size_does_not_count_alone() -> None:
    curve = Curve()
    curve.add(1, 1.0)
    curve.add(1, 1.0)
    curve.add(2, 50.0)
    assert curve.most == 1
    curve.add(2, 1.1)
    assert curve.seconds(2) == pytest.approx(1.1)


def test_sizes_are_rounded_to_similar_ones() -> None:
    for rows in range(1, 5000):
        assert rows * (1 - 1 / 16) < rounded(rows) <= rows
        assert rounded(rounded(rows)) == rounded(rows)


def test_rates_forget_and_begin_with_those_of_all() -> None:
    common = Rates()
    assert (common.rate(0), common.rate(3), common.trusted) == (1.0, 1.0, 0)
    for _ in range(100):
        common.add(2, 1)
    assert common.rate(0) == pytest.approx(1.0)
    assert common.rate(1) == common.rate(5) == 0.0
    assert common.trusted == 2
    own = Rates(common)
    assert own.rate(0) == pytest.approx(1.0)
    for _ in range(40):
        own.add(1, 0)
        common.add(1, 0)
    assert own.rate(0) < 0.1
    for _ in range(100):
        common.add(1, 1)
    assert common.rate(0) > 0.95


def test_rounds_in_which_the_drafter_catches_up_are_neither_plain_nor_free() -> None:
    """A useless drafter that has to catch up with each new text, for 8 rounds of three plain steps each."""
    controller, seconds, rounds = DepthController(catches_up=True), 0.0, 3000
    behind = 0
    for number in range(rounds):
        if number % 200 == 0:
            behind = 8
        (depth,) = controller.choose([Limit((number // 200, 0), 8)])
        late = depth > 0 and behind > 0
        behind -= late
        took = 3.0 if late else 1.0 + 0.1 * depth
        drafted = 0 if late else depth
        controller.observe([Outcome((number // 200, 0), drafted, min(1, drafted), 0)], took)
        seconds += took
    plain = controller.plain_seconds(1)
    assert plain == pytest.approx(1.0, rel=0.01)
    assert rounds / seconds > 0.965


@pytest.mark.parametrize("accept", [0.3, 0.8])
def test_a_machine_that_becomes_slower_and_faster_is_not_taken_for_a_change_of_depths(accept: float) -> None:
    """The speed of all steps changes by a factor of three, in waves, while each depth costs as much as before."""
    machine, controller = Machine(medium, [accept], noise=0.1), DepthController(catches_up=False)
    limits, seconds, tokens = [Limit((0, 0), 8)], 0.0, 0.0
    for number in range(2400):
        slower = 3 ** math.sin(number / 150)
        (depth,) = controller.choose(limits)
        got = machine.accepted(depth)
        controller.observe([Outcome((0, 0), depth, min(got + 1, depth), got)], slower * machine.seconds([depth]))
        if number >= 400:
            seconds, tokens = seconds + machine.seconds([depth], noisy=False), tokens + machine.tokens(depth)
    assert tokens / seconds > 0.93 * machine.best(1, 8)
    assert tokens / seconds > 0.96 * machine.plain(1)


def test_probes_in_steps_with_other_rows_are_limited_too() -> None:
    """Useless drafts on a server where every step has rows of a prompt, too."""
    controller, machine = DepthController(catches_up=False), Machine(steep, [0.0])
    play(controller, machine, 100)
    limits, lost = [Limit((0, 0), 8)], 0.0
    for _ in range(1000):
        (depth,) = controller.choose(limits)
        controller.observe([Outcome((0, 0), depth, min(1, depth), 0)], None)
        lost += machine.seconds([depth]) - machine.seconds([0])
    assert lost < 0.012 * 1000 * machine.seconds([0]) + 4 * machine.seconds([0])


def test_what_a_round_has_won_is_reckoned_with_what_its_drafter_took_to_catch_up() -> None:
    controller, machine = DepthController(catches_up=True), Machine(flat, [1.0])
    play(controller, machine, 200)
    key = (0, 0)
    controller.choose([Limit(key, 4)])
    plain = controller.plain_seconds(1)
    assert plain is not None
    controller.choose([Limit(key, 4)])
    won = controller.observe([Outcome(key, 4, 4, 4)], flat(5), proposed=0.1)
    assert won == pytest.approx(5 * flat(1) - flat(5), rel=0.05)
    other = (9, 0)
    controller.choose([Limit(other, 4)])
    late = controller.observe([Outcome(other, 4, 4, 4)], 3 + flat(5), proposed=3.0)
    assert late == pytest.approx(won - 3.0, rel=0.05)
    assert controller.observe([Outcome(key, 0, 0, 0)], flat(1), proposed=2.0) <= 0.01
