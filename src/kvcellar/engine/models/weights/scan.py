"""scan: replace the scan functions that mixers call, to pass states in and to compute states after fewer tokens.

A mixer projects, convolves, scans, and projects again. Only the scan needs the state, but it is called in the middle of
a mixer's code. So a mixer whose code refers to one of the scans below is run with another function under that name;
neither its code nor its module is changed. Then

  * Mamba's scan, which in transformers always begins at zero, begins with the state;
  * the arguments of a scan are kept until the step ends, so the state after fewer tokens is computed by a scan over
    these alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels.packed import CAUSAL_CONV, of_few_lengths
from kvcellar.kernels.scans import TYPES, Recurrence, ScanKernel

Function = Callable[..., Any]


def recurrent(index: int) -> str:
    """The name of the plane of a layer's recurrence of this index."""
    return f"recurrent {index}"


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_states: Tensor | None = None,
    **_: Any,
) -> Any:
    """hidden_states, dt, z [b,d,L], A [d,n], B and C [b,n,L], D [d], initial_states [b,d,n] -> [b,d,L], the last state.

    The recurrence of Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.
    Sums are kept in float32.
    """
    names = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")
    values = (hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus)
    of = _of_selective(dict(zip(names, values, strict=True)))
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x = hidden_states.to(wide)
    h = x.new_zeros(*x.shape[:2], A.shape[-1]) if initial_states is None else initial_states.to(wide).clone()
    step = advance(of)
    y = torch.stack([step(h, t)[:, 0] for t in range(x.shape[-1])], -1).to(hidden_states.dtype)
    return (y, h) if return_last_state else y


# Updates the states [n,*shape] of the first n sequences by token t, in place; returns its outputs [n,heads,elements].
Advance = Callable[[Tensor, int], Tensor]


def _of_selective(given: Mapping[str, Any]) -> Recurrence:
    """The arguments of `selective_scan`: all channels are one head."""

    def tokens(name: str) -> Tensor | None:
        return None if given[name] is None else given[name].transpose(1, 2)[:, :, None]

    def weights(name: str) -> Tensor | None:
        return None if given[name] is None else given[name][None]

    return Recurrence(
        "space",
        tuple(map(tokens, ("hidden_states", "dt", "B", "C", "z"))),
        tuple(map(weights, ("delta_bias", "A", "D"))),
        softplus=given["delta_softplus"],
        limits=(-inf, inf),
    )


def _of_dual(given: Mapping[str, Any]) -> Recurrence:
    """Of Dao and Gu, "Transformers are SSMs" (2024), section 6: A is one number for each head."""
    bias, a, d = (None if given[name] is None else given[name][:, None] for name in ("dt_bias", "A", "D"))
    return Recurrence(
        "space",
        (given["hidden_states"], given["dt"][..., None], given["B"], given["C"], None),
        (bias, None if a is None else a[..., None], d),
        softplus=given["dt_softplus"],
        limits=given["dt_limit"],
    )


def _of_delta(given: Mapping[str, Any]) -> Recurrence:
    """Of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), section 3. The decay is one number for each head,
    or for each channel of the keys."""
    query, key, value, g, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    g = g if g.dim() == 4 else g[..., None]
    return Recurrence("delta", (query, key, value, g, beta[..., None]), normed=given["use_qk_l2norm_in_kernel"])


def advance(of: Recurrence) -> Advance:
    """The recurrence in torch, token by token: slow and obvious. It judges the kernel, and serves other devices."""
    return _space(of) if of.kind == "space" else _delta(of)


def _wide(x: Tensor | None, heads: int) -> Tensor:
    """In float32 at least, with as many heads: those of a group are beside each other."""
    assert x is not None
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(heads // x.shape[2], dim=2)


def _space(of: Recurrence) -> Advance:
    x, dt, b, c = (_wide(one, of.shape[2]) for one in of.tokens[:4])
    (bias, a, d), z = of.weights, of.tokens[4]
    assert a is not None
    if bias is not None:
        dt = dt + bias
    dt = (F.softplus(dt) if of.softplus else dt).clamp(*of.limits)
    drive = dt * x

    def step(states: Tensor, t: int) -> Tensor:
        n = len(states)
        held = states.view(n, *drive.shape[2:], -1)
        held.mul_(torch.exp(dt[:n, t, ..., None] * a)).addcmul_(drive[:n, t, ..., None], b[:n, t, :, None])
        y = (held @ c[:n, t, ..., None])[..., 0]
        y = y if d is None else y + x[:n, t] * d
        return y if z is None else y * F.silu(z[:n, t])

    return step


def _delta(of: Recurrence) -> Advance:
    query, key, value, g, beta = (_wide(one, of.shape[2]) for one in of.tokens)
    if of.normed:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, decay = query * query.shape[-1] ** -0.5, g.exp()[..., None]

    def step(states: Tensor, t: int) -> Tensor:
        n = len(states)
        k = key[:n, t, :, None]  # [n,h,1,k]
        states.mul_(decay[:n, t])
        missing = (value[:n, t, :, None] - k @ states) * beta[:n, t, :, None]
        states.addcmul_(k.transpose(2, 3), missing)
        return (query[:n, t, :, None] @ states)[..., 0, :]

    return step


@dataclass(frozen=True, slots=True)
class Scan:
    """The signature of a scan in transformers: what it computes from its arguments, and the name of the initial state.

    It returns (outputs, final state). `ours` replaces a scan that takes no initial state. `wide`: its outputs are in
    float32, whatever its inputs are.
    """

    of: Callable[[Mapping[str, Any]], Recurrence]
    state: str
    ours: Function | None = None
    wide: bool = False


_DELTA = Scan(_of_delta, "initial_state")
SCANS: Mapping[str, Scan] = {
    "mamba_selective_scan": Scan(_of_selective, "initial_states", selective_scan),
    "mamba2_chunk_scan": Scan(_of_dual, "initial_states", wide=True),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A scan over L tokens of each of B sequences, with every argument of `function` by name."""

    scan: Scan
    function: Function
    arguments: Mapping[str, Any]

    def from_state(self, state: Tensor) -> "Call":
        """The same scan with this initial state."""
        return replace(self, arguments={**self.arguments, self.scan.state: state})

    def run(self) -> Any:
        """Outputs and final state.

        Chunks are padded to `chunk_size` at full cost, so that is limited to the number of tokens.
        """
        given = dict(self.arguments)
        if "chunk_size" in given:
            given["chunk_size"] = min(given["chunk_size"], self.recurrence.shape[1])
        more = given.pop("kwargs", {})
        return self.function(**given, **more)

    @property
    def recurrence(self) -> Recurrence:
        return self.scan.of(self.arguments)

    @property
    def by_head(self) -> bool:
        """Whether it scans one head of a mixer that has a state for each."""
        return self.scan.ours is not None

    def outputs(self, out: Tensor) -> Tensor:
        """Outputs [B,L,heads,elements], as the scan returns them."""
        return out[:, :, 0].transpose(1, 2) if self.by_head else out


def after(of: Recurrence, before: Tensor, indices: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The states [n,*shape] of the sequences `indices` after their first `counts` tokens, from the states `before`,
    which may be overwritten. `counts` are in descending order."""
    some = torch.tensor(indices, device=before.device)
    states = before.to(torch.promote_types(before.dtype, torch.float32))
    step = advance(of.of(lambda x: x.index_select(0, some).narrow(1, 0, counts[0])))
    for t in range(counts[0]):
        step(states[: sum(count > t for count in counts)], t)
    return states


class Scans(Protocol):
    """The part of a door that scans and convolutions call."""

    def convolve(self, kernel: ScanKernel, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """A causal convolution of x [B,C,L], by the kernel."""
        ...

    def scan(self, layer: int, call: Call) -> Any:
        """Run a scan of the mixer of `layer`."""
        ...


@dataclass(frozen=True, slots=True)
class Scanned:
    """The forward of a mixer whose scans the open door runs, by the kernel if there is one."""

    forward: Function
    kernel: ScanKernel | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def with_our_scans(module: nn.Module, door: Callable[[], Scans | None], kernel: ScanKernel | None) -> Function:
    """The forward of a mixer, with scans and convolutions run by the open door; without a kernel, convolutions are
    torch's, over few distinct lengths.

    It is the mixer's own forward if its code refers to none of these functions, or if `forward` was replaced on the
    module.
    """
    if "forward" in vars(module):
        return module.forward
    own = inspect.unwrap(type(module).forward)
    names = {*SCANS, CAUSAL_CONV} & set(own.__code__.co_names)
    if not names:
        return module.forward
    layer: Any = module.layer_idx
    named = {
        name: (
            _convolution(of_few_lengths(theirs), door, kernel)
            if name == CAUSAL_CONV
            else _replacement(SCANS[name], theirs, layer, door)
        )
        for name in names
        for theirs in (own.__globals__[name],)
    }
    forward = FunctionType(own.__code__, own.__globals__ | named, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    ours = MethodType(forward, module)
    return Scanned(ours, kernel) if names & SCANS.keys() else ours


SILU = ("silu", "swish")  # names of the activation that the kernel has


def _convolution(theirs: Function, door: Callable[[], Scans | None], kernel: ScanKernel | None) -> Function:
    """Theirs, or the kernel's where there is one for its types, which then computes texts of any length."""

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any
    ) -> Tensor:
        opened, packed = door(), more.get("seq_idx") is not None
        typed = x.dtype is weight.dtype and x.dtype in TYPES and (activation is None or activation in SILU)
        if opened is None or kernel is None or packed or not typed or weight.device.type != "cpu":
            return theirs(x, weight, bias, activation=activation, **more)
        return opened.convolve(kernel, x, weight, bias, activation is not None)

    return convolve


def _replacement(scan: Scan, theirs: Function, layer: int, door: Callable[[], Scans | None]) -> Function:
    signature = inspect.signature(scan.ours or theirs)

    def run(*args: Any, **kwargs: Any) -> Any:
        opened = door()
        if opened is None:
            return theirs(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return opened.scan(layer, Call(scan, scan.ours or theirs, bound.arguments))

    return run
