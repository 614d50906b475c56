"""scan: the recurrences that mixers call by name, taken into our hands.

A mixer projects, convolves, scans, and projects again. The scan alone carries the state, and costs little of that; but
it is called in the middle of a mixer's code. A mixer whose code names one of the scans below is run with another
function under that name. Its code stays what it is, and so does everybody else's. So

  * Mamba's first scan, which in transformers begins at zero whatever was read before, begins with the state;
  * what a scan was given is kept until the step ends, and the state after fewer tokens is had by scanning those again.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]


def recurrent(index: int) -> str:
    """What the plane of a layer's recurrence of this index is called."""
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
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    dt, x = dt.to(wide), hidden_states.to(wide)
    decay = torch.exp(dt[..., None] * A[:, None].to(wide))  # [b,d,L,n]
    drive = (dt * x)[..., None] * B.transpose(1, 2)[:, None].to(wide)  # [b,d,L,n]
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


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan as transformers calls it: which arguments have a token per place of `axis`, and which is the state before.

    It answers (what comes out, the state after). `ours` stands in for one that takes no state.
    """

    tokens: tuple[str, ...]
    axis: int
    state: str
    ours: Function | None = None


_DELTA = Scan(("query", "key", "value", "g", "beta"), 1, "initial_state")
SCANS: Mapping[str, Scan] = {
    "mamba_selective_scan": Scan(("hidden_states", "dt", "B", "C", "z"), -1, "initial_states", selective_scan),
    "mamba2_chunk_scan": Scan(("hidden_states", "dt", "B", "C", "z"), 1, "initial_states"),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A scan that was made, of `length` tokens of each of B sequences."""

    scan: Scan
    function: Function
    arguments: Mapping[str, Any]

    def after(self, indices: Sequence[int], length: int) -> Tensor:
        """The state of some of the sequences after `length` of the tokens."""
        some, arguments = list(indices), dict(self.arguments)
        for name in self.scan.tokens:
            given = arguments.get(name)
            if given is not None:
                arguments[name] = given[some].narrow(self.scan.axis, 0, length)
        before = arguments.get(self.scan.state)
        if before is not None:
            arguments[self.scan.state] = before[some]
        more = arguments.pop("kwargs", {})
        return self.function(**arguments, **more)[1]


class Scans(Protocol):
    """A door, as far as scans know it."""

    def scan(self, layer: int, scan: Scan, function: Function, arguments: dict[str, Any]) -> Any:
        """Make the scan, which the mixer of `layer` asks for."""
        ...


def in_our_hands(module: nn.Module, door: Callable[[], Scans | None]) -> Function:
    """The forward of a mixer, which scans as the open door does. The mixer's own if it names none of the scans."""
    own = inspect.unwrap(type(module).forward)
    found = SCANS.keys() & set(own.__code__.co_names)
    if not found:
        return module.forward
    layer: Any = module.layer_idx
    named = {name: _stand_in(SCANS[name], own.__globals__[name], layer, door) for name in found}
    forward = FunctionType(own.__code__, own.__globals__ | named, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return MethodType(forward, module)


def _stand_in(scan: Scan, theirs: Function, layer: int, door: Callable[[], Scans | None]) -> Function:
    signature = inspect.signature(scan.ours or theirs)

    def made(*args: Any, **kwargs: Any) -> Any:
        opened = door()
        if opened is None:
            return theirs(*args, **kwargs)
        return opened.scan(layer, scan, scan.ours or theirs, dict(signature.bind(*args, **kwargs).arguments))

    return made
