"""restart: starts a model that was loaded before from what its load has found, without transformers.

A load builds the network, compares it with its own forward, records its steps and measures them. What that finds is
kept in the user's cache directory: limits, text, the shape of memory, programs, of which stored tensors the weights are
made that programs read (`kept_weights.py`), and the bytes of steps. The next engine of the same model reads these
weights, and runs the programs. Its network is built when something needs it, by a load like any other: an adapter, say,
or a step that no program runs.

Always true:
  * a file is named by the digest of everything that a load depends on (`_digest`), settings included;
  * what is damaged or cannot be used is not used: the model is loaded;
  * a guest is used only if a first step of it has the logits that this step had after the load, bit for bit;
  * a network that is built later has the shape that was kept, or is refused.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from msgspec import Struct
from tokenizers import Tokenizer
from torch import nn

from kvcellar.engine.load.kept_weights import Weights, find_weights, made_weights, word
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.load.step_bytes import Measures
from kvcellar.engine.models.described import Described
from kvcellar.engine.models.guest import MODEL_ERRORS, ComputedKeys, Guest, Verdict, backends_for
from kvcellar.engine.models.shape import Shape
from kvcellar.engine.models.weights.find import locate
from kvcellar.engine.models.weights.packing import Packed
from kvcellar.engine.recording.facts import Unsettled, changed, digest, module_sources, surroundings
from kvcellar.engine.recording.kept import Damaged, Kept, place_of
from kvcellar.engine.recording.native import native
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recording import Recording
from kvcellar.engine.recording.saved import decoded, encoded
from kvcellar.errors import ModelRefused
from kvcellar.kernels.compiled import NotCompiled, compiled_for
from kvcellar.library.names import EMBEDDED
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

KIND = b"kvcellar start 3\n"
TOKENIZER = "tokenizer.json"
FIRST = 5  # tokens of the first step
_LAYOUTS: Mapping[tuple[str, ...], Any] = {(): Causal, ("window", "memory"): Sliding, ("size",): Chunked}  # by fields


class _Group(Struct):
    name: str
    layout: dict[str, int]
    planes: tuple[Plane, ...]
    layers: tuple[int, ...]
    rotations: Mapping[int, Mapping[str, Rotation]]
    no_shift: str | None


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
    weights: Weights
    computed_keys: ComputedKeys
    experts: int | str  # see `Packed`
    routers: int | str
    measures: dict[str, int]
    sources: dict[str, str]  # of the network's modules, which are not imported
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
        self._found = locate(EMBEDDED if model is None else model)
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
        if other := changed(start.sources):
            log.info("%s is loaded, and not started as before: %s is not as it was", described.name, other[0])
            return None
        try:
            weights, packing = made_weights(start.weights, self._found[1], packs=self._settings.pack)
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
        if self._files is None or guest.verdict is None:
            return
        if guest.recording is None:
            log.info("each start loads %s: its steps are not recorded: %s", loaded.name, guest.not_recorded)
            return
        captured = guest.recording.captured
        try:
            weights, sources = find_weights(guest.model, captured, loaded.sources), module_sources(guest.model)
        except (LookupError, Unsettled) as error:
            log.info("each start loads %s: %s", loaded.name, error)
            return
        shape, about = guest.shape, {one.name: getattr(loaded, one.name) for one in fields(Described)}
        start = _Start(
            described=Described(**about),
            groups=tuple(map(_group, shape.groups)),
            specs=dict(shape.specs),
            recurrent=shape.recurrent,
            mixers=len(shape.mixers),
            dtype=word(guest.dtype),
            verdict=guest.verdict,
            no_partial_commit=guest.no_partial_commit,
            programs=encoded(captured),
            weights=weights,
            computed_keys=guest.computed_keys,
            experts=packing.experts if packing is not None else 0,
            routers=packing.routers if packing is not None else 0,
            measures=measures.known,
            sources=sources,
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
        self._computed_keys: ComputedKeys = start.computed_keys

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

    @property
    def computed_keys(self) -> ComputedKeys:
        return self._computed_keys

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
    with memory.stepping(Batch((Feed(0, Span(0, FIRST)),))) as plan:
        logits = guest.forward(memory, plan, range(1, FIRST + 1), [FIRST - 1])
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# -- parts of a file ---------------------------------------------------------------------------------------------------


def _group(one: Group) -> _Group:
    layout: Any = one.layout  # a dataclass of numbers
    return _Group(one.name, asdict(layout), one.planes, one.layers, one.rotations, one.no_shift)
