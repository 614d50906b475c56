"""restart: starts a model that was loaded before from what its load has found, without transformers.

A load builds the network, compares it with its own forward, records its steps and measures them. What that finds is
kept in the user's cache directory: limits, text, the shape of memory, programs, the stored names of the weights that
programs read, and the bytes of steps. The next engine of the same model reads these weights, and runs the programs. Its
network is built when something needs it, by a load like any other: an adapter, say, or a step that no program runs.

Always true:
  * a file is named by the digest of everything that a load depends on (`_digest`), settings included;
  * what is damaged or cannot be used is not used: the model is loaded;
  * a guest is used only if a first step of it has the logits that this step had after the load, bit for bit;
  * a network that is built later has the shape that was kept, or is refused.
"""

import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from msgspec import Struct
from tokenizers import Tokenizer
from torch import Tensor, nn

from kvcellar.engine.load.settings import Settings
from kvcellar.engine.load.step_bytes import Measures
from kvcellar.engine.models.described import AsStored, Described
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest, Verdict, backends_for
from kvcellar.engine.models.quantize.kinds import CodesKind
from kvcellar.engine.models.quantize.reading import decoded as with_dense
from kvcellar.engine.models.quantize.rounding import codes_of
from kvcellar.engine.models.shape import Shape
from kvcellar.engine.models.weights.find import locate
from kvcellar.engine.models.weights.packing import Packed
from kvcellar.engine.models.weights.weights_files import WeightsFiles, opened
from kvcellar.engine.recording.facts import Unsettled, digest, surroundings
from kvcellar.engine.recording.kept import Damaged, Kept, place_of
from kvcellar.engine.recording.native import native
from kvcellar.engine.recording.program import Program
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recording import Recording
from kvcellar.engine.recording.saved import decoded, encoded
from kvcellar.errors import ModelRefused
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import NotCompiled, compiled_for
from kvcellar.kernels.packed import Packing, pack
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear, most_bytes
from kvcellar.memory.attention.choose import named
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Plane, Recurrent, Rotation
from kvcellar.memory.spans import Span

if TYPE_CHECKING:  # imports transformers
    from transformers import PreTrainedModel

    from kvcellar.engine.models.load import Loaded

log = logging.getLogger("kvcellar.engine.models")

Sources = Mapping[str, AsStored | None]
KIND = b"kvcellar start 2\n"
TOKENIZER = "tokenizer.json"
MOST_DATA = 1 << 20  # bytes of tensors that are in no file, such as frequencies of positions
FIRST = 5  # tokens of the first step
MODULES = {"kvcellar.mix", "kvcellar.module", "kvcellar.heads", "kvcellar.experts"}  # operators that a network has
_LAYOUTS: Mapping[tuple[str, ...], Any] = {(): Causal, ("window", "memory"): Sliding, ("size",): Chunked}  # by fields


class _Group(Struct):
    name: str
    layout: dict[str, int]
    planes: tuple[Plane, ...]
    layers: tuple[int, ...]
    rotations: Mapping[int, Mapping[str, Rotation]]
    no_shift: str | None


class _Stored(Struct):
    """A tensor of the weights files, or one with its data."""

    dtype: Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "bool"]
    name: str | None = None
    shape: tuple[int, ...] = ()
    data: bytes = b""
    kind: CodesKind | None = None  # of the codes that are made of it, as in `AsStored`


Tensors = dict[str, _Stored]


class _Start(Struct, forbid_unknown_fields=True):
    described: Described
    groups: tuple[_Group, ...]
    specs: dict[str, AttentionSpec]
    recurrent: Recurrent | None
    mixers: int
    dtype: Literal["float32", "bfloat16"]
    verdict: Verdict
    no_partial_commit: str | None
    programs: bytes
    tensors: Tensors
    linears: list[str]
    experts: int | str  # see `Packed`
    routers: int | str
    measures: dict[str, int]
    logits: str


class _Files(Kept[_Start]):
    """Those of models in `path`, whose tokenizers have passed their trial: a tokenizer that is as its file has it is
    kept as an empty text."""

    def __init__(self, directory: Path, path: Path) -> None:
        super().__init__(directory, KIND, partial(msgspec.msgpack.encode, enc_hook=self._encoded), self._start)
        self._model, self._tokenizer = path, path / TOKENIZER

    def _encoded(self, value: Any) -> str:
        if isinstance(value, Path):
            return str(value)
        assert isinstance(value, Tokenizer)
        content, file = value.to_str(), self._tokenizer
        return "" if file.is_file() and Tokenizer.from_file(str(file)).to_str() == content else content

    def _start(self, stored: bytes) -> _Start:
        try:
            return msgspec.msgpack.decode(stored, type=_Start, dec_hook=self._decoded)
        except Exception as error:
            raise Damaged(str(error)) from error

    def _decoded(self, kind: type, stored: Any) -> Any:
        if kind is Path:
            return self._model
        assert kind is Tokenizer
        return Tokenizer.from_str(stored) if stored else Tokenizer.from_file(str(self._tokenizer))


@dataclass(frozen=True, slots=True)
class Restart(Described):
    """What an engine is made from in place of a network that was loaded."""

    guest: Guest = field(kw_only=True)
    packing: Packed | None = field(kw_only=True)
    measures: Measures = field(kw_only=True)


class Restarts:
    """What is kept of one model with these settings, where anything is."""

    def __init__(
        self, model: "str | Path | PreTrainedModel | None", settings: Settings, began: int, build: Callable[[], Guest]
    ) -> None:
        """`began`: when the load began, in nanoseconds of the clock. `build` loads the network, and tests it."""
        self._settings, self._build = settings, build
        self._digest, self._files, self._found = "", None, None
        others = (settings.draft, settings.adapters or None, settings.kv_dtype)
        plain = settings.record != "off" and settings.device in ("auto", "cpu") and not torch.cuda.is_available()
        if not plain or any(one is not None for one in others) or not isinstance(model, str | Path | None):
            return
        self._found = locate("embedded" if model is None else model)
        try:
            self._digest = _digest(*self._found, settings, began)
        except (Unsettled, OSError, NotCompiled) as error:
            log.info("each start loads the model: %s", error)
        else:
            if (directory := place_of("starts", os.environ)) is not None:
                self._files = _Files(directory, self._found[1])

    def read(self) -> Restart | None:
        """None: the model has to be loaded."""
        if self._files is None or self._found is None or (start := self._files.read(self._digest)) is None:
            return None
        described = start.described
        try:
            weights, packing = _weights(start, self._found[1], packs=self._settings.pack)
            guest = Restored(start, weights, named(self._settings.attention), self._build)
            if _first_logits(guest) != start.logits:
                raise Damaged("its first step has other logits than after its load")
        except (*MODEL_ERRORS, NotCompiled) as error:
            log.warning("%s is loaded, and not started as before: %s", described.name, error)
            return None
        for note in described.notes:
            log.warning("%s: %s", described.name, note)
        packed = None if packing is None else Packed(packing, start.experts, start.routers)
        about: Any = {one.name: getattr(described, one.name) for one in fields(described)}
        return Restart(**about, guest=guest, packing=packed, measures=Measures(start.measures))

    def keep(self, loaded: "Loaded", guest: Guest, packing: Packed | None, measures: Measures) -> None:
        """What a load has found, if the next start can be made from it."""
        if self._files is None or guest.recording is None or guest.verdict is None:
            return
        captured = guest.recording.captured
        programs = [one for one in (captured.program, captured.decoding) if one is not None]
        if any(op.name in MODULES for program in programs for op in program.ops):
            return
        linears = _linears(programs)
        try:
            tensors = _tensors(guest.model, programs, linears, loaded.sources)
        except LookupError as error:
            log.info("each start loads %s: %s", loaded.name, error)
            return
        shape, about = guest.shape, {one.name: getattr(loaded, one.name) for one in fields(Described)}
        start = _Start(
            described=Described(**about),
            groups=tuple(map(_group, shape.groups)),
            specs=dict(shape.specs),
            recurrent=shape.recurrent,
            mixers=len(shape.mixers),
            dtype=_word(guest.dtype),
            verdict=guest.verdict,
            no_partial_commit=guest.no_partial_commit,
            programs=encoded(captured),
            tensors=tensors,
            linears=linears,
            experts=packing.experts if packing is not None else 0,
            routers=packing.routers if packing is not None else 0,
            measures=measures.known,
            logits=_first_logits(guest),
        )
        self._files.write(self._digest, start)


def _digest(name: str, path: Path, settings: Settings, began: int) -> str:
    found = surroundings(path, began=began, environment=os.environ)
    return digest([name, repr(settings), hashlib.sha256(compiled_for(os.environ)).hexdigest(), found])


class Restored(Guest):
    """A guest whose steps run recorded, on weights of its own, until its network is needed. From then on it is like the
    guest that `build` returns."""

    def __init__(self, start: _Start, weights: nn.Module, backends: Any, build: Callable[[], Guest]) -> None:
        groups = tuple(
            Group(
                one.name, _LAYOUTS[tuple(one.layout)](**one.layout), one.planes, one.layers, one.rotations, one.no_shift
            )
            for one in start.groups
        )
        shape = Shape(groups, start.specs, {}, start.recurrent, (weights,) * start.mixers)
        captured, execute = decoded(start.programs), native(weights, StepKernel(os.environ))
        network: Any = weights  # until it is built
        super().__init__(network, shape, "flat", backends_for(shape, backends))
        decoding = None if captured.decoding is None else execute(captured.decoding)
        self.recording, self.not_recorded = Recording(captured, execute(captured.program), decoding), None
        self.verdict, self.no_partial_commit = start.verdict, start.no_partial_commit
        self._dtype, self._build, self._building = getattr(torch, start.dtype), build, threading.Lock()
        self._built = False

    @property
    def model(self) -> "PreTrainedModel":
        """Its network, which is built where it was not needed before."""
        with self._building:
            if not self._built:
                self._become(self._build())
                self._built = True
            return self._model

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _become(self, guest: Guest) -> None:
        """Raises `ModelRefused`. The memory of this guest was made for its groups."""
        if (guest.shape.groups, guest.shape.recurrent, guest.mode) != (self.shape.groups, self.shape.recurrent, "flat"):
            raise ModelRefused(f"{type(guest.model).__name__} has another memory than when it was loaded before")
        log.info("the network of %s was built, since something needs it", type(guest.model).__name__)
        kept = {"draws": self.draws, "chosen": self.chosen}
        vars(self).update(vars(guest) | kept)


@torch.inference_mode()
def _first_logits(guest: Guest) -> str:
    """The digest of the logits after a few tokens."""
    memory = guest.memory({group.name: 2 * FIRST for group in guest.shape.groups}, rows=2)
    plan = memory.begin(Batch((Feed(0, Span(0, FIRST)),)))
    logits = guest.forward(memory, plan, range(1, FIRST + 1), [FIRST - 1])
    memory.abandon()
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# -- parts of a file ---------------------------------------------------------------------------------------------------


def _group(one: Group) -> _Group:
    layout: Any = one.layout  # a dataclass of numbers
    return _Group(one.name, asdict(layout), one.planes, one.layers, one.rotations, one.no_shift)


def _word(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def _linears(programs: Iterable[Program]) -> list[str]:
    """Paths of the linear layers that programs call."""
    called = [op.args[1] for program in programs for op in program.ops if op.name == "kvcellar.linear"]
    return list(dict.fromkeys(str(path) for paths in called if isinstance(paths, tuple) for path in paths))


def _read_paths(programs: Sequence[Program]) -> Iterable[str]:
    """Paths of tensors that programs read beside those of layers: constants, and weights of which they look up rows."""
    found = [str(op.args[1]) for program in programs for op in program.ops if op.name == "kvcellar.embedding"]
    found += [one.path for program in programs for one in program.constants.values() if one.path is not None]
    return dict.fromkeys(found)


def _tensors(network: nn.Module, programs: Sequence[Program], linears: Iterable[str], sources: Sources) -> Tensors:
    """What programs read. Raises `LookupError` for what is not as it is stored, and for too many data."""
    found: Tensors = {}
    for path in linears:
        names = [f"{path}.{name}" for name in ("weight", "bias") if f"{path}.{name}" in sources]
        if not names or any(sources[name] is None for name in names):
            raise LookupError(f"{path} is no layer whose weights are as they are stored")
        own = ((name, sources[name]) for name in names)
        found |= {name: _Stored(one.dtype, one.name, kind=one.kind) for name, one in own if one is not None}
    left = MOST_DATA
    for path in _read_paths(programs):
        if (source := sources.get(path)) is not None:
            found[path] = _Stored(source.dtype, source.name)
            continue
        parent, _, name = path.rpartition(".")
        tensor = getattr(network.get_submodule(parent), name).detach().contiguous()
        if (left := left - tensor.nbytes) < 0:
            raise LookupError(f"{path} is not stored")
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        found[path] = _Stored(_word(tensor.dtype), None, tuple(tensor.shape), data)
    return found


def _weights(start: _Start, path: Path, *, packs: bool) -> tuple[nn.Module, Packing | None]:
    """The tensors that programs read, by the paths that they have in the network, and its linear layers. A tensor that
    has two names is read once."""
    root, coded = nn.Module(), {name: one for name, one in start.tensors.items() if one.kind is not None}
    with opened(path) as stored:
        read: dict[tuple[str, str], nn.Parameter] = {}
        files = with_dense(stored) if coded else stored
        for name, one in start.tensors.items():
            if name in coded:
                continue
            key = (name if one.name is None else one.name, one.dtype)
            if key not in read:
                read[key] = nn.Parameter(_tensor(one, files), requires_grad=False)
            _parent(root, name).register_parameter(name.rpartition(".")[2], read[key])
        _add_codes(root, coded, files)
        files.check_unchanged()
    read.clear()
    for name in start.linears:
        if f"{name}.weight" in coded:
            continue
        held, parent = root.get_submodule(name)._parameters, _parent(root, name)
        if (weight := held.get("weight")) is None or weight.dim() != 2:
            raise Damaged(f"{name} is no linear layer")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=held.get("bias") is not None, device="meta")
        layer._parameters.update(held)
        parent.add_module(name.rpartition(".")[2], layer)
    return root, pack(root, environment=os.environ) if packs else None


def _add_codes(root: nn.Module, coded: Tensors, files: WeightsFiles) -> None:
    """The layers of weights with codes. Their biases are there."""
    if not coded:
        return
    stored = {name: files.tensors.get(one.name or "") for name, one in coded.items()}
    if any(one is None or len(one.shape) != 2 for one in stored.values()):
        raise Damaged("the weights files hold no matrix of a layer with codes")
    kernel = QuantisedKernel(os.environ)
    arena = Arena(sum(most_bytes(*one.shape) for one in stored.values() if one is not None))
    for name, one in coded.items():
        assert one.kind is not None
        codes = codes_of(name, files.slices[one.name or ""], one.kind)
        if isinstance(codes, str):
            raise Damaged(f"{name} has no codes: {codes}")
        bias, path = _parent(root, name)._parameters.get("bias"), name.rpartition(".")[0]
        layer = QuantisedLinear(kernel, codes, bias, getattr(torch, one.dtype), arena)
        _parent(root, path).add_module(path.rpartition(".")[2], layer)


def _parent(root: nn.Module, path: str) -> nn.Module:
    """What the last name of a path belongs to, made where it is missing."""
    for name in path.split(".")[:-1]:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def _tensor(one: _Stored, files: WeightsFiles) -> Tensor:
    dtype = getattr(torch, one.dtype)
    if one.name is not None:
        if one.name not in files.tensors:
            raise Damaged(f"the weights files hold no {one.name}")
        return files.slices[one.name][...].to(dtype)
    if math.prod(one.shape) * dtype.itemsize != len(one.data):
        raise Damaged("data of a tensor have another size than its shape")
    return torch.frombuffer(bytearray(one.data), dtype=dtype).view(one.shape) if one.data else torch.empty(one.shape)
