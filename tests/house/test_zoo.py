"""The zoo's animals are alive: each hears every visible token and every position, and nothing from the future."""

import pytest
import torch
from torch import Tensor

from tests.zoo import ARCHS, WINDOW, Arch, reference_logits

LENGTH = 40
TOKENS = torch.randint(3, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
HEARD = 1e-2
SILENT = 1e-5

every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)


def moved(before: Tensor, after: Tensor) -> float:
    """The largest difference of logits, as a part of the largest logit."""
    return float((after - before).abs().max() / before.abs().max())


def changed(pos: int) -> list[int]:
    other = 3 + (TOKENS[pos] + 7) % 98
    return [*TOKENS[:pos], other, *TOKENS[pos + 1 :]]


def early(arch: Arch) -> int:
    """A position from which the last logits must hear: the second, or the first of the last window."""
    return LENGTH - WINDOW if "full" not in arch.kinds and "sliding" in arch.kinds else 1


@every_arch
def test_the_last_logits_hear_an_early_token_and_the_order_but_not_the_future(arch: Arch) -> None:
    model = arch.build()
    pos = early(arch)
    swapped = [*TOKENS[:pos], TOKENS[pos + 1], TOKENS[pos], *TOKENS[pos + 2 :]]
    logits = reference_logits(model, TOKENS)
    assert logits.shape == (LENGTH, arch.vocab)
    assert logits.isfinite().all()
    assert moved(logits[-1], reference_logits(model, changed(pos))[-1]) > HEARD
    assert moved(logits[-1], reference_logits(model, swapped)[-1]) > HEARD
    assert moved(logits[:30], reference_logits(model, changed(30))[:30]) < SILENT
