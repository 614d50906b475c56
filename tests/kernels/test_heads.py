"""Each head goes through a layer of its own, with the bits that its row has alone."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import HeadsKernel, panel_heads


@pytest.fixture(scope="module")
def kernel() -> HeadsKernel:
    try:
        return HeadsKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20), heads=st.integers(1, 9), sizes=st.sampled_from([(1, 1), (64, 70), (33, 7)]),
    tail=st.sampled_from([0, 1, 32]),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_what_its_layer_makes_of_it_and_its_tail_is_kept(kernel, dtype, rows, heads, sizes, tail) -> None:
    draw = torch.Generator().manual_seed(rows)
    weights = torch.randn(heads, *sizes, generator=draw).to(dtype)
    layer = panel_heads(kernel, weights, tail)
    x = torch.randn(heads, rows, sizes[1] + tail, generator=draw).to(dtype).transpose(0, 1)  # as models leave queries
    found = layer(x)
    assert torch.equal(found[..., sizes[0] :], x[..., sizes[1] :])
    exact = torch.einsum("thi,hoi->tho", x[..., : sizes[1]].double(), weights.double())
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert (found[..., : sizes[0]].double() - exact).abs().max() <= bound * max(1.0, float(exact.abs().max()))
    for row in range(rows):
        assert torch.equal(found[row], layer(x[row : row + 1].contiguous())[0])


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 8), torch.zeros(2, 4, 7), torch.zeros(2, 4, 8, dtype=torch.bfloat16)])
def test_other_sizes_and_types_are_refused(kernel, x) -> None:
    with pytest.raises(RuntimeError, match=r"4 heads of 8 inputs in torch\.float32"):
        panel_heads(kernel, torch.zeros(4, 5, 6), 2)(x)


def test_no_rows_are_no_rows(kernel) -> None:
    assert panel_heads(kernel, torch.zeros(4, 5, 6))(torch.zeros(0, 4, 6)).shape == (0, 4, 5)
