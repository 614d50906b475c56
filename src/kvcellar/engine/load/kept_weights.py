"""kept_weights: of which stored tensors the weights that programs read are made, and the same weights from the files.

`find_weights` looks at a network that was loaded, once; `made_weights` makes modules with its paths, and no network.

Always true: what is not exactly as it is stored, but for its type, is refused by `find_weights`, as is a module whose
code programs call.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct
from torch import Tensor, nn

from kvcellar.engine.models.described import AsStored
from kvcellar.engine.models.quantize.kinds import CodesKind
from kvcellar.engine.models.quantize.reading import decoded as with_dense
from kvcellar.engine.models.quantize.rounding import codes_of
from kvcellar.engine.models.weights.packing import CHILDREN
from kvcellar.engine.models.weights.weights_files import WeightsFiles, opened
from kvcellar.engine.recording.kept import Damaged
from kvcellar.engine.recording.program import Program
from kvcellar.engine.recording.recording import Captured
from kvcellar.errors import first_few
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.codes import Codes, side_by_side
from kvcellar.kernels.layers import (
    ExpertsKernel,
    HeadsKernel,
    OwnExperts,
    OwnHeads,
    OwnLinear,
    PanelKernel,
    panel_bytes,
    panel_experts,
    panel_heads,
    panel_linear,
)
from kvcellar.kernels.packed import Packing, pack
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear, coded_layers, most_bytes

Sources = Mapping[str, AsStored | None]
KernelOf = Callable[[type[Any]], Any]  # a kernel of that class, looked up once
Dtype = Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "bool"]
MOST_DATA = 1 << 20  # bytes of tensors that are in no file, such as frequencies of positions


class StoredTensor(Struct):
    """A tensor of the weights files, or one with its data."""

    dtype: Dtype
    name: str | None = None
    shape: tuple[int, ...] = ()
    data: bytes = b""
    kind: CodesKind | None = None  # of the codes that are made of it, as in `AsStored`


class Layers(Struct):
    """Layers of ours that replace no `nn.Linear`: those of experts or of heads, or one of a router. The stored
    `matrices` of a layer are side by side; or `stack` has as many rows for each of `count`, of which those from `first`
    up to `last` are its matrix, turned or not."""

    what: Literal["experts", "heads", "router"]
    dtype: Dtype
    matrices: tuple[tuple[str, ...], ...] = ()
    kind: CodesKind | None = None
    stack: str = ""
    count: int = 1
    first: int = 0
    last: int | None = None
    turned: bool = False
    bias: str | None = None  # its stored name
    tail: int = 0  # of heads
    computed: Dtype = "float32"  # of a router: the type that it multiplies in


class Weights(Struct):
    """What programs read, by the paths in the network: tensors, linear layers, and others of ours."""

    tensors: dict[str, StoredTensor]
    linears: list[str]
    layers: dict[str, Layers]


def find_weights(network: nn.Module, captured: Captured, sources: Sources) -> Weights:
    """Raises `LookupError` with the reasons if some of them cannot be made from the files alone."""
    finder = _Finder(network, sources, captured.opaque)
    for program in (captured.program, captured.decoding):
        if program is not None:
            finder.add(program)
    if finder.reasons:
        raise LookupError(first_few(list(finder.reasons)))
    return finder.weights


class _Finder:
    def __init__(self, network: nn.Module, sources: Sources, opaque: Mapping[str, str]) -> None:
        self._network, self._sources, self._opaque, self._left = network, sources, opaque, MOST_DATA
        self.weights = Weights({}, [], {})
        self.reasons: dict[str, None] = {}

    def add(self, program: Program) -> None:
        for find, path in self._wanted(program):
            try:
                find(path)
            except LookupError as error:
                self.reasons[str(error)] = None

    def _wanted(self, program: Program) -> Iterator[tuple[Any, str]]:
        for op in program.ops:
            match op.name, op.args:
                case "kvcellar.linear", (_, tuple(paths)):
                    yield from ((self._linear, str(path)) for path in paths)
                case "kvcellar.experts", (_, _, path):
                    yield self._experts, str(path)
                case "kvcellar.heads", (path, _):
                    yield self._heads, str(path)
                case "kvcellar.embedding", (_, path):
                    yield self._tensor, str(path)
                case "kvcellar.mix" | "kvcellar.module", (path, *_):
                    yield self._module, str(path)
                case _:
                    continue
        yield from ((self._tensor, one.path) for one in program.constants.values() if one.path is not None)

    def _module(self, path: str) -> None:
        kind = type(self._network.get_submodule(path)).__name__
        raise LookupError(f"its steps call the code of {kind} ({self._opaque.get(kind, 'in prompts')})")

    def _stored(self, path: str) -> AsStored:
        """Of a parameter that is one stored tensor."""
        if (source := self._sources.get(path)) is None or source.matrices:
            raise LookupError(f"{path} is not as it is stored")
        return source

    def _bias(self, path: str) -> str | None:
        return self._stored(path).name if path in self._sources else None

    def _linear(self, path: str) -> None:
        parent, _, leaf = path.rpartition(".")
        if leaf in CHILDREN.values():
            weight, layer = self._stored(f"{parent}.weight"), self._network.get_submodule(path)
            assert isinstance(layer, OwnLinear)
            how: Any = {"stack": weight.name, "bias": self._bias(f"{parent}.bias"), "computed": word(layer.dtype)}
            self.weights.layers[path] = Layers("router", weight.dtype, **how)
            return
        names = [name for name in (f"{path}.weight", f"{path}.bias") if name in self._sources]
        if not names:
            raise LookupError(f"{path} is no layer whose weights are as they are stored")
        for name in names:
            one = self._stored(name)
            self.weights.tensors[name] = StoredTensor(one.dtype, one.name, kind=one.kind)
        if path not in self.weights.linears:
            self.weights.linears.append(path)

    def _experts(self, path: str) -> None:
        module: Any = self._network.get_submodule(path.rpartition(".")[0])
        source, experts = self._sources.get(path), self._network.get_submodule(path)
        assert isinstance(experts, OwnExperts)
        if source is None or (source.matrices and module.is_transposed):
            raise LookupError(f"{path} is not as it is stored")
        how: Any = {"count": len(experts.layers), "bias": self._bias(f"{path}_bias")}
        how |= {"stack": source.name, "turned": module.is_transposed, "kind": source.kind}
        self.weights.layers[path] = Layers("experts", source.dtype, source.matrices, **how)

    def _heads(self, path: str) -> None:
        """Their matrices are rows of a linear layer of the attention module (`latent_attention.py`)."""
        heads, attention = self._network.get_submodule(path), path.rsplit(".", 2)[0]
        assert isinstance(heads, OwnHeads)
        plain = torch.stack([part.plain() for layer in heads.layers for part in layer.parts])
        for name, source in self._sources.items():
            if source is None or source.kind or source.matrices or not name.startswith(f"{attention}."):
                continue
            place, _, leaf = name.rpartition(".")
            module: Any = self._network.get_submodule(place)
            for turned in (False, True) if leaf == "weight" else ():
                rows = _rows(module.weight, plain.transpose(1, 2) if turned else plain)
                if rows is not None:
                    how: Any = {"count": len(plain), "first": rows[0], "last": rows[1], "turned": turned}
                    self.weights.layers[path] = Layers("heads", source.dtype, stack=source.name, tail=heads.tail, **how)
                    return
        raise LookupError(f"the matrices of {path} are in no stored weight")

    def _tensor(self, path: str) -> None:
        if (source := self._sources.get(path)) is not None and not source.matrices:
            self.weights.tensors[path] = StoredTensor(source.dtype, source.name)
            return
        parent, _, name = path.rpartition(".")
        tensor = getattr(self._network.get_submodule(parent), name).detach().contiguous()
        if path not in self.weights.tensors and (left := self._left - tensor.nbytes) >= 0:
            self._left = left
            data = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            self.weights.tensors[path] = StoredTensor(word(tensor.dtype), None, tuple(tensor.shape), data)
        elif path not in self.weights.tensors:
            raise LookupError(f"{path} is not stored")


def _rows(weight: Tensor, matrices: Tensor) -> tuple[int, int] | None:
    """Which rows of its part of a weight [H*n,in] each of the matrices [H,m,in] is; None: it is not there."""
    count, size, inner = matrices.shape
    if weight.dim() != 2 or weight.shape[1] != inner or weight.shape[0] % count or weight.dtype is not matrices.dtype:
        return None
    parts = weight.view(count, -1, inner)
    for first in (parts[0] == matrices[0, 0]).all(-1).nonzero().flatten().tolist():
        if torch.equal(parts[:, first : first + size], matrices):
            return first, first + size
    return None


def word(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


# -- from files --------------------------------------------------------------------------------------------------------


def made_weights(weights: Weights, path: Path, *, packs: bool) -> tuple[nn.Module, Packing | None]:
    """The tensors that programs read, by the paths that they have in the network, and its layers. A tensor that has two
    names is read once. Raises `Damaged`, and what reading raises."""
    root, coded = nn.Module(), {name: one for name, one in weights.tensors.items() if one.kind is not None}

    @cache
    def kernel(kind: type[Any]) -> Any:
        return kind(os.environ)

    with opened(path) as stored:
        made: dict[tuple[str, str], nn.Parameter] = {}
        files = with_dense(stored) if coded or any(one.kind is not None for one in weights.layers.values()) else stored
        for name, one in weights.tensors.items():
            if name in coded:
                continue
            key = (name if one.name is None else one.name, one.dtype)
            if key not in made:
                made[key] = nn.Parameter(_tensor(one, files), requires_grad=False)
            _parent(root, name).register_parameter(name.rpartition(".")[2], made[key])
        _add_codes(root, coded, files, kernel)
        for name, layers in weights.layers.items():
            _place(root, name, _made(layers, files, kernel))
        files.check_unchanged()
    made.clear()
    for name in weights.linears:
        if f"{name}.weight" in coded:
            continue
        held = root.get_submodule(name)._parameters
        if (weight := held.get("weight")) is None or weight.dim() != 2:
            raise Damaged(f"{name} is no linear layer")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=held.get("bias") is not None, device="meta")
        layer._parameters.update(held)
        _place(root, name, layer)
    return root, pack(root, environment=os.environ) if packs else None


def _made(one: Layers, files: WeightsFiles, kernel: KernelOf) -> nn.Module:
    """Layers of ours."""
    bias = None if one.bias is None else _slice(files, one.bias, one.dtype)
    if one.kind is not None:
        return _coded(one, one.kind, bias, files, kernel)
    weights = _matrices(one, files)
    if one.what == "heads":
        return panel_heads(kernel(HeadsKernel), weights, one.tail)
    if one.what == "router":
        computed = getattr(torch, one.computed)
        (weight,) = (each.to(computed) for each in weights)
        bias = None if bias is None else bias.to(computed)
        return panel_linear(kernel(PanelKernel), Arena(panel_bytes(weight)), weight, bias)
    return panel_experts(kernel(ExpertsKernel), kernel(PanelKernel), weights, bias)


def _matrices(one: Layers, files: WeightsFiles) -> list[Tensor]:
    """The weight [out,in] of each layer."""
    if one.matrices:
        return [torch.cat([_slice(files, name, one.dtype) for name in names]) for names in one.matrices]
    whole = _slice(files, one.stack, one.dtype)
    parts = whole.reshape(one.count, -1, whole.shape[-1])[:, one.first : one.last]
    return [part.T.contiguous() if one.turned else part for part in parts]


def _coded(one: Layers, kind: CodesKind, biases: Tensor | None, files: WeightsFiles, kernel: KernelOf) -> OwnExperts:
    """Experts with codes."""

    def of(expert: int) -> Codes | str:
        return side_by_side(codes_of(name, files.slices[name], kind) for name in one.matrices[expert])

    layers = coded_layers(kernel(QuantisedKernel), len(one.matrices), of, biases, getattr(torch, one.dtype))
    if isinstance(layers, str):
        raise Damaged(f"{one.matrices[0][0]} has no codes: {layers}")
    return OwnExperts(kernel(ExpertsKernel), layers)


def _add_codes(root: nn.Module, coded: Mapping[str, StoredTensor], files: WeightsFiles, kernel: KernelOf) -> None:
    """The layers of weights with codes. Their biases are there."""
    if not coded:
        return
    stored = {name: files.tensors.get(one.name or "") for name, one in coded.items()}
    if any(one is None or len(one.shape) != 2 for one in stored.values()):
        raise Damaged("the weights files hold no matrix of a layer with codes")
    arena = Arena(sum(most_bytes(*one.shape) for one in stored.values() if one is not None))
    for name, one in coded.items():
        assert one.kind is not None
        codes = codes_of(name, files.slices[one.name or ""], one.kind)
        if isinstance(codes, str):
            raise Damaged(f"{name} has no codes: {codes}")
        bias, path = _parent(root, name)._parameters.get("bias"), name.rpartition(".")[0]
        _place(root, path, QuantisedLinear(kernel(QuantisedKernel), codes, bias, getattr(torch, one.dtype), arena))


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    _parent(root, path).add_module(path.rpartition(".")[2], module)


def _parent(root: nn.Module, path: str) -> nn.Module:
    """What the last name of a path belongs to, made where it is missing."""
    for name in path.split(".")[:-1]:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def _tensor(one: StoredTensor, files: WeightsFiles) -> Tensor:
    if one.name is not None:
        return _slice(files, one.name, one.dtype)
    dtype = getattr(torch, one.dtype)
    if math.prod(one.shape) * dtype.itemsize != len(one.data):
        raise Damaged("data of a tensor have another size than its shape")
    data = bytearray(one.data)
    return torch.frombuffer(data, dtype=dtype).view(one.shape) if data else torch.empty(one.shape, dtype=dtype)


def _slice(files: WeightsFiles, name: str, dtype: str) -> Tensor:
    """A stored tensor in another type."""
    if name not in files.tensors:
        raise Damaged(f"the weights files hold no {name}")
    return files.slices[name][...].to(getattr(torch, dtype))
