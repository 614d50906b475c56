"""open_drafts: what proposes the drafts of an engine, as its setting `draft` names it.

A draft model is loaded and tested like the model that it drafts for, and has to fit it
(`engine/models/heads/draft_fit.py`). It has a memory of its own, for as many sequences. Heads draft from the hidden
states of the model: its own MTP layers, which have a memory, too, or an assistant's directory, which has none.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvcellar.engine.load.allocate import Needs, allocated
from kvcellar.engine.load.capacity import Capacity
from kvcellar.engine.load.in_library import located
from kvcellar.engine.load.open_store import Source
from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.reserve import prove, scratch
from kvcellar.engine.load.settings import Settings, step_tokens_of
from kvcellar.engine.load.step_bytes import measures_of
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.assistant_head import AssistantHead
from kvcellar.engine.models.heads.draft_fit import Check, DraftFit, draft_fit, fit_of, outline_fit, placed
from kvcellar.engine.models.heads.heads import OWN, find_head
from kvcellar.engine.models.heads.mtp_head import MtpHead
from kvcellar.engine.models.input_limits import context_of, vocabulary_of
from kvcellar.engine.models.load import Loaded, is_network, load
from kvcellar.engine.speculate.assistant import AssistantDrafter
from kvcellar.engine.speculate.chain import Key
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import Forward, ModelDrafter
from kvcellar.engine.speculate.drafter import Drafter
from kvcellar.engine.speculate.factory import DrafterFactory, Target
from kvcellar.engine.speculate.head import FLUSH, HISTORY, HeadDrafter
from kvcellar.engine.speculate.ngram import NGramDrafter
from kvcellar.errors import BadRequest, DraftRefused, ModelNotFound, ModelRefused, shown
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import named
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefixes import Shares
from kvcellar.memory.store import Store
from kvcellar.progress import report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEEPEST = 8  # drafts of a draft model, or of a head with one layer, in a round
KINDS = (
    "ngram (repetitions in the text), mtp (the model's own MTP layers), or a smaller model or assistant: the path of "
    "its directory, its name (owner/model) in the local Hugging Face cache, or embedded"
)


class Uses(NamedTuple):
    """What drafters may use: the target's memory, the sequences of the completions that are drafted for, and of a
    memory of their own, if they have one, the capacity, the shares, and `open_store`, which needs its source, too."""

    memory: Memory
    sequence: Callable[[Key], int | None]
    capacity: Capacity | None
    shares: Shares
    open_store: Callable[..., Store | None]


Made = tuple[Drafter, DraftMemory | None]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts. `deepest` is the most drafts of a completion in a round, `needs` what its memory takes, if it
    has one. `make` makes the drafter, and its memory; it raises `CapacityTooSmall`. `guest` runs a draft model."""

    fit: DraftFit
    deepest: int
    make: Callable[[Uses], Made]
    needs: Needs | None = None
    guest: Guest | None = None


def open_drafts(
    draft: str | Path | DrafterFactory, loaded: Loaded, guest: Guest, settings: Settings, context: int
) -> Drafts:
    """What the settings name, loaded and tested. Raises `DraftRefused`, and what `load` and `build_guest` raise for a
    draft model."""
    checks: dict[str, Check] = {"verification": lambda: _verifies(guest)}
    if draft == "ngram":
        return _guesses(NGramDrafter(), loaded, settings, checks)
    if isinstance(draft, str | Path):
        place = draft if draft == "mtp" else located(draft)
        with _naming(draft):
            head = _head(place, loaded, guest, settings, checks)
            return head if head is not None else _model(place, loaded, guest, settings, checks)
    if is_network(draft):
        return _model(draft, loaded, guest, settings, checks)
    return _guesses(_made(draft, loaded, guest, context), loaded, settings, checks)


@contextmanager
def _naming(draft: str | Path) -> Iterator[None]:
    """Errors of finding and loading a draft name it, and what else `draft` can be."""
    try:
        yield
    except DraftRefused:
        raise  # names it
    except ModelNotFound as error:
        why = str(error).removesuffix(".")
        raise ModelNotFound(f"draft {shown(str(draft))} was not found: {why}. draft is {KINDS}") from error
    except ModelRefused as error:
        raise ModelRefused(f"draft {shown(str(draft))} cannot be loaded: {error}") from error


def _guesses(drafter: Drafter, loaded: Loaded, settings: Settings, checks: Mapping[str, Check]) -> Drafts:
    """A drafter without memory of the engine."""
    fit = fit_of(loaded.name, drafter.name, checks)
    fit.require()
    return Drafts(fit, min(drafter.deepest, settings.draft_depth or drafter.deepest), lambda _: (drafter, None))


def _verifies(guest: Guest) -> str:
    if guest.no_partial_commit is not None:
        raise ModelRefused(
            f"the target cannot keep a part of a step, so no draft can be rejected: {guest.no_partial_commit}. Leave "
            f"draft out"
        )
    return "the target can keep any part of a step"


def _made(draft: DrafterFactory, loaded: Loaded, guest: Guest, context: int) -> Drafter:
    """What the caller's factory makes. Raises `BadRequest` for something else than a drafter."""
    device, dtype = str(guest.device), str(guest.dtype).removeprefix("torch.")
    made = draft(Target(loaded.name, vocabulary_of(loaded.model), context, loaded.end_ids, device, dtype))
    if not isinstance(made, Drafter) or not isinstance(made.deepest, int) or made.deepest < 1:
        raise BadRequest(f"draft has to return a Drafter with a `deepest` of at least 1, not {shown(made)}", "draft")
    return made


def _model(
    draft: "str | Path | PreTrainedModel",
    target: Loaded,
    guest: Guest,
    settings: Settings,
    checks: Mapping[str, Check],
) -> Drafts:
    """A model of its own."""
    began = time.time_ns()
    report("loading the draft model")
    loaded, fit = _loaded(draft, target, guest, settings, checks)
    if settings.pack and guest.device.type == "cpu":
        pack(loaded.model)
    own = build_guest(loaded.model, named(None))
    record_steps(own, settings)
    limits = {"context": context_of(loaded.model), "step_tokens": step_tokens_of(settings, own.device.type)}
    most = {**limits, "max_sequences": settings.max_sequences}
    measures = measures_of(own, loaded.path, began=began, limits=most, environment=os.environ)
    deepest = settings.draft_depth or DEEPEST
    source = Source(loaded.directories, "draft model", loaded.multiplied)
    forward = _readable(own.forward, vocabulary_of(loaded.model), vocabulary_of(target.model))

    def make(uses: Uses) -> Made:
        measures.keep()
        memory = _allocated(own.memory, uses, limits["context"], own.device)
        if own.device.type == "cuda":
            assert uses.capacity is not None
            prove(own, memory, max_sequences=uses.capacity.states.sequences, **limits)
        in_parts = own.no_partial_commit is None
        cache = DraftMemory(
            memory, in_parts=in_parts, shares=uses.shares, open_store=partial(uses.open_store, source=source)
        )
        batched = own.mode == "flat"
        return ModelDrafter(loaded.name, forward, cache, deepest=deepest, batched=batched, **limits), cache

    return Drafts(fit, deepest, make, Needs.of(own, limits["context"], scratch(own, measures=measures, **limits)), own)


def _allocated(make: Callable[..., Memory], uses: Uses, context: int, device: torch.device) -> Memory:
    assert uses.capacity is not None, "it has a memory"
    return allocated(make, uses.capacity, context, device)


def _loaded(
    draft: "str | Path | PreTrainedModel",
    target: Loaded,
    guest: Guest,
    settings: Settings,
    checks: Mapping[str, Check],
) -> tuple[Loaded, DraftFit]:
    """A draft model that fits. One that does not is refused before its weights are read."""
    before: list[DraftFit] = []

    def fits(outline: Loaded) -> bool:
        before.append(outline_fit(target, outline, checks))
        before[0].require()
        return True

    weights = "dense" if settings.weights == "dense" else "auto"  # a draft is not quantised at load
    loaded = load(draft, dtype=settings.dtype, device=str(guest.device), weights=weights, check=fits)
    fit = placed(before[0], target, loaded) if before else draft_fit(target, loaded, checks)
    fit.require()
    return loaded, fit


def _readable(forward: Forward, own: int, vocabulary: int) -> Forward:
    """`forward` of a model with `own` tokens, for texts of a `vocabulary`. What it has more of is padding, or added
    tokens that the draft model lacks: it reads its last token in place of them."""
    if own >= vocabulary:
        return forward
    return lambda memory, plan, ids, rows: forward(memory, plan, [min(token, own - 1) for token in ids], rows)


# -- heads -------------------------------------------------------------------------------------------------------------


def _head(
    draft: str | Path, loaded: Loaded, guest: Guest, settings: Settings, checks: Mapping[str, Check]
) -> Drafts | None:
    """The head that `draft` names, which passes `checks`, too; None: it names an ordinary model. Raises `DraftRefused`
    and `ModelNotFound`."""
    found: list[MtpHead | AssistantHead | None] = []

    def find() -> str:
        report("looking for a head")
        found.append(find_head(draft, loaded, guest, named(None)))
        return "a model of its own" if found[0] is None else _described(found[0])

    fit = fit_of(loaded.name, str(draft) if draft == OWN else Path(draft).name, {**checks, "head": find})
    fit.require()
    if (head := found[0]) is None:
        return None
    deepest = settings.draft_depth or DEEPEST
    if isinstance(head, MtpHead):
        return _mtp(head, fit, deepest, loaded, guest, settings)
    how = {"context": context_of(guest.model), "deepest": deepest}
    return Drafts(
        fit, deepest, lambda uses: (AssistantDrafter(fit.draft, head, uses.memory, uses.sequence, **how), None)
    )


def _described(head: MtpHead | AssistantHead) -> str:
    if isinstance(head, AssistantHead):
        count = sum(parameter.numel() for parameter in head.network.parameters())
        return f"an assistant with {count:,} parameters, which reads the target's keys and values as by itself"
    count = sum(parameter.numel() for parameter in head.network.layers.parameters())
    return f"MTP layers of its own: {head.layers}, with {count:,} parameters, which compute what they do by themselves"


def _mtp(head: MtpHead, fit: DraftFit, deepest: int, loaded: Loaded, guest: Guest, settings: Settings) -> Drafts:
    """The model's own MTP layers. A step of theirs runs between two of the model, and takes no more than one of these:
    they are fewer, of the same sizes, and have the same output head. Hidden states that wait are added."""
    if settings.pack and guest.device.type == "cpu":
        pack(head.network.layers)
    if head.layers > 1:
        deepest = min(deepest, head.layers)
    context, size = context_of(guest.model), head.dtype.itemsize
    how = {"context": context, "deepest": deepest, "step_tokens": step_tokens_of(settings, guest.device.type)}
    # They read what the model computes from its K/V.
    source = Source(loaded.directories, f"MTP layers, kv_dtype {settings.kv_dtype}", loaded.multiplied)

    def make(uses: Uses) -> Made:
        memory = _allocated(head.memory, uses, context, head.device)
        cache = DraftMemory(
            memory, ahead=head.layers, shares=uses.shares, open_store=partial(uses.open_store, source=source)
        )
        return HeadDrafter(fit.draft, head, cache, history=HISTORY, **how), cache

    def waiting(longest: int, tokens: int, sequences: int) -> int:
        return min(tokens, sequences * min(FLUSH, longest)) * head.hidden_size * size

    needs = Needs(head.shape.groups, size, head.device.type, 0, context, waiting)
    return Drafts(fit, deepest, make, needs)
