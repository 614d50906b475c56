"""Products with weights of 8 and 4 bits are those of float64 on the same rounded inputs, in the same bits whatever the
instructions, the number of rows, and the rows beside."""

import os
import platform
import shutil
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.codes import INT4, Codes
from kvcellar.kernels.compiled import COMPILERS, NotCompiled
from kvcellar.kernels.layers import merged
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear, most_bytes, unfit
from tests.kernels.rounded import rounded

BUILDS = {
    "native": "",
    "AVX-512 without VNNI": "-mno-avx512vnni",
    "AVX-VNNI": "-mno-avx512f",
    "AVX2": "-mno-avx512f -mno-avxvnni",
    "portable": "-mno-ssse3",
}
TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -128, 127)
SHAPES = [(1, 32), (33, 16), (64, 96), (100, 320), (31, 5), (7, 250)]
GROUPS = (None, 16, 32, 64)


def kernel_of(options: str) -> QuantisedKernel:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if options and platform.machine() != "x86_64":
        pytest.skip("the instruction sets named here are those of x86-64")
    try:
        return QuantisedKernel({**os.environ, "CXX": f"{compiler} {options}"} if options and compiler else os.environ)
    except NotCompiled as error:
        pytest.skip(f"not compiled here: {error}")


@pytest.fixture(scope="module")
def native() -> QuantisedKernel:
    return kernel_of("")


@pytest.fixture(scope="module", params=BUILDS)
def build(request) -> QuantisedKernel:
    return kernel_of(BUILDS[request.param])


def codes_of(shape: tuple[int, int], table: tuple[int, ...] | None, group: int | None, **parts: bool) -> Codes:
    """Random codes; None as the group: one scale for all inputs of an output."""
    outputs, inputs = shape
    numbers = torch.Generator().manual_seed(outputs * inputs)
    count = 1 if group is None else inputs // group
    values = torch.randint(0, 16, shape, generator=numbers).to(torch.uint8)
    if table is None:
        values = torch.randint(-128, 128, shape, generator=numbers).to(torch.int8)
    scales = torch.randn(outputs, count, generator=numbers)
    scales = scales.bfloat16() if parts.get("narrow") else scales
    mins = torch.randn(outputs, count, generator=numbers).to(scales.dtype) if parts.get("mins") else None
    order = torch.randperm(inputs, generator=numbers) if parts.get("order") else None
    made = Codes(values, table, scales, mins, order)
    made.check()
    return made


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_codes() -> list[Codes]:
    found: list[Codes] = []
    for shape, table, group in product(SHAPES, (None, INT4, TABLE), GROUPS):
        if group is not None and shape[1] % group:
            continue
        found += [codes_of(shape, table, group, narrow=True), codes_of(shape, table, group, mins=True, order=True)]
    return found


def test_every_build_multiplies_rounded_inputs_and_returns_the_same_bits(
    build: QuantisedKernel, native: QuantisedKernel
) -> None:
    for codes in every_codes():
        x, bias = random(9, codes.values.shape[1]), random(len(codes.values), seed=1)
        layer = QuantisedLinear(build, codes, bias, torch.float32)
        wanted = rounded(x, codes) @ codes.dense().double().T + bias.double()
        got = layer(x)
        assert (got.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        assert torch.equal(got, QuantisedLinear(native, codes, bias, torch.float32)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_types_are_float32_rounded_once(native: QuantisedKernel, dtype: torch.dtype) -> None:
    for codes in every_codes():
        x, bias = random(5, codes.values.shape[1]).to(dtype), random(len(codes.values), seed=1).to(dtype)
        expected = QuantisedLinear(native, codes, bias.float(), torch.float32)(x.float())
        assert torch.equal(QuantisedLinear(native, codes, bias, dtype)(x), expected.to(dtype))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("table", [None, INT4, TABLE], ids=["int8", "int4", "table"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(build: QuantisedKernel, table: Any, group: int | None) -> None:
    layer = QuantisedLinear(build, codes_of((70, 128), table, group, mins=True), None, torch.bfloat16)
    x = random(512, 128).bfloat16()
    whole = layer(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 31, 257):
        assert torch.equal(layer(x[100 : 100 + count]), whole[100 : 100 + count])


def test_the_bits_of_a_row_do_not_depend_on_threads(native: QuantisedKernel) -> None:
    layer = QuantisedLinear(native, codes_of((640, 4096), None, 32), None, torch.float32)
    x = random(5, 4096)
    alone, out = layer(x), torch.empty(5, 640)
    call: Any = layer.native(x, out)
    call.call.threads = 3
    assert native.run(call.address) == 0
    assert torch.equal(out, alone)


def test_a_native_call_reads_and_writes_rows_that_are_apart(native: QuantisedKernel) -> None:
    layer = QuantisedLinear(native, codes_of((40, 96), INT4, 32), random(40), torch.bfloat16)
    x, out = torch.zeros(7, 200).bfloat16(), torch.zeros(7, 100).bfloat16()
    call = layer.native(x[:, 50:146], out[:, 30:70])
    x.copy_(random(7, 200))
    assert native.run(call.address) == 0
    assert torch.equal(out[:, 30:70], layer(x[:, 50:146]))
    assert not out[:, :30].any()
    assert not out[:, 70:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_make_their_own_row_nan(build: QuantisedKernel, bad: float) -> None:
    layer = QuantisedLinear(build, codes_of((40, 64), INT4, 32), None, torch.float32)
    x = random(3, 64)
    before = layer(x)
    x[1, 40] = bad
    after = layer(x)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_rows_of_zeros_and_of_tiny_numbers_are_the_bias(build: QuantisedKernel) -> None:
    codes, bias = codes_of((40, 64), TABLE, 16, mins=True), random(40)
    out = QuantisedLinear(build, codes, bias, torch.float32)(torch.stack((torch.zeros(64), torch.full((64,), 1e-39))))
    assert torch.equal(out, bias.expand(2, 40))


def test_codes_are_kept_and_dense_weights_are_made_of_them(native: QuantisedKernel) -> None:
    for codes in every_codes():
        layer = QuantisedLinear(native, codes, None, torch.float32)
        kept = layer._coded()[0].codes()
        kept.check()
        assert torch.equal(kept.values, codes.values)
        assert torch.equal(kept.scales.float(), codes.scales.float())
        assert torch.equal(layer.weight, codes.dense())


def test_a_layer_takes_the_bytes_of_its_codes(native: QuantisedKernel) -> None:
    """Half a byte and a part of a scale of bfloat16 for each weight of 4 bits, a byte for each of 8."""
    four = QuantisedLinear(native, codes_of((128, 640), INT4, 32, narrow=True), None, torch.bfloat16)
    eight = QuantisedLinear(native, codes_of((128, 640), None, None, narrow=True), None, torch.bfloat16)
    assert four.nbytes == 128 * 640 * (16 + 2) // 32
    assert eight.nbytes == 128 * (640 + 2)


@pytest.mark.parametrize("bias", [None, "bias"])
def test_merged_layers_give_the_outputs_of_each_side_by_side(build: QuantisedKernel, bias: Any) -> None:
    """Also of 4 and 8 bits, which share the rounded inputs."""
    kinds: Any = [((33, 96), INT4, 32), ((64, 96), None, None), ((7, 96), TABLE, 32)]
    layers = [
        QuantisedLinear(build, codes_of(*kind, mins=True), None if bias is None else random(kind[0][0]), torch.bfloat16)
        for kind in kinds
    ]
    one = merged(layers)
    for count in (1, 7, 200):
        x = random(count, 96).bfloat16()
        assert torch.equal(one(x), torch.cat([layer(x) for layer in layers], 1))
    assert torch.equal(one.weight, torch.cat([layer.weight for layer in layers]))
    odd = QuantisedLinear(build, codes_of((5, 96), INT4, 16), None, torch.bfloat16)
    assert not any(layer.joins(odd) for layer in layers)
    ordered = QuantisedLinear(build, codes_of((5, 96), INT4, 32, order=True), None, torch.bfloat16)
    assert not ordered.joins(layers[0])
    assert not layers[0].joins(ordered)


def test_scales_take_the_fewest_bits_that_hold_them(native: QuantisedKernel) -> None:
    """And numbers of float16, also tiny ones, are what they are in every build: `every_codes` has none."""
    codes = codes_of((32, 64), INT4, 32)
    half = Codes(codes.values, INT4, torch.linspace(-6e-8, 3.0, 64).half().view(32, 2))
    sizes = {
        QuantisedLinear(native, one, None, torch.float32).nbytes - 32 * 32: one.scales.dtype
        for one in (codes_of((32, 64), INT4, 32, narrow=True), half, codes)
    }
    assert sizes == {2 * 64: torch.float16, 4 * 64: torch.float32}


def test_scales_of_float16_are_multiplied_as_float32(build: QuantisedKernel) -> None:
    codes = codes_of((40, 64), INT4, 32)
    half = torch.linspace(-6e-8, 3.0, 80).half().view(40, 2)
    wide = torch.full((1, 64), 2**-30)  # which bfloat16 holds, and float16 does not
    one = QuantisedLinear(build, Codes(codes.values, INT4, half), None, torch.float32)
    other = Codes(torch.cat((codes.values, codes.values[:1])), INT4, torch.cat((half.float(), wide[:, :2])))
    x = random(3, 64)
    assert torch.equal(one(x), QuantisedLinear(build, other, None, torch.float32)(x)[:, :40])


def test_groups_that_blocks_cannot_be_made_of_are_refused() -> None:
    assert "24 inputs" in (unfit(codes_of((4, 48), INT4, 24)) or "")
    assert unfit(codes_of((4, 50), INT4, None)) is None


def test_inputs_of_another_type_are_refused(native: QuantisedKernel) -> None:
    layer = QuantisedLinear(native, codes_of((4, 48), INT4, None), None, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"in torch.bfloat16 .* got \(2, 48\) in torch.float32"):
        layer(random(2, 48))


def test_an_arena_holds_all_codes_and_changes_no_bits(native: QuantisedKernel) -> None:
    for codes in every_codes():
        arena, x = Arena(most_bytes(*codes.values.shape)), random(3, codes.values.shape[1])
        layer = QuantisedLinear(native, codes, None, torch.float32, arena)
        assert torch.equal(layer(x), QuantisedLinear(native, codes, None, torch.float32)(x))
        assert torch.equal(layer.weight, codes.dense())
