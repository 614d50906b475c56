"""The context is the longest for which logits are right: up to its last position, and while stored keys stay valid."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar.engine.load.build import build
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.input_limits import context_of, context_reason
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.verify.diagnosis import diagnose
from tests.models.timeline import BOUND, guest_and_reference, read, relative, small_memory
from tests.zoo import ARCHS, ROPE_LONG, reference_logits

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def dynamic() -> PreTrainedModel:
    """Its frequencies change once a sequence is longer than 64 tokens."""
    return ARCHS["llama"].build(rope_parameters=DYNAMIC, max_position_embeddings=64)


def longrope() -> PreTrainedModel:
    """Extended to 256 positions by other frequencies than those for up to 64."""
    return ARCHS["phi3"].build(rope_parameters=ROPE_LONG | {"factor": 4.0}, original_max_position_embeddings=64)


def gap(model: PreTrainedModel, reference: PreTrainedModel, length: int) -> float:
    """The largest difference over a sequence of `length` tokens, in chunks and with the last token alone."""
    tokens = torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    guest = build_guest(model, backends())
    memory = small_memory(guest, length, sequences=2)
    cuts = [*range(0, length - 1, 50), length - 1, length]
    logits = torch.cat([read(guest, memory, (1, tokens[a:b]))[0] for a, b in pairwise(cuts)])
    return relative(logits, reference_logits(reference, tokens))


@pytest.mark.parametrize("make", [dynamic, longrope])
def test_the_context_ends_where_rope_frequencies_change(make) -> None:
    assert context_of(make()) == 64
    assert gap(make(), make(), 64) <= BOUND
    assert gap(make(), make(), 65) > 10 * BOUND  # so the context has to end there


@pytest.mark.parametrize(("make", "kind"), [(dynamic, "dynamic"), (longrope, "longrope")])
def test_a_longer_context_is_refused_with_the_reason(make: Callable[[], PreTrainedModel], kind: str) -> None:
    why = f"its {kind} rope has other frequencies in sequences of more than 64 tokens"
    with pytest.raises(BadRequest, match=f"context is 65; this model is served up to 64 tokens: {why}") as caught:
        build(make(), Settings(context=65), ExitStack())
    assert caught.value.param == "context"
    notes = diagnose(make(), Settings(cache_bytes=2**20), kv_quality=False).notes
    assert [note for note in notes if note.startswith(f"context: {why}, and the keys stored before")]


def test_there_is_no_reason_where_the_context_is_the_configured_one() -> None:
    for name in ("llama", "llama-rope-yarn", "opt"):
        assert context_reason(ARCHS[name].build()) is None
    beyond = ROPE_LONG | {"factor": 4.0, "original_max_position_embeddings": 512}
    model = ARCHS["phi3"].build(rope_parameters=beyond, original_max_position_embeddings=512)
    assert (context_of(model), context_reason(model)) == (256, None)


@pytest.mark.parametrize("name", ["llama", "llama-rope-yarn", "gpt2", "opt", "biogpt", "gemma3", "llama4", "xglm"])
def test_logits_are_right_up_to_the_last_position(name: str) -> None:
    arch = ARCHS[name]
    context = min(256, context_of(guest_and_reference(name)[1]))
    assert gap(arch.build(), arch.build(), context) <= BOUND


def test_the_shortest_limit_of_all_kinds_of_layers_is_the_context() -> None:
    ropes = {
        "full_attention": DYNAMIC | {"original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert context_of(ARCHS["gemma3"].build(rope_parameters=ropes)) == 32


def test_a_context_too_short_for_the_self_test_is_refused() -> None:
    with pytest.raises(ModelRefused, match="context of 7 positions is too short"):
        build_guest(ARCHS["llama"].build(max_position_embeddings=7), backends())
    assert build_guest(ARCHS["llama"].build(max_position_embeddings=8), backends()).mode == "flat"
