"""Linear layers of our own return what float64 does, rounded once; a row has the same bits in any company."""

import copy
import gc
import os
import platform
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels import packed
from kvcellar.kernels.arena import HUGE, SMAPS, Arena
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.kernels.layers import (
    FOREIGN,
    PAIRS,
    PanelKernel,
    PanelLinear,
    PanelWeight,
    merged,
    panel_bytes,
    panel_linear,
)
from kvcellar.kernels.packed import PackedLinear, pack

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here")

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # 2: what is mapped counts, written or not
X86 = ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"]
BUILDS = ["", *(X86 if os.uname().machine == "x86_64" else [])]  # options for the compiler
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(64, 96), (17, 33), (5, 1), (130, 7), (1, 4), (3000, 11), (301, 200)]  # inputs, outputs
COUNTS = [*range(1, 15), 24, 64, 193, 400]  # rows


@pytest.fixture(scope="module", params=BUILDS, ids=lambda options: options or "native")
def kernel(request: pytest.FixtureRequest) -> PanelKernel:
    """The kernel, as this CPU and lesser ones run it."""
    return PanelKernel({**os.environ, "CXX": f"{FOUND} {request.param}"})


@pytest.fixture(scope="module")
def native() -> PanelKernel:
    return PanelKernel(os.environ)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plain(inner: int, outer: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    generator = torch.Generator().manual_seed(inner * outer)
    linear = nn.Linear(inner, outer, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def own(kernel: PanelKernel, linear: nn.Linear) -> PanelLinear:
    return panel_linear(kernel, Arena(panel_bytes(linear.weight)), linear.weight, linear.bias)


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


def close(got: Tensor, wanted: Tensor) -> bool:
    """Equal but for one rounding to the type of the result, and for what float32 loses in between."""
    rounding = 2**-8 if got.dtype is torch.bfloat16 else 2**-22
    return bool((got.double() - wanted).abs().le(wanted.abs() * rounding + 5e-4).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_it_equals_float64(kernel: PanelKernel, inner: int, outer: int, bias: bool, dtype: torch.dtype) -> None:
    linear = plain(inner, outer, dtype, bias=bias)
    ours = own(kernel, linear)
    shapes = [*((n,) for n in COUNTS), (2, 3), (0,), (1, 0), (1, 2, 3), ()]
    for x in [*(rows(*shape, inner, dtype=dtype) for shape in shapes), rows(5, 2 * inner, dtype=dtype)[:, ::2]]:
        got = ours(x)
        assert (got.shape, got.dtype) == ((*x.shape[:-1], outer), dtype)
        assert close(got, exact(linear, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(301, 200), (4500, 70)])
def test_a_row_has_the_same_bits_in_any_batch(kernel: PanelKernel, inner: int, outer: int, dtype: torch.dtype) -> None:
    ours = own(kernel, plain(inner, outer, dtype, bias=True))
    x = rows(210, inner, dtype=dtype)
    whole = ours(x)
    alone = torch.cat([ours(row[None]) for row in x[:20]])
    assert torch.equal(alone, whole[:20])
    for count in range(2, 65):
        start = 3 * count % 140
        assert torch.equal(ours(x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_threads(kernel: PanelKernel, dtype: torch.dtype, threads: None) -> None:
    ours = own(kernel, plain(301, 3000, dtype, bias=True))
    x = rows(30, 301, dtype=dtype)
    torch.set_num_threads(1)
    expected = [ours(x[:count]) for count in range(1, 31)]
    torch.set_num_threads(3)
    for _ in range(5):
        for count, wanted in enumerate(expected, 1):
            assert torch.equal(ours(x[:count]), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_layers_give_the_outputs_of_each_side_by_side(kernel: PanelKernel, dtype: torch.dtype) -> None:
    parts = [plain(31, outer, dtype, bias=bias) for outer, bias in ((64, False), (7, True), (130, True))]
    layers = [own(kernel, part) for part in parts]
    one = merged(layers)
    for count in (1, 9, 200):
        x = rows(count, 31, dtype=dtype)
        assert torch.equal(one(x), torch.cat([layer(x) for layer in layers], 1))
    assert torch.equal(one.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(one.bias, torch.cat([torch.zeros(64, dtype=dtype), parts[1].bias, parts[2].bias]))
    assert merged(layers[:1]).bias is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_finite_come_out_as_from_torch(kernel: PanelKernel, dtype: torch.dtype) -> None:
    linear = plain(3, 70, dtype, bias=False)
    linear.weight.copy_(torch.eye(70, 3))
    large = torch.finfo(dtype).max
    x = torch.tensor([[torch.inf, 1.0, -torch.inf], [torch.nan, 1.0, 2.0], [1.0, large, -2.0]], dtype=dtype)
    linear.weight[5] = 2.0  # an output that overflows
    for count in (1, 3, 9):
        some = x.repeat(3, 1)[:count]
        torch.testing.assert_close(
            own(kernel, linear)(some), F.linear(some.float(), linear.weight.float()).to(dtype), equal_nan=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_beside_a_row_is_not_read(kernel: PanelKernel, dtype: torch.dtype) -> None:
    linear = plain(33, 65, dtype, bias=False)
    around = torch.full((12, 40), torch.nan, dtype=dtype)
    around[2:11, 3:36] = rows(9, 33, dtype=dtype)
    x, into = around[2:11, 3:36], torch.full((9, 80), 7.0, dtype=dtype)
    ours = own(kernel, linear)
    assert close(ours(x), exact(linear, x))
    call = ours.native(x, into[:, 4:69])
    assert kernel.run(call.address) == 0
    assert torch.equal(into[:, 4:69], ours(x))
    assert bool((into[:, :4] == 7).all())
    assert bool((into[:, 69:] == 7).all())


def test_a_native_call_reads_what_is_at_its_addresses(native: PanelKernel) -> None:
    ours = own(native, plain(16, 24, torch.bfloat16, bias=True))
    x, into = rows(3, 16, dtype=torch.bfloat16), torch.empty(3, 24, dtype=torch.bfloat16)
    call = ours.native(x, into)
    for scale in (1.0, -2.0):
        x *= scale
        assert native.run(call.address) == 0
        assert torch.equal(into, ours(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_weight_can_be_looked_at(native: PanelKernel, inner: int, outer: int, dtype: torch.dtype) -> None:
    linear = plain(inner, outer, dtype, bias=True)
    ours = own(native, linear)
    assert torch.equal(ours.weight, linear.weight)
    assert torch.equal(ours.bias, linear.bias)
    assert list(ours.parameters()) == []
    turned = panel_linear(native, Arena(panel_bytes(linear.weight)), linear.weight.T.contiguous().T, None)
    assert torch.equal(turned.weight, linear.weight)


class Tied(nn.Module):
    """An output layer with the weight of an embedding."""

    def __init__(self, inner: int, outer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = plain(inner, outer, dtype, bias=False)
        self.embedding = nn.Embedding(outer, inner, _weight=self.head.weight, _freeze=True)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_an_embedding_that_is_the_output_layer_is_in_memory_once(inner: int, outer: int, dtype: torch.dtype) -> None:
    model = Tied(inner, outer, dtype)
    weight, storage = model.embedding.weight.clone(), weakref.ref(model.embedding.weight.untyped_storage())
    pack(model)
    assert storage() is None
    embedding = model.embedding.weight
    assert (embedding.shape, embedding.dtype, embedding.device) == (weight.shape, dtype, weight.device)
    assert torch.equal(embedding.view(-1), weight.view(-1)), "in the order of its strides"
    for shape in ((), (1,), (9,), (2, 3), (0,)):
        ids = torch.randint(outer, shape, generator=torch.Generator().manual_seed(1))
        assert torch.equal(model.embedding(ids), F.embedding(ids, weight))
    assert torch.equal(model.embedding(torch.arange(outer).expand(3, -1).t()), weight[:, None].expand(-1, 3, -1))
    assert torch.equal(model.embedding(torch.arange(outer, dtype=torch.int32)), weight)


def test_what_else_reads_an_embedding_in_panels_gets_a_copy_and_nothing_writes_it(native: PanelKernel) -> None:
    model = Tied(17, 33, torch.bfloat16)
    weight = model.embedding.weight.clone()
    pack(model)
    embedding = model.embedding.weight
    assert type(embedding.detach()) is type(embedding) is not Tensor
    assert torch.equal(embedding, weight)
    assert torch.equal(embedding[3:5].float() * 2, weight[3:5].float() * 2)
    with torch.inference_mode():
        assert torch.equal(embedding[3, 2:], weight[3, 2:])
    assert torch.equal(torch.zeros_like(weight).copy_(embedding), weight)
    writes = (
        embedding.zero_,
        lambda: embedding.copy_(weight),
        lambda: torch.add(weight, weight, out=embedding),
        lambda: torch._foreach_mul_([weight.clone(), embedding], 2),
    )
    for write in writes:
        with pytest.raises(RuntimeError, match="cannot be written; load the model with pack=False"):
            write()
    for read in (embedding.data_ptr, embedding.untyped_storage, model.share_memory):
        with pytest.raises(RuntimeError, match=r"has no (memory|storage) of its own"):
            read()
    with pytest.raises(RuntimeError, match=r"ids are int64 or int32, not torch\.float32"):
        model.embedding(torch.tensor([1.5]))
    for ids in (torch.tensor([33]), torch.tensor([0, -1])):
        with pytest.raises(IndexError, match="is not one of the rows"):
            model.embedding(ids)
    assert torch.equal(embedding, weight)


def test_copies_of_an_embedding_in_panels_share_them(native: PanelKernel) -> None:
    model, ids = Tied(17, 33, torch.bfloat16), torch.arange(33)
    weight = model.embedding.weight.clone()
    pack(model)
    assert isinstance(model.embedding.weight, nn.Parameter)
    twin, other = copy.deepcopy(model.embedding), nn.Embedding(33, 17)
    other.weight = model.embedding.weight
    for one in (twin, other):
        assert type(one.weight) is PanelWeight
        assert torch.equal(one(ids), weight)


class Computing(nn.Module):
    """As heads that multiply by a weight of their own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_a_weight_that_other_modules_compute_with_stays(native: PanelKernel) -> None:
    for made in (Computing, lambda weight: nn.Embedding(33, 17, max_norm=1.0, _weight=weight)):
        model = Tied(17, 33, torch.bfloat16)
        plain_weight = model.embedding.weight
        model.other = made(plain_weight)
        model.other.weight = plain_weight
        assert pack(model).layers == 1
        assert model.embedding.weight is model.other.weight is plain_weight


def test_layers_with_one_weight_are_each_packed(native: PanelKernel) -> None:
    model = nn.Sequential(plain(16, 16, torch.float32, bias=False), plain(16, 16, torch.float32, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight.clone()
    assert pack(model).layers == 2
    assert all(torch.equal(one.weight, weight) for one in model)


def test_what_a_plain_layer_refuses_it_refuses(native: PanelKernel) -> None:
    linear = plain(8, 8, torch.bfloat16, bias=False)
    for layer in (linear, own(native, linear)):
        for wrong in (torch.ones(2, 8), torch.ones(2, 9, dtype=torch.bfloat16)):
            with pytest.raises(RuntimeError):
                layer(wrong)


# -- packing a model ---------------------------------------------------------------------------------------------------


def mixed() -> nn.Sequential:
    return nn.Sequential(plain(8, 8, torch.bfloat16, bias=True), plain(8, 9, torch.float32, bias=False))


def test_a_model_gets_layers_of_our_own(native: PanelKernel) -> None:
    model = mixed()
    if native.multiplies == FOREIGN:
        pytest.skip("bfloat16 is left to oneDNN on this CPU")
    packing = pack(model)
    assert [type(part) for part in model] == [PanelLinear, PanelLinear]
    assert (packing.layers, packing.own, packing.not_own, packing.kept) == (2, 2, None, {})
    assert packing.bytes == 8 * 8 * 2 + 8 * 9 * 4


def test_where_onednn_has_instructions_for_matrices_it_has_bfloat16(
    native: PanelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies", FOREIGN)
    monkeypatch.setattr(packed, "PanelKernel", lambda environment: native)
    model = mixed()
    packing = pack(model)
    assert isinstance(model[1], PanelLinear)
    assert packing.own == 1
    assert "instructions for matrices" in (packing.not_own or "")
    assert isinstance(model[0], PackedLinear) or "no bfloat16" in packing.kept["0"]


def test_plain_weights_are_freed_one_by_one_and_there_is_no_second_copy(
    native: PanelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(plain(40, 70, torch.float32, bias=False) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    honest = PanelKernel.pack

    def watched(self: PanelKernel, weight: Tensor, panels: Tensor) -> None:
        alive.append(sum(ref() is not None for ref in weights))
        return honest(self, weight, panels)

    monkeypatch.setattr(PanelKernel, "pack", watched)
    sizes = [panel_bytes(layer.weight) for layer in model]
    packing = pack(model)
    assert alive == [4, 3, 2, 1]
    assert list(model.parameters()) == []
    assert packing.arena is not None
    assert packing.arena.span[1] - packing.arena.span[0] == -(-sum(sizes) // HUGE) * HUGE, "room for one copy"


def test_a_layer_with_wrong_results_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PanelLinear.forward
    for wrong in (-1.0, torch.nan):
        monkeypatch.setattr(PanelLinear, "forward", lambda self, x, by=wrong: by * honest(self, x))
        model = nn.Sequential(plain(8, 8, torch.float32, bias=False))
        assert "differs" in pack(model).kept["0"]
        assert type(model[0]) is nn.Linear


def test_without_a_compiler_it_gives_the_reason_and_onednn_serves(tmp_path: Path) -> None:
    model = nn.Sequential(plain(8, 8, torch.float32, bias=False))
    x = rows(3, 8, dtype=torch.float32)
    expected = model(x)
    packing = pack(model, environment={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert packing.own == 0
    assert packing.arena is None
    assert "no C++ compiler" in (packing.not_own or "")
    torch.testing.assert_close(model(x), expected)
    assert list(tmp_path.iterdir()) == []


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_arena_has_its_own_memory_for_each_tensor() -> None:
    arena = Arena(3 * 200)
    tensors = [arena.tensor(50, torch.float32) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert [float(tensor.sum()) for tensor in tensors] == [50.0, 100.0, 150.0]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert tensors[0].data_ptr() == arena.span[0]
    assert arena.span[0] % HUGE == 0
    with pytest.raises(AssertionError, match="fewer bytes"):
        arena.tensor(HUGE, torch.float32)
    del arena
    gc.collect()
    assert float(tensors[2].sum()) == 150.0


@pytest.mark.skipif(not OVERCOMMIT.is_file() or OVERCOMMIT.read_text().strip() == "2", reason="addresses are limited")
def test_an_arena_may_be_larger_than_the_memory_of_the_machine() -> None:
    """Codes of 4 bits are given room for more, of which only what is written is resident."""
    arena = Arena(4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert not arena.tensor(50, torch.float32).any()


def resident(span: tuple[int, int]) -> int:
    """Bytes in memory, of mappings that contain any of these addresses."""
    total, inside = 0, False
    for line in SMAPS.read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start < span[1] and end > span[0]
        elif name == "Rss:" and inside:
            total += int(words[0]) << 10
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="what is resident is read from Linux's /proc")
def test_memory_of_an_arena_is_resident_once_it_is_written_and_freed_with_its_tensors() -> None:
    size = 64 << 20
    gc.collect()  # an arena of other tests beside this one would be counted with it
    arena = Arena(2 * size)
    span = arena.span
    tensor = arena.tensor(size, torch.uint8)
    assert resident(span) < size // 4
    tensor.fill_(1)
    assert size * 3 // 4 < resident(span) < size * 5 // 4
    assert (arena.huge_bytes() or 0) <= 2 * size
    del arena, tensor
    gc.collect()
    assert resident(span) < size // 4


def test_this_cpu_multiplies_pairs_if_it_can(native: PanelKernel) -> None:
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    if "avx512_bf16" in flags and "amx_bf16" not in flags:
        assert native.multiplies == PAIRS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library keeps freed memory as it likes")
def test_memory_of_plain_weights_is_given_back_while_a_model_is_packed(
    native: PanelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "TRIMMED", 1 << 20)
    honest, sizes = packed.trim_heap, []
    monkeypatch.setattr(
        packed, "trim_heap", lambda: sizes.append(sum(one.numel() for one in model.parameters())) or honest()
    )
    model = nn.Sequential(*(plain(512, 640, torch.float32, bias=False) for _ in range(4)))
    pack(model)
    assert sizes == [3 * 512 * 640, 2 * 512 * 640, 512 * 640, 0]
