"""opaque: modules that are one operator of a program: linear layers, mixers, and what cannot be traced.

The shapes of their results are known for linear layers. For others they are found by running the module on zeros, with
two values of each symbol: a size of a result is a sum of multiples of symbols.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from kvcellar.kernels.experts import OwnExperts
from kvcellar.kernels.heads import OwnHeads
from kvcellar.kernels.program import Sizes as Values
from kvcellar.kernels.program import size_of
from kvcellar.models.adapters import sizes_of
from kvcellar.models.recording.doors import SampleDoor
from kvcellar.models.recording.sizes import NotRecordable, Sizes
from kvcellar.models.recording.trace import Trace
from kvcellar.models.seam import GuestCache, opened
from kvcellar.models.shape import Shape

Forward = Callable[..., Any]
Symbols = Mapping[str, Any]  # of torch, by name


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Within the block, modules have another `forward`."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(_restore, module, vars(module).get("forward"))
            module.forward = forward
        yield


def _restore(module: nn.Module, own: Forward | None) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own


def linear_operator(trace: Trace, path: str, module: nn.Module) -> Forward:
    """The forward of a linear layer that is written down."""
    own, (_, width) = module.forward, sizes_of(module)

    def forward(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            return own(x)
        out = trace.empty(x, (*x.shape[:-1], width))
        trace.add("kvcellar.linear", (x, (path,)), {}, (out,))
        return out

    return forward


def experts_operator(trace: Trace, path: str, module: OwnExperts) -> Forward:
    """The forward of linear layers of experts that is written down."""
    own = module.forward

    def forward(x: Tensor, index: Tensor, share: int) -> Tensor:
        if not isinstance(x, FakeTensor):
            return own(x, index, share)
        out = trace.empty(x, (index.shape[0], module.out_features))
        trace.add("kvcellar.experts", (x, index, path), {"share": share}, (out,))
        return out

    return forward


def heads_operator(trace: Trace, path: str, module: OwnHeads) -> Forward:
    """The forward of a linear layer for each head that is written down."""
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            return own(x)
        out = trace.empty(x, (*x.shape[:-1], module.out_features))
        trace.add("kvcellar.heads", (path, (x,)), {}, (out,))
        return out

    return forward


class Opaque:
    """Makes forwards of modules that are written down as one operator."""

    def __init__(self, trace: Trace, shape: Shape, sizes: Sizes, symbols: Symbols, values: Values) -> None:
        """`symbols` by name, and the values with which the network is traced."""
        self._trace, self._shape, self._sizes, self._symbols, self._values = trace, shape, sizes, symbols, values

    def operator(self, name: str, path: str, module: nn.Module) -> Forward:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs))):
                return own(*args, **kwargs)
            out = self._result(own, args, kwargs)
            tensors = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
            self._trace.add(name, (path, args), kwargs, tensors)
            return out

        return forward

    def _result(self, own: Forward, args: Any, kwargs: Any) -> Any:
        """Fake tensors like the results of a module."""
        like = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor))
        base = self._sample(own, args, kwargs, self._values)
        other = {
            name: self._sample(own, args, kwargs, {**self._values, name: value + 2})
            for name, value in self._values.items()
            if self._depend(name, args, kwargs)
        }
        leaves = {name: tree_leaves(sample) for name, sample in other.items()}
        numbers = iter(range(len(tree_leaves(base))))

        def fake(one: Any) -> Any:
            number = next(numbers)
            if not isinstance(one, Tensor):
                return one
            shape = [self._size(dim, size, number, leaves) for dim, size in enumerate(one.shape)]
            return self._trace.empty(like, shape, one.dtype)

        return tree_map(fake, base)

    def _size(self, dim: int, size: int, number: int, samples: Mapping[str, list[Any]]) -> Any:
        total: Any = size
        for name, leaves in samples.items():
            times, rest = divmod(leaves[number].shape[dim] - size, 2)
            if rest:
                raise NotRecordable("the size of its result is no multiple of the number of rows")
            if times:
                total = total + times * (self._symbols[name] - self._values[name])
        return total

    def _depend(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a size of an argument depends on a symbol."""
        other = {**self._values, name: self._values[name] + 2}
        sizes = (
            self._sizes.of(dim) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) for dim in one.shape
        )
        return any(size_of(size, self._values) != size_of(size, other) for size in sizes)

    def _sample(self, own: Forward, args: Any, kwargs: Any, values: Values) -> Any:
        """What the module returns for zeros."""

        def real(tensor: Tensor) -> Tensor:
            shape = [size_of(self._sizes.of(dim), values) for dim in tensor.shape]
            return (
                torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
                if isinstance(tensor, FakeTensor)
                else tensor
            )

        with _disable_current_modes(), torch.no_grad(), opened(SampleDoor(self._shape)) as cache:
            given = tree_map_only(Tensor, real, (args, kwargs))
            some_args, some_kwargs = tree_map(lambda one: cache if isinstance(one, GuestCache) else one, given)
            tensors = [one for one in tree_leaves((some_args, some_kwargs)) if isinstance(one, Tensor)]
            versions = [one._version for one in tensors]
            out = own(*some_args, **some_kwargs)
            if versions != [one._version for one in tensors]:
                raise NotRecordable("it writes into its arguments")
        return out
