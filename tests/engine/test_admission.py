"""A request is restored where that takes less time than computing it, by what this machine has been measured to do."""

from kvcellar import Engine
from kvcellar.frontend.result import Collector
from tests.engine.test_store import GREEDY, conversation, opened, saved  # noqa: F401
from tests.engine.tiered import acknowledged, store_of


def asked(engine: Engine, prompt: list[int]):
    """A result with its recall."""
    collector = Collector(1)
    engine.submit(prompt, engine.params(**GREEDY), deliver=collector.deliver)
    return collector.result()


def test_what_is_cheaper_to_compute_is_computed_and_the_record_says_so(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("slow", 1, 300))
    with opened(saved["llama"], tmp_path / "store") as engine:
        wanted = asked(engine, prompt).token_ids
        acknowledged(engine)
        restores, transfers = store_of(engine).restores, store_of(engine).transfers
        for fast, slow, cached in ((1e-6, 10.0, 0), (10.0, 1e-6, len(prompt) - 1)):
            engine.clear_cache()
            for _ in range(100):
                restores.planner.prefill.record(512, 512 * fast)
                transfers.reads["disk"].record(10_000, slow)
            found = asked(engine, prompt)
            assert (found.token_ids, found.usage.cached_tokens) == (wanted, cached)
            assert (found.recall.reason == "cheaper to recompute") == (not cached)
        assert engine.stats().store.declined == 1
        assert restores.planner.prefill.seconds(512) > 0


def test_rates_are_measured_again_when_restoring_seemed_too_slow(saved, tmp_path) -> None:  # noqa: F811
    prompt = next(conversation("again", 1, 200))
    with opened(saved["llama"], tmp_path / "store") as engine:
        engine.generate(prompt, **GREEDY)
        acknowledged(engine)
        restores, transfers = store_of(engine).restores, store_of(engine).transfers
        transfers.reads["disk"].record(10_000, 1000.0)
        cached = []
        for _ in range(40):
            restores.planner.prefill.record(512, 0.1)
            engine.clear_cache()
            cached.append(engine.generate(prompt, **GREEDY).usage.cached_tokens)
        assert cached[0] == 0
        assert cached[-1] == len(prompt) - 1, "one slow read is remembered for ever"
