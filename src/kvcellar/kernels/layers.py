"""layers: linear layers of our own on CPUs, whatever their weights are: the module, and what it passes to its kernel.

A weight that is an embedding, too, is in memory once: lookups read the panels of its layer (`PanelWeight`). Weights of
several layers with the same input can be one call (`merged`). Plain weights, in bfloat16 or float32, are in
panels (`linear.cpp`); quantised ones are in `quantised.py`. Layers of one shape can be a set: one for each expert
(`experts.cpp`), or for each head (`heads.cpp`).

Always true: the bits of a row of outputs depend only on that row, on the weights, and on its expert: not on other rows,
on their number or their experts, on layers that are computed in the same call, or on threads.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kvcellar.kernels.arena import LINE, Arena
from kvcellar.kernels.compiled import SOURCES, Kernel, Native, Threads, address_of, error_of
from kvcellar.kernels.structures import constant, structure

_HEADER = SOURCES / "layers.h"
TYPES = {dtype: constant(_HEADER, str(dtype).removeprefix("torch.").upper()) for dtype in (
    torch.bfloat16, torch.float32, torch.float16,
)}  # fmt: skip
PER_THREAD = 1 << 19  # products that are worth another thread
Part, _Layer, _Call = (structure(_HEADER, name) for name in ("Part", "Layer", "LayerCall"))
_EXPERTS, _HEADS = SOURCES / "experts.cpp", SOURCES / "heads.cpp"
_ExpertsCall, _HeadsCall = structure(_EXPERTS, "Call"), structure(_HEADS, "Call")
_LOOKUP = torch.ops.aten.embedding.default
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LayerKernel(Kernel):
    """A kernel of linear layers, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, source: Path, function: str, environment: Mapping[str, str]) -> None:
        super().__init__(source, function, environment)
        pool = Threads(environment)
        self.threads = pool.address
        self._touch = pool.touch

    def placed(self, arena: Arena, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros for weights that this kernel reads, in an arena, near to the threads that read them."""
        made = arena.tensor(count, dtype)
        self._touch(made.data_ptr(), made.nbytes)
        return made


class Weights(ABC):
    """The weights of one layer, in the order of its kernel, and its bias."""

    out: int
    bias: Tensor | None

    @abstractmethod
    def part(self, column: int) -> Any:
        """Its addresses, which stay. `column` is that of its first output."""

    @abstractmethod
    def plain(self) -> Tensor:
        """A copy [out,in] in the type of the layer."""


class OwnLinear(nn.Module):
    """Replaces one `nn.Linear`, or several with the same input. It has no parameters."""

    def __init__(
        self, kernel: LayerKernel, parts: Sequence[Weights], inner: int, dtype: torch.dtype, *,
        step: int = 0, order: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`dtype` is that of inputs and outputs. `step` and `order` [in] I32 are how quantised weights need inputs."""
        super().__init__()
        self.kernel, self.parts, self.dtype = kernel, tuple(parts), dtype
        self.computed = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32  # in which type
        self.in_features, self.out_features = inner, sum(part.out for part in parts)
        self._step, self._order = step, order
        columns = [sum(part.out for part in parts[:at]) for at in range(len(parts))]
        self._fields = (Part * len(parts))(*(part.part(at) for part, at in zip(parts, columns, strict=True)))
        ordered = None if order is None else order.data_ptr()
        sizes = (len(parts), inner, TYPES[self.computed], step)
        self._layer = _Layer(ctypes.addressof(self._fields), ordered, kernel.threads, *sizes)

    @property
    def address(self) -> int:
        """Where the kernel's description of the layer is, as long as the layer lives."""
        return ctypes.addressof(self._layer)

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded to 8 bits."""
        return self._step > 0

    @property
    def weight(self) -> Tensor:
        """A plain copy [out,in], made at each access, for code that reads weights instead of calling layers."""
        return torch.cat([part.plain() for part in self.parts])

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self.parts]
        if len(biases) == 1 or all(bias is None for bias in biases):
            return biases[0]
        zeros = (torch.zeros(part.out, dtype=self.dtype, device="cpu") for part in self.parts)
        return torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])

    def joins(self, other: "OwnLinear") -> bool:
        """Whether both can be one call, given the same input."""
        mine, theirs = ((one.in_features, one.dtype, one._step) for one in (self, other))
        ordered = self._order is not None or other._order is not None
        return type(self) is type(other) and self.kernel.run is other.kernel.run and mine == theirs and not ordered

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]. Raises for other types and sizes, as a plain layer does."""
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features or x.device.type != "cpu":
            raise RuntimeError(
                f"a layer of {self.in_features} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"on {x.device}"
            )
        rows = x.reshape(-1, self.in_features).to(self.computed)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows) and self.kernel.run(ctypes.byref(self._call(rows, out))):
            raise MemoryError(f"there is not enough memory for {len(rows)} rows of a linear layer")
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def native(self, x: Tensor, out: Tensor) -> Native:
        """The call that fills out [T,out] from x [T,in], both of type `computed` at fixed addresses, with elements of a
        row beside each other."""
        assert x.dtype is out.dtype is self.computed
        assert (*x.shape, *out.shape) == (len(x), self.in_features, len(x), self.out_features)
        assert x.stride(1) == 1 == out.stride(1)
        return Native(address_of(self.kernel.run), self._call(x, out), (self, x, out))

    def _call(self, rows: Tensor, out: Tensor) -> Any:
        """rows [n,in], out [n,out]."""
        n, threads = len(rows), threads_for(self.in_features, self.out_features, len(rows))
        return _Call(self.address, rows.data_ptr(), out.data_ptr(), n, rows.stride(0), out.stride(0), threads)


def merged(layers: Sequence[OwnLinear]) -> OwnLinear:
    """One layer that computes several with the same input, outputs side by side. It shares their weights."""
    first = layers[0]
    assert all(first is one or first.joins(one) for one in layers)
    made = object.__new__(type(first))
    parts = [part for one in layers for part in one.parts]
    OwnLinear.__init__(made, first.kernel, parts, first.in_features, first.dtype, step=first._step, order=first._order)
    return made


def threads_for(inner: int, out: int, rows: int) -> int:
    """Threads that so many rows of a weight [out,inner] are worth."""
    return min(torch.get_num_threads(), 1 + inner * out * (rows + 8) // (8 * PER_THREAD))


SOURCE = SOURCES / "linear.cpp"
PANEL = constant(SOURCE, "PANEL")  # outputs
_RowsCall = structure(SOURCE, "RowsCall")
PACKED = (torch.bfloat16, torch.float32)  # types of weights
PAIRS, WIDENED, FOREIGN = range(3)  # how the kernel multiplies bfloat16: `kvcellar_multiplies`


class PanelKernel(LayerKernel):
    """The kernel, compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(SOURCE, "kvcellar_linear", environment)
        self._pack = self.library.kvcellar_pack
        self._pack.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]
        self._pack.restype = None
        self.multiplies: int = self.library.kvcellar_multiplies()
        self.rows = self.library.kvcellar_weight_rows
        self.rows.argtypes, self.rows.restype = [ctypes.c_void_p], ctypes.c_int

    def pack(self, weight: Tensor, panels: Tensor) -> None:
        """Write a weight [out,in] into `panels`."""
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        self._pack(
            weight.data_ptr(), panels.data_ptr(), *weight.shape, weight.stride(0), TYPES[weight.dtype],
            self.threads, torch.get_num_threads(),
        )  # fmt: skip


def panel_elements(out: int, inner: int, dtype: torch.dtype) -> int:
    """Elements of the panels of a weight [out,inner]."""
    return -(-out // PANEL) * PANEL * _stored(inner, dtype)


def panel_bytes(weight: Tensor) -> int:
    """Bytes that the panels of a weight take in an `Arena`."""
    out, inner = weight.shape
    size = panel_elements(out, inner, weight.dtype) * weight.itemsize
    return -(-size // LINE) * LINE


def _stored(inner: int, dtype: torch.dtype) -> int:
    """Inputs in a panel: bfloat16 is stored in pairs."""
    return inner + inner % 2 if dtype is torch.bfloat16 else inner


class _Panels(Weights):
    """The panels of one layer."""

    def __init__(self, panels: Tensor, bias: Tensor | None, shape: torch.Size) -> None:
        self.panels, self.bias = panels, bias
        self.out, self._inner = shape
        self._wide = None if bias is None else bias.float().contiguous()

    def part(self, column: int) -> Any:
        bias = None if self._wide is None else self._wide.data_ptr()
        return Part(panels=self.panels.data_ptr(), bias=bias, out=self.out, column=column)

    def plain(self) -> Tensor:
        per = 2 if self.panels.dtype is torch.bfloat16 else 1  # inputs beside each other
        inner = _stored(self._inner, self.panels.dtype)
        panels = self.panels.view(-1, inner // per, PANEL, per).transpose(1, 2).reshape(-1, inner)
        return panels[: self.out, : self._inner].clone(memory_format=torch.contiguous_format)


class PanelLinear(OwnLinear):
    """A layer with its weights in panels."""

    kernel: PanelKernel
    parts: tuple[_Panels]


class PanelWeight(Tensor):
    """The weight [out,in] of a layer in panels, a parameter of other modules that have it, too. Rows are looked up in
    the panels; whatever else reads it gets a plain copy, made at each use, of which views are views. It has no memory
    of its own, and cannot be written."""

    @staticmethod
    def __new__(cls, layer: PanelLinear) -> "PanelWeight":
        shape = (layer.out_features, layer.in_features)
        place = torch.device("cpu")
        return Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=place, storage_size=0)

    def __init__(self, layer: PanelLinear) -> None:
        self._layer = layer
        self._is_param = True  # what torch calls a parameter

    def plain(self) -> Tensor:
        """A copy [out,in]."""
        with torch.inference_mode(False):  # as this weight: torch links views of it to it
            return self._layer.parts[0].plain()

    def data_ptr(self) -> int:
        raise RuntimeError("a weight in panels has no memory of its own")

    def untyped_storage(self) -> torch.UntypedStorage:
        raise RuntimeError("a weight in panels has no storage of its own")

    def __deepcopy__(self, memo: Any) -> "PanelWeight":
        return PanelWeight(self._layer)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] -> [...,in]. Raises `IndexError`, and `RuntimeError` for ids of other types than torch takes."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(f"ids are int64 or int32, not {ids.dtype}")
        out = torch.empty(*ids.shape, self._layer.in_features, dtype=self._layer.dtype, device="cpu")
        ids = ids.to(torch.int64).contiguous()
        if error := self._layer.kernel.rows(ctypes.byref(self._call(ids, out))):
            raise error_of(error)
        return out

    def native(self, ids: Tensor, out: Tensor) -> Native:
        """The call that fills out [...,in] from ids [...] I64, both at fixed addresses and contiguous."""
        assert ids.dtype is torch.int64
        assert out.dtype is self._layer.dtype
        assert ids.is_contiguous()
        assert out.is_contiguous()
        return Native(address_of(self._layer.kernel.rows), self._call(ids, out), (self, ids, out))

    def _call(self, ids: Tensor, out: Tensor) -> Any:
        layer, panels = self._layer, self._layer.parts[0].panels
        sizes = (ids.numel(), layer.out_features, layer.in_features, TYPES[layer.dtype])
        return _RowsCall(panels.data_ptr(), ids.data_ptr(), out.data_ptr(), *sizes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(first, PanelWeight) and func is _LOOKUP:
            return first.rows(args[1])
        if isinstance(first, PanelWeight) and func in _SAME:
            return PanelWeight(first._layer)
        if any(isinstance(one, PanelWeight) for one in tree_leaves(_written(func._schema, args, kwargs))):
            raise RuntimeError("the weight of a packed layer cannot be written; load the model with pack=False")
        return func(*tree_map_only(PanelWeight, cls.plain, args), **tree_map_only(PanelWeight, cls.plain, kwargs))


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    given = ((one, args[at] if at < len(args) else kwargs.get(one.name)) for at, one in enumerate(schema.arguments))
    return [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]


def panel_linear(kernel: PanelKernel, arena: Arena, weight: Tensor, bias: Tensor | None) -> PanelLinear:
    """A layer with a copy of a plain weight [out,in], which is in bfloat16 or float32 on the CPU, in an arena."""
    out, inner = weight.shape
    panels = kernel.placed(arena, panel_elements(out, inner, weight.dtype), weight.dtype)
    kernel.pack(weight, panels)
    return PanelLinear(kernel, [_Panels(panels, bias, weight.shape)], inner, weight.dtype)


# -- sets of layers ----------------------------------------------------------------------------------------------------


class _LayerSet(nn.Module):
    """Layers of one shape. It has no parameters."""

    def __init__(self, kernel: Kernel, layers: Sequence[OwnLinear]) -> None:
        super().__init__()
        first = layers[0]
        self.kernel, self.layers, self.dtype, self.computed = kernel, tuple(layers), first.dtype, first.computed
        self.inner, self.out = first.in_features, first.out_features
        assert all((one.in_features, one.out_features) == (self.inner, self.out) for one in layers)
        self._addresses = (ctypes.c_void_p * len(layers))(*(one.address for one in layers))

    def _where(self) -> tuple[int, int]:
        """The addresses of the function of a layer, and of the layers."""
        return address_of(self.layers[0].kernel.run), ctypes.addressof(self._addresses)

    def _run(self, call: Any, rows: int) -> None:
        if rows and self.kernel.run(ctypes.byref(call)):
            raise MemoryError(f"there is not enough memory for {rows} rows of {len(self.layers)} layers")


class ExpertsKernel(Kernel):
    """The kernel, compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(_EXPERTS, "kvcellar_experts", environment)


class OwnExperts(_LayerSet):
    """Replaces the stacked weights of experts by a layer for each."""

    def __init__(self, kernel: ExpertsKernel, layers: Sequence[OwnLinear]) -> None:
        super().__init__(kernel, layers)
        self.in_features, self.out_features, self.rounds = self.inner, self.out, layers[0].rounds

    def forward(self, x: Tensor, index: Tensor, share: int) -> Tensor:
        """x [n,in] and the experts of each row, index [n*share] -> [n*share,out]: row i is expert index[i] of row
        i // share. An index that is no expert gives zeros. Raises for other types and sizes."""
        types = x.dtype is self.dtype and index.dtype is torch.int64 and x.device.type == index.device.type == "cpu"
        if not types or x.shape[1:] != (self.in_features,) or index.shape != (len(x) * share,):
            raise RuntimeError(
                f"experts of {self.in_features} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"and {tuple(index.shape)} experts in {index.dtype}, {share} for each row"
            )
        rows = x.to(self.computed)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(len(index), self.out_features)
        self._run(self._call(rows, index.contiguous(), share, out), len(index))
        return out.to(x.dtype)

    def native(self, x: Tensor, index: Tensor, share: int, out: Tensor) -> Native:
        """The call that fills out [n*share,out] from x [n,in] and index [n*share], all at fixed addresses, the elements
        of a row beside each other."""
        assert x.dtype is out.dtype is self.computed
        assert (*index.shape, index.dtype, index.stride(0)) == (len(x) * share, torch.int64, 1)
        return Native(address_of(self.kernel.run), self._call(x, index, share, out), (self, x, index, out))

    def _call(self, x: Tensor, index: Tensor, share: int, out: Tensor) -> Any:
        return _ExpertsCall(
            *self._where(), x.data_ptr(), index.data_ptr(), out.data_ptr(), len(self.layers), len(x), share,
            self.inner, self.out, x.stride(0), out.stride(0), x.itemsize, threads_for(self.inner, self.out, len(index)),
        )  # fmt: skip


def panel_experts(
    kernel: ExpertsKernel, by: PanelKernel, weights: Tensor | Sequence[Tensor], biases: Tensor | None
) -> OwnExperts:
    """Experts with a copy of plain weights [experts,out,in] and biases [experts,out], in bfloat16 or float32 on the
    CPU."""
    arena = Arena(sum(map(panel_bytes, weights)))
    own = [None] * len(weights) if biases is None else [bias.clone() for bias in biases]
    return OwnExperts(kernel, [panel_linear(by, arena, *one) for one in zip(weights, own, strict=True)])


class HeadsKernel(Kernel):
    """The kernel, compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(_HEADS, "kvcellar_heads", environment)
        self.linear = PanelKernel(environment)


class OwnHeads(_LayerSet):
    """A layer for each head."""

    def __init__(self, kernel: HeadsKernel, layers: Sequence[OwnLinear], tail: int) -> None:
        """`tail`: elements of a head behind its inputs that are copied behind its results."""
        super().__init__(kernel, layers)
        self.tail, self.in_features, self.out_features = tail, self.inner + tail, self.out + tail

    def forward(self, x: Tensor) -> Tensor:
        """x [...,H,in] -> [...,H,out]. Raises for other types and sizes."""
        shape = (len(self.layers), self.in_features)
        if x.dtype is not self.dtype or tuple(x.shape[-2:]) != shape or x.device.type != "cpu":
            raise RuntimeError(
                f"{shape[0]} heads of {shape[1]} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"on {x.device}"
            )
        rows = x.reshape(-1, *shape)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(*rows.shape[:2], self.out_features)
        self._run(self._call(rows, out), len(rows))
        return out.view(*x.shape[:-1], self.out_features)

    def native(self, x: Tensor, out: Tensor) -> Native:
        """The call that fills out [T,H,out] from x [T,H,in], both at fixed addresses, the elements of a head beside
        each other."""
        assert x.dtype is out.dtype is self.computed
        assert x.stride(2) == 1 == out.stride(2)
        return Native(address_of(self.kernel.run), self._call(x, out), (self, x, out))

    def _call(self, x: Tensor, out: Tensor) -> Any:
        return _HeadsCall(
            *self._where(), x.data_ptr(), out.data_ptr(), len(self.layers), len(x), self.inner, self.out, self.tail,
            *x.stride()[:2], *out.stride()[:2], x.itemsize, threads_for(self.inner, self.out, len(x)),
        )  # fmt: skip


def panel_heads(kernel: HeadsKernel, weights: Tensor | Sequence[Tensor], tail: int = 0) -> OwnHeads:
    """With a copy of plain weights [heads,out,in], in bfloat16 or float32 on the CPU."""
    arena = Arena(sum(map(panel_bytes, weights)))
    return OwnHeads(kernel, [panel_linear(kernel.linear, arena, one, None) for one in weights], tail)
