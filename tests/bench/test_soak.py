"""The result of a soak follows from its samples, and its clients leave nothing in memory. No time is compared."""

import sys

import pytest

from benchmarks.soak import MAX_GROWTH, Sample, fill, judged, resident, soak, table
from kvcellar import Engine
from tests.engine.mixes import assert_at_rest

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from Linux's /proc")


def samples(*rss: int, cancelled: int = 3) -> list[Sample]:
    """One sample every ten seconds."""
    return [Sample(10.0 * (i + 1), size, 7, cancelled, 99) for i, size in enumerate(rss)]


@pytest.mark.parametrize(
    ("after", "passed"),
    [([1000, 1050], True), ([1000, 1051, 1000], False), ([500, 1000], True)],
    ids=["within", "above for a moment", "below"],
)
def test_only_growth_after_the_first_minutes_counts(after: list[int], passed: bool) -> None:
    found = judged("some", samples(1, 1000, 3000, 1000, *after), warm=40.0)
    assert (found.warm, found.most, found.least) == (1000, max(after), min(after))
    assert found.passed is passed
    assert ("FAILED" in table([found])[1]) is not passed
    assert MAX_GROWTH == 0.05


def test_a_soak_without_cancellations_fails() -> None:
    assert not judged("some", samples(1000, 1000, cancelled=0), warm=10.0).passed


@pytest.mark.parametrize("warm", [0.0, 99.0])
def test_samples_on_one_side_only_raise(warm: float) -> None:
    with pytest.raises(ValueError, match="both sides"):
        judged("some", samples(1000, 1000), warm=warm)


@pytest.mark.slow
@linux
def test_a_soak_leaves_nothing_in_memory() -> None:
    with Engine(cache_bytes=32 << 20, context=128, threads=1) as engine:
        fill(engine, seed=1)
        assert_at_rest(engine)
        seen = list(soak(engine, 1.0, seed=1, every=0.3))
        assert seen
        assert 0 < seen[-1].rss <= 2 * resident()
        assert_at_rest(engine)


def test_a_client_that_fails_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(cache_bytes=32 << 20, context=128, threads=1) as engine:
        monkeypatch.setattr(engine, "params", _raise)
        monkeypatch.setattr(engine, "stream", _raise)
        clients = soak(engine, 600.0, seed=1, every=0.1)
        monkeypatch.setattr("benchmarks.soak.fill", lambda *_: None)
        with pytest.raises(RuntimeError, match="the request failed"):
            list(clients)


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("the request failed")
