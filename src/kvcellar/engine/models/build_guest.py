"""build_guest: choose how a model is run (flat, else solo), confirmed by the self-test on its real weights.

Always true:
  * a guest exists only if a mixed batch through our memory (chunked prompts, a fork, decoding) gave the logits of the
    model's own eager forward over the same tokens, on the real weights;
  * a guest whose `no_partial_commit` is None also gave them after parts of steps had been committed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import torch
from transformers import PreTrainedModel

from kvcellar.engine.models.crossing import with_no_image
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest, Verdict, backends_for
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.input_limits import context_of
from kvcellar.engine.models.latent_attention import with_latents, without_latents
from kvcellar.engine.models.mixers import scan_kernel, wrap_mixers
from kvcellar.engine.models.registered import fresh_layers, layers_with_masks, our_attention, own_attention, register
from kvcellar.engine.models.rope import with_rotations
from kvcellar.engine.models.seam import current_door
from kvcellar.engine.models.selftest import TOLERANCE, Reference, partial_commit_test, reference_of, whole_step_test
from kvcellar.engine.models.shape import PROBE_TOKENS, ProbeDoor, differing, probe, shape_of, stored_shape
from kvcellar.engine.models.text_decoder import let_decoder_read
from kvcellar.errors import KvcellarError, ModelRefused, NotSupported
from kvcellar.memory.kv.history import Backend
from kvcellar.progress import report

MIN_CONTEXT = 8  # positions that the self-test needs


def build_guest(model: PreTrainedModel, backends: Sequence[Backend]) -> Guest:
    """Find the model's shape and test it. Raises `ModelRefused`, with the reason of every mode that was tried.

    The guest owns the model, which is changed for good (eval mode, attention, the forward of mixers), also where it is
    refused. To keep a model unchanged, pass a copy that shares its weights (`engine/models/load.py`).
    """
    _check_testable(model)
    report("testing the network")
    register()
    refused: dict[str, str] = {}
    modes = {
        "flat": lambda: _flat(model, backends, offsets=True),
        "flat, with a past length of 0": lambda: _flat(model, backends, offsets=False),
        "solo": lambda: _solo(model, backends, refused["flat"]),
    }
    model.eval()
    with silence_transformers():
        try:
            with_no_image(model)
            reference = _reference(model)
        except MODEL_ERRORS as error:
            said = str(error) if isinstance(error, ModelRefused) else f"its own forward fails. {reason_of(error)}"
            raise _refusal(model, _not_causal(model) or said) from error
        for mode, build in modes.items():
            found = _attempt(build, reference)
            if isinstance(found, Guest):
                _attend_latents(found, reference)
                found.shape = with_rotations(found)
                return found
            refused[mode] = found
    raise _refusal(model, _not_causal(model) or _joined(refused))


def _reference(model: PreTrainedModel) -> Reference:
    """Of its own forward; of its decoder's, where that needs an image with every text."""
    try:
        return reference_of(model, seed=0)
    except MODEL_ERRORS:
        if not let_decoder_read(model):
            raise
        return reference_of(model, seed=0)


def _check_testable(model: PreTrainedModel) -> None:
    if model.dtype not in TOLERANCE:
        raise _refusal(model, f"its weights are {model.dtype}, not a float of 16, 32 or 64 bits")
    if (context := context_of(model)) < MIN_CONTEXT:
        raise _refusal(model, f"its context of {context} positions is too short to test")
    if own := layers_with_masks(model):
        raise _refusal(
            model,
            f"its own cache layers ({own[0]}) decide what tokens see, so a reply drawn with them is not what its "
            f"forward gives without a cache",
        )


def _not_causal(model: PreTrainedModel) -> str:
    """Why it cannot read the ids of a text alone, if its class says that; else ""."""
    if model.config.is_encoder_decoder:
        return "an encoder reads its prompts, all tokens at once, so that none can be kept for another prompt"
    given = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    more = " and ".join(name for name in needed if name != "input_ids")
    return f"its forward needs {more} with every text" if more else ""


def _refusal(model: PreTrainedModel, reason: str) -> ModelRefused:
    return ModelRefused(f"{type(model).__name__} cannot be served: {reason}")


def _attempt(build: Callable[[], Guest], reference: Reference) -> Guest | str:
    """A guest that passed, or why this mode does not work.

    Where only committing a part of a step fails and there are recurrent layers, that alone is switched off.
    """
    try:
        guest = build()
        guest.verdict = _retried(whole_step_test, guest, reference)
    except MODEL_ERRORS as error:
        return reason_of(error)
    if not guest.verdict.passed:
        return str(guest.verdict)
    try:
        partial = _retried(partial_commit_test, guest, reference)
        guest.no_partial_commit = None if partial.passed else str(partial)
    except MODEL_ERRORS as error:
        guest.no_partial_commit = reason_of(error)
    if guest.no_partial_commit is not None and guest.shape.recurrent is None:
        return f"after a commit of a part of a step, {guest.no_partial_commit}"
    return guest


def _attend_latents(guest: Guest, reference: Reference) -> None:
    """Let modules that compute keys attend to what is stored instead, if that passes the tests; else they expand, and
    `expands` has the reason."""
    if guest.mode != "flat" or not any(binding.expands for binding in guest.shape.bindings.values()):
        return
    before, verdict = guest.shape, guest.verdict
    try:
        guest.shape = replace(guest.shape, bindings=with_latents(guest))
        tests = (whole_step_test, *(() if guest.no_partial_commit is not None else (partial_commit_test,)))
        verdicts = [_retried(test, guest, reference) for test in tests]
        guest.verdict = verdicts[0]
        guest.expands = next((f"attending to latents, {one}" for one in verdicts if not one.passed), None)
    except MODEL_ERRORS as error:
        guest.expands = reason_of(error)
    if guest.expands is not None:
        without_latents(guest)
        guest.shape, guest.verdict = before, verdict


def _retried(test: Callable[[Guest, Reference], Verdict], guest: Guest, reference: Reference) -> Verdict:
    """The verdict; a failed test is repeated once with other tokens, since a near tie of a router's experts can fall
    either way, while a defect of kvcellar shows with any tokens."""
    verdict = test(guest, reference)
    if verdict.passed or not isfinite(verdict.difference):
        return verdict
    return test(guest, reference_of(guest.model, seed=1))


def reason_of(error: Exception) -> str:
    """What to say of one of `MODEL_ERRORS`."""
    if isinstance(error, NotSupported):
        return error.reason
    return str(error) if isinstance(error, KvcellarError) else f"its code raised {type(error).__name__}: {error}"


def _joined(refused: Mapping[str, str]) -> str:
    """Every reason once, with the first mode that it holds for where they differ."""
    modes: dict[str, str] = {}
    for mode, reason in refused.items():
        modes.setdefault(reason, mode)
    return "; ".join([f"{mode}: {reason}" for reason, mode in modes.items()] if len(modes) > 1 else list(modes))


def _flat(model: PreTrainedModel, backends: Sequence[Backend], *, offsets: bool) -> Guest:
    context = context_of(model)
    near = ProbeDoor(context)
    if not model._can_set_attn_implementation():
        raise ModelRefused("its attention does not go through transformers' attention interface")
    our_attention(model)
    probe(model, near, range(PROBE_TOKENS))
    if near.reads and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelRefused("its forward takes no positions")
    wrap_mixers(near.mixers, current_door, scan_kernel(model))
    shape = shape_of(near, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type)
    guest = Guest(model, shape, "flat", backends_for(shape, backends), offsets=offsets)
    positions = [*range(PROBE_TOKENS - 1), context - 1]
    # Without offsets the model must not depend on the past length, so the second probe passes another one.
    past = guest.past_length(torch.tensor(positions, device=model.device)) if offsets else context - PROBE_TOKENS
    far = ProbeDoor(context, past)
    probe(model, far, positions)
    if (why := differing(near, far, PROBE_TOKENS - 1)) is not None:
        raise ModelRefused(why)
    return guest


def _solo(model: PreTrainedModel, backends: Sequence[Backend], why: str) -> Guest:
    own_attention(model)
    shape = stored_shape(model, fresh=fresh_layers(model))
    return Guest(model, shape, "solo", backends_for(shape, backends), refused=why)
