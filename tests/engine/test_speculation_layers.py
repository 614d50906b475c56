"""On every kind of layer, with every drafter: the text is that of plain decoding, and so is what memory has of it after
every round, in every cell and state row."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvcellar import Engine
from kvcellar.engine.speculate.drafter import Drafter
from kvcellar.engine.speculate.ngram import NGramDrafter
from tests.engine.mixes import Ear, assert_at_rest, assert_greedy, small_engine
from tests.engine.speculating import Oracle, Rounds, ask, report, speculates, told, watched
from tests.zoo import WINDOW

# Windows and chunks are 8 wide: all texts go far beyond, and drafts cross their borders at every offset.
KINDS = {
    "full": "llama",
    "sliding": "mistral",
    "sliding and full, with sinks": "gpt-oss",
    "chunked": "llama4-untempered",
    "convolutions": "lfm2",
    "convolutions and windows": "lfm3",
    "linear attention": "qwen3-next",
    "state spaces": "falcon-h1",
    "shared K/V": "gemma4-e2b",
    "latents": "deepseek-v3",
    "indexed, solo": "deepseek-v3.2",
    "own attention, solo": "bloom",
}
OTHER = {"deepseek-v3.2": 1}  # where two tokens are about as likely after the usual prompts
TOKENS = 22
DEPTH = 4
LONG = 11  # drafts
GREEDY = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Plain:
    """An engine, and what plain decoding gives on it."""

    engine: Engine
    prompts: list[list[int]]
    ears: list[Ear]
    rounds: Rounds

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return told(self.prompts, self.ears)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def plain(request: pytest.FixtureRequest) -> Iterator[Plain]:
    other = OTHER.get(request.param, 0)
    prompts = [[token + other for token in prompt] for prompt in ([*range(5, 16)], [33, 34, 33])]
    with small_engine(request.param) as engine:
        speculates(engine, None)
        with watched(engine) as rounds:
            ears = ask(engine, prompts, **GREEDY)
        for prompt, ear in zip(prompts, ears, strict=True):
            assert_greedy(request.param, prompt, ear.ids(), ended=False)
        assert rounds.kept == [1] * len(prompts) * (TOKENS - 1)
        yield Plain(engine, prompts, ears, rounds)
        assert_at_rest(engine)


def drafted(plain: Plain, drafter: Drafter, depth: int = DEPTH, *, clear: bool = True) -> tuple[list[Ear], Rounds]:
    """What comes of it, which is what comes of plain decoding, and every round has left the same in memory."""
    speculates(plain.engine, drafter, depth)
    with watched(plain.engine) as rounds:
        ears = ask(plain.engine, plain.prompts, clear=clear, **GREEDY)
    assert told(plain.prompts, ears) == plain.texts
    rounds.assert_as_in(plain.rounds)
    assert sum(rounds.kept) == len(plain.prompts) * (TOKENS - 1)
    return ears, rounds


@pytest.mark.parametrize("right", range(DEPTH + 1))
def test_as_many_drafts_as_are_right_are_kept(plain: Plain, right: int) -> None:
    ears, rounds = drafted(plain, Oracle(plain.texts, right))
    assert max(rounds.kept) == right + 1
    for ear in ears:
        assert report(ear).accepted == sum(report(ear).accepted_at[:right]) == TOKENS - 1 - report(ear).rounds


def test_each_completion_has_its_own_depth_and_its_own_errors(plain: Plain) -> None:
    oracle = Oracle(plain.texts)
    _, rounds = drafted(plain, oracle)
    assert set(oracle.rounds) == set(range(DEPTH + 1))
    assert len(set(rounds.kept)) >= 3


@pytest.mark.parametrize("right", [WINDOW - 1, WINDOW, LONG])
def test_drafts_may_be_longer_than_a_window_or_a_chunk(plain: Plain, right: int) -> None:
    _, rounds = drafted(plain, Oracle(plain.texts, right), LONG)
    assert max(rounds.kept) == right + 1


def test_n_grams_repeat_what_a_text_before_has_said(plain: Plain) -> None:
    """Of the same namespace: the second time all of it is known."""
    drafter = NGramDrafter()
    drafted(plain, drafter)
    ears, rounds = drafted(plain, drafter, clear=False)
    drafter.check()
    assert max(rounds.kept) == DEPTH + 1
    for ear in ears:
        assert report(ear).accepted > 0.7 * report(ear).drafted > 0
