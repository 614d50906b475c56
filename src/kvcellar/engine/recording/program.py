"""program: a forward as data: operators in order, on tensors whose sizes are expressions of a few symbols.

`trace.py` and `capture.py` make a program from a network, once; `recorded.py` binds it to fixed memory for given
numbers and runs it. A program holds no tensors: weights are named by their path in the network.

Symbols: `T` rows of the step, `W` rows whose logits are wanted; a program may have others, which its `symbols` list.

Operators of torch have torch's names ("aten.mul.Tensor") and take its arguments. Those of ours:

    kvcellar.linear(x [...,in], paths)                   -> [...,out]; of several modules, their outputs side by side
    kvcellar.embedding(ids [...], path)                  -> [...,in]; rows of a weight that a layer has in panels
    kvcellar.experts(x [n,in], index, path, share)       -> [n*share,out]; row i is expert index[i] of row i // share
    kvcellar.heads(path, (x [...,H,in],))                -> [...,H,out]; a layer for each head
    kvcellar.put(k [1,G,T,D], v [1,G,T,Dv], layer)       -> (); stores keys and values of the new tokens
    kvcellar.attend(q [1,H,T,D], layer, scoring)         -> [1,T,H,Dv]; over the stored cells of a layer
    kvcellar.attend_latent(q [1,T,H,D+Dv], layer, scoring) -> [1,T,H,D]; keys are planes side by side, values the first
    kvcellar.dense(layer, plane)                         -> [1,G,N,D]; what is stored of all cells that the step sees
    kvcellar.attend_dense(q, k, v, layer, scoring)       -> [1,T,H,Dv]; over keys computed from `dense`
    kvcellar.mix(path, arguments, keywords)              -> tensors; a module that keeps a state, called by the door
    kvcellar.convolve_states(x [1,C,T], weight, bias, layer, plane, silu, by_token) -> [1,C,K+T], or [1,K+T,C]; each
                                                            sequence behind the inputs in its state, which it shifts
                                                            in; only the T columns of new tokens are written
    kvcellar.scan_states(layer, head, *recurrence)       -> [1,T,heads,elements]; each sequence from its state; also
                                                            stores their states after it
    kvcellar.states(layer)                               -> planes [T,*shape]; states of T sequences
    kvcellar.keep_states(planes, names, layer)           -> (); stores these planes of their states after the step
    kvcellar.convolve(x [T,C,L], weight, bias, silu, by_token) -> [T,C,L], or [T,L,C]; causal, each channel by itself
    kvcellar.scan(layer, head, *recurrence)              -> [T,1,heads,elements]; also stores their states after it
    kvcellar.module(path, arguments, keywords)           -> tensors; a module that could not be traced

`path` is that of the module in the network, as in `get_submodule`; of an embedding, that of the weight. `scoring` are
the keywords `scale`, `softcap` and `sinks` (a value, or None). `arguments` is a tuple of the call's positional
arguments; its keywords are the operator's. Tensors among them are `Ref`s, and `Cache()` stands for the cache that the
guest passes to its modules. The number N of cells is a symbol of its own for each group of layers.

Arguments that only name a device or an order in memory are left out: a copy is written as its output value says.

Always true (`check`):
  * an operator reads only inputs, constants and what operators before it have written;
  * values of one storage share memory: a view is a value of its own, without an operator.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

Index = Annotated[int, Meta(ge=0)]
Kind = Annotated[str, Meta(pattern=r"^(bool|uint8|int(8|16|32|64)|b?float16|float(32|64)|complex(64|128))$")]
Size = Index | str  # an expression of symbols: names, integers, + - * // %, Min(a, b), Max(a, b)
Sizes = Mapping[str, int]  # the value of each symbol

CONVOLVE, SCAN_STATES = "kvcellar.convolve_states", "kvcellar.scan_states"  # parts of mixers in prompts
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: Mapping[str, Callable[[int, int], int]] = {"Min": min, "Max": max}


class Ref(Struct, frozen=True, tag=True):
    """A tensor argument: the index of a value."""

    value: Index


class Number(Struct, frozen=True, tag=True):
    """An integer argument that depends on symbols."""

    size: Size


class Dtype(Struct, frozen=True, tag=True):
    """An argument that is a type of torch, by its name ("float32")."""

    name: Kind


class Cache(Struct, frozen=True, tag=True):
    """An argument of a module that is the cache of the running forward."""


Argument = Ref | Number | Dtype | Cache | int | float | bool | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. Strides and the offset, from the start of its storage, count elements of its dtype."""

    dtype: Kind
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    storage: Index
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """A storage that is there before the program runs: that of a parameter or buffer of the network, by its path, where
    offsets count from the tensor's first element; or `data`, the content of a tensor that was made while the network
    was traced and does not depend on symbols."""

    path: str | None = None
    data: tuple[float | int | bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """`outputs` are the values that it writes, in the order in which the operator returns them; None: not used. An
    operator that writes into an argument (`aten.copy_`) has that argument's storage as its output."""

    name: Annotated[str, Meta(pattern=r"^(aten|prims|kvcellar)\.\w+(\.\w+)?$")]
    args: tuple[Any, ...]  # of `Argument`, a recursive type, which msgspec does not read
    kwargs: Mapping[str, Any]
    outputs: tuple[Index | None, ...]

    @property
    def reads(self) -> list[int]:
        """Values among its arguments, in order."""
        return [ref.value for ref in _refs((*self.args, *self.kwargs.values()))]


@dataclass(frozen=True, slots=True)
class Program:
    """A forward. `inputs` by name: ids [T], positions [T], wanted [W], all int64. `outputs` by name: logits [W,V], and
    hidden [T,hidden], what the output head reads, where it is known."""

    symbols: tuple[Annotated[str, Meta(pattern=r"^[A-Z]\d*$")], ...]
    values: tuple[Value, ...]
    constants: Mapping[Index, Constant]  # by storage
    inputs: Mapping[str, Index]
    ops: tuple[Op, ...]
    outputs: Mapping[str, Index]

    def check(self) -> None:
        """Assert what is always true."""
        known = {self.values[value].storage for value in self.inputs.values()} | self.constants.keys()
        for op in self.ops:
            for value in op.reads:
                assert self.values[value].storage in known, f"{op.name} reads value {value} before it is written"
            known |= {self.values[value].storage for value in op.outputs if value is not None}
        for name, value in self.outputs.items():
            assert self.values[value].storage in known, f"{name} is never written"


def resolved(argument: Argument, value: Callable[[int], Any], sizes: Sizes, cache: Any = None) -> Any:
    """An argument with `value(index)` in place of references, numbers in place of sizes, torch's types, and `cache`."""
    match argument:
        case Ref(index):
            return value(index)
        case Number(size):
            return size_of(size, sizes)
        case Dtype(name):
            return getattr(torch, name)
        case Cache():
            return cache
        case tuple():
            return tuple(resolved(one, value, sizes, cache) for one in argument)
        case _:
            return argument


def size_of(size: Size, symbols: Sizes) -> int:
    """The number that an expression has. Raises `ValueError` for what is none, and for symbols without a value."""
    return size if isinstance(size, int) else _evaluated(_parsed(size), symbols)


def _refs(arguments: Sequence[Argument]) -> list[Ref]:
    found: list[Ref] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            found.append(argument)
        elif isinstance(argument, tuple):
            found += _refs(argument)
    return found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression of sizes") from error


def _evaluated(node: Any, symbols: Sizes) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand, symbols)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _BINARY:
            return _BINARY[type(kind)](_evaluated(left, symbols), _evaluated(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _CALLS:
            return _CALLS[name](_evaluated(left, symbols), _evaluated(right, symbols))
        case _:
            raise ValueError(f"{ast.unparse(node)} is no size, given {', '.join(symbols) or 'no symbols'}")
