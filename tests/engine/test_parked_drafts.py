"""While a head is parked, steps are those of an engine without one: no hidden states, no forward of the head, nothing
in its memory. A trial begins by itself, also in the middle of a text, and changes no text."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.engine.speculate.head import HISTORY
from kvcellar.engine.speculate.speculator import SHORTEST, Speculator
from tests.models.mtp import saved_beside

BYTES = 20_000_000
PROMPT = [3, 4, 5, 6, 7, 8] * 5
HOW = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = saved_beside(tmp_path_factory.mktemp("models") / "model", "llama", num_mtp_layers=1)
    with Engine(path, draft="mtp", cache_bytes=BYTES, threads=1) as made:
        yield made


class Counted:
    """Calls of what a head costs in each step of an engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden = self.forwards = 0
        guest, speculator = engine._built.guest, engine._built.loop.manager.drafting.speculator
        assert speculator is not None
        self.speculator: Speculator = speculator
        head = speculator.drafter._head  # type: ignore[attr-defined]
        states, forward = guest.forward_with_hidden, head.forward

        def with_hidden(*given: object) -> object:
            self.hidden += 1
            return states(*given)  # type: ignore[arg-type]

        def forwarded(*given: object) -> object:
            self.forwards += 1
            return forward(*given)

        monkeypatch.setattr(guest, "forward_with_hidden", with_hidden)
        monkeypatch.setattr(head, "forward", forwarded)

    def park(self, rounds: float) -> None:
        parking = self.speculator._parking
        assert parking is not None
        parking.parked, parking._left = True, rounds


def test_a_parked_head_costs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(PROMPT, **HOW).token_ids
    engine.clear_cache()
    counted, rounds = Counted(engine, monkeypatch), engine.stats().speculation
    counted.park(SHORTEST)
    result = engine.generate(PROMPT, **HOW)
    assert result.token_ids == expected
    assert (counted.hidden, counted.forwards) == (0, 0)
    engine.check()
    cache = engine._loop.manager.drafting.memory
    assert cache is not None
    assert not cache.memory.sequences
    assert result.speculation is not None
    assert (result.speculation.rounds, result.speculation.drafted) == (HOW["max_tokens"] - 1, 0)
    stats = engine.stats().speculation
    assert rounds is not None
    assert stats is not None
    assert stats.rounds == rounds.rounds + HOW["max_tokens"] - 1


def test_a_trial_begins_in_the_middle_of_a_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.clear_cache()
    how = HOW | {"max_tokens": HISTORY + 40}
    counted = Counted(engine, monkeypatch)
    counted.park(SHORTEST)
    expected = engine.generate(PROMPT, **how).token_ids
    engine.clear_cache()
    counted.park(10)
    assert engine.generate(PROMPT, **how).token_ids == expected
    assert counted.hidden, "no step had hidden states after the trial began"
    engine.check()
