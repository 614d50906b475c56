"""A linear layer that widens its bfloat16 weights returns what float32 does, rounded once, and leaves them where they
are."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels import packed, widened
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.kernels.packed import PackedLinear, pack
from kvcellar.kernels.widened import FEW, Kernel, WidenedLinear

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"),
]


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(os.environ)


@pytest.fixture
def needed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel, on a CPU that needs it: this one may not."""
    monkeypatch.setattr(kernel, "needed", True)
    monkeypatch.setattr(widened, "Kernel", lambda environment: kernel)
    return kernel


def layer(inner: int, outer: int, *, bias: bool) -> nn.Linear:
    generator = torch.Generator().manual_seed(inner * outer)
    linear = nn.Linear(inner, outer, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


def close(got: Tensor, wanted: Tensor) -> bool:
    """Equal but for one rounding to bfloat16, of 8 bits, and for what float32 loses in between."""
    return bool((got.double() - wanted).abs().le(wanted.abs() / 2**8 + 1e-4).all())


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (17, 33), (5, 1), (130, 7), (1, 4), (3000, 11)])
def test_it_equals_float32_for_any_number_of_rows(kernel: Kernel, inner: int, outer: int, bias: bool) -> None:
    linear = layer(inner, outer, bias=bias)
    ours = WidenedLinear(kernel, linear.weight, linear.bias)
    shapes = [(1,), (2,), (3,), (5,), (8,), (15,), (FEW,), (FEW + 1,), (2, 3), (0,), (1, 0), (1, 2, 3), ()]
    for x in [*(rows(*shape, inner) for shape in shapes), rows(5, 2 * inner)[:, ::2]]:
        got = ours(x)
        assert (got.shape, got.dtype) == ((*x.shape[:-1], outer), torch.bfloat16)
        assert close(got, exact(linear, x))


def test_more_outputs_than_a_strip_has_are_all_there(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "STRIP", 7)
    linear = layer(16, 33, bias=True)
    x = rows(FEW + 1, 16)
    assert close(WidenedLinear(kernel, linear.weight, linear.bias)(x), exact(linear, x))


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(kernel: Kernel) -> None:
    linear = layer(301, 5000, bias=True)  # enough weights for more than one thread
    x = rows(13, 301)
    ours = WidenedLinear(kernel, linear.weight, linear.bias)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([ours(row[None]) for row in x])
        torch.set_num_threads(3)
        for count in (2, 5, 8, 13):
            assert torch.equal(ours(x[:count]), alone[:count])
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_number_and_what_is_too_large_come_out_as_such(kernel: Kernel) -> None:
    linear = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(torch.eye(4, 3))
    x = torch.tensor([[torch.inf, 1.0, -torch.inf], [torch.nan, 1.0, 2.0]], dtype=torch.bfloat16)
    ours = WidenedLinear(kernel, linear.weight, None)
    torch.testing.assert_close(ours(x), F.linear(x.float(), linear.weight.float()).bfloat16(), equal_nan=True)


def test_where_the_cpu_needs_it_bfloat16_is_widened_and_float32_packed(needed: Kernel) -> None:
    model = nn.Sequential(layer(8, 8, bias=True), nn.Linear(8, 8).requires_grad_(False))
    packing = pack(model)
    assert [type(part) for part in model] == [WidenedLinear, PackedLinear]
    assert (packing.layers, packing.widened, packing.not_widened) == (2, 1, None)


def test_where_the_cpu_does_not_need_it_nothing_is_widened(needed: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "needed", False)
    packing = pack(nn.Sequential(layer(8, 8, bias=False)))
    assert (packing.widened, packing.not_widened) == (0, "this CPU multiplies bfloat16 as it is")


def test_without_a_compiler_it_gives_the_reason_and_continues(tmp_path: Path) -> None:
    model = nn.Sequential(layer(8, 8, bias=False))
    x = rows(3, 8)
    wanted = model(x)
    packing = pack(model, environment={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert packing.widened == 0
    assert "no C++ compiler" in (packing.not_widened or "")
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=0.05)


def test_a_weight_stays_where_it_is(needed: Kernel) -> None:
    model = nn.Sequential(layer(8, 8, bias=True))
    weight = model[0].weight
    pack(model)
    assert isinstance(model[0], WidenedLinear)
    assert model[0].weight.data_ptr() == weight.data_ptr()


def test_a_layer_with_wrong_results_stays_plain(needed: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Kernel.linear
    monkeypatch.setattr(Kernel, "linear", lambda self, x, weight, bias: -honest(self, x, weight, bias))
    model = nn.Sequential(layer(8, 8, bias=False))
    assert "differs" in packed.pack(model).kept["0"]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_plain_layer_refuses_it_refuses(kernel: Kernel, dtype: torch.dtype) -> None:
    linear = layer(8, 8, bias=False)
    for one in (linear, WidenedLinear(kernel, linear.weight, None)):
        with pytest.raises(RuntimeError, match=r"(?i)dtype|float"):
            one(torch.ones(2, 8, dtype=dtype))
