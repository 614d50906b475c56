"""Layers that select keys with an indexer: what it looks at is a plane of theirs, and it is looked at in order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcellar.attention.choose import backends
from kvcellar.contracts import StoredAs
from kvcellar.errors import ModelRefused, NotSupported
from kvcellar.models.generation import GenerationCache
from kvcellar.models.guest import adopt
from kvcellar.models.seam import SoloDoor
from kvcellar.spans import Span
from tests.models.timeline import BOUND, Timeline, animal, read, relative, seed_of, small_memory
from tests.zoo import ARCHS, reference_logits

INDEXED = ("deepseek-v3.2", "glm-moe-dsa", "hy-v4")


def tokens(n: int) -> list[int]:
    return torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("name", INDEXED)
def test_the_layers_that_have_an_indexer_have_a_plane_of_its_keys(name: str) -> None:
    guest, judge = animal(name)
    config = judge.config.get_text_config()
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    wanted = {layer: kind == "full" for layer, kind in enumerate(kinds)}
    indexed: dict[int, bool] = {}
    for group in guest.shape.groups:
        sizes = {plane.name: (plane.heads, plane.size) for plane in group.planes}
        assert sizes.get("index") in (None, (1, config.index_head_dim))
        indexed |= dict.fromkeys(group.layers, "index" in sizes)
    assert indexed == wanted


def test_layers_that_share_a_selection_keep_no_keys_of_an_indexer() -> None:
    groups = animal("glm-moe-dsa")[0].shape.groups
    assert [("index" in {plane.name for plane in group.planes}) for group in groups] == [True, False]


@pytest.mark.parametrize("name", INDEXED)
def test_nothing_is_taken_out_of_the_middle_and_the_end_can_be_cut(name: str) -> None:
    guest, judge = animal(name)
    memory = small_memory(guest, 64)
    text = tokens(30)
    read(guest, memory, (1, text))
    with pytest.raises(NotSupported, match="runs solo"):
        memory.remove(1, Span(10, 15))
    assert memory.length(1) == 30
    assert memory.remove(1, Span(20, 30)) == 20
    other = [*text[:20], *tokens(8)]
    (logits,) = read(guest, memory, (1, other[20:]))
    assert relative(logits, reference_logits(judge, other)[20:]) <= BOUND


def test_what_is_stored_in_fewer_bits_are_keys_and_values_only() -> None:
    guest = animal("deepseek-v3.2")[0].storing(StoredAs.parse("int8"), backends())
    for group in guest.shape.groups:
        kinds = {plane.name: plane.storage and plane.storage.kind for plane in group.planes}
        assert kinds == {"k": "int8", "v": "int8", "index": None}
    memory = guest.memory({group.name: 64 for group in guest.shape.groups})
    (logits,) = read(guest, memory, (1, tokens(8)))
    assert logits.isfinite().all()


def backwards(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, keys, layer: honest(self, keys, layer).flip(1)


def only_new(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Padded with zeros, so that all fits."""

    def update(self: SoloDoor, keys: Tensor, layer: int) -> Tensor:
        held = honest(self, keys, layer).clone()
        held[:, : held.shape[1] - keys.shape[1]] = 0
        return held

    return update


@pytest.mark.parametrize("forget", [backwards, only_new])
def test_who_shows_the_indexer_other_keys_is_found_out(
    forget: Callable[..., Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = adopt(ARCHS["deepseek-v3.2"].build(), backends())
    monkeypatch.setattr(SoloDoor, "update_index", forget(SoloDoor.update_index))
    timeline = Timeline(guest, animal("deepseek-v3.2")[1], seed_of("deepseek-v3.2"))
    timeline.play()
    try:
        worst = timeline.judged()
    except AssertionError:  # other text
        worst = float("inf")
    assert worst > 10 * BOUND


def test_the_cache_for_generate_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(ModelRefused, match="an indexer of its own"):
        GenerationCache.of(ARCHS["hy-v4"].build(), cells=64)
