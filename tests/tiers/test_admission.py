"""Rates as they were measured, what is worth restoring, and when a medium is tried again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.tiers.admission import Piece, Rate, restored
from kvcellar.memory.tiers.tier import Breaker


def test_a_rate_finds_latency_and_bandwidth_again() -> None:
    rate, rng = Rate(), random.Random(0)
    assert rate.seconds(10**9) == 0.0  # what was never measured is tried
    for _ in range(50):
        n = rng.randrange(1000, 10**6)
        rate.record(n, 0.01 + n / 10**8)
    for n in (0, 1000, 10**7):
        assert rate.seconds(n) == pytest.approx(0.01 + n / 10**8, rel=0.01)


def test_transfers_of_one_size_are_scaled() -> None:
    rate = Rate()
    for _ in range(5):
        rate.record(1000, 0.1)
    assert rate.seconds(1000) == pytest.approx(0.1)
    assert rate.seconds(4000) == pytest.approx(0.4)


def test_a_rate_follows_what_has_changed() -> None:
    rate, rng = Rate(), random.Random(0)
    for seconds in (1e-6, 1e-4):
        for _ in range(200):
            n = rng.randrange(1000, 2000)
            rate.record(n, n * seconds)
    assert rate.seconds(1500) == pytest.approx(0.15, rel=0.05)


pieces = st.lists(st.builds(Piece, st.integers(1, 1000), st.floats(0, 10)), max_size=8)


@given(pieces, st.floats(1, 1000))
def test_what_is_restored_takes_the_least_time_of_all_choices(chain: list[Piece], speed: float) -> None:
    def takes(count: int) -> float:
        return sum(one.seconds for one in chain[:count]) + sum(one.tokens for one in chain[count:]) / speed

    assert takes(restored(chain, speed)) <= min(map(takes, range(len(chain) + 1))) + 1e-6


def test_a_slow_piece_is_restored_for_the_sake_of_what_follows_only() -> None:
    slow, fast = Piece(10, 2.0), Piece(1000, 0.1)
    assert restored([slow], 10.0) == 0
    assert restored([slow, fast], 10.0) == 2
    assert restored([fast, slow], 10.0) == 1
    assert restored([], 10.0) == 0


def test_a_breaker_waits_longer_each_time_and_forgets_at_success() -> None:
    now = [0.0]
    breaker = Breaker(after=2, wait=1.0, longest=3.0, clock=lambda: now[0])
    breaker.failed()
    assert not breaker.down
    for wait in (1.0, 2.0, 3.0, 3.0):
        breaker.failed()
        assert breaker.down
        now[0] += wait - 0.5
        breaker.failed()  # a call that had begun before
        assert breaker.down
        now[0] += 0.5
        assert not breaker.down
    breaker.succeeded()
    breaker.failed()
    assert not breaker.down
    breaker.failed()
    now[0] += 0.9
    assert breaker.down
    now[0] += 0.1
    assert not breaker.down
