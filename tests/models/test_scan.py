"""Scan functions: from any state, over any number of tokens, they equal a plain loop and those of transformers."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.zamba import modeling_zamba

from kvcellar.engine.models.mixers import StateView
from kvcellar.engine.models.weights import scan
from kvcellar.engine.models.weights.scan import SCANS, Call, after, selective_scan
from kvcellar.errors import ModelRefused
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.scans import ScanKernel
from kvcellar.memory.plan import StateSegment
from tests.models.timeline import relative


def obvious(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor, h: Tensor):
    """Token by token, channel by channel, in float64."""
    u, delta, A, B, C, D, z, bias, h = (x.double() for x in (u, delta, A, B, C, D, z, bias, h))
    y = torch.zeros_like(u)
    for b in range(u.shape[0]):
        for d in range(u.shape[1]):
            state = h[b, d].clone()
            for t in range(u.shape[2]):
                step = torch.log1p(torch.exp(delta[b, d, t] + bias[d]))
                state = torch.exp(step * A[d]) * state + step * B[b, :, t] * u[b, d, t]
                gate = z[b, d, t] * torch.sigmoid(z[b, d, t])
                y[b, d, t] = (C[b, :, t] @ state + D[d] * u[b, d, t]) * gate
            h[b, d] = state
    return y, h


def drawn(batch: int, channels: int, states: int, length: int) -> list[Tensor]:
    """u, delta, A, B, C, D, z and the bias of delta."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(batch, channels, length)] * 2 + [(channels, states)] + [(batch, states, length)] * 2
    shapes += [(channels,), (batch, channels, length), (channels,)]
    made = [torch.randn(shape, generator=draw) for shape in shapes]
    made[2] = -made[2].exp()
    return made


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_scan_continues_from_its_initial_state(length: int) -> None:
    u, delta, A, B, C, D, z, bias = drawn(2, 3, 4, length)
    state = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    y, last = selective_scan(u, delta, A, B, C, D, z, bias, True, True, state)
    wanted, wanted_last = obvious(u, delta, A, B, C, D, z, bias, state)
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last.double(), wanted_last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("theirs", [modeling_mamba, modeling_zamba], ids=lambda module: module.__name__[-5:])
def test_a_scan_from_zero_equals_that_of_transformers(theirs: ModuleType, plain: bool) -> None:
    u, delta, A, B, C, D, z, bias = drawn(2, 3, 4, 9)
    if plain:
        delta = delta.abs()
    more: dict[str, Any] = {} if plain else {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
    ours = selective_scan(u, delta, A, B, C, return_last_state=True, **more)
    own = theirs.mamba_selective_scan(u, delta, A, B, C, return_last_state=True, **more)
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(selective_scan(u, delta, A, B, C, **more), own[0], atol=1e-5, rtol=1e-5)


def test_a_scan_in_half_precision_sums_in_float32() -> None:
    """Small terms would be lost beside a large sum of 8 significant bits."""
    u, delta, A, B, C, D, z, bias = (x.bfloat16() for x in drawn(1, 2, 3, 400))
    A, B, u = torch.full_like(A, -1e-4), torch.ones_like(B), torch.ones_like(u)
    state = torch.full((1, 2, 3), 50.0)
    y, last = selective_scan(u, delta, A, B, C, D, z, bias, True, True, state)
    wanted, wanted_last = obvious(u, delta, A, B, C, D, z, bias, state)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert relative(last.double(), wanted_last) < 1e-2
    assert relative(y.double(), wanted) < 2e-2


def call_of(name: str, theirs: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    """As a mixer makes it, with every argument by name."""
    kind = SCANS[name]
    bound = inspect.signature(kind.ours or theirs).bind(**arguments)
    bound.apply_defaults()
    return Call(kind, kind.ours or theirs, bound.arguments)


def drawn_calls() -> Iterator[tuple[str, Call]]:
    """Scans of 4 sequences of 6 tokens, of every kind and with every option that changes the result."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    u, delta, A, B, C, D, z, bias = drawn(4, 3, 5, 6)
    first = {"hidden_states": u, "dt": delta, "A": A, "B": B, "C": C, "D": D, "return_last_state": True}
    state = {"initial_states": draw(4, 3, 5)}
    settled = {"z": z, "delta_bias": bias, "delta_softplus": True}
    yield "selective", call_of("mamba_selective_scan", modeling_mamba.mamba_selective_scan, first | settled | state)
    bare = first | state | {"dt": delta.abs()}
    yield "selective, bare", call_of("mamba_selective_scan", modeling_mamba.mamba_selective_scan, bare)

    second = {
        "hidden_states": draw(4, 6, 6, 3),
        "dt": draw(4, 6, 6),
        "A": -draw(6).exp(),
        "B": draw(4, 6, 2, 5),
        "C": draw(4, 6, 2, 5),
        "chunk_size": 8,
        "D": draw(6),
        "dt_bias": draw(6),
        "dt_softplus": True,
        "initial_states": draw(4, 6, 3, 5),
        "return_final_states": True,
    }
    yield "dual", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, second)
    limited = second | {"dt_limit": (0.3, 0.9)}
    yield "dual, limited", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, limited)
    bare = second | {"dt": draw(4, 6, 6).abs(), "dt_bias": None, "dt_softplus": False}
    yield "dual, bare", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, bare)

    third = {
        "query": draw(4, 6, 2, 5),
        "key": draw(4, 6, 2, 5) / 5,
        "value": draw(4, 6, 4, 3),
        "g": -draw(4, 6, 4).exp(),
        "beta": draw(4, 6, 4).sigmoid(),
        "initial_state": draw(4, 4, 5, 3),
        "output_final_state": True,
    }
    delta_rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    for normed in (False, True):
        given = third | {"use_qk_l2norm_in_kernel": normed}
        yield f"delta, {normed}", call_of("torch_chunk_gated_delta_rule", delta_rule, given)
    channels = {"query": draw(4, 6, 4, 5), "key": draw(4, 6, 4, 5), "g": -draw(4, 6, 4, 5).exp()}
    given = third | channels | {"use_qk_l2norm_in_kernel": True}
    yield "kimi", call_of("chunk_kimi_delta_attention", modeling_kimi_linear.chunk_kimi_delta_attention, given)


CALLS = dict(drawn_calls())
ALL_TOKENS = {"hidden_states", "dt", "B", "C", "z", "query", "key", "value", "g", "beta"}


@pytest.mark.parametrize("kind", CALLS)
def test_the_state_after_some_tokens_equals_that_of_a_scan_over_these_alone(kind: str) -> None:
    call = CALLS[kind]
    indices, counts = [3, 0, 2], [6, 2, 1]
    before = call.arguments[call.scan.state]
    found = after(call.recurrence, before[indices], indices, counts)
    for state, index, most in zip(found, indices, counts, strict=True):
        alone = {
            name: value[index : index + 1].narrow(-1 if call.by_head else 1, 0, most)
            for name, value in call.arguments.items()
            if name in ALL_TOKENS and isinstance(value, Tensor)
        }
        before = {call.scan.state: call.arguments[call.scan.state][index : index + 1]}
        _, wanted = call.function(**{**call.arguments, **alone, **before})
        torch.testing.assert_close(state, wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CALLS)
def test_a_short_scan_equals_one_in_whole_chunks(kind: str) -> None:
    call = CALLS[kind]
    torch.testing.assert_close(call.run(), call.function(**call.arguments), atol=1e-5, rtol=1e-5)


class _Held:
    """One state."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def planes(self, layer: int) -> dict[str, Tensor]:
        return {scan.recurrent(0): self._state}

    def read(self, layer: int, segments: Sequence[StateSegment], names: Any = None) -> dict[str, Tensor]:
        return self.planes(layer)

    def write(self, layer: int, segments: Sequence[StateSegment], planes: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it is not stored")


@pytest.mark.parametrize("kind", CALLS)
def test_the_kernel_equals_scans_of_transformers_and_writes_rows(kind: str) -> None:
    """Of all tokens, and after some, in rows of their own or as a part of a step."""
    try:
        kernel = ScanKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))
    call = CALLS[kind]
    before = call.arguments[call.scan.state]
    n = len(before)
    rows = torch.cat([torch.zeros_like(before[:1]), before, *[torch.full_like(before, torch.nan)] * 2])
    segments = [StateSegment(i, 0, 6, 1 + i, 1 + n + i, ((4, 1 + 2 * n + i),)) for i in range(n)]
    view = StateView(_Held(rows), segments, 6, revertible=True, kernel=kernel)
    assert view.state(0, scan.recurrent(0)) is None
    bare = replace(call, arguments={**call.arguments, call.scan.state: None})
    wanted, last = call.run()
    found, _ = view.scan(0, bare)
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows[1 + n : 1 + 2 * n], last, atol=1e-5, rtol=1e-5)
    parts = view._at(0, lambda indices, count: view)([2, 1], [4, 2])[scan.recurrent(0)]
    assert torch.equal(parts[0], rows[1 + 2 * n + 2])
    torch.testing.assert_close(parts, after(call.recurrence, before[[2, 1]], [2, 1], [4, 2]), atol=1e-5, rtol=1e-5)


def test_each_head_is_scanned_from_its_own_state() -> None:
    u, delta, A, B, C, *_ = drawn(2, 3, 4, 5)
    state = torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    view = StateView(_Held(state), [], 5)
    zero, none = torch.zeros(3), torch.full((2, 3, 5), 1e4)
    given = {"hidden_states": u, "dt": delta.abs(), "A": A, "B": B, "C": C, "return_last_state": True}
    call = call_of("mamba_selective_scan", modeling_mamba.mamba_selective_scan, given)
    for head in range(3):
        _, last = view.scan(0, call)
        unbiased = torch.expm1(delta.abs().double()).log()  # the inverse of softplus
        _, wanted = obvious(u, unbiased, A, B, C, zero, none, zero, state[:, head])
        torch.testing.assert_close(last.double(), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelRefused, match="more scans than states"):
        view.scan(0, call)
