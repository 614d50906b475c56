"""The compiled recurrences, judged by those in torch in float64, and by themselves on texts that are cut."""

import os
import platform
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.engine.models.weights.scan import advance
from kvcellar.kernels.compiled import COMPILERS, NotCompiled
from kvcellar.kernels.scans import Recurrence, Rows, ScanKernel, runs_of

BUILDS = {"native": "", "AVX2": "-mno-avx512f", "portable": "-mno-avx"}
# heads, heads that share, elements, states: of state spaces with one decay for a head, and with one for each entry
SPACES = [(4, 2, 5, 16), (6, 1, 70, 128), (2, 2, 64, 64), (3, 3, 3, 9), (2, 1, 9, 256)]
BY_ENTRY = [(1, 1, 70, 16), (1, 1, 5, 7), (1, 1, 16, 40)]
DELTAS = [(4, 2, 5, 3), (2, 2, 128, 128), (3, 1, 33, 70), (4, 4, 16, 32)]  # heads, of keys, keys, values


@pytest.fixture(scope="module", params=BUILDS)
def kernel(request) -> ScanKernel:
    """Compiled once for all tests, and kept in the user's cache."""
    options = BUILDS[request.param]
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if options and platform.machine() != "x86_64":
        pytest.skip("the instruction sets named here are those of x86-64")
    try:
        return ScanKernel({**os.environ, "CXX": f"{compiler} {options}"} if options and compiler else os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))


def space(
    sizes: tuple[int, ...], batch: int, length: int, dtype: torch.dtype, options: tuple[bool, bool, bool], *,
    by_entry: bool,
) -> tuple[Recurrence, tuple[int, ...]]:  # fmt: skip
    """A recurrence, and the shape of a state. `options`: a gate, a bias with softplus and D, and limits of dt."""
    heads, groups, rows, size = sizes
    gated, biased, limited = options
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    dt = normal(batch, length, heads, rows if by_entry else 1)
    # As models have it: tokens of one channel beside each other.
    x = normal(batch, heads, rows, length).to(dtype).permute(0, 3, 1, 2)
    b, c = normal(batch, length, 2, groups, size).to(dtype).unbind(2)
    z = normal(batch, length, heads, rows).to(dtype) if gated else None
    a = -normal(heads, rows if by_entry else 1, size if by_entry else 1).exp()
    weights = (normal(heads, rows if by_entry else 1).to(dtype), a, normal(heads, 1).to(dtype))
    weights = weights if biased else (None, a, None)
    dt = (dt if biased else dt.abs()).to(dtype)
    limits = (0.3, 0.9) if limited else (0.0, float("inf"))
    return Recurrence("space", (x, dt, b, c, z), weights, biased, limits), (heads, rows, size)


def delta(
    sizes: tuple[int, ...], batch: int, length: int, dtype: torch.dtype, *, by_key: bool, normed: bool
) -> tuple[Recurrence, tuple[int, ...]]:
    heads, groups, keys, values = sizes
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q, k = (normal(batch, length, groups, keys) / keys**0.5).to(dtype), normal(batch, length, groups, keys)
    k = (k / k.norm(dim=-1, keepdim=True)).to(dtype)
    v, beta = normal(batch, length, heads, values).to(dtype), normal(batch, length, heads, 1).sigmoid().to(dtype)
    g = -normal(batch, length, heads, keys if by_key else 1).exp()
    return Recurrence("delta", (q, k, v, g, beta), normed=normed), (heads, keys, values)


def exact(of: Recurrence, before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and states after each token [B,L,*shape], in float64."""
    weights = tuple(None if one is None else one.double() for one in of.weights)
    step, h = advance(of.of(Tensor.double)._replace(weights=weights)), before.double()
    outputs, states = zip(*((step(h, t).clone(), h.clone()) for t in range(of.shape[1])), strict=True)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def check(kernel: ScanKernel, of: Recurrence, shape: tuple[int, ...], cuts: list[int], dtype: torch.dtype) -> None:
    """Outputs, and the states at cuts, are near the exact ones, and have the same bits in one run, in several of one
    call, in several calls, and alone."""
    batch, length = of.shape[:2]
    before = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    cuts = sorted({*(cut % length for cut in cuts), length} - {0})
    rows = torch.zeros(1 + batch * (1 + len(cuts)), *shape)
    rows[1 : 1 + batch] = before
    kept = [[(n, 1 + batch + b * len(cuts) + i) for i, n in enumerate(cuts)] for b in range(batch)]
    out = torch.empty(of.shape, dtype=dtype)
    kernel.run(of, Rows(rows, rows, runs_of([(1 + b, kept[b]) for b in range(batch)]), batch), out)

    wanted, states = exact(of, before)
    bound = 2e-5 if dtype is torch.float32 else 1e-2
    assert (out.double() - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max()))
    for b, i in ((b, i) for b in range(batch) for i in range(len(cuts))):
        found, right = rows[kept[b][i][1]].double(), states[b, cuts[i] - 1]
        assert (found - right).abs().max() <= 2e-5 * max(1.0, float(right.abs().max()))

    last = batch - 1
    alone, single = of.of(lambda x: x[last:]), torch.cat([torch.zeros(1, *shape), before[last:], before[last:] * 0])
    whole = torch.empty_like(out[last:])
    kernel.run(alone, Rows(single, single, runs_of([(1, [(length, 2)])]), 1), whole)
    assert torch.equal(whole, out[last:])
    assert torch.equal(single[2], rows[kept[last][-1][1]])
    start = 0
    for n in cuts:  # in place
        part = whole[:, start:n].clone()
        kernel.run(
            alone.of(lambda x, a=start, b=n: x[:, a:b]), Rows(single, single, runs_of([(1, [(n - start, 1)])]), 1), part
        )
        assert torch.equal(part, out[last:, start:n])
        start = n
    assert torch.equal(single[1], single[2])


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
CUTS = st.lists(st.integers(0, 60), max_size=3)
SETTINGS = settings(max_examples=25, deadline=None)


@SETTINGS
@given(st.sampled_from(SPACES), st.integers(1, 3), st.integers(1, 40), DTYPES, CUTS, st.tuples(*[st.booleans()] * 3))
def test_a_state_space_is_the_recurrence(kernel, sizes, batch, length, dtype, cuts, options) -> None:
    of, shape = space(sizes, batch, length, dtype, options, by_entry=False)
    check(kernel, of, shape, cuts, dtype)


@SETTINGS
@given(st.sampled_from(BY_ENTRY), st.integers(1, 3), st.integers(1, 40), DTYPES, CUTS, st.tuples(*[st.booleans()] * 3))
def test_a_selective_scan_is_the_recurrence(kernel, sizes, batch, length, dtype, cuts, options) -> None:
    of, shape = space(sizes, batch, length, dtype, options, by_entry=True)
    check(kernel, of, shape, cuts, dtype)


@SETTINGS
@given(st.sampled_from(DELTAS), st.integers(1, 3), st.integers(1, 40), DTYPES, CUTS, st.booleans(), st.booleans())
def test_the_delta_rule_is_the_recurrence(kernel, sizes, batch, length, dtype, cuts, by_key, normed) -> None:
    of, shape = delta(sizes, batch, length, dtype, by_key=by_key, normed=normed)
    check(kernel, of, shape, cuts, dtype)


def test_a_state_that_is_not_kept_overwrites_nothing(kernel) -> None:
    for of, shape in (
        space(SPACES[0], 1, 20, torch.float32, (True, True, True), by_entry=False),
        delta(DELTAS[0], 1, 20, torch.float32, by_key=False, normed=True),
    ):
        rows = torch.randn(2, *shape)
        kept, out = rows.clone(), torch.empty(of.shape)
        kernel.run(of, Rows(rows, rows, runs_of([(1, [(20, 0)])]), 1), out)
        assert torch.equal(rows, kept)
        kernel.run(of, Rows(rows, kept, runs_of([(1, [(20, 1)])]), 1), again := torch.empty(of.shape))
        assert torch.equal(out, again)


def test_threads_change_no_bit(kernel, monkeypatch) -> None:
    of, shape = space(SPACES[1], 2, 40, torch.bfloat16, (True, True, False), by_entry=False)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rows, out = torch.zeros(3, *shape), torch.empty(of.shape)
        kernel.run(of, Rows(rows, rows, runs_of([(0, [(40, 1)]), (0, [(40, 2)])]), 2), out)
        found.append((rows, out))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@SETTINGS
@given(
    st.integers(1, 3), st.sampled_from([1, 33, 300]), st.integers(1, 40), st.integers(1, 5), DTYPES, st.booleans(),
    st.booleans(), st.integers(1, 40),
)  # fmt: skip
def test_a_convolution_is_that_of_torch_however_it_is_cut(
    kernel, batch, channels, length, size, dtype, biased, silu, cut
) -> None:
    draw = torch.Generator().manual_seed(length)
    x = torch.randn(batch, length, channels, generator=draw).to(dtype).transpose(1, 2)
    w, bias = (torch.randn(channels, n, generator=draw).to(dtype) for n in (size, 1))
    given_bias = bias[:, 0] if biased else None
    y = kernel.convolve(x, w, given_bias, silu=silu)
    wide = None if given_bias is None else given_bias.double()
    wanted = torch.conv1d(x.double(), w.double()[:, None], wide, padding=size - 1, groups=channels)[..., :length]
    wanted = torch.nn.functional.silu(wanted) if silu else wanted
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert (y.double() - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max()))
    start = min(cut, length - 1)
    before = max(0, start - size + 1)
    part = kernel.convolve(x[-1:, :, before:].contiguous(), w, given_bias, silu=silu)
    assert torch.equal(part[..., start - before :], y[-1:, :, start:])
