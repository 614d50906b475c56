"""A drafter that does not pay is parked: what it loses is bounded, its trials become rarer, and what pays goes on."""

import random

import pytest

from kvcellar.engine.speculate.speculator import IDLE, LONGEST, MOST, SHARE, SHORTEST, Parking

STEP = 0.02  # seconds of a plain step


def rests(parking: Parking) -> int:
    """Rounds until the next trial."""
    rounds = 1
    while not parking.rest():
        rounds += 1
        parking.check()
    return rounds


def test_a_drafter_whose_drafts_are_never_chosen_is_parked_and_tried_ever_more_rarely() -> None:
    parking, waits = Parking(), list[int]()
    while len(waits) < 8:
        for number in range(IDLE):
            assert not parking.parked, number
            parking.observe(0.0, STEP, drafting=False)
            parking.check()
        assert parking.parked
        waits.append(rests(parking))
    assert waits == [min(SHORTEST * 2**trial, LONGEST) for trial in range(8)]


@pytest.mark.parametrize("lost", [0.1, 0.7, 3.0])
def test_a_drafter_that_loses_in_every_round_is_parked_for_as_long_as_its_loss_allows(lost: float) -> None:
    parking, rounds, seconds = Parking(), 0, 0.0
    while not parking.parked:
        parking.observe(-lost * STEP, STEP, drafting=True)
        rounds, seconds = rounds + 1, seconds + lost * STEP
    assert seconds <= (MOST + lost) * STEP * 1.001
    assert rests(parking) >= int(seconds / STEP / SHARE) - 1


def test_what_is_spent_beside_rounds_is_set_against_what_they_win() -> None:
    """Each text costs 6 steps to read, and its rounds win a tenth of a step each: 100 of them pay for it, 20 do not."""
    for rounds, pays in ((100, True), (20, False)):
        parking = Parking()
        parking.observe(0.0, STEP, drafting=True)
        for _ in range(40):
            parking.spend(6 * STEP)
            for _ in range(rounds):
                if not parking.parked:
                    parking.observe(0.1 * STEP, STEP, drafting=True)
            parking.check()
        assert parking.parked != pays


def test_what_was_won_long_ago_does_not_pay_for_losses_without_end() -> None:
    parking = Parking()
    for _ in range(10_000):
        parking.observe(STEP, STEP, drafting=True)
    rounds = 0
    while not parking.parked:
        parking.observe(-0.5 * STEP, STEP, drafting=True)
        rounds += 1
    assert rounds <= 2 * 2 * MOST + 2


def test_a_trial_that_pays_makes_the_next_ones_frequent_again() -> None:
    parking = Parking()
    for _ in range(4):
        for _ in range(IDLE):
            parking.observe(0.0, STEP, drafting=False)
        assert rests(parking)
    for _ in range(20):
        parking.observe(STEP, STEP, drafting=True)
    for _ in range(IDLE):
        parking.observe(0.0, STEP, drafting=False)
    assert rests(parking) == SHORTEST


def test_luck_of_single_rounds_does_not_park_what_pays() -> None:
    """Rounds that win a fifth of a step on average, and half of them lose three fifths."""
    draw, parking = random.Random(3), Parking()
    for _ in range(5000):
        parking.observe(draw.choice((1.0, -0.6)) * STEP, STEP, drafting=True)
        parking.check()
        assert not parking.parked
