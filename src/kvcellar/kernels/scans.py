"""scans: recurrences of state spaces and of linear attention on CPUs, token by token, in float32 (`scans.cpp`).

The convolutions in front of them are here, too.

A recurrence reads its states in rows of a plane, and leaves those after given numbers of tokens in other rows.

Always true: the bits of a token's output depend on the state before it and on the token, not on how a text is cut into
steps, on other sequences of a step, or on threads.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcellar.kernels.compiled import SOURCES, Kernel, Native, Threads, address_of
from kvcellar.kernels.structures import structure

SOURCE = SOURCES / "scans.cpp"
TYPES = (torch.float32, torch.bfloat16)
KINDS = ("space", "delta", "convolution")
PER_THREAD = 1 << 17  # elements of states, once for each token, that are worth another thread
_Input, _States, _Space, _Delta, _Convolution = (
    structure(SOURCE, name) for name in ("Input", "States", "Space", "Delta", "Convolution")
)


class Recurrence(NamedTuple):
    """What a scan computes from. `space`: y = (C h + D x) silu(z), where h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t, with
    dt = softplus(dt + bias) within limits. `delta`: o = q S, where S_t = exp(g_t) S_(t-1) and its value at key k_t
    moves towards v_t by beta_t.

    `tokens` [B,L,heads,elements]: x, dt, B, C, z, or q, k, v, g, beta. `weights`, of `space` only: bias and D
    [heads,elements], A [heads,elements,states]. A dimension of one element is the same for all.
    """

    kind: str
    tokens: tuple[Tensor | None, ...]
    weights: tuple[Tensor | None, ...] = ()
    softplus: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    normed: bool = False  # of `delta`: queries and keys are divided by their norms

    @property
    def first(self) -> Tensor:
        """x or q, whose type is that of outputs in transformers."""
        assert self.tokens[0] is not None
        return self.tokens[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the outputs [B,L,heads,elements]."""
        like = self.tokens[0 if self.kind == "space" else 2]
        assert like is not None
        return tuple(like.shape)

    def of(self, change: Any) -> "Recurrence":
        """The same with changed `tokens`."""
        return self._replace(tokens=tuple(None if one is None else change(one) for one in self.tokens))


def runs_of(ends: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Tensor:
    """The runs [n,4] of sequences, each with the row of its state before, and the rows that get the one after so many
    tokens, in order."""
    first: list[list[int]] = []
    more: list[list[int]] = []
    for read, after in ends:
        start, run = 0, [0, 0, 0, 0]
        for tokens, row in after:
            if start:
                run[3] = len(ends) + len(more)
                run = [0, 0, 0, 0]
                more.append(run)
            else:
                first.append(run)
            run[:3] = read, row, tokens - start
            read, start = row, tokens
    return torch.tensor(first + more, dtype=torch.int64, device="cpu").view(-1, 4)


class Rows(NamedTuple):
    """Where states are read and written: planes [rows,heads,...] in float32, and `runs` [n,4] of `sequences`."""

    read: Tensor
    write: Tensor
    runs: Tensor
    sequences: int


class ScanKernel:
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._kernels = {kind: Kernel(SOURCE, f"kvcellar_{kind}", environment).run for kind in KINDS}
        self._threads = Threads(environment).address

    def run(self, recurrence: Recurrence, rows: Rows, out: Tensor) -> None:
        """Fill out [B,L,heads,elements], and the rows of the runs."""
        self._run(recurrence.kind, self.native(recurrence, rows, out), out)

    def _run(self, kind: str, native: Native, out: Tensor) -> None:
        if out.numel() and self._kernels[kind](native.address):
            raise MemoryError(f"there is not enough memory for a {kind} of {tuple(out.shape)}")

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        """x [B,C,L], weight [C,K], bias [C] -> [B,C,L], each channel by itself; inputs before the first are zero."""
        out = torch.empty_like(x)  # in the order of x
        self._run("convolution", self.native_convolution(x, weight, bias, out, silu=silu), out)
        return out

    def native_convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, silu: bool) -> Native:
        """The call that fills out [B,C,L], of tensors at fixed addresses."""
        (sequences, channels, tokens), size = out.shape, weight.shape[1]
        threads = min(torch.get_num_threads(), 1 + out.numel() * size // PER_THREAD)
        inputs = [
            x.transpose(1, 2),
            weight.T[None],
            None if bias is None else bias[None, None],
            out.transpose(1, 2),
        ]  # [B,L,C]
        given = (_input(None if one is None else one[:, :, None]) for one in inputs)
        call = _Convolution(*given, self._threads, threads, sequences, tokens, channels, size, silu)
        return Native(address_of(self._kernels["convolution"]), call, (self, x, weight, bias, out))

    def native(self, recurrence: Recurrence, rows: Rows, out: Tensor) -> Native:
        """The call, of tensors in `TYPES` at fixed addresses."""
        threads = min(torch.get_num_threads(), 1 + prod(out.shape[:3]) * rows.read[0, 0].numel() // PER_THREAD)
        strides = rows.read.stride(0), rows.write.stride(0), rows.read.stride(1)
        places = rows.runs.data_ptr(), rows.read.data_ptr(), rows.write.data_ptr()
        states = _States(*places, *strides, self._threads, threads, rows.sequences)
        for plane in (rows.read, rows.write):
            assert plane.dtype is torch.float32
            assert plane[0, 0].is_contiguous()
        call = (_space if recurrence.kind == "space" else _delta)(recurrence, states, out)
        return Native(address_of(self._kernels[recurrence.kind]), call, (self, recurrence, rows, out))


def _space(of: Recurrence, states: Any, out: Tensor) -> Any:
    x, dt, b, c, z = of.tokens
    bias, a, d = of.weights
    assert a is not None
    assert b is not None
    assert a.dtype is torch.float32
    assert a.stride(2) == 1
    by_entry = a.shape[1:] != (1, 1)
    weights = (_input(one, 2) for one in (bias, a, d))
    sizes = out.shape[2], b.shape[2], out.shape[3], b.shape[3]
    tokens = (_input(one) for one in (x, dt, b, c, z))
    return _Space(states, *tokens, *weights, _input(out), *sizes, by_entry, of.softplus, *of.limits)


def _delta(of: Recurrence, states: Any, out: Tensor) -> Any:
    q, g = of.first, of.tokens[3]
    assert g is not None
    keys = q.shape[3]
    sizes = out.shape[2], q.shape[2], keys, out.shape[3]
    return _Delta(states, *map(_input, of.tokens), _input(out), *sizes, g.shape[3] > 1, of.normed, keys**-0.5)


def _input(x: Tensor | None, missing: int = 0) -> Any:
    """A tensor whose first `missing` dimensions of four are left out; A has its states as a fifth."""
    if x is None:
        return _Input()
    assert x.dtype in TYPES
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return _Input(x.data_ptr(), x.dtype is torch.float32, *[0] * missing, *strides[: 4 - missing])
