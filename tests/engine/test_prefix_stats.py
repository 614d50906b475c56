"""The statistics of the prefix cache add up to the records of the requests, over resets and on every kind of layer."""

import random
from collections import Counter

import pytest

from kvcellar import Engine
from kvcellar.events import Recall
from tests.engine.mixes import small_engine, tokens
from tests.engine.test_why import GREEDY, stored_engine
from tests.engine.tiered import settled


def recalled(engine: Engine, prompt: list[int], **options) -> Recall:
    found = engine.generate(prompt, **GREEDY | options).recall
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_totals_are_the_sums_of_what_requests_report(name) -> None:
    rng = random.Random(7)
    words = [list(tokens(rng, 30)) for _ in range(3)]
    with small_engine(name) as engine:
        records = []
        for number in range(12):
            records.append(recalled(engine, [one for word in rng.choices(words, k=2) for one in word]))
            if number == 6:
                before = engine.stats().prefixes
                engine.clear_cache()
                cleared = engine.stats().prefixes
                assert (cleared.tokens, cleared.lost) == (0, before.lost + before.tokens)
                assert cleared.lost_checkpoints == before.lost_checkpoints + before.checkpoints
        found = engine.stats().prefixes
        for field in ("asked", "matched", "restored"):
            assert getattr(found, field) == sum(getattr(one, field) for one in records)
        sources, missed = Counter[str](), Counter[str]()
        for one in records:
            sources.update(dict(one.sources))
            missed[one.reason] += one.asked - one.restored
        assert found.sources == dict(+sources)
        assert found.missed == dict(+missed)
        assert sum(found.missed.values()) == found.asked - found.restored
        assert (found.checkpoints > 0) == (name != "llama")
        engine.clear_cache()
        after = engine.stats().prefixes
        assert (after.tokens, after.checkpoints) == (0, 0)
        assert after.lost == found.lost + found.tokens


def test_forks_are_counted_and_totals_outlast_a_recovery() -> None:
    with small_engine("llama") as engine:
        engine.generate(list(tokens(random.Random(2), 40)), **GREEDY, n=3)
        before = engine.stats().prefixes
        assert before.forks == 2
        engine._loop.call(engine._loop.manager._reset_cache)
        after = engine.stats().prefixes
        assert (after.asked, after.forks, after.tokens) == (before.asked, 2, 0)
        assert after.lost == before.lost + before.tokens > 0


def test_traffic_of_a_tier_is_what_was_written_and_read_there(tmp_path) -> None:
    prompt = list(tokens(random.Random(3), 200))
    with stored_engine(tmp_path) as engine:
        recalled(engine, prompt)
        settled(engine)
        store = engine.stats().store
        assert store is not None
        disk = store.tier("disk")
        assert disk.written_bytes > 0
        assert disk.read_bytes == 0
    with stored_engine(tmp_path) as engine:
        assert recalled(engine, prompt).sources[0][0] in ("host", "disk")
        store = engine.stats().store
        assert store is not None
        assert 0 < store.tier("disk").read_bytes <= disk.written_bytes
        assert engine.stats().prefixes.sources["disk"] > 0
