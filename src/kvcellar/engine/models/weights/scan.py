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
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels.packed import CAUSAL_CONV, of_few_lengths

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

    The recurrence of Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3:
    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t and y_t = C_t h_t + D x_t. Sums are kept in float32.
    """
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x = hidden_states.to(wide)
    decay, drive = _terms(x, dt, A, B, delta_bias, delta_softplus)
    h = x.new_zeros(*x.shape[:2], A.shape[-1]) if initial_states is None else initial_states.to(wide)
    out = torch.empty_like(x)
    for t in range(x.shape[-1]):
        h = decay[:, :, t] * h + drive[:, :, t]
        out[..., t] = torch.einsum("bdn,bn->bd", h, C[..., t].to(wide))
    if D is not None:
        out = out + x * D.to(wide)[:, None]
    y = out.to(hidden_states.dtype)
    if z is not None:
        y = y * F.silu(z)
    return (y, h) if return_last_state else y


def _terms(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """[b,d,L,n] in the type of x: how a state decays in each token, and what is added to it."""
    dt = _steps(dt, None if bias is None else bias[..., None], softplus).to(x.dtype)
    decay = torch.exp(dt[..., None] * A[:, None].to(x.dtype))
    return decay, (dt * x)[..., None] * B.transpose(1, 2)[:, None].to(x.dtype)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step size of a state space for each token, from a mixer's projection. At 0 the state stays as it is."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


Advance = Callable[[Tensor, int], None]  # updates the states [n,*shape] of the first n sequences by token t, in place


def _selective(given: Mapping[str, Any]) -> Advance:
    """The recurrence of `selective_scan`."""
    x = given["hidden_states"]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    decay, drive = _terms(x, given["dt"], given["A"], given["B"], given["delta_bias"], given["delta_softplus"])

    def advance(states: Tensor, t: int) -> None:
        n = len(states)
        states.mul_(decay[:n, :, t]).add_(drive[:n, :, t])

    return advance


def _state_space_dual(given: Mapping[str, Any]) -> Advance:
    """The recurrence of Dao and Gu, "Transformers are SSMs" (2024), section 6:
    h_t = exp(dt_t a) h_(t-1) + dt_t x_t B_t^T."""
    x, B = given["hidden_states"].float(), given["B"].float()  # [b,L,h,p], [b,L,groups,n]
    dt = _steps(given["dt"], given["dt_bias"], given["dt_softplus"]).clamp(*given["dt_limit"])  # [b,L,h]
    B = B.repeat_interleave(x.shape[2] // B.shape[2], dim=2)
    decay, drive = torch.exp(given["A"].float() * dt.float()), x * dt[..., None].float()

    def advance(states: Tensor, t: int) -> None:
        n = len(states)
        states.mul_(decay[:n, t, :, None, None]).addcmul_(drive[:n, t, ..., None], B[:n, t, :, None])

    return advance


def _gated_delta(given: Mapping[str, Any]) -> Advance:
    """The recurrence of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), section 3: S decays, and its value
    at key k_t moves towards v_t by beta_t. The decay is one number per head, or one per channel of the keys."""
    key, value, g, beta = (given[name].float() for name in ("key", "value", "g", "beta"))  # [b,L,h,...]
    if given["use_qk_l2norm_in_kernel"]:
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    key = key.repeat_interleave(value.shape[2] // key.shape[2], dim=2)
    decay = g.exp().reshape(*g.shape[:3], -1, 1)

    def advance(states: Tensor, t: int) -> None:
        n = len(states)
        k = key[:n, t, :, None]  # [n,h,1,k]
        states.mul_(decay[:n, t])
        missing = (value[:n, t, :, None] - k @ states) * beta[:n, t, :, None, None]
        states.addcmul_(k.transpose(2, 3), missing)

    return advance


@dataclass(frozen=True, slots=True)
class Scan:
    """The signature of a scan in transformers: the arguments that change the state, with tokens along `axis`, and the
    name of the initial state.

    It returns (outputs, final state). `recurrence` computes only states, token by token. `ours` replaces a scan that
    takes no initial state.
    """

    drives: tuple[str, ...]
    axis: int
    state: str
    recurrence: Callable[[Mapping[str, Any]], Advance]
    ours: Function | None = None


_DELTA = Scan(("key", "value", "g", "beta"), 1, "initial_state", _gated_delta)
_MAMBA = ("hidden_states", "dt", "B")
SCANS: Mapping[str, Scan] = {
    "mamba_selective_scan": Scan(_MAMBA, -1, "initial_states", _selective, selective_scan),
    "mamba2_chunk_scan": Scan(_MAMBA, 1, "initial_states", _state_space_dual),
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
            given["chunk_size"] = min(given["chunk_size"], given[self.scan.drives[0]].shape[self.scan.axis])
        more = given.pop("kwargs", {})
        return self.function(**given, **more)

    def without_state(self) -> "Call":
        """The same call without its initial state, which memory has while the step is open."""
        return replace(self, arguments={**self.arguments, self.scan.state: None})

    def after(self, before: Tensor, indices: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The states [n,*shape] of the sequences `indices` after their first `counts` tokens, from the states `before`,
        which may be overwritten. `counts` are in descending order."""
        given = dict(self.arguments)
        some = torch.tensor(indices, device=before.device)
        for name in self.scan.drives:
            given[name] = given[name].index_select(0, some).narrow(self.scan.axis, 0, counts[0])
        states = before.to(torch.promote_types(before.dtype, torch.float32))
        advance = self.scan.recurrence(given)
        for t in range(counts[0]):
            advance(states[: sum(count > t for count in counts)], t)
        return states


class Scans(Protocol):
    """The part of a door that scans call."""

    def scan(self, layer: int, call: Call) -> Any:
        """Run a scan of the mixer of `layer`."""
        ...


def with_our_scans(module: nn.Module, door: Callable[[], Scans | None]) -> Function:
    """The forward of a mixer, with scans run by the open door and convolutions over few distinct lengths.

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
        name: of_few_lengths(theirs) if name == CAUSAL_CONV else _replacement(SCANS[name], theirs, layer, door)
        for name in names
        for theirs in (own.__globals__[name],)
    }
    forward = FunctionType(own.__code__, own.__globals__ | named, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, module)


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
