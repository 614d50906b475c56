"""open_drafts: what proposes the drafts of an engine, as its setting `draft` names it.

A draft model is loaded and tested like the model that it drafts for, and has to fit it
(`engine/models/heads/draft_fit.py`). It has a memory of its own, for as many sequences.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvcellar.engine.load.allocate import Needs, allocated
from kvcellar.engine.load.capacity import Capacity
from kvcellar.engine.load.in_library import located
from kvcellar.engine.load.open_heads import Reads, open_head
from kvcellar.engine.load.open_store import Source
from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.reserve import prove, scratch
from kvcellar.engine.load.settings import Settings, step_tokens_of
from kvcellar.engine.load.step_bytes import Measures, measures_of
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.draft_fit import Check, DraftFit, draft_fit, fit_of, outline_fit, placed
from kvcellar.engine.models.input_limits import context_of, vocabulary_of
from kvcellar.engine.models.load import Loaded, is_network, load
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import Forward, ModelDrafter
from kvcellar.engine.speculate.drafter import Drafter
from kvcellar.engine.speculate.factory import DrafterFactory, Target
from kvcellar.engine.speculate.ngram import NGramDrafter
from kvcellar.errors import BadRequest, DraftRefused, ModelNotFound, ModelRefused, shown
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import named
from kvcellar.memory.prefixes import Shares
from kvcellar.memory.store import OpenStore
from kvcellar.progress import report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEEPEST = 8  # drafts of a draft model in a round
KINDS = (
    "ngram (repetitions in the text), mtp (the model's own MTP layers), or a smaller model or assistant: the path of "
    "its directory, its name (owner/model) in the local Hugging Face cache, or embedded"
)


class Drafts(Protocol):
    """What drafts. `deepest` is the most drafts of a completion in a round."""

    @property
    def name(self) -> str: ...
    @property
    def fit(self) -> DraftFit: ...
    @property
    def deepest(self) -> int: ...
    @property
    def source(self) -> Source:
        """What decides the bytes of the memory that it has."""
        ...

    def needs(self) -> Needs | None:
        """Of the memory that it has; None: none."""
        ...

    def made(
        self, capacity: Capacity | None, shares: Shares, reads: Reads, open_store: OpenStore
    ) -> tuple[Drafter, DraftMemory | None]:
        """The drafter, and its memory, of this capacity, if it needs one; others may read the target's. Raises
        `CapacityTooSmall`."""
        ...


@dataclass(frozen=True, slots=True)
class Guesses:
    """A drafter without memory of the engine."""

    drafter: Drafter
    fit: DraftFit
    deepest: int

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def source(self) -> Source:
        return Source(())

    def needs(self) -> None:
        return None

    def made(
        self, capacity: Capacity | None, shares: Shares, reads: Reads, open_store: OpenStore
    ) -> tuple[Drafter, None]:
        return self.drafter, None


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model of its own, from the directory `path`, if it was not given as an object. `vocabulary` is how many tokens
    the target has."""

    name: str
    path: Path | None
    fit: DraftFit
    deepest: int
    guest: Guest
    measures: Measures
    step_tokens: int
    vocabulary: int
    multiplied: str  # how its weights are, if not as dense ones

    @property
    def context(self) -> int:
        return context_of(self.guest.model)

    @property
    def source(self) -> Source:
        return Source(() if self.path is None else (self.path,), "draft model", self.multiplied)

    def needs(self) -> Needs:
        limits = {"context": self.context, "step_tokens": self.step_tokens}
        return Needs.of(self.guest, self.context, scratch(self.guest, measures=self.measures, **limits))

    def made(
        self, capacity: Capacity | None, shares: Shares, reads: Reads, open_store: OpenStore
    ) -> tuple[Drafter, DraftMemory]:
        assert capacity is not None, "a draft model has a memory"
        self.measures.keep()
        memory = allocated(self.guest.memory, capacity, self.context, self.guest.device)
        if self.guest.device.type == "cuda":
            limits = {"context": self.context, "step_tokens": self.step_tokens}
            prove(self.guest, memory, max_sequences=capacity.states.sequences, **limits)
        in_parts = self.guest.no_partial_commit is None
        cache = DraftMemory(memory, in_parts=in_parts, shares=shares, open_store=open_store)
        drafter = ModelDrafter(
            self.name,
            _readable(self.guest.forward, vocabulary_of(self.guest.model), self.vocabulary),
            cache,
            context=self.context,
            deepest=self.deepest,
            step_tokens=self.step_tokens,
            batched=self.guest.mode == "flat",
        )
        return drafter, cache


def open_drafts(loaded: Loaded, guest: Guest, settings: Settings, context: int) -> Drafts | None:
    """What the settings name, loaded and tested; None: nothing. Raises `DraftRefused`, and what `load` and
    `build_guest` raise for a draft model."""
    draft = settings.draft
    if draft is None:
        return None
    checks: dict[str, Check] = {"verification": lambda: _verifies(guest)}
    if draft == "ngram":
        return _guesses(NGramDrafter(), loaded, settings, checks)
    if isinstance(draft, str | Path):
        place = draft if draft == "mtp" else located(draft)
        with _naming(draft):
            head = open_head(place, loaded, guest, settings, checks)
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


def _guesses(drafter: Drafter, loaded: Loaded, settings: Settings, checks: Mapping[str, Check]) -> Guesses:
    fit = fit_of(loaded.name, drafter.name, checks)
    fit.require()
    return Guesses(drafter, fit, min(drafter.deepest, settings.draft_depth or drafter.deepest))


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
) -> DraftModel:
    began = time.time_ns()
    report("loading the draft model")
    loaded, fit = _loaded(draft, target, guest, settings, checks)
    if settings.pack and guest.device.type == "cpu":
        pack(loaded.model)
    own = build_guest(loaded.model, named(None))
    record_steps(own, settings)
    steps = step_tokens_of(settings, own.device.type)
    limits = {"context": context_of(loaded.model), "step_tokens": steps, "max_sequences": settings.max_sequences}
    measures = measures_of(own, loaded.path, began=began, limits=limits, environment=os.environ)
    ids = vocabulary_of(target.model)
    deepest = settings.draft_depth or DEEPEST
    return DraftModel(loaded.name, loaded.path, fit, deepest, own, measures, steps, ids, loaded.multiplied)


def _loaded(
    draft: "str | Path | PreTrainedModel",
    target: Loaded,
    guest: Guest,
    settings: Settings,
    checks: Mapping[str, Check],
) -> tuple[Loaded, DraftFit]:
    """A draft model that fits. One that does not is refused before its weights are read."""
    before: list[DraftFit] = []

    def fits(outline: Loaded) -> None:
        before.append(outline_fit(target, outline, checks))
        before[0].require()

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
