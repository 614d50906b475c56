"""Short continuations by drafts have the distribution of plain sampling, judged by chi-square; a wrong residual does
not. tests/sample/test_couple.py has more draws, of one token."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from kvcellar.engine.sample import draw as drawing
from kvcellar.engine.sample.draw import edit, weights_of
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate.chain import Chain, extend, verify
from tests.speculate.chains import VOCAB, Model, sampler

LENGTH = 3  # tokens of a continuation
DEPTH = 2
TEXTS = 2_000
TARGET = Model(1)
DRAFT = TARGET.near(0.8)
PROMPT = [0, 3, 3]

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 3, "temperature": 1.3},
    "top-p": {"top_p": 0.8, "temperature": 1.2},
    "min-p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.8},
    "all": {
        "temperature": 1.4, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.5,
    },
}  # fmt: skip


class Tree:
    """The samplers after each sequence of tokens, made once: they depend on the tokens only."""

    def __init__(self, root: Sampler) -> None:
        self.after: dict[tuple[int, ...], Sampler] = {(): root}

    def __getitem__(self, path: tuple[int, ...]) -> Sampler:
        if path not in self.after:
            self.after[path] = self[path[:-1]].after(path[-1])
        return self.after[path]


def exact(tree: Tree) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, from the weights that plain sampling draws from."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in found.items():
            scores = edit(TARGET([path[-1] if path else PROMPT[-1]]), [tree[path]])
            weights = weights_of(scores, scores.max(1).values, [tree[path].params])[0].double()
            shares = (weights / weights.sum()).tolist()
            longer |= {(*path, token): chance * share for token, share in enumerate(shares) if share}
        found = longer
    return found


class Shared(Chain):
    """A chain whose samplers come from the tree: 10^5 copies would take longer than the draws."""

    def __init__(self, tree: Tree, path: tuple[int, ...], pos: int) -> None:
        super().__init__((0, 0), (), tree[path], pos, DEPTH, namespace="", shared=0)
        self.tree, self.path = tree, path

    def add(self, token: int, weights: torch.Tensor | None = None) -> None:
        self.drafts.append(drawing.Draft(token, weights))
        self.samplers.append(self.tree[(*self.path, *self.tokens)])


def guessed(chains: list[Shared]) -> None:
    """Drafts that are not drawn."""
    for chain in chains:
        for step in range(DEPTH):
            chain.add((chain.pos + step) % VOCAB)


def drawn(chains: list[Shared]) -> None:
    for _ in range(DEPTH):
        extend(chains, DRAFT([chain.tokens[-1] if chain.drafts else last(chain.path) for chain in chains]))


def last(path: tuple[int, ...]) -> int:
    return path[-1] if path else PROMPT[-1]


def continuations(tree: Tree, propose: Callable[[list[Shared]], None]) -> Iterator[tuple[int, ...]]:
    """Rounds until every continuation is complete. Each is at positions of its own, and so has noise of its own."""
    paths: list[tuple[int, ...]] = [()] * TEXTS
    running = list(range(TEXTS))
    while running:
        chains = [Shared(tree, paths[i], 10 * i + len(paths[i])) for i in running]
        propose(chains)
        rows = [token for chain in chains for token in (last(chain.path), *chain.tokens)]
        for i, verified in zip(running, verify(chains, TARGET(rows)), strict=True):
            paths[i] = (*paths[i], *(one.token_id for one in verified.drawn))[:LENGTH]
        running = [i for i in running if len(paths[i]) < LENGTH]
    yield from paths


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """In standard deviations above its mean. Rare continuations count as one."""
    assert counts.keys() <= expected.keys(), "a continuation that plain sampling cannot give"
    common = [path for path, chance in expected.items() if chance * TEXTS >= 10]
    cells = [(counts[path], expected[path] * TEXTS) for path in common]
    rest = TEXTS - sum(want for _, want in cells)
    if rest >= 10:
        cells.append((TEXTS - sum(got for got, _ in cells), rest))
    degrees = len(cells) - 1
    assert degrees >= 10
    return (sum((got - want) ** 2 / want for got, want in cells) - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_drawn_drafts_leave_the_distribution_as_it_is(case: str) -> None:
    tree = Tree(sampler(PROMPT, **CASES[case]))
    assert chi_square(Counter(continuations(tree, drawn)), exact(tree)) < 4


@pytest.mark.parametrize("case", ["all", "temperature"])
def test_guesses_leave_the_distribution_as_it_is(case: str) -> None:
    tree = Tree(sampler(PROMPT, **CASES[case]))
    assert chi_square(Counter(continuations(tree, guessed)), exact(tree)) < 4


def test_a_wrong_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(sampler(PROMPT, **CASES["temperature"]))
    monkeypatch.setattr(drawing, "residual", lambda weights, drawn_from: weights)
    assert chi_square(Counter(continuations(tree, drawn)), exact(tree)) > 8


def test_drafts_without_the_penalties_of_drafts_before_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    root = sampler(PROMPT, **CASES["penalties"])
    tree, blind = Tree(root), Tree(root)
    for path in (path for n in range(1, LENGTH + DEPTH + 1) for path in product(range(VOCAB), repeat=n)):
        blind.after[path] = root
    assert chi_square(Counter(continuations(blind, drawn)), exact(tree)) > 8
