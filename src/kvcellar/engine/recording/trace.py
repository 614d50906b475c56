"""trace: write down the operators that run on fake tensors, as a program.

A fake tensor has a type, sizes and strides, and no content: sizes may depend on symbols, and are written as expressions
of those of the program. So a forward over fake tensors runs the network's own code, computes nothing, and is the same
for every number of rows. Weights are replaced by fake tensors when an operator reads them; nothing is copied.

Always true:
  * an operator that returns views of its arguments is no operator of the program: its results are values of the same
    storage;
  * no constant is written.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvcellar.engine.models.registered import GuestCache
from kvcellar.engine.recording.program import Argument, Cache, Constant, Dtype, Number, Op, Program, Ref, Size, Value
from kvcellar.engine.recording.recording import NotRecordable
from kvcellar.kernels.layers import PanelWeight

_CALLS = {"Max": "Max", "Min": "Min"}
_OPERATORS = {"FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": None, "Mod": "%", "PythonMod": "%"}


class Sizes:
    """Writes expressions of sympy, whose symbols have other names in a program. Each expression is written once."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        """`names` by symbol of sympy."""
        self._names, self._written = dict(names), dict[Any, Size]()

    def of(self, size: Any) -> Size:
        """An int, or a `torch.SymInt`."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._written:
            self._written[expression] = int(expression) if expression.is_Integer else self._text(expression)
        return self._written[expression]

    def _text(self, expression: Any) -> str:
        if expression.is_Integer:
            return str(int(expression))
        if expression.is_Symbol:
            if expression not in self._names:
                raise NotRecordable(f"a size depends on {expression}, which is no size of the forward's inputs")
            return self._names[expression]
        name, parts = type(expression).__name__, [self._text(part) for part in expression.args]
        if expression.is_Add:
            return "(" + " + ".join(parts) + ")"
        if expression.is_Mul:
            return "(" + " * ".join(parts) + ")"
        if expression.is_Pow and expression.exp.is_Integer and 0 < expression.exp <= 4:
            return "(" + " * ".join([parts[0]] * int(expression.exp)) + ")"
        if (sign := _OPERATORS.get(name)) is not None:
            return f"({parts[0]} {sign} {parts[1]})"
        if name in _CALLS:
            text = parts[0]
            for part in parts[1:]:
                text = f"{_CALLS[name]}({text}, {part})"
            return text
        raise NotRecordable(f"a size is {expression}, which a program cannot compute")


MOST_DATA = 4096  # elements of a constant that is not in the network
_PLACES = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})  # keywords that are left out


class Trace(TorchDispatchMode):
    """Within the block, operators are written down. `sizes` writes sizes, `paths` are those of the network's tensors,
    by identity, and `check` is called after each operator."""

    def __init__(self, sizes: Sizes, paths: Mapping[int, str], check: Callable[[], None]) -> None:
        super().__init__()
        self._sizes, self._paths, self._check = sizes, paths, check
        self._values: dict[Value, int] = {}
        self._storages: dict[int, int] = {}  # by identity of the fake storage
        self._constants: dict[int, Constant] = {}
        self._fake_of: dict[int, Tensor] = {}  # by identity of the tensor that it stands for
        self._content: dict[int, Tensor] = {}  # of constants with data, by identity of the fake tensor
        self._ops: list[Op] = []
        self._alive: list[Any] = []  # what identities are of
        self._paused = False

    # -- operators of torch ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(args[0])
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.detach.default) and not _is_fake(args[0]):
            return self._fake(args[0])
        if func is torch.ops.aten.embedding.default and isinstance(args[0], PanelWeight):
            return self._looked_up(args[0], args[1])
        if self._is_foreign([one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        if func is torch.ops.aten.polar.default:  # torch's own fake kernel makes its sizes numbers
            out = self.empty(args[0], args[0].shape, torch.promote_types(args[0].dtype, torch.complex32))
        else:
            out = self._convolved(*args) if _is_plain_convolution(func, args, kwargs) else func(*args, **kwargs)
        self._alive.append((args, kwargs, out))
        self._check()
        self._note(func, args, kwargs, [one for one in tree_leaves(out) if isinstance(one, Tensor)])
        return out

    def _is_foreign(self, given: Sequence[Tensor]) -> bool:
        """Whether tensors are large ones that are not in the network: a packed layer, say, makes its plain weight of
        them, of which code may read the type. What is made of them is no part of the program."""
        return bool(given) and not any(
            _is_fake(one) or id(one) in self._paths or id(one) in self._fake_of or one.numel() <= MOST_DATA
            for one in given
        )

    def _note(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        writes = func._schema.is_mutable
        if not writes and outs and {_storage(out) for out in outs} <= {_storage(one) for one in given}:
            return  # views
        if not outs:
            return  # a property
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordable(f"it draws random numbers ({func})")
        written = self._written(func, args, kwargs) if writes else outs
        for out in written:
            if writes and self._storage_of(out) in self._constants:
                raise NotRecordable(f"it writes into a weight or buffer ({func})")
        keywords = {name: value for name, value in kwargs.items() if name not in _PLACES}
        self._add(str(func), args, keywords, [self.value(out) for out in written])

    def _looked_up(self, weight: PanelWeight, ids: Tensor) -> Tensor:
        """Rows of a weight of the network."""
        if id(weight) not in self._paths:
            raise NotRecordable("it looks up rows of a weight that is not in the network")
        out = self.empty(ids, (*ids.shape, weight.shape[1]), weight.dtype)
        self.add("kvcellar.embedding", (ids, self._paths[id(weight)]), {}, (out,))
        return out

    def _convolved(
        self, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, *_: Any
    ) -> Tensor:
        """The result [n,out,length] of a convolution. Torch's own fake kernel compares n with a number, by which torch
        chooses how to compute it."""
        length = (x.shape[2] + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1) - 1) // stride[0] + 1
        return self.empty(x, (x.shape[0], weight.shape[0], length))

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The arguments that an operator writes into."""
        found: list[Tensor] = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                found += [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        return found

    def _item(self, tensor: Tensor) -> Any:
        """A number that code of the network reads: it is part of the program, if it is that of a constant."""
        tensor = self._content.get(id(tensor), tensor)
        if _is_fake(tensor):
            raise NotRecordable("its code depends on the content of tensors")
        with unset_fake_temporarily():
            return tensor.item()

    # -- operators of ours ----------------------------------------------------------------------------------------

    def add(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor | None]) -> None:
        """An operator that did not run. `outputs` are fake tensors of storages of their own."""
        self._alive.append((args, kwargs, outputs))
        args, kwargs = tree_map_only(Tensor, self._fake, (list(args), dict(kwargs)))
        self._add(name, args, kwargs, [None if out is None else self.value(out) for out in outputs])

    def empty(self, like: Tensor, shape: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """A fake tensor of a storage of its own, written by nothing yet."""
        paused, self._paused = self._paused, True
        try:
            return torch.empty(list(shape), dtype=dtype or like.dtype, device=like.device)
        finally:
            self._paused = paused

    def _add(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[int | None]) -> None:
        arguments = tuple(self._argument(one) for one in args)
        keywords = {key: self._argument(one) for key, one in kwargs.items()}
        self._ops.append(Op(name.replace("aten::", "aten."), arguments, keywords, tuple(outputs)))

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Tensor):
            return Ref(self.value(value))
        if isinstance(value, torch.SymInt):
            size = self._sizes.of(value)
            return size if isinstance(size, int) else Number(size)
        if isinstance(value, bool | int | float | str) or value is None:
            return value
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if isinstance(value, tuple | list):
            return tuple(self._argument(one) for one in value)
        if isinstance(value, GuestCache):
            return Cache()
        raise NotRecordable(f"an operator has an argument of type {type(value).__name__}")

    # -- values ---------------------------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> int:
        """The index of a tensor's value."""
        tensor = self._fake(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise NotRecordable("a tensor is a lazy conjugate")
        size = self._sizes.of
        made = Value(
            str(tensor.dtype).removeprefix("torch."),
            tuple(map(size, tensor.shape)),
            tuple(map(size, tensor.stride())),
            self._storage_of(tensor),
            size(tensor.storage_offset()),
        )
        return self._values.setdefault(made, len(self._values))

    def _storage_of(self, tensor: Tensor) -> int:
        return self._storages.setdefault(_storage(tensor), len(self._storages))

    def _fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for one of the network, or for data."""
        if _is_fake(tensor):
            return tensor
        found = self._fake_of.get(id(tensor))
        if found is None:
            if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
                raise NotRecordable(f"it reads a {type(tensor).__name__} of layout {tensor.layout}")
            found = self._fake_of[id(tensor)] = self._constant(tensor)
            self._alive.append((tensor, found))
        return found

    def _constant(self, tensor: Tensor) -> Tensor:
        paused, self._paused = self._paused, True
        try:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        finally:
            self._paused = paused
        path = self._paths.get(id(tensor))
        if path is None:
            if tensor.numel() > MOST_DATA:
                raise NotRecordable(f"it reads a tensor of shape {list(tensor.shape)} that is not in the network")
            self._content[id(made)] = tensor
            self._constants[self._storage_of(made)] = Constant(data=tuple(_numbers(tensor)))
        else:
            self._constants[self._storage_of(made)] = Constant(path=path)
        return made

    def selected_from(self, selected: Tensor, rows: Tensor) -> int | None:
        """The value [T,...] of which `selected` [1,W,...] are some rows; None if it is something else."""
        value, index = self.value(selected), Ref(self.value(rows))
        for op in self._ops:
            match op:
                case Op("aten.index.Tensor", (Ref(whole), (None, chosen)), _, (made,)) if (made, chosen) == (
                    value,
                    index,
                ):
                    of = list(self._values)[whole]
                    row = Value(of.dtype, of.shape[1:], of.strides[1:], of.storage, of.offset)
                    return self._values.setdefault(row, len(self._values))
                case _:
                    continue
        return None

    def program(self, symbols: Sequence[str], inputs: Mapping[str, Tensor], outputs: Mapping[str, int]) -> Program:
        """What was written down."""
        named = {name: self.value(tensor) for name, tensor in inputs.items()}
        made = Program(
            tuple(symbols), tuple(self._values), dict(self._constants), named, tuple(self._ops), dict(outputs)
        )
        made.check()
        return made


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _is_plain_convolution(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of one dimension, and not transposed, all arguments by place."""
    return func is torch.ops.aten.convolution.default and not kwargs and args[0].dim() == 3 and not args[6]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _numbers(tensor: Tensor) -> list[float | int | bool]:
    with unset_fake_temporarily():
        return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).tolist()
