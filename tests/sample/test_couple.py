"""Coupled draws have the distribution of plain ones and accept as often as is possible; with a wrong residual they have
another. Each case draws 10^5 tokens at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.engine.sample import draw as drawing
from kvcellar.engine.sample.couple import WEIGHT_BITS, Draft, keeps, residual
from kvcellar.engine.sample.draw import draw, edit, pick, weights_of
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.sampling_params import SamplingParams

DRAWS, VOCAB = 100_000, 12

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "all": {
        "temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3,
        "presence_penalty": 0.2, "frequency_penalty": 0.3,
    },
}  # fmt: skip


def sampler(**fields: Any) -> Sampler:
    made = Sampler(SamplingParams(**fields), seed=1, index=0, prompt_ids=(1, 2), vocab_size=VOCAB, end_ids=frozenset())
    for token in (3, 4, 3):
        made.accept(token)
    return made


def weights(seed: int, near: int | None = None, **fields: Any) -> Tensor:
    """[1,VOCAB] of random logits, or of some near those of another seed."""
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    if near is not None:
        scores = 0.7 * scores + torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(near)) * 1.5
    made = sampler(**fields)
    scores = edit(scores, [made])
    return weights_of(scores, scores.max(1).values, [made.params])


def coupled(p: Tensor, q: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens drawn, and which of them are the draft."""
    noise = torch.Generator().manual_seed(7)
    draft, accept, rest = torch.rand(3, DRAWS, dtype=torch.float64, generator=noise)
    drafts = pick(q.expand(DRAWS, VOCAB), draft)
    kept = keeps(p.expand(DRAWS, VOCAB), q.expand(DRAWS, VOCAB), drafts, accept)
    return torch.where(kept, drafts, pick(left.expand(DRAWS, VOCAB), rest)), kept


def chi_square(tokens: Tensor, p: Tensor) -> float:
    """In standard deviations above its mean; infinite for a token that cannot be drawn."""
    expected = p[0].double() / p.sum() * DRAWS
    counts = torch.bincount(tokens, minlength=VOCAB)
    if counts[expected == 0].any():
        return float("inf")
    some = expected > 0
    degrees = int(some.sum()) - 1
    found = float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())
    return (found - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_a_coupled_draw_has_the_distribution_of_a_plain_one(case: str) -> None:
    p, q = weights(1, **CASES[case]), weights(2, near=1, **CASES[case])
    tokens, kept = coupled(p, q, residual(p, q))
    assert chi_square(tokens, p) < 4
    assert chi_square(tokens, q) > 20, "the case cannot tell the two distributions apart"
    shares = torch.minimum(p / p.sum(), q / q.sum()).sum()
    assert abs(float(kept.double().mean() - shares)) < 0.01


@pytest.mark.parametrize("wrong", ["target", "reversed", "sign", "a third of q"])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_residual_is_found(case: str, wrong: str) -> None:
    p, q = weights(1, **CASES[case]), weights(2, near=1, **CASES[case])
    left = {
        "target": p,
        "reversed": residual(q, p),
        "sign": ((p / p.sum() - q / q.sum()).abs() * 2**WEIGHT_BITS).long(),
        "a third of q": (p - q // 3).clamp(min=0),
    }[wrong]
    assert chi_square(coupled(p, q, left)[0], p) > 8


def test_equal_distributions_keep_every_draft_and_another_residual_is_never_empty() -> None:
    p = weights(1)
    assert coupled(p, p, residual(p, p))[1].all()
    assert torch.equal(residual(p, p), p)
    almost = p + torch.tensor([1 if token == 5 else 0 for token in range(VOCAB)])
    assert residual(p, almost).sum() > 0
    assert residual(almost, p).argmax() == 5


def test_a_draft_that_the_target_cannot_draw_is_replaced() -> None:
    p = torch.tensor([[0, 3, 1]])
    q = torch.tensor([[5, 5, 0]])
    assert not keeps(p, q, torch.tensor([0]), torch.tensor([0.0], dtype=torch.float64))
    assert residual(p, q)[0].nonzero()[:, 0].tolist() == [1, 2]


def test_a_row_is_coupled_alike_in_any_company() -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3))
    samplers = [sampler(temperature=0.0 if row % 5 == 0 else 1.0, logprobs=2) for row in range(40)]
    drafts = [Draft(row % VOCAB, weights(row)[0]) if row % 5 and row % 3 else None for row in range(40)]
    together = draw(logits, samplers, range(40), drafts)
    alone = [draw(logits[r : r + 1], samplers[r : r + 1], [r], drafts[r : r + 1])[0] for r in range(40)]
    assert together == alone
    plain = draw(logits, samplers, range(40))
    changed = [a.token_id != b.token_id for a, b in zip(together, plain, strict=True)]
    assert any(changed)
    assert not any(was for was, draft in zip(changed, drafts, strict=True) if draft is None)


def test_a_draft_that_was_not_drawn_changes_nothing() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(4))
    samplers = [sampler() for _ in range(20)]
    assert draw(logits, samplers, range(20), [Draft(3)] * 20) == draw(logits, samplers, range(20))


def test_many_rows_are_drawn_in_parts_as_they_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(5))
    samplers = [sampler(temperature=0.0 if row % 4 == 0 else 1.1, top_p=0.9) for row in range(30)]
    drafts = [Draft(1, weights(row)[0]) if row % 4 and row % 2 else None for row in range(30)]
    whole = draw(logits, samplers, range(30), drafts)
    monkeypatch.setattr(drawing, "MOST_WEIGHTS", 7 * VOCAB)
    assert draw(logits, samplers, range(30), drafts) == whole
