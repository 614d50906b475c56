"""adopt: how a model becomes a guest, after it has shown that it gives the right logits.

Always true:
  * a guest exists only if a mixed batch through our memory (chunked prompts, a fork, decoding) gave the logits of the
    model's own eager forward over the same tokens, on the real weights;
  * a guest whose `no_partial_commit` is None also gave them after parts of steps had been committed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch
from transformers import PreTrainedModel

from kvcellar.contracts import Backend
from kvcellar.errors import KvcellarError, ModelRefused, NotSupported
from kvcellar.models.facts import context_of
from kvcellar.models.guest import Guest, Verdict, backends_for
from kvcellar.models.mixers import install
from kvcellar.models.own_layers import fresh_layers
from kvcellar.models.probe import probe, stored_shape
from kvcellar.models.quiet import quiet
from kvcellar.models.rope import with_rotations
from kvcellar.models.seam import current_door, our_attention, own_attention, register
from kvcellar.models.selftest import TOLERANCE, Trial, partial_verdict_of, trial_of, verdict_of
from kvcellar.models.shape import PROBE_TOKENS, ProbeDoor, describe, differing
from kvcellar.progress import report

LEAST_CONTEXT = 8  # positions without which the self-test has nothing to test
STRANGE = (
    # What a stranger's code may raise under our doors. It means that a way does not work, and is reported.
    KvcellarError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError,
    ImportError, OSError,
)  # fmt: skip


def adopt(model: PreTrainedModel, backends: Sequence[Backend]) -> Guest:
    """Learn the model's shape and test it. Raises `ModelRefused`, with the reason of every way that was tried.

    The guest owns the model: it is changed for good (eval mode, attention, the forward of mixers), also if it is
    refused. To keep a model as it is, adopt a copy that shares its weights (`shared_weights.py`).
    """
    name = type(model).__name__
    if model.dtype not in TOLERANCE:
        raise ModelRefused(f"{name} cannot be served: its weights are {model.dtype}, not a float of 16, 32 or 64 bits")
    if context_of(model) < LEAST_CONTEXT:
        raise ModelRefused(
            f"{name} cannot be served: its context of {context_of(model)} positions is too short to test"
        )
    report("testing the network")
    register()
    refused: dict[str, str] = {}
    ways = {
        "flat": lambda: _flat(model, backends, offsets=True),
        "flat, told that nothing came before": lambda: _flat(model, backends, offsets=False),
        "solo": lambda: _solo(model, backends, refused["flat"]),
    }
    model.eval()
    with quiet():
        try:
            trial = trial_of(model, seed=0)
        except STRANGE as error:
            raise ModelRefused(f"{name} cannot be served: its own forward fails. {_told(error)}") from error
        for mode, way in ways.items():
            found = _attempt(way, trial)
            if isinstance(found, Guest):
                found.shape = with_rotations(found)
                return found
            refused[mode] = found
    raise ModelRefused(_refusal(model, refused))


def _attempt(way: Callable[[], Guest], trial: Trial) -> Guest | str:
    """A guest that passed, or why this way does not work.

    Where only committing a part of a step fails, recurrent layers are asked to keep no parts from then on.
    """
    try:
        guest = way()
        guest.verdict = _twice(verdict_of, guest, trial)
    except STRANGE as error:
        return _told(error)
    if not guest.verdict.passed:
        return str(guest.verdict)
    try:
        partial = _twice(partial_verdict_of, guest, trial)
        guest.no_partial_commit = None if partial.passed else str(partial)
    except STRANGE as error:
        guest.no_partial_commit = _told(error)
    if guest.no_partial_commit is not None and guest.shape.recurrent is None:
        return f"after a commit of a part of a step, {guest.no_partial_commit}"
    return guest


def _twice(test: Callable[[Guest, Trial], Verdict], guest: Guest, trial: Trial) -> Verdict:
    """In a router's tie either side may win once in a while. What is wrong is wrong with other tokens, too."""
    verdict = test(guest, trial)
    if verdict.passed or not isfinite(verdict.difference):
        return verdict
    return test(guest, trial_of(guest.model, seed=1))


def _told(error: Exception) -> str:
    if isinstance(error, NotSupported):
        return error.reason
    return str(error) if isinstance(error, KvcellarError) else f"its code raised {type(error).__name__}: {error}"


def _refusal(model: PreTrainedModel, refused: Mapping[str, str]) -> str:
    """Every reason once, with the first way that it holds for where they differ."""
    ways: dict[str, str] = {}
    for mode, why in refused.items():
        ways.setdefault(why, mode)
    reasons = [f"{mode}: {why}" for why, mode in ways.items()] if len(ways) > 1 else list(ways)
    return f"{type(model).__name__} cannot be served: " + "; ".join(reasons)


def _flat(model: PreTrainedModel, backends: Sequence[Backend], *, offsets: bool) -> Guest:
    context = context_of(model)
    near = ProbeDoor(context)
    if not model._can_set_attn_implementation():
        raise ModelRefused("its attention does not go through transformers' attention interface")
    our_attention(model)
    probe(model, near, range(PROBE_TOKENS))
    if near.reads and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelRefused("its forward takes no positions")
    install(near.mixers, current_door)
    shape = describe(near, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type)
    guest = Guest(model, shape, "flat", backends_for(shape, backends), offsets=offsets)
    positions = [*range(PROBE_TOKENS - 1), context - 1]
    # A model that is told nothing about what came before must not care what it is told.
    past = guest.seen(torch.tensor(positions, device=model.device)) if offsets else context - PROBE_TOKENS
    far = ProbeDoor(context, past)
    probe(model, far, positions)
    if (why := differing(near, far, PROBE_TOKENS - 1)) is not None:
        raise ModelRefused(why)
    return guest


def _solo(model: PreTrainedModel, backends: Sequence[Backend], why: str) -> Guest:
    own_attention(model)
    shape = stored_shape(model, fresh=fresh_layers(model))
    return Guest(model, shape, "solo", backends_for(shape, backends), refused=why)
