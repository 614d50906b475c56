"""Convolutions of mixers meet few lengths of text, and give what they give without zeros behind their input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvcellar.engine.models import build_guest
from kvcellar.kernels.packed import BLOCK, PADDED, of_few_lengths, with_padding
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.zoo import ARCHS

LENGTHS = [*range(1, 40), 63, 64, 65, 100, 127, 128, 129, 200, 300]


def causal(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """x [B,C,L], weight [C,K] -> [B,C,L]"""
    n, k = x.shape[-1], weight.shape[-1]
    return functional.conv1d(x, weight[:, None], bias, padding=k - 1, groups=len(weight))[..., :n]


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Of the inputs of all convolutions."""
    seen: set[int] = set()
    real: Callable[..., Tensor] = functional.conv1d

    def watched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.add(x.shape[-1])
        return real(x, *args, **kwargs)

    monkeypatch.setattr(functional, "conv1d", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_behind_the_input_change_no_output(dtype: torch.dtype, lengths: set[int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 4, dtype=dtype), torch.randn(6, dtype=dtype)
    for n in LENGTHS:
        x = torch.randn(2, 6, n, dtype=dtype)
        torch.testing.assert_close(of_few_lengths(causal)(x, weight, bias), causal(x, weight, bias))
    few = {with_padding(n) for n in LENGTHS}
    assert lengths == few | set(LENGTHS)  # the latter without ours
    assert few <= {*PADDED, *(BLOCK + n for n in PADDED), *(2 * BLOCK + n for n in PADDED)}


def test_texts_that_are_packed_into_one_are_left_to_transformers(lengths: set[int]) -> None:
    of_few_lengths(causal)(torch.randn(1, 6, 37), torch.randn(6, 4), seq_idx=torch.zeros(1, 37))
    assert lengths == {37}


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3.5"])
def test_prompts_of_many_lengths_meet_few_in_a_model_without_kernels(
    name: str, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_guest, "scan_kernel", lambda network: None)
    guest = build_guest.build_guest(ARCHS[name].build(), backends())
    lengths.clear()  # of the probes that it was adopted by
    memory = guest.memory({group.name: 100 for group in guest.shape.groups}, rows=4)
    for n in range(2, 60):
        plan = memory.begin(Batch((Feed(0, Span(0, n)),)))
        guest.forward(memory, plan, torch.ones(n, dtype=torch.long), torch.arange(n))
        memory.abandon()
    assert lengths
    assert lengths <= set(PADDED)
