"""A recorded program returns the bits that torch returns, for any number of rows, in memory that is used again."""

import ctypes
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.engine.recording.program import Number, Op, Program, Ref, Value
from kvcellar.engine.recording.recorded import FIXED, KEPT, Recorded
from kvcellar.engine.recording.recorded_kernel import CANDIDATES, REFERENCES, Functions, StepKernel, same_bits
from kvcellar.engine.recording.recorded_lowering import operator
from kvcellar.engine.recording.recorded_operators import Life, placed
from kvcellar.engine.recording.recorded_outline import Handler, outlined
from kvcellar.kernels.compiled import COMPILERS
from tests.kernels.traced import data_of, traced

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here")
BUILDS = {"native": "", "AVX2": "-mno-avx512f", "portable": "-mno-avx"}
X86 = platform.machine() == "x86_64"
ROWS = (1, 2, 3, 8, 33)


@pytest.fixture(scope="module", params=BUILDS)
def kernel(request: pytest.FixtureRequest) -> StepKernel:
    if BUILDS[request.param] and not X86:
        pytest.skip("the instruction sets named here are those of x86-64")
    return StepKernel({**os.environ, "CXX": f"{FOUND} {BUILDS[request.param]}"})


@pytest.fixture(scope="module")
def native() -> StepKernel:
    return StepKernel(os.environ)


def rows(t: int, *widths: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(t + sum(widths))
    return (torch.randn(t, *widths, generator=generator) * 3).to(dtype)


def recorded(
    program: Program, kernel: StepKernel, handlers: Mapping[str, Handler] | None = None, kept: int = KEPT
) -> Recorded:
    program.check()
    return Recorded(outlined(program, data_of(program), FIXED), handlers or {}, kernel, kept)


def run(made: Recorded, t: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(made.run({"T": t}, {f"x{index}": one for index, one in enumerate(inputs)}).values())


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope(x: Tensor, angle: Tensor) -> Tensor:
    """Queries of 4 heads, turned [1,4,T,16]."""
    q = norm(x).view(1, -1, 4, 16).transpose(1, 2)
    cos, sin = angle[None, None].cos().to(x.dtype), angle[None, None].sin().to(x.dtype)
    return q * cos + rotated(q) * sin


def gated(x: Tensor, angle: Tensor) -> Tensor:
    q = rope(x, angle).transpose(1, 2).reshape(-1, 64)
    return F.silu(q) * x + F.gelu(x, approximate="tanh")


def heads_first(x: Tensor, angle: Tensor) -> Tensor:
    """A copy in which a row's heads are apart [1,4,T,16]."""
    return rope(x, angle).contiguous() * 2 + 1


def picked(x: Tensor, angle: Tensor) -> Tensor:
    table = torch.arange(40.0).view(10, 4).to(x.dtype)
    index = (x[:, 0].float().abs() * 2).long() % 10
    return torch.cat((F.embedding(index, table), x.index_select(0, index * 0), angle.to(x.dtype)), -1)


def limited(x: Tensor, angle: Tensor) -> Tensor:
    low = torch.where(x > 0, x.clamp(-1, 1), torch.minimum(x, x.flip(-1)).abs())
    return (low / 3 - x.clamp(max=0.5)).float() + torch.relu(angle.sum(-1, keepdim=True)) - x.amax(-1, keepdim=True)


def in_place(x: Tensor, angle: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 2, 64)
    y[:, 1].copy_(x)
    y[:, 0].add_(x[:, :1])
    y.mul_(0.3)
    return y.transpose(1, 2)


def folded(x: Tensor, angle: Tensor) -> Tensor:
    scale = torch.arange(x.shape[0], dtype=torch.float32)[:, None] + torch.ones(64).cumsum(0)
    return x * scale.to(x.dtype)


def gated_state(x: Tensor, angle: Tensor) -> Tensor:
    """The state of 4 heads of 8 by 16: numbers of each head are expanded to all of its elements."""
    step = F.softplus(x[:, :4, None].expand(-1, -1, 8) + torch.arange(4.0).to(x.dtype)[:, None].expand(-1, 8))
    decay = torch.exp(step[..., None].float() * -torch.arange(1.0, 5.0)[:, None, None].expand(-1, 8, 16))
    drive = step[..., None] * angle[:, None, None].to(x.dtype) * x[:, 32:].view(-1, 4, 8)[..., None]
    return (decay * decay + drive).to(x.dtype)


def convolved(x: Tensor, angle: Tensor) -> Tensor:
    """20 channels, by factors of their own; two positions, of which one is used."""
    longer = torch.cat((x[:, :60].view(-1, 20, 3), x[:, 4:24, None]), -1)
    weight = torch.arange(60.0).sub(30).div(20).to(x.dtype).view(20, 1, 3)
    return F.silu(F.conv1d(longer, weight, x.new_ones(20) / 3, groups=20)[..., -1:]).transpose(1, 2)


def angles(x: Tensor, angle: Tensor) -> Tensor:
    """Products of columns and rows, also of zeros of both signs, and rows that are named by number."""
    product = torch.bmm(
        torch.arange(-3.0, 4.0)[None, :, None], (angle.round() * 0.0 + angle[:, :1])[None, :, 0][:, None]
    )
    picked = angle[None][:, (angle[:, 0] > 0).long() - 1][0]
    return torch.cat((product[0].t(), product[0].t().sin(), product[0].t().cos(), picked), -1)


FUNCTIONS = (rope, gated, heads_first, picked, limited, in_place, folded, gated_state, convolved, angles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_program_returns_the_bits_of_torch(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, kernel: StepKernel
) -> None:
    made = recorded(traced(function, [rows(5, 64, dtype=dtype), rows(5, 16, dtype=torch.float32)]), kernel)
    for t in (*ROWS, 1):
        inputs = rows(t, 64, dtype=dtype), rows(t, 16, dtype=torch.float32)
        (got,) = run(made, t, inputs)
        expected = function(*inputs)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert same_bits(got, expected), f"{t} rows"


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "relu": torch.relu, "silu": lambda x: F.silu(x), "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "gelu": lambda x: F.gelu(x), "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "exp": torch.exp, "softplus": lambda x: F.softplus(x), "rsqrt": torch.rsqrt, "sqrt": torch.sqrt,
    "square": lambda x: x.pow(2),
    "cube": lambda x: x.pow(3), "reciprocal": torch.reciprocal, "float": lambda x: x.float(),
    "erf": torch.erf, "add": lambda x: x + 1e-3, "mul": lambda x: x * 0.3, "div": lambda x: x / 0.3,
    "sub": lambda x: x - 0.3, "clamp": lambda x: x.clamp(-0.3, 0.7),
    "positive": lambda x: x.clamp(min=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_every_bfloat16_is_treated_as_torch_does(name: str, kernel: StepKernel) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    made = recorded(traced(UNARY[name], [every]), kernel)
    for x in (every, every[:3]):
        assert same_bits(run(made, len(x), [x])[0], UNARY[name](x))


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("width", [64, 5])
def test_functions_of_float32_have_the_bits_of_torch(name: str, width: int, kernel: StepKernel) -> None:
    function = operator(name)
    made = recorded(traced(lambda x: function(x[:, :width]) * 1, [rows(5, 70, dtype=torch.float32)]), kernel)
    for t in ROWS:
        x = rows(t, 70, dtype=torch.float32) * 20
        x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        assert same_bits(run(made, t, [x])[0], function(x[:, :width]))


def test_functions_are_native_where_torchs_library_has_them(native: StepKernel) -> None:
    """Without the library they are left to torch."""
    if X86 and native.functions.lanes:
        assert all(native.function(name, operator(name)) for name in CANDIDATES)
    none = Functions(lambda _: 1, 16, lambda *_: torch.ones(0), Path("no library"))
    assert none.of("aten.exp.default", torch.exp, lambda: torch.ones(64)) is None


@pytest.mark.parametrize("name", ["gelu", "rsqrt", "silu", "softplus"])
def test_rows_that_torch_computes_in_several_ways_are_equal_too(name: str, native: StepKernel) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[: 65535 // 5 * 5].view(-1, 5)
    made = recorded(traced(UNARY[name], [every]), native)
    assert same_bits(run(made, len(every), [every])[0], UNARY[name](every))


def test_lines_and_reductions_are_native_in_every_build(kernel: StepKernel) -> None:
    for name in ("add", "sub", "mul", "div", "minimum", "maximum"):
        for inputs, out in [("ff", "f"), ("bb", "b"), ("bf", "f"), ("fb", "f"), ("b-", "b"), ("f-", "f")]:
            types = {"f": torch.float32, "b": torch.bfloat16, "-": None}
            assert kernel.line(name, [types[one] for one in inputs], types[out]), (name, inputs)
    assert all(kernel.line(name, [torch.float32], torch.float32) for name in ("neg", "square", "relu"))
    assert kernel.reduction("amax", torch.float32)
    assert not kernel.line("add", [torch.float16, torch.float16], torch.float16)


def test_sums_and_roots_are_native_on_x86_64_and_torchs_bits_everywhere(kernel: StepKernel) -> None:
    """On other CPUs torch adds in another order, or estimates roots: the operators are then left to torch."""

    def function(x: Tensor) -> Tensor:
        return torch.cat((x.sum(-1, keepdim=True), x.mean(-1, keepdim=True), torch.rsqrt(x)), -1)

    if X86:
        assert kernel.line("rsqrt", [torch.float32], torch.float32)
        assert all(kernel.reduction(name, torch.float32) for name in ("sum", "mean"))
    made = recorded(traced(function, [rows(5, 331, dtype=torch.float32)]), kernel)
    for t in ROWS:
        x = rows(t, 331, dtype=torch.float32)
        assert same_bits(run(made, t, [x])[0], function(x))


def test_an_operator_that_is_not_as_torchs_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = StepKernel(os.environ)
    monkeypatch.setitem(REFERENCES, "mul", lambda a, b: torch.add(a, b))  # type: ignore[arg-type]
    monkeypatch.setitem(REFERENCES, "mean", lambda x: x.sum(-1))  # type: ignore[arg-type]
    assert not kernel.line("mul", [torch.float32, torch.float32], torch.float32)
    assert not kernel.reduction("mean", torch.float32)
    x = rows(3, 64)
    made = recorded(traced(norm, [rows(5, 64)]), kernel)
    assert same_bits(run(made, 3, [x])[0], norm(x))


# Random programs: each operator takes values that are there, in the shapes that they happen to have.
STEPS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b * 0.5,
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: rotated(a) + b,
    lambda a, b: F.silu(a),
    lambda a, b: norm(a) * b,
    lambda a, b: a * a.float().mean(-1, keepdim=True).to(a.dtype),
    lambda a, b: a.view(a.shape[0], 4, 2).transpose(1, 2).reshape(a.shape) + b,
    lambda a, b: torch.where(a > b, a, b * 2),
    lambda a, b: a.flip(0) + b,
    lambda a, b: a.cumsum(0) * b[:1],
    lambda a, b: torch.softmax(a, -1),
    lambda a, b: a[:, :4].repeat(1, 2) + b[:, 1:2],
    lambda a, b: torch.cat((a[:, 4:], b[:, :4]), 1),
    lambda a, b: (a.float() * 2).to(b.dtype).contiguous() + a.amax(-1, keepdim=True),
    lambda a, b: a.t().contiguous().t() * b,
)


@settings(max_examples=8)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9
    ),
    wide=st.booleans(),
    special=st.booleans(),
)
def test_random_programs_return_the_bits_of_torch(
    native: StepKernel, steps: list[tuple[int, int, int]], wide: bool, special: bool
) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        values = [x, y]
        for step, a, b in steps:
            values.append(STEPS[step](values[a % len(values)], values[b % len(values)]))
        return values[-1]

    dtype = torch.float32 if wide else torch.bfloat16
    made = recorded(traced(function, [rows(5, 8, dtype=dtype), rows(5, 8)]), native)
    for t in (1, 2, 7):
        inputs = [rows(t, 8, dtype=dtype), rows(t, 8) * 2]
        if special:
            inputs[0][0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        assert same_bits(run(made, t, inputs)[0], function(*inputs))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(-1, 12), st.integers(0, 8)), max_size=30))
def test_storages_in_use_at_the_same_time_do_not_overlap(numbers: list[tuple[int, int, int]]) -> None:
    lives = [Life(size, first, first + more) for size, first, more in numbers]
    offsets, total = placed(lives)
    for at in range(-1, 21):
        used = sorted((offsets[i], max(1, one.bytes)) for i, one in enumerate(lives) if one.first <= at <= one.last)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(used))
        assert all(a % 64 == 0 and a + n <= total for a, n in used)


class Doubled:
    """Handles an operator that doubles its input, and can be made to fail."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Callable[[], None]:
        (x,), (out,) = inputs, outputs
        assert out is not None

        def call() -> None:
            if self.fails:
                raise RuntimeError("the operator failed")
            torch.mul(x, 2, out=out)

        return call


def doubling(n: str = "T") -> Program:
    """(x + 1) * 2 - 1, of which the product is `kvcellar.double`; `n` rows of it."""
    values = tuple(Value("float32", (n, 4), (4, 1), storage) for storage in range(4))
    ops = (
        Op("aten.add.Tensor", (Ref(0), 1), {}, (1,)),
        Op("kvcellar.double", (Ref(1),), {}, (2,)),
        Op("aten.sub.Tensor", (Ref(2), 1), {}, (3,)),
    )
    return Program(("T",), values, {}, {"x": 0}, ops, {"y": 3})


def test_an_exception_of_an_operator_is_raised_and_the_next_run_is_right(native: StepKernel) -> None:
    handler = Doubled()
    made = recorded(doubling(), native, {"kvcellar.double": handler})
    x = torch.ones(3, 4)
    for fails in (False, True, False):
        handler.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="the operator failed"):
                made.run({"T": 3}, {"x": x})
        else:
            assert torch.equal(made.run({"T": 3}, {"x": x})["y"], torch.full((3, 4), 3.0))


def test_an_operator_without_a_handler_is_named(native: StepKernel) -> None:
    made = recorded(doubling(), native)
    with pytest.raises(ValueError, match=r"kvcellar\.double is no operator of torch and has no handler"):
        made.run({"T": 3}, {"x": torch.ones(3, 4)})


def test_an_index_outside_of_its_rows_is_an_error(native: StepKernel) -> None:
    made = recorded(traced(lambda index: F.embedding(index, torch.ones(10, 4)), [torch.arange(5)]), native)
    assert torch.equal(run(made, 2, [torch.tensor([0, 9])])[0], torch.ones(2, 4))
    for bad in (10, -1):
        with pytest.raises(IndexError, match="an index"):
            run(made, 2, [torch.tensor([0, bad])])


def test_sizes_of_one_step_only_are_taken_in_each_run(native: StepKernel) -> None:
    """A value with a size that bindings have no number for is made as its operator is called."""
    values = (
        Value("float32", ("T",), (1,), 0),
        Value("float32", ("N", "T"), ("T", 1), 1),
        Value("float32", ("T", "N"), (1, "T"), 1),
        Value("float32", ("T",), (1,), 2),
        Value("float32", ("T",), (1,), 3),
    )
    ops = (
        Op("aten.repeat.default", (Ref(0), (Number("N"), 1)), {}, (1,)),
        Op("aten.sum.dim_IntList", (Ref(2), (-1,)), {}, (3,)),
        Op("aten.mul.Tensor", (Ref(3), 2), {}, (4,)),
    )
    made = recorded(Program(("T", "N"), values, {}, {"x": 0}, ops, {"y": 4}), native)
    x = torch.arange(3.0)
    for n in (1, 5, 2):
        assert torch.equal(made.run({"T": 3, "N": n}, {"x": x})["y"], 2 * n * x)


def test_bindings_are_counted_and_capped(native: StepKernel) -> None:
    made = recorded(traced(norm, [rows(5, 64)]), native, kept=2)
    sizes: list[int] = []
    for t in (64, *range(1, 30), 64):
        (got,) = run(made, t, [rows(t, 64)])
        assert same_bits(got, norm(rows(t, 64)))
        sizes.append(made.bytes)
    assert max(sizes) <= sizes[0] + 8000  # the arena of the largest, and instructions of two
    made.check()
    made.clear()
    assert made.bytes == 0


def test_an_arena_that_grew_is_no_larger_than_a_new_one(native: StepKernel) -> None:
    grown, new = (recorded(traced(norm, [rows(5, 64)]), native) for _ in range(2))
    for t in (40, 1, 100, 101):
        run(grown, t, [rows(t, 64)])
        grown.check()
    run(new, 101, [rows(101, 64)])
    assert grown.bytes == new.bytes
    run(grown, 1, [rows(1, 64)])
    assert grown.bytes > new.bytes  # instructions of two bindings


def test_what_a_run_returned_stays_when_the_next_one_runs(native: StepKernel) -> None:
    made = recorded(traced(norm, [rows(5, 64)]), native)
    (first,) = run(made, 3, [rows(3, 64)])
    kept = first.clone()
    run(made, 3, [rows(3, 64) * 7 + 1])
    assert torch.equal(first, kept)


def test_memory_is_shared_by_what_is_not_in_use_at_once(native: StepKernel) -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.flip(0) + 1
        return x

    made = recorded(traced(long, [rows(5, 64)]), native)
    run(made, 100, [rows(100, 64)])
    assert made.bytes < 10 * 100 * 64 * 2 + 30 * 400 + 2000


def test_the_address_of_a_number_stays_also_where_another_is_equal_to_it(kernel: StepKernel) -> None:
    values = (0.0, -0.0, math.nan, 0.5)
    first = [kernel.number(value) for value in values]
    again = [kernel.number(value) for value in reversed(values)][::-1]
    assert first == again
    assert len(set(first)) == len(values)
    found = [ctypes.c_float.from_address(address).value for address in first]
    assert [str(number) for number in found] == ["0.0", "-0.0", "nan", "0.5"]
