"""Planes beside keys and values: the keys of indexers, and the inputs of a model's own cache layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.seam import OwnLayer, SoloDoor
from kvcellar.engine.models.shape import StoreProbe
from kvcellar.errors import ModelRefused, NotSupported
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.shapes import StoredAs
from kvcellar.memory.spans import Span
from tests.models.timeline import BOUND, guest_and_reference, read, relative, small_memory
from tests.zoo import ARCHS, reference_logits

INDEXED = ("deepseek-v3.2", "glm-moe-dsa", "hy-v4")
OWN = ("deepseek-v4", "minimax-m3")  # cache layers of their own class


def tokens(n: int) -> list[int]:
    return torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("name", INDEXED)
def test_layers_with_an_indexer_have_a_plane_for_its_keys(name: str) -> None:
    guest, reference = guest_and_reference(name)
    config = reference.config.get_text_config()
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    wanted = {layer: kind == "full" for layer, kind in enumerate(kinds)}
    indexed: dict[int, bool] = {}
    for group in guest.shape.groups:
        sizes = {plane.name: (plane.heads, plane.size) for plane in group.planes}
        assert sizes.get("index") in (None, (1, config.index_head_dim))
        indexed |= dict.fromkeys(group.layers, "index" in sizes)
    assert indexed == wanted


def test_layers_that_reuse_a_selection_store_no_indexer_keys() -> None:
    groups = guest_and_reference("glm-moe-dsa")[0].shape.groups
    assert [("index" in {plane.name for plane in group.planes}) for group in groups] == [True, False]


@pytest.mark.parametrize("name", OWN)
def test_inputs_of_own_cache_layers_are_stored_per_token(name: str) -> None:
    guest, reference = guest_and_reference(name)
    config = reference.config
    planes: dict[int, dict[str, int]] = {}
    for group in guest.shape.groups:
        sizes = {plane.name: plane.heads * plane.size for plane in group.planes if plane.name not in ("k", "v")}
        planes |= dict.fromkeys(group.layers, sizes)
    if name == "minimax-m3":
        wanted = {"minimax_m3_sparse": {"index": config.index_head_dim}, "full_attention": {}}
    else:
        size, index = config.head_dim, config.index_head_dim
        wanted = {
            "sliding_attention": {},
            "heavily_compressed_attention": {"compressor kv": size, "compressor gate": size},
            "compressed_sparse_attention": {
                **dict.fromkeys(("compressor kv", "compressor gate"), 2 * size),
                **dict.fromkeys(("indexer kv", "indexer gate"), 2 * index),
            },
        }
    assert planes == {layer: wanted[kind] for layer, kind in enumerate(config.layer_types)}


@pytest.mark.parametrize("name", [*INDEXED, *OWN])
def test_only_the_end_of_a_sequence_can_be_removed(name: str) -> None:
    guest, reference = guest_and_reference(name)
    memory = small_memory(guest, 64)
    text = tokens(30)
    read(guest, memory, (1, text))
    with pytest.raises(NotSupported, match="runs solo"):
        memory.remove(1, Span(10, 15))
    assert memory.length(1) == 30
    assert memory.remove(1, Span(20, 30)) == 20
    other = [*text[:20], *tokens(8)]
    (logits,) = read(guest, memory, (1, other[20:]))
    assert relative(logits, reference_logits(reference, other)[20:]) <= BOUND


def test_only_keys_and_values_are_quantised() -> None:
    guest = guest_and_reference("deepseek-v3.2")[0].storing(StoredAs.parse("int8"), backends())
    for group in guest.shape.groups:
        kinds = {plane.name: plane.storage and plane.storage.kind for plane in group.planes}
        assert kinds == {"k": "int8", "v": "int8", "index": None}
    memory = guest.memory({group.name: 64 for group in guest.shape.groups})
    (logits,) = read(guest, memory, (1, tokens(8)))
    assert logits.isfinite().all()


def backwards(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, name, new, layer: original(self, name, new, layer).flip(1)


def only_new(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Padded with zeros to the same shape."""

    def update(self: SoloDoor, name: str, new: Tensor, layer: int) -> Tensor:
        held = original(self, name, new, layer).clone()
        held[:, : held.shape[1] - new.shape[1]] = 0
        return held

    return update


@pytest.mark.parametrize("name", ["deepseek-v3.2", *OWN])
@pytest.mark.parametrize("mutate", [backwards, only_new])
def test_wrong_values_in_additional_planes_change_the_logits(
    mutate: Callable[..., Callable[..., Tensor]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, text = build_guest(ARCHS[name].build(), backends()), tokens(36)
    right = reference_logits(guest_and_reference(name)[1], text)
    monkeypatch.setattr(SoloDoor, "update_plane", mutate(SoloDoor.update_plane))
    memory = small_memory(guest, 64)
    logits = torch.cat([read(guest, memory, (1, text[a:b]))[0] for a, b in ((0, 20), (20, 21), (21, 36))])
    assert not relative(logits, right) <= 10 * BOUND


def test_own_cache_layers_have_keys_and_positions_of_all_tokens() -> None:
    door = StoreProbe()
    door.stored[3] = torch.zeros(1, 1, 7, 2), torch.zeros(1, 1, 7, 2)
    layer = OwnLayer(object(), 3, door)
    assert layer.keys.shape == (1, 1, 7, 2)
    assert layer.get_seq_length() == 7
    assert layer.indexer_position_ids is None
    door.before = torch.arange(4)
    layer.indexer_position_ids = torch.zeros(3, 1, 9)  # the next forward has them from its door
    assert torch.equal(layer.indexer_position_ids, torch.arange(4).expand(3, 1, 4))


def test_an_unknown_method_of_a_cache_layer_is_refused_by_name() -> None:
    layer = OwnLayer(object(), 3, StoreProbe())
    with pytest.raises(ModelRefused, match="layer 3 uses store_something of a cache layer of its own class"):
        layer.store_something(torch.zeros(1))
