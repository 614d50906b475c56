"""10^5 short continuations by drafts have the distribution of plain sampling, judged by chi-square; by a wrong rule
they have another.

The continuations are played all at once, with the parts of a round: what rows draw from, and how drafts are kept and
replaced. `test_distribution` plays fewer, with whole rounds and the sampler's noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kvcellar.engine.sample.couple import keeps, residual
from kvcellar.engine.sample.draw import edit, pick, weights_of
from tests.speculate.chains import VOCAB, Model, sampler
from tests.speculate.test_distribution import CASES, PROMPT

DRAWS = 100_000
LENGTH = 3  # tokens of a continuation: at most two drafts, and one that follows them
TARGET = Model(1)
DRAFT = TARGET.near(0.8)
DRAW, DRAFT_OF, ACCEPT = range(3)  # purposes of noise

# Continuations so far are nodes of a tree: 0 is none, and the children of a node are consecutive.
NODES = sum(VOCAB**n for n in range(LENGTH))
PATHS: list[tuple[int, ...]] = [()]
for node in range(NODES):
    PATHS += [(*PATHS[node], token) for token in range(VOCAB)]


@cache
def noise() -> Tensor:
    """[purpose,DRAWS,LENGTH] float64: what is drawn again at a position is drawn by the same noise."""
    return torch.rand(3, DRAWS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@cache
def tables(case: str) -> tuple[Tensor, Tensor]:
    """[NODES,VOCAB]: what the next token is drawn from after each continuation, and what its draft is drawn from."""
    samplers = [sampler(PROMPT, **CASES[case])]
    for path in PATHS[1:NODES]:
        parent = PATHS.index(path[:-1])
        samplers.append(samplers[parent].after(path[-1]))
    last = [path[-1] if path else PROMPT[-1] for path in PATHS[:NODES]]

    def weights(model: Model) -> Tensor:
        scores = edit(model(last), samplers)
        return weights_of(scores, scores.max(1).values, [one.params for one in samplers])

    return weights(TARGET), weights(DRAFT)


@dataclass(frozen=True)
class Rule:
    """How a row draws. Some are wrong."""

    kept: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = keeps
    left: Callable[[Tensor, Tensor], Tensor] = residual
    sees_drafts: bool = True  # whether a row has the penalties of the drafts before it
    bonus_of_draft: bool = False  # whether the last row draws what the draft model would
    goes_on: bool = False  # whether drafts behind a rejected one are taken, too


RIGHT = Rule()
WRONG = {
    "residual: the target": Rule(left=lambda p, q: p),
    "residual: reversed": Rule(left=lambda p, q: residual(q, p)),
    "drafts that are too likely are kept": Rule(kept=lambda p, q, tokens, noise: keeps(p * 2, q, tokens, noise / 2)),
    "every draft is kept": Rule(kept=lambda p, q, tokens, noise: p.gather(1, tokens[:, None])[:, 0] > 0),
    "the draft model's bonus": Rule(bonus_of_draft=True),
    "drafts behind a rejected one": Rule(goes_on=True),
}  # fmt: skip


def continued(case: str, rule: Rule) -> Tensor:
    """[DRAWS]: the node that each continuation is."""
    target, draft = tables(case)
    nodes, lengths = torch.zeros(DRAWS, dtype=torch.long), torch.zeros(DRAWS, dtype=torch.long)
    for length in range(LENGTH):
        rows = (lengths == length).nonzero()[:, 0]
        drafts = [nodes[rows]]  # a round: the nodes after none, one, ... of the drafts
        for pos in range(length, LENGTH - 1):
            drafts.append(child(drafts[-1], pick(draft[drafts[-1]], noise()[DRAFT_OF][rows, pos])))
        going = torch.ones(len(rows), dtype=torch.bool)
        for place, pos in enumerate(range(length, LENGTH)):
            at, number = nodes[rows], rows
            seen = drafts[place] if rule.sees_drafts else drafts[0]
            p = (draft if rule.bonus_of_draft and pos == LENGTH - 1 else target)[seen]
            if pos == LENGTH - 1:
                tokens, kept = pick(p, noise()[DRAW][number, pos]), torch.zeros(len(rows), dtype=torch.bool)
            else:
                q, wanted = draft[drafts[place]], drafts[place + 1] - child(drafts[place], torch.zeros_like(at))
                kept = rule.kept(p, q, wanted, noise()[ACCEPT][number, pos])
                tokens = torch.where(kept, wanted, pick(rule.left(p, q), noise()[DRAW][number, pos]))
            nodes[rows[going]] = child(at, tokens)[going]
            lengths[rows[going]] += 1
            going &= kept | rule.goes_on
    assert (lengths == LENGTH).all()
    return nodes


def child(nodes: Tensor, tokens: Tensor) -> Tensor:
    return 1 + nodes * VOCAB + tokens


def expected(case: str) -> Tensor:
    """[VOCAB**LENGTH], the probability of each continuation in plain sampling."""
    shares = tables(case)[0].double()
    shares /= shares.sum(1, keepdim=True)
    chances = torch.ones(1, dtype=torch.float64)
    first = 0
    for _ in range(LENGTH):
        chances = (chances[:, None] * shares[first : first + len(chances)]).flatten()
        first = 1 + first * VOCAB
    return chances


def chi_square(case: str, rule: Rule) -> float:
    """In standard deviations above its mean; infinite for a continuation that cannot be. Rare ones count as one."""
    wanted = expected(case) * DRAWS
    counts = torch.bincount(continued(case, rule) - NODES, minlength=len(wanted)).double()
    if counts[wanted == 0].any():
        return float("inf")
    common = wanted >= 10
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([wanted[common], wanted[~common].sum()[None]])
    some = wanted >= 10
    degrees = int(some.sum()) - 1
    assert degrees >= 10
    found = float(((counts - wanted)[some] ** 2 / wanted[some]).sum())
    return (found - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_continuations_by_drafts_have_the_distribution_of_plain_sampling(case: str) -> None:
    assert abs(chi_square(case, RIGHT)) < 4


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("case", ["temperature", "all"])
def test_a_wrong_rule_is_found(case: str, wrong: str) -> None:
    assert chi_square(case, WRONG[wrong]) > 8


@pytest.mark.parametrize("case", ["penalties", "all"])
def test_penalties_that_do_not_see_the_drafts_are_found(case: str) -> None:
    assert chi_square(case, replace(RIGHT, sees_drafts=False)) > 8
