"""adapters: read LoRA adapters in the form of `peft`: adapter_config.json and adapter_model.safetensors.

A directory is not trusted. Its config, and the name and shape of every tensor, are compared with the layers of the
network before anything is read, so that what is allocated is bounded by the network and a cap. An adapter that does not
fit is refused with the names of the tensors.

Several adapters of one network are one: the sum of low-rank products is the product of matrices with all ranks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvcellar.engine.models.adapters.adapter_config import CONFIG, AdapterConfig, adapter_config
from kvcellar.engine.models.weights.config_file import config_fields
from kvcellar.engine.models.weights.weights_files import FLOATS, WeightsFiles, is_finite, opened, opened_file
from kvcellar.errors import AdapterRefused, ModelRefused, first_few
from kvcellar.kernels.packed import LINEARS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"
DIGEST = 16  # bytes
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OTHER = {  # what else a tensor of an adapter may be, by a part of its name
    ".lora_magnitude_vector": "DoRA",
    ".lora_embedding_": "an adapter of embeddings",
    ".lora_A.bias": "a bias of its own",
    ".lora_B.bias": "a bias of its own",
    ".modules_to_save.": "a whole module",
}
Place = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Lora:
    """What is added to the output of one linear layer: inputs [n,in] times `a` [r,in], times `b` [out,r], scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one or several adapters add to the layers of a network, by the names of these. `digest` tells it from every
    adapter that computes anything else."""

    loras: Mapping[str, Lora]
    digest: str

    @property
    def bytes(self) -> int:
        return sum(one.a.nbytes + one.b.nbytes for one in self.loras.values())

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(one.a) for one in self.loras.values())

    def on(self, device: torch.device, dtype: torch.dtype) -> "Adapter":
        """The same on the device of a network of this dtype: on a CPU in float32, elsewhere in the dtype. Raises
        `ModelRefused` if values are too large for that."""
        if device.type == "cpu":
            return self
        loras = {name: Lora(one.a.to(device, dtype), one.b.to(device, dtype)) for name, one in self.loras.items()}
        if large := [name for name, one in loras.items() if not (is_finite(one.a) and is_finite(one.b))]:
            raise ModelRefused(f"its matrices of {first_few(large)} are too large for {dtype}")
        return Adapter(loras, self.digest)


def read_adapter(directories: Sequence[Path], network: "PreTrainedModel", *, most_bytes: Callable[[], int]) -> Adapter:
    """The sum of the adapters in these directories, for a network, in float32 on the CPU. Raises `AdapterRefused`,
    before anything is read if one of them does not fit, or if they take more than `most_bytes`."""
    layers = linear_layers(network)
    with ExitStack() as files:
        parts = [files.enter_context(_opened(directory, network, layers)) for directory in directories]
        size = sum(part.bytes for part in parts)
        if size > (most := most_bytes()):
            raise AdapterRefused(
                parts[0].name, f"it takes {size} bytes, and {most} are left for it. Raise adapter_bytes"
            )
        names = dict.fromkeys(name for part in parts for name in part.ranks)
        loras = {name: _joined([part.read(name) for part in parts if name in part.ranks]) for name in names}
        for part in parts:
            part.check_unchanged()
    return Adapter(loras, _digest(loras))


def check_adapter(directory: Place, adapter: Place) -> None:
    """Raise `AdapterRefused` if an adapter does not fit the model of a directory, whose weights are not read."""
    from kvcellar.engine.models.hf_globals import silence_transformers  # imports transformers
    from kvcellar.engine.models.load import config_of, skeleton_of

    path = Path(directory)
    with silence_transformers(), opened(path) as weights:
        skeleton = skeleton_of(config_of(config_fields(path), weights), torch.float32)
    with _opened(Path(adapter), skeleton, linear_layers(skeleton)) as part:
        for name in part.ranks:
            part.read(name)


def linear_layers(network: nn.Module) -> dict[str, nn.Module]:
    """The layers that an adapter can change, by name."""
    from transformers.pytorch_utils import Conv1D  # imports of transformers take seconds

    kinds = (nn.Linear, Conv1D, *LINEARS)
    return {name: module for name, module in network.named_modules() if isinstance(module, kinds)}


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Values of an input and of an output of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    assert isinstance(layer, (nn.Linear, *LINEARS))
    return layer.in_features, layer.out_features


def _joined(parts: Sequence[Lora]) -> Lora:
    if len(parts) == 1:
        return parts[0]
    return Lora(torch.cat([one.a for one in parts]), torch.cat([one.b for one in parts], 1))


def _digest(loras: Mapping[str, Lora]) -> str:
    digest = blake2b(digest_size=DIGEST, person=b"kvcellar-adapter")
    for name, lora in sorted(loras.items()):
        for values in (lora.a, lora.b):
            digest.update(f"{name} {values.dtype} {list(values.shape)}\n".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- one directory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """An adapter whose tensors all fit the layers of a network; `ranks` by layer."""

    name: str
    config: AdapterConfig
    weights: WeightsFiles
    tensors: Mapping[str, str]  # names in the file, by name in the network
    layers: Mapping[str, nn.Module]
    ranks: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """In float32."""
        return sum(4 * rank * sum(sizes_of(self.layers[name])) for name, rank in self.ranks.items())

    def read(self, name: str) -> Lora:
        """The matrices of a layer, in float32."""
        return Lora(self._read(name + _A, 1.0), self._read(name + _B, self.config.scale_of(name)))

    def _read(self, tensor: str, scale: float) -> Tensor:
        name = self.tensors[tensor]
        values = (self.weights.slices[name][:].float() * scale).contiguous()
        if not is_finite(values):
            raise AdapterRefused(self.name, f"{name} holds NaN or infinity: it is damaged")
        return values

    def check_unchanged(self) -> None:
        try:
            self.weights.check_unchanged()
        except ModelRefused as error:
            raise AdapterRefused(self.name, str(error)) from error


@contextmanager
def _opened(directory: Path, network: "PreTrainedModel", layers: Mapping[str, nn.Module]) -> Iterator[_Part]:
    """An adapter, checked; its file is open within the block."""
    with ExitStack() as files:
        try:
            config = adapter_config(directory, [name for name, _ in network.named_modules() if name])
            weights = files.enter_context(opened_file(directory, _file(directory)))
            tensors = {name.removeprefix(_PREFIX): name for name in weights.tensors}
            _check_kinds(weights)
            ranks = _ranks(config, network, layers)
            _check_tensors(config, weights, tensors, layers, ranks)
        except ModelRefused as error:
            raise AdapterRefused(directory.name, str(error)) from error
        yield _Part(directory.name, config, weights, tensors, layers, ranks)


def _file(directory: Path) -> str:
    if (directory / WEIGHTS).is_file():
        return WEIGHTS
    if (directory / "adapter_model.bin").exists():
        raise ModelRefused("it has only pickled weights, which can run code when they are read. Convert them")
    raise ModelRefused(f"{directory} has no {WEIGHTS}")


def _check_kinds(weights: WeightsFiles) -> None:
    for name, stored in weights.tensors.items():
        if kind := next((what for part, what in _OTHER.items() if part in name), None):
            raise ModelRefused(f"{name} is {kind}, which is not supported")
        if not name.endswith((_A, _B)):
            raise ModelRefused(f"{name} is not a matrix of a LoRA ({_A} or {_B} of a layer)")
        if stored.dtype not in FLOATS:
            raise ModelRefused(f"{name} is stored as {stored.dtype}; float32, bfloat16 and float16 are supported")


def _ranks(config: AdapterConfig, network: "PreTrainedModel", layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """The rank of each layer that the config selects. Raises `ModelRefused` for a module that is no linear layer."""
    head = network.get_output_embeddings()
    found: dict[str, int] = {}
    for name, module in network.named_modules():
        if config.targets is None and (name not in layers or module is head):
            continue
        if not name or not config.selects(name):
            continue
        if name not in layers:
            kind = type(module).__name__
            raise ModelRefused(f"target_modules selects {name}, a {kind}; only linear layers are supported")
        found[name] = config.rank_of(name)
    return found


def _check_tensors(
    config: AdapterConfig,
    weights: WeightsFiles,
    tensors: Mapping[str, str],
    layers: Mapping[str, nn.Module],
    ranks: Mapping[str, int],
) -> None:
    """Raise `ModelRefused` unless there are exactly the two matrices of each layer, in the right shapes."""
    base = f"; it was made for {config.base}" if config.base else ""
    modules = dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in tensors)
    if unknown := [name for name in modules if name not in layers]:
        raise ModelRefused(f"the model has no linear layers {first_few(unknown)}{base}")
    if unused := [name for name in modules if name not in ranks]:
        raise ModelRefused(f"{CONFIG} does not select {first_few(unused)}, which {WEIGHTS} has matrices of")
    if not ranks:
        raise ModelRefused(f"{CONFIG} selects no layer of the model{base}")
    expected = {
        name + matrix: shape
        for name, rank in ranks.items()
        for matrix, shape in zip((_A, _B), _shapes(layers[name], rank), strict=True)
    }
    if missing := [name for name in expected if name not in tensors]:
        raise ModelRefused(f"{WEIGHTS} lacks {first_few(missing)}, of layers that {CONFIG} selects")
    other = [
        f"{tensors[name]} is {list(found)}, and {list(shape)} is expected"
        for name, shape in expected.items()
        if (found := weights.tensors[tensors[name]].shape) != shape
    ]
    if other:
        raise ModelRefused(f"{'; '.join(other[:3])} ({len(other)} tensors), by the model's layer and the rank{base}")


def _shapes(layer: nn.Module, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    inputs, outputs = sizes_of(layer)
    return (rank, inputs), (outputs, rank)
