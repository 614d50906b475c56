"""Programs of plain functions on tensors, for tests of what runs programs."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kvcellar.engine.recording.program import Constant, Dtype, Number, Op, Program, Ref, Size, Value


class _Traced:
    def __init__(self, names: dict[str, str]) -> None:
        self.names, self.values, self.ops = names, list[Value](), list[Op]()
        self.storages: dict[int, int] = {}
        self.alive: list[Any] = []

    def size(self, n: Any) -> Size:
        if not isinstance(n, torch.SymInt):
            return int(n)
        text = str(n.node.expr)
        for symbol, name in self.names.items():
            text = text.replace(symbol, name)
        return int(text) if text.lstrip("-").isdigit() else text

    def value(self, tensor: Tensor) -> int:
        storage = self.storages.setdefault(tensor.untyped_storage()._cdata, len(self.storages))
        self.alive.append(tensor.untyped_storage())
        shape, strides = (tuple(self.size(n) for n in of) for of in (tensor.shape, tensor.stride()))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(Value(dtype, shape, strides, storage, self.size(tensor.storage_offset())))
        return len(self.values) - 1

    def argument(self, given: Any, known: dict[Any, Any]) -> Any:
        if isinstance(given, torch.fx.Node):
            found = known[given]
            return Ref(found) if isinstance(found, int) else found
        if isinstance(given, torch.dtype):
            return Dtype(str(given).removeprefix("torch."))
        if isinstance(given, list | tuple):
            return tuple(self.argument(one, known) for one in given)
        return given


_NOT_GIVEN = {"device", "layout", "pin_memory", "memory_format"}


def traced(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, names: Sequence[str] = ("T",)) -> Program:
    """The program of `function` on inputs whose first sizes are symbols: one for each distinct size, in order."""
    fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    faked = [
        fakes.from_tensor(
            one,
            symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK, *[DimDynamic.STATIC] * (one.dim() - 1)]),
        )
        for one in inputs
    ]
    with torch.no_grad(), fakes:
        graph: Any = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*faked).graph
    symbols: dict[str, str] = {}
    made = _Traced(symbols)
    known: dict[Any, Any] = {}
    given: dict[str, int] = {}
    outputs: dict[str, int] = {}
    constants: dict[int, Constant] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            tensor = node.meta["val"]
            for n in tensor.shape:
                if isinstance(n, torch.SymInt):
                    if str(n.node.expr) not in symbols:
                        symbols[str(n.node.expr)] = names[len(symbols)]
            known[node] = given[f"x{len(given)}"] = made.value(tensor)
        elif node.op == "get_attr":
            tensor = getattr(graph.owning_module, node.target)
            known[node] = made.value(tensor)
            constants[made.values[-1].storage] = Constant(data=tuple(tensor.flatten().tolist()))
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
            outputs = {f"y{index}": known[one] for index, one in enumerate(results)}
        elif node.target is operator.getitem:
            known[node] = made.value(node.meta["val"])
        else:
            _call(made, node, known)
    return Program(tuple(symbols.values()), tuple(made.values), constants, given, tuple(made.ops), outputs)


def _call(made: _Traced, node: Any, known: dict[Any, Any]) -> None:
    result = node.meta["val"]
    if not isinstance(result, Tensor | list | tuple):
        known[node] = Number(made.size(result))
        return
    tensors = [result] if isinstance(result, Tensor) else list(result)
    before = set(made.storages.values())
    values = [made.value(tensor) for tensor in tensors]
    known[node] = values[0]
    mutable = node.target._schema.is_mutable
    if all(made.values[value].storage in before for value in values) and not mutable:
        return  # views
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["val"] = tensors[user.args[1]]
    kwargs = {name: made.argument(one, known) for name, one in node.kwargs.items() if name not in _NOT_GIVEN}
    made.ops.append(Op(str(node.target), tuple(made.argument(one, known) for one in node.args), kwargs, tuple(values)))


def data_of(program: Program) -> dict[int, Tensor]:
    """The constants of a traced program, by storage."""
    dtypes = {value.storage: value.dtype for value in program.values}
    return {
        storage: torch.tensor(constant.data, dtype=getattr(torch, dtypes[storage]))
        for storage, constant in program.constants.items()
    }
