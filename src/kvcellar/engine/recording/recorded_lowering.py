"""recorded_lowering: which of torch's operators the compiled loop runs by itself, and as which of its own.

`lowered` returns them, or None for an operator (or types, strides or arguments of it) that torch itself has to compute.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcellar.engine.recording.recorded_kernel import TYPES, StepKernel, number_for
from kvcellar.engine.recording.recorded_operators import Small, Take, View

Resolved = Any  # an argument: a view, a number, a type, a tuple of such, ...

ELEMENTWISE: Mapping[str, str] = {
    "aten.add.Tensor": "add",
    "aten.add.Scalar": "add",
    "aten.add_.Tensor": "add",
    "aten.sub.Tensor": "sub",
    "aten.sub.Scalar": "sub",
    "aten.sub_.Tensor": "sub",
    "aten.mul.Tensor": "mul",
    "aten.mul.Scalar": "mul",
    "aten.mul_.Tensor": "mul",
    "aten.div.Tensor": "div",
    "aten.div.Scalar": "div",
    "aten.div_.Tensor": "div",
    "aten.minimum.default": "minimum",
    "aten.maximum.default": "maximum",
    "aten.clamp_min.default": "maximum",
    "aten.clamp_max.default": "minimum",
    "aten.neg.default": "neg",
    "aten.abs.default": "abs",
    "aten.relu.default": "relu",
    "aten.sqrt.default": "sqrt",
    "aten.rsqrt.default": "rsqrt",
    "aten.reciprocal.default": "reciprocal",
    "aten.where.self": "where",
}
COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.copy_.default", "aten.contiguous.default"})
POWERS: Mapping[float, str] = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
REDUCTIONS: Mapping[str, str] = {
    "aten.sum.dim_IntList": "sum",
    "aten.mean.dim": "mean",
    "aten.amax.default": "amax",
}
# Operators on one tensor whose results are in a table if it is bfloat16.
TABLES = frozenset({
    "aten.silu.default", "aten.sigmoid.default", "aten.tanh.default", "aten.gelu.default", "aten.exp.default",
    "aten.softplus.default", "aten.sin.default", "aten.cos.default", "aten.rsqrt.default", "aten.log.default",
    "aten.log1p.default", "aten.erf.default", "aten.mish.default", "aten.elu.default", "aten.hardsigmoid.default",
    "aten.hardswish.default", "aten.leaky_relu.default", "aten.exp2.default", "aten.expm1.default",
    "aten.pow.Tensor_Scalar",
})  # fmt: skip
FILLS: Mapping[str, int | float] = {  # a value, or the index of the argument that is it
    "aten.zeros.default": 0.0,
    "aten.zeros_like.default": 0.0,
    "aten.new_zeros.default": 0.0,
    "aten.ones.default": 1.0,
    "aten.ones_like.default": 1.0,
    "aten.new_ones.default": 1.0,
    "aten.full.default": 1,
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
    "aten.fill_.Scalar": 1,
}
APART = 32768  # elements from which on torch computes with several threads
WHOLE = 64  # elements of bfloat16 that torch computes at once on any CPU; what is left it may compute in another way


def operator(name: str) -> Any:
    """The operator of torch that a program names. Raises `ValueError` if there is none."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ValueError(f"torch {torch.__version__} has no operator {name}") from error
    return found


class Lowering:
    """Lowers operators of a program for one binding."""

    def __init__(self, kernel: StepKernel) -> None:
        self._kernel = kernel

    def __call__(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], outputs: Sequence[View | None]
    ) -> Sequence[Small | Take] | None:
        """Operators that have the same effect, in order; None if torch has to compute it."""
        if len(outputs) != 1 or (out := outputs[0]) is None:
            return None
        found = self._found(name, args, kwargs, out)
        if not found or not all(isinstance(one, Take) or one.fits for one in found):
            return None
        return found

    def _found(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View
    ) -> Sequence[Small | Take] | None:
        if name in COPIES:
            return self._line("copy", [args[1] if name == "aten.copy_.default" else args[0]], out)
        if name in ELEMENTWISE or name in TABLES:
            found = self._elementwise(name, args, kwargs, out) or self._table(name, args, kwargs, out)
            return found or self._function(name, args, kwargs, out)
        if name in REDUCTIONS:
            return self._reduction(name, args, kwargs, out)
        if name in FILLS:
            value = FILLS[name]
            return self._line("copy", [value if isinstance(value, float) else args[value]], out)
        if name == "aten.clamp.default":
            return self._clamp(args, kwargs, out)
        if name == "aten.cat.default":
            return self._cat(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), out)
        return self._lone(name, args, out)

    def _lone(self, name: str, args: Sequence[Resolved], out: View) -> Sequence[Small | Take] | None:
        match name:
            case "aten.embedding.default":
                return self._take(args[0], 0, args[1], out)
            case "aten.index_select.default":
                return self._take(args[0], args[1], args[2], out)
            case "aten.index.Tensor":
                *before, index = args[1]
                whole = all(one is None for one in before)
                return self._take(args[0], len(before), index, out, wraps=True) if whole else None
            case "aten.bmm.default":
                return self._outer(args[0], args[1], out)
            case _:
                return None

    def _elementwise(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View
    ) -> list[Small] | None:
        if name == "aten.pow.Tensor_Scalar":
            power = POWERS.get(args[1])
            return None if power is None else self._line(power, args[:1], out)
        if kwargs or name not in ELEMENTWISE or (name in _SCALED and len(args) > 2):
            return None
        return self._line(ELEMENTWISE[name], args, out)

    def _line(self, name: str, inputs: Sequence[Resolved], out: View) -> list[Small] | None:
        if not all(isinstance(x, View | int | float) for x in inputs) or any(isinstance(x, bool) for x in inputs):
            return None
        dtypes: list[torch.dtype | None] = []
        for x in inputs:
            if isinstance(x, View) and not x.shape and len(out.shape) and x.dtype != out.dtype:
                return None  # a tensor without dimensions has no say in the type
            dtypes.append(x.dtype if isinstance(x, View) else None)
        if name in ("minimum", "maximum") and 0 in inputs:
            return None  # which of two zeros of opposite signs is the result
        line = self._kernel.line(name, dtypes, out.dtype)
        if not line:
            return None
        known = tuple(x if isinstance(x, View) else number_for(name, float(x), out.dtype) for x in inputs)
        return [Small(self._kernel.each, line, out, known)]

    def _clamp(self, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View) -> list[Small] | None:
        low = args[1] if len(args) > 1 else kwargs.get("min")
        high = args[2] if len(args) > 2 else kwargs.get("max")
        found: list[Small] = []
        for name, bound in (("maximum", low), ("minimum", high)):
            if bound is not None:
                more = self._line(name, [out if found else args[0], bound], out)
                if more is None:
                    return None
                found += more
        return found

    def _table(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View
    ) -> list[Small] | None:
        x, *others = args
        line = self._kernel.line("table", (x.dtype,), out.dtype) if isinstance(x, View) else 0
        plain = all(isinstance(one, int | float | str | None) for one in (*others, *kwargs.values()))
        if not line or not plain or name not in TABLES:
            return None
        of = operator(name)
        key = name, tuple(others), tuple(sorted(kwargs.items()))
        table, placed = self._kernel.table(key, lambda values: of(values, *others, **kwargs))
        if placed and not _whole(x, out):
            return None
        return [Small(self._kernel.each, line, out, (x,), table.data_ptr(), table)]

    def _reduction(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View
    ) -> list[Small] | None:
        x, dims = args[0], args[1] if len(args) > 1 else None
        if not isinstance(x, View) or not x.shape or x.dtype != out.dtype or not isinstance(dims, tuple):
            return None
        if len(dims) != 1 or dims[0] % len(x.shape) != len(x.shape) - 1 or x.strides[-1] != 1 or x.shape[-1] < 1:
            return None
        if kwargs.get("dtype") not in (None, out.dtype):
            return None
        run = self._kernel.reduction(REDUCTIONS[name], x.dtype)
        return [Small(run, 0, out, (x,), reduces=True)] if run else None

    def _cat(self, pieces: Sequence[View], dim: int, out: View) -> list[Small] | None:
        dim %= len(out.shape)
        at, found = 0, list[Small]()
        for piece in pieces:
            if piece.shape == (0,) and len(out.shape) != 1:
                continue  # torch skips it, whatever the other shapes
            shape = tuple(n if one != dim else piece.shape[dim] for one, n in enumerate(out.shape))
            part = out._replace(shape=shape, offset=out.offset + at * out.strides[dim])
            if dim == out.row:
                part = part._replace(row=None, rows=None)
            copies = self._line("copy", [piece], part)
            if copies is None:
                return None
            found += copies
            at += shape[dim]
        return found

    def _take(self, source: View, dim: int, index: View, out: View, *, wraps: bool = False) -> list[Take] | None:
        if source.dtype not in TYPES or source.dtype != out.dtype:
            return None
        if index.dtype != torch.int64 or (len(index.shape) > 1 and not _contiguous(index)):
            return None
        dim %= len(source.shape)
        width = math.prod(source.shape[dim + 1 :])
        behind = source._replace(shape=source.shape[dim + 1 :], strides=source.strides[dim + 1 :])
        if any(n != 1 for n in source.shape[:dim]) or not _contiguous(behind) or not _contiguous(out):
            return None
        return [Take(self._kernel.take, out, source, index, width, source.strides[dim], source.shape[dim], wraps)]

    def _function(
        self, name: str, args: Sequence[Resolved], kwargs: Mapping[str, Resolved], out: View
    ) -> list[Small] | None:
        x, of = args[0], operator(name)
        if len(args) > 1 or kwargs or not isinstance(x, View) or not x.dtype == out.dtype == torch.float32:
            return None
        found = self._kernel.function(name, of)
        if found is None or (found.placed and not _whole(x, out)):
            return None
        return [Small(self._kernel.each, found.line, out, (x,), ctypes.addressof(found.called), found.called)]

    def _outer(self, a: View, b: View, out: View) -> list[Small] | None:
        """Products of columns and rows [n,.,1], [n,1,.]: one product for each element, and the sign that torch gives
        to a product that is zero, which depends on its shape."""
        if a.shape[2] != 1 or not a.dtype == b.dtype == out.dtype == torch.float32 or 0 in out.shape:
            return None
        zero = torch.zeros(out.shape[:2], device="cpu")[..., None]
        signed = torch.bmm(-zero, torch.ones(out.shape[0], 1, out.shape[2], device="cpu")).signbit()
        products = self._line("mul", [_spread(a, out.shape), _spread(b, out.shape)], out)
        if products is None or bool(signed.all()):
            return products
        positive = self._line("add", [out, 0.0], out)
        return None if positive is None or bool(signed.any()) else [*products, *positive]


# They have a third argument that multiplies the second.
_SCALED = frozenset(name for name in ELEMENTWISE if name.startswith(("aten.add", "aten.sub")))


def _contiguous(view: View) -> bool:
    expected = 1
    for n, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _spread(x: View, shape: tuple[int, ...]) -> View:
    """The same, expanded."""
    strides = tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True))
    return x._replace(shape=shape, strides=strides)


def _whole(x: View, out: View) -> bool:
    """Whether torch computes all elements of it in the same way: as one line, or row by row, with a part of so many
    elements for each of its threads."""
    elements = math.prod(out.shape)
    threads = min(torch.get_num_threads(), -(-elements // APART))
    if threads > 1 and -(-elements // threads) % WHOLE:
        return False
    if _contiguous(x) and _contiguous(out):
        return elements % WHOLE == 0
    beside = bool(out.shape) and x.shape == out.shape and x.strides[-1] == 1 == out.strides[-1]
    return beside and out.shape[-1] % WHOLE == 0
