"""Random engines answer as plain transformers do, and games of them find what is broken."""

import logging
import os
from collections.abc import Callable, Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvcellar.memory import restore_plan, store
from kvcellar.memory.cells.layouts import Chunked, Sliding
from kvcellar.memory.kv.claim import Claim
from kvcellar.memory.kv.states import States
from tests.engine.drafting import always_restored
from tests.engine.games import Game, play
from tests.zoo import ARCHS

EVERY_DAY, ALL = 20, 1000  # games


def seeds(config: pytest.Config) -> range:
    """`KVCELLAR_GAMES` is how many there are with `--long`; or the first one and the one after the last: `7:9`."""
    if not config.getoption("--long"):
        return range(EVERY_DAY)
    start, _, end = os.environ.get("KVCELLAR_GAMES", str(ALL)).rpartition(":")
    return range(int(start or 0), int(end))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            ARCHS[name].build().save_pretrained(found[name])
        return found[name]

    return path


@pytest.fixture(autouse=True)
def reads_back(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is stored is read back, also a few tokens of it."""
    always_restored(monkeypatch)
    for module in (restore_plan, store):
        monkeypatch.setattr(module, "LEAST", 8)
    monkeypatch.setattr(store, "SEGMENT", 16)


def test_random_engines_answer_as_plain_transformers_do(seed: int, tmp_path: Path, saved) -> None:
    done = play(seed, tmp_path, saved)
    assert done["tokens"] > 0


def test_games_have_each_architecture_with_scarce_memory_and_with_a_store() -> None:
    games = [Game.of(seed) for seed in range(100)]
    kinds = {(game.name, game.tight, game.stored) for game in games}
    assert len(kinds) == 4 * len({game.name for game in games})
    assert {game.draft for game in games} == {"", "ngram", "oracle", "model"}
    assert {game.settings["record"] for game in games} == {"auto", "off"}
    assert any(game.shifts for game in games)


# -- what games find --------------------------------------------------------------------------------------------------


def states_that_are_restored_fade(patch: pytest.MonkeyPatch) -> None:
    restore = States.restore

    def faded(self: States, row: int, content: Iterable[Tensor]) -> None:
        restore(self, row, (0.9 * values if values.is_floating_point() else values for values in content))

    patch.setattr(States, "restore", faded)


def resumed_anywhere(patch: pytest.MonkeyPatch) -> None:
    for kind in (Sliding, Chunked):
        patch.setattr(kind, "can_resume", lambda self, first, end, pos: 0 <= pos <= end)


def cells_that_a_sequence_shares_are_freed_with_their_claim(patch: pytest.MonkeyPatch) -> None:
    close = Claim.close

    def twice(self: Claim, rows: Any) -> None:
        held = [(table._cells, list(table.runs)) for table in self.tables.values()]
        close(self, rows)
        for cells, runs in held:
            for run in runs:
                piece = cells._at.get(run.cell)
                if piece is not None and piece.holders and piece.begins:
                    cells.drop([run])
                    return

    patch.setattr(Claim, "close", twice)


Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[tuple[Mutant, Callable[[Game], bool], int]] = [  # in which games, and how many of these are enough
    (states_that_are_restored_fade, lambda game: game.stored and game.name in ("lfm2", "falcon-h1", "qwen3-next"), 9),
    (resumed_anywhere, lambda game: game.shifts and game.name == "llama4", 9),
    (cells_that_a_sequence_shares_are_freed_with_their_claim, lambda game: game.tight, 9),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "may_find", "enough"), MUTANTS)
def test_games_find_what_is_broken(
    mutant: Mutant, may_find: Callable[[Game], bool], enough: int, tmp_path: Path, saved, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO, __name__)
    for number, seed in enumerate(islice((seed for seed in count() if may_find(Game.of(seed))), enough), start=1):
        with monkeypatch.context() as patch:
            mutant(patch)
            found = failure(seed, tmp_path / f"{seed} broken", saved)
        if found is not None and failure(seed, tmp_path / f"{seed}", saved) is None:
            logging.getLogger(__name__).info("%d games, the last with seed %d: %s", number, seed, found)
            return
    pytest.fail(f"{enough} games did not find it")


def failure(seed: int, where: Path, saved) -> AssertionError | None:
    """Why a game fails; None if it does not."""
    try:
        play(seed, where, saved)
    except AssertionError as error:
        return error
    return None
