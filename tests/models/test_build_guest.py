"""How each architecture is served, and which shape is found. A change in the table is visible to users."""

import re

import pytest

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from tests.models.served import FLAT, REFUSED, SERVED, SOLO
from tests.models.timeline import guest_and_reference
from tests.zoo import ARCHS, ATTENTION, WINDOW

NAMED = (  # must be served flat
    "llama", "llama-rope-llama3", "llama-rope-yarn", "phi3-longrope", "qwen2", "qwen3", "qwen3-moe", "mistral",
    "mixtral", "phi3", "gemma2", "gemma3", "gemma3n", "gemma4-e2b", "gemma4-26b", "gpt-oss", "llama4", "cohere2",
    "olmo2", "olmo3", "granite", "deepseek-v2", "deepseek-v3", "glm4", "ernie4.5", "smollm3", "gpt2", "opt",
    "gpt-neox", "stablelm",
)  # fmt: skip


def test_common_architectures_are_served_flat() -> None:
    assert set(NAMED) <= set(FLAT) & set(ATTENTION)
    assert set(SOLO) | set(REFUSED) <= set(ARCHS)


@pytest.mark.parametrize("name", SERVED)
def test_an_architecture_is_served_in_the_listed_mode(name: str) -> None:
    guest, _ = guest_and_reference(name)
    assert guest.mode == ("solo" if name in SOLO else "flat"), guest.refused
    assert guest.verdict is not None
    assert guest.verdict.passed
    assert (guest.refused is None) == (name in FLAT)
    assert SOLO.get(name, "") in (guest.refused or "")


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_is_refused_with_the_listed_reason(name: str) -> None:
    with pytest.raises(ModelRefused, match=re.escape(REFUSED[name])) as refusal:
        build_guest(ARCHS[name].build(), backends())
    assert "cannot be served" in str(refusal.value)


@pytest.mark.parametrize("name", FLAT)
def test_layouts_match_the_kinds_of_layers(name: str) -> None:
    guest, kinds = guest_and_reference(name)[0], ARCHS[name].kinds
    layouts = {group.layout for group in guest.shape.groups}
    assert layouts == {
        layout
        for kind, layout in (("full", Causal()), ("sliding", Sliding(WINDOW)), ("chunked", Chunked(WINDOW)))
        if kind in kinds
    }


@pytest.mark.parametrize("name", FLAT)
def test_only_latent_attention_reads_computed_keys(name: str) -> None:
    guest, kinds = guest_and_reference(name)[0], ARCHS[name].kinds
    assert any(not binding.direct for binding in guest.shape.bindings.values()) == ("mla" in kinds)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-e2b"])
def test_layers_that_share_kv_store_none(name: str) -> None:
    guest, _ = guest_and_reference(name)
    stored = sum(len(group.layers) for group in guest.shape.groups)
    read = len(guest.shape.bindings)
    assert (stored, read) == (4, 6)
