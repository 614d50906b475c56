"""Noise: the same for the same arguments, unrelated for any others."""

from kvcellar.engine.sample.sampler import uniform


def test_noise_is_written_in_stone() -> None:
    """Answers must not change with a version of Python or of ours: these numbers may never change."""
    assert uniform(0, 0, 0) == 0.32733142713340824
    assert uniform(-1, 3, 17) == 0.33430277427723176
    assert uniform(2**64 - 1, 0, 2**40, "accept") == 0.08039362577115639


def test_noise_differs_in_every_argument() -> None:
    seeds = (0, 1, -1, 2**64 - 1, -(2**63))
    numbers = {uniform(s, c, p, why) for s in seeds for c in range(3) for p in range(3) for why in ("draw", "accept")}
    assert len(numbers) == len(seeds) * 3 * 3 * 2


def test_noise_is_spread_evenly() -> None:
    buckets = [0] * 16
    for pos in range(4096):
        number = uniform(7, 0, pos)
        assert 0 <= number < 1
        buckets[int(number * 16)] += 1
    assert sum((count - 256) ** 2 / 256 for count in buckets) < 37.7  # chi-square, 15 degrees, one in a thousand
