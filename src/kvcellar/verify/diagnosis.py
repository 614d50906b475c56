"""diagnosis: everything that an engine determines about a model before it starts, as one record, and notes on what of
this machine is not used, or was not tested.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcellar.engine.card import default_sampling
from kvcellar.engine.load.build import Built, build, card_of
from kvcellar.engine.load.capacity import sized
from kvcellar.engine.load.in_library import located
from kvcellar.engine.load.machine import threads_of
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.generation_defaults import SAMPLING
from kvcellar.engine.models.guest import TEXT_ONLY, Guest
from kvcellar.engine.models.input_limits import context_reason
from kvcellar.engine.models.quantize.kinds import DENSE, QUANTISED
from kvcellar.engine.models.quantize.measuring import measure_harm
from kvcellar.engine.models.weights.packing import Packed
from kvcellar.engine.models.weights.placement import ONE_DEVICE, why_not_on
from kvcellar.engine.recording.graphs import Graphs
from kvcellar.errors import BadRequest, DraftRefused
from kvcellar.frontend.reply_formats import Replies
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.kernels.compiled import described
from kvcellar.kernels.packed import Packing
from kvcellar.memory.attention.choose import backends, named
from kvcellar.progress import report
from kvcellar.sampling_params import SamplingParams
from kvcellar.verify.kv_quality import KvQuality, is_small
from kvcellar.verify.kv_quality import kv_quality as measure

TESTED = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Machine:
    """What Python and torch report."""

    processor: str
    gpus: int  # CUDA devices
    mps: bool

    @classmethod
    def here(cls) -> "Machine":
        return cls(platform.machine(), torch.cuda.device_count(), torch.backends.mps.is_available())


def machine_notes(device: str, machine: Machine) -> Iterator[str]:
    """`device`: the one that a model is on."""
    if device == "cpu" and machine.processor not in TESTED:
        tested = "were tested in emulation only" if machine.processor in ARM else "were not tested on such a machine"
        yield f"processor {machine.processor}: kernels are compiled from their portable source, and {tested}"
    if machine.mps:
        yield f"mps is not used: {why_not_on('mps')}"
    if device != "cpu" and machine.gpus > 1:
        yield f"{device} is used of {machine.gpus} CUDA devices: {ONE_DEVICE}"


@dataclass(frozen=True, slots=True)
class GroupDiagnosis:
    """One group. `bytes_per_cell` is the sum over its layers. `verdicts` has, for every backend, the reason why it
    refused, or None if it supports the group. `backend` is the chosen one, or None if the model runs solo."""

    name: str
    layers: int
    bytes_per_cell: int
    cells: int
    backend: str | None
    verdicts: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class RecurrentDiagnosis:
    """The recurrent layers. They store one state row per sequence, whatever its length."""

    layers: int
    bytes_per_row: int
    rows: int
    bytes: int
    checkpoints: int  # rows reserved for checkpoints; free rows are used for more


@dataclass(frozen=True, slots=True)
class DraftDiagnosis:
    """Whether what `draft` names fits the model. `found` and `refused` have what each check found, or why it fails: an
    engine is refused then. Bytes and tokens are those of the memory that a draft model has beside the model's."""

    name: str
    found: Mapping[str, str]
    refused: Mapping[str, str]
    deepest: int = 0
    cache_bytes: int = 0
    tokens: int = 0

    @property
    def fits(self) -> bool:
        return not self.refused


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The properties of a model and how it is served. `difference` is that of the self-test's logits, relative to the
    largest logit. In half precision it is taken from the middle rows, because rounding can change a router's choice in
    some rows. `sequences` is the number of completions that can run at once.
    """

    name: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    context: int
    vocab_size: int
    layers: int
    mode: str
    why_not_flat: str | None
    difference: float
    bound: float
    groups: tuple[GroupDiagnosis, ...]
    recurrent: RecurrentDiagnosis | None
    sequences: int
    bytes_per_token: int
    tokens: int
    cache_bytes: int
    scratch_bytes: int
    staging_bytes: int
    limit_bytes: int
    because: str
    # how requests without sampling parameters choose tokens: the temperature, and each filter in use
    sampling: Mapping[str, float]
    sampling_because: str
    notes: tuple[str, ...]
    kv_quality: tuple[KvQuality, ...] = ()  # of each way to store K/V in fewer bits
    draft: DraftDiagnosis | None = None
    # what the quantised weights of `weights` change, compared with dense ones
    weights_harm: Mapping[str, Any] | None = None


def diagnose(model: Any, settings: Settings, *, kv_quality: bool | None = None, text: str | None = None) -> Diagnosis:
    """Load and test a model as an engine does. Raises the same errors as `build`, but where only drafts do not fit.

    `kv_quality`: whether to measure every way of storing K/V; None: only for small models, where it takes seconds.
    What weights that are quantised at load change is measured on `text`, or on samples of the model; with a text also
    what products of weights that are stored quantised do.
    """
    harm = _weights_harm(model, settings, text) if settings.weights in QUANTISED or text is not None else None
    with ExitStack() as opened:
        try:
            built, refused = build(model, settings, opened, restarts=False), None
        except DraftRefused as error:
            alone = replace(settings, draft=None, draft_depth=None, draft_bytes=None)
            refused = DraftDiagnosis(error.draft, error.found, error.refused)
            built = build(model, alone, opened, restarts=False)
        found = _diagnosed(built, settings, is_small(built.loaded.parameters) if kv_quality is None else kv_quality)
    return replace(found, draft=refused or _draft(built), weights_harm=harm)


def _weights_harm(model: Any, settings: Settings, text: str | None) -> Mapping[str, Any]:
    """Measured before the engine is built, so that at most one copy of the weights is in memory. Raises `BadRequest` if
    the settings ask for dense weights, which change nothing."""
    if settings.weights == DENSE:
        raise BadRequest(f"text needs weights that are quantised, and weights is {DENSE}", "text")
    torch.set_num_threads(threads_of(settings.threads, torch.get_num_threads()).count)
    place = located(model)
    return measure_harm(place, place, weights=settings.weights, text=text, dtype=settings.dtype, device=settings.device)


def _draft(built: Built) -> DraftDiagnosis | None:
    if (drafts := built.drafts) is None:
        return None
    fit, own = drafts.fit, built.draft_capacity
    size, tokens = (own.bytes, own.tokens) if own is not None else (0, 0)
    return DraftDiagnosis(fit.draft, fit.found, fit.refused, drafts.deepest, size, tokens)


def _diagnosed(built: Built, settings: Settings, kv_quality: bool) -> Diagnosis:
    guest = built.guest
    groups = tuple(_groups(built))
    if kv_quality:
        report("measuring quantised K/V")
    assert guest.verdict is not None, "a guest is only handed out with a verdict"
    return Diagnosis(
        name=built.loaded.name,
        architecture=type(guest.model).__name__,
        parameters=built.loaded.parameters,
        dtype=str(guest.dtype).removeprefix("torch."),
        device=str(guest.device),
        context=built.intake.context,
        vocab_size=built.intake.vocab_size,
        layers=sum(len(group.layers) for group in guest.shape.groups),
        mode=guest.mode,
        why_not_flat=guest.refused,
        difference=guest.verdict.difference,
        bound=guest.verdict.bound,
        groups=groups,
        recurrent=_recurrent(built),
        sequences=built.capacity.states.sequences,
        bytes_per_token=sum(group.bytes_per_cell for group in groups),
        tokens=built.capacity.tokens,
        cache_bytes=built.capacity.bytes,
        scratch_bytes=built.capacity.scratch,
        staging_bytes=built.capacity.staging,
        limit_bytes=built.capacity.budget,
        because=built.capacity.because,
        sampling=_sampling(built),
        sampling_because=built.loaded.defaults_because,
        notes=tuple(_notes(built)),
        kv_quality=tuple(measure(guest, named(settings.attention))) if kv_quality else (),
    )


def _groups(built: Built) -> Iterator[GroupDiagnosis]:
    guest, sizes = built.guest, built.guest.shape.bytes_per_cell(built.guest.dtype.itemsize)
    every = backends()  # once: each call looks for a compiler
    for group in guest.shape.groups:
        yield GroupDiagnosis(
            group.name,
            len(group.layers),
            sizes[group.name],
            built.capacity.cells[group.name],
            guest.chosen[group.name].backend.name if guest.mode == "flat" else None,
            {backend.name: backend.refuse(guest.shape.specs[group.name]) for backend in every},
        )


def _sampling(built: Built) -> Mapping[str, float]:
    names, plain = dict.fromkeys(("temperature", *SAMPLING)), SamplingParams()
    used = default_sampling(built.loaded.defaults, vocab_size=built.intake.vocab_size, model=built.loaded.name)
    every = {name: getattr(used, name) for name in names}
    return {name: value for name, value in every.items() if name == "temperature" or value != getattr(plain, name)}


def _recurrent(built: Built) -> RecurrentDiagnosis | None:
    recurrent, states = built.guest.shape.recurrent, built.capacity.states
    if recurrent is None:
        return None
    return RecurrentDiagnosis(len(recurrent.layers), recurrent.bytes, states.rows, states.bytes, states.checkpoints)


def _limits(guest: Guest) -> Iterator[str]:
    """Restrictions that are properties of the model."""
    if (reason := context_reason(guest.model)) is not None:
        yield f"context: {reason}"
    stuck = [group.no_shift for group in guest.shape.groups if group.no_shift is not None]
    if guest.shape.recurrent is not None:
        stuck.append("tokens cannot be removed from the state of its recurrent layers")
    yield f"context shift: by recomputing ({stuck[0]})" if stuck else "context shift: in place"
    if guest.no_partial_commit is not None:
        yield f"committing a part of a step: off ({guest.no_partial_commit})"


def _latents(guest: Guest) -> Iterator[str]:
    """How layers attend that store less than keys and values (MLA)."""
    count = sum(binding.latent is not None for binding in guest.shape.bindings.values())
    if count:
        yield f"latents: attended to as they are stored, in {count} layers"
    elif guest.expands is not None:
        yield f"latents: expanded to keys and values in every step ({guest.expands})"


def _recording(guest: Guest) -> str:
    if (recording := guest.recording) is None:
        return f"steps: by the model's modules ({guest.not_recorded})"
    opaque = recording.captured.opaque
    kept = "".join(f"; {kind} runs as it is ({why})" for kind, why in opaque.items())
    graphs = "; CUDA graphs in decode, the model's modules in prefill" if recording.executor.name == Graphs.name else ""
    return f"steps: recorded, {len(recording.captured.program.ops)} operators{graphs}{kept}"


def _notes(built: Built) -> list[str]:
    notes = [f"CPU threads: {built.threads.count} ({built.threads.because})"]
    if built.guest.device.type == "cpu":
        notes.append(f"kernels: {described(os.environ)}")
    notes += machine_notes(str(built.guest.device), Machine.here())
    notes += built.loaded.notes
    decoded = f", and decoded to {built.guest.dtype} when they are loaded" if not built.loaded.served else ""
    notes += [f"{count} weights are stored quantised ({form}){decoded}" for form, count in built.loaded.stored.items()]
    card = card_of(built)
    if not card.model.has_text:
        notes.append(f"no text: {built.loaded.without_text}; prompts are token ids")
    elif not card.model.has_chat:
        notes.append("no chat template: it completes text, and messages are refused")
    else:
        notes.append(Replies(TextCodec(card.text)).described)
    if built.guest.vision is not None:
        notes.append("images: yes, its logits with them are those of its own forward")
    elif built.guest.not_seeing != TEXT_ONLY:
        notes.append(f"images: no, {built.guest.not_seeing}")
    notes += _limits(built.guest)
    notes += _latents(built.guest)
    notes.append(_recording(built.guest))
    if built.capacity.states.sequences < built.settings.max_sequences:
        notes.append(
            f"{built.capacity.states.sequences} completions at once, not {built.settings.max_sequences}: there are no "
            f"rows of recurrent state for more; raise cache_bytes"
        )
    if (served := built.loaded.served) is not None:
        counts = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(served.layers.items()))
        notes.append(f"linear layers that multiply integers: {counts}, {sized(served.bytes)}")
        notes += [f"{name} is dense: {why}" for name, why in list(served.dense.items())[:5]]
    packing = built.packing
    if packing is not None:
        notes += _packed(packing.linears, built.loaded.path is None)
        notes += [f"{name} stays plain: {why}" for name, why in list(packing.linears.kept.items())[:5]]
        notes += _experts(packing)
    return notes


def _experts(packing: Packed) -> Iterator[str]:
    if isinstance(packing.experts, str):
        yield f"experts are computed by their own code: {packing.experts}"
    elif packing.experts:
        yield f"experts of our own layers: {sized(packing.experts)}"


def _packed(packing: Packing, given: bool) -> list[str]:
    """`given`: the network was given as an object, which keeps its own weights."""
    how = "packed for oneDNN" if packing.own < packing.layers else "of our own"
    if 0 < packing.own < packing.layers:
        how += f", {packing.own} of them of our own"
    if packing.not_own is not None:
        how += f" ({packing.not_own})"
    if given:
        how += ", in copies beside the weights of the given network"
    if packing.arena is not None and (huge := packing.arena.huge_bytes()) is not None:
        how += f", {sized(huge)} in huge pages"
    return [f"{packing.layers} linear layers {how}: {sized(packing.bytes)}"]
