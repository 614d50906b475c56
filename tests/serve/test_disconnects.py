"""Random requests of every API, valid and invalid, whose clients leave at random moments: nothing is left over."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.mixes import assert_at_rest
from tests.serve.every_api import tiny_engine
from tests.serve.fake_engine import FakeEngine
from tests.serve.leaving import CLIENTS, Crowd
from tests.serve.random_requests import act
from tests.serve.wire import MODEL

SEED = 14
FEW, MANY = 120, 10_000  # requests; `--long`: many
MiB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")


def many_leave(crowd: Crowd, model: str, count: int, check: Callable[[], object]) -> None:
    """The first fifth of them fills pools and caches; the others leave the server with what it had then."""
    acts = [act(SEED, number, model=model, real=model != MODEL) for number in range(count)]
    with crowd.serving():
        before = crowd.send(acts[: count // 5], check=check)
        after = crowd.send(acts[count // 5 :], check=check)
    assert crowd.tally.requests == count
    assert crowd.tally.answered[200], "no answer was read to its end"
    assert crowd.tally.answered[400], "no request was invalid"
    assert after.files == before.files
    assert after.links <= before.links + CLIENTS
    left = {kind: number for kind, number in (after.objects - before.objects).items() if number > CLIENTS}
    assert not left, "a part of the requests has left objects of the server behind"
    assert after.bytes - before.bytes < 96 * MiB  # what is kept for clients, and caches, have limits of their own


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return MANY if request.config.getoption("--long") else FEW


@pytest.mark.parametrize("kind", ["fake", "lfm2"])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    kind: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the fake engine, each moment can be met; that of a hybrid network, whose memory is too small for all prompts,
    evicts meanwhile, and is checked again and again."""
    caplog.set_level(logging.ERROR)
    if kind == "fake":
        with FakeEngine() as engine, engine.scripted(delay=0.0005):
            many_leave(Crowd(engine, lambda: engine.running == 0), MODEL, count, lambda: None)
    else:
        with tiny_engine(tmp_path / "m", kind, max_sequences=4, cache_bytes=6_500_000) as engine:

            def at_rest() -> bool:
                stats, prompts = engine.stats(), engine._built.intake.prompts
                held = stats.running, stats.waiting, stats.sequences, stats.cells_used, stats.rows_used, prompts.taken
                return not any(held)

            many_leave(Crowd(engine, at_rest), "m", count, engine.check)
            assert_at_rest(engine)
    assert not caplog.records, "the server has met an error"
