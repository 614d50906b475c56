"""Each row goes through the experts of its index, with the bits that it has alone."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import ExpertsKernel, OwnExperts, PanelKernel, panel_experts


@pytest.fixture(scope="module")
def kernel() -> ExpertsKernel:
    try:
        return ExpertsKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))


def made(
    kernel: ExpertsKernel, count: int, out: int, inner: int, dtype: torch.dtype
) -> tuple[OwnExperts, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count * 1000 + out * 10 + inner)
    weights = torch.randn(count, out, inner, generator=draw).to(dtype)
    biases = torch.randn(count, out, generator=draw).to(dtype)
    return panel_experts(kernel, PanelKernel(os.environ), weights, biases), weights, biases


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_what_its_expert_makes_of_it_whatever_is_beside_it(kernel, dtype, data) -> None:
    count, rows, share = (data.draw(st.integers(1, most)) for most in (9, 20, 4))
    experts, weights, biases = made(kernel, count, *data.draw(st.sampled_from([(1, 1), (64, 64), (70, 33)])), dtype)
    x = torch.randn(rows, experts.in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    index = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=rows * share, max_size=rows * share)))
    found = experts(x, index, share)
    for place in data.draw(st.lists(st.integers(0, rows * share - 1), max_size=4)):
        row, expert = x[place // share], int(index[place])
        assert torch.equal(found[place], experts(row[None], index[place : place + 1], 1)[0])
        exact = weights[expert].double() @ row.double() + biases[expert].double()
        bound = 1e-5 if dtype is torch.float32 else 1e-2
        assert (found[place].double() - exact).abs().max() <= bound * max(1.0, float(exact.abs().max()))


def test_an_index_that_is_no_expert_gives_zeros_and_reads_nothing(kernel) -> None:
    experts, *_ = made(kernel, 3, 70, 33, torch.float32)
    x = torch.full((2, 33), torch.nan)
    x[1] = 1
    found = experts(x, torch.tensor([3, -1, 2, 1 << 60]), 2)
    assert torch.equal(found[[0, 1, 3]], torch.zeros(3, 70))
    assert torch.equal(found[2], experts(x[1:], torch.tensor([2]), 1)[0])


def test_a_native_call_fills_what_the_module_returns_also_between_other_columns(kernel) -> None:
    experts, *_ = made(kernel, 4, 70, 33, torch.bfloat16)
    wide = torch.full((6, 200), 7.0, dtype=torch.bfloat16)
    x, index, out = torch.randn(3, 40).to(torch.bfloat16)[:, :33], torch.tensor([1, 3, 1, 0, 2, 2]), wide[:, 50:120]
    native: Any = experts.native(x, index, 2, out)
    assert kernel.run(native.address) == 0
    assert torch.equal(out, experts(x, index, 2))
    assert bool((wide[:, :50] == 7).all())
    assert bool((wide[:, 120:] == 7).all())


def test_other_types_and_sizes_are_refused(kernel) -> None:
    experts, *_ = made(kernel, 4, 64, 64, torch.float32)
    x, index = torch.zeros(2, 64), torch.zeros(4, dtype=torch.int64)
    for bad in ((x.bfloat16(), index, 2), (x[:, 1:], index, 2), (x, index, 1), (x, index.int(), 2)):
        with pytest.raises(RuntimeError, match=r"experts of 64 inputs in torch\.float32 on the CPU got"):
            experts(*bad)
