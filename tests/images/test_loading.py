"""Weights of types that see, saved from the class with images and from the one for text alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gemma3 import modeling_gemma3

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.input_limits import first_position
from kvcellar.engine.models.load import load
from kvcellar.engine.models.registered import our_attention, own_attention, register
from kvcellar.engine.models.vision import _looks_ahead, vision_of
from kvcellar.engine.recording.recording import Hooks
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.sdpa import Sdpa
from tests.images.seeing import pictures_of
from tests.zoo_test_support.images import PLACEHOLDER, config_of, inputs_of, network_of
from tests.zoo_test_support.initialise import initialise

TEXT = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen3_5"])
def test_weights_of_the_class_with_images(model_type: str, tmp_path: Path) -> None:
    model = network_of(model_type)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path).model
    found, stored = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "qwen3_5"])
def test_weights_of_the_class_for_text(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type).get_text_config(decoder=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    initialise(model, 0)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path).model
    loaded.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=TEXT).logits, model(input_ids=TEXT).logits)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("unlimited_ocr", "its own cache layers .* decide what tokens see"),
        ("diffusion_gemma", "its forward gives 256 rows of logits for 24 tokens, not one for each"),
        ("t5gemma2", "an encoder reads its prompts"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        build_guest(network_of(model_type), [Sdpa()])


def test_what_needs_images_and_names_no_placeholder_is_refused_with_the_reason() -> None:
    nowhere = network_of("blip-2")
    nowhere.config.image_token_index = None
    with pytest.raises(ModelRefused, match="its forward needs pixel_values with every text"):
        build_guest(nowhere, [Sdpa()])


@pytest.mark.parametrize(("model_type", "inner"), [("blip-2", "language_model"), ("kosmos-2", "text_model")])
def test_text_alone_is_read_by_the_decoder_of_a_network_that_needs_images(model_type: str, inner: str) -> None:
    model = network_of(model_type)
    with torch.inference_mode():
        expected = model.get_submodule(inner)(input_ids=TEXT).logits
        guest = build_guest(model, [Sdpa()])
        own_attention(model)
        assert guest.verdict is not None
        assert guest.verdict.passed
        assert torch.equal(model(input_ids=TEXT, use_cache=False).logits, expected)
    assert not Hooks(model).found()  # so that its steps can be recorded


def test_positions_begin_behind_the_row_of_padding_where_a_table_counts_tokens() -> None:
    model = network_of("kosmos-2.5")
    assert first_position(model) == 1 + model.config.text_config.pad_token_id
    with torch.inference_mode():
        given = model(input_ids=TEXT, position_ids=first_position(model) + torch.arange(TEXT.shape[1])[None])
        assert torch.equal(given.logits, model(input_ids=TEXT).logits)


def test_what_has_no_embedding_of_its_inputs_is_refused_with_the_reason(tmp_path: Path) -> None:
    network_of("pp_formulanet").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="cannot be served: `get_input_embeddings`"):
        load(tmp_path)


def test_networks_whose_prompts_see_both_ways_are_told_by_their_masks() -> None:
    register()
    causal, other = (vision_of(network_of(one)) for one in ("gemma3", "paligemma"))
    assert causal is not None
    assert other is not None
    our_attention(causal.model)
    our_attention(other.model)
    assert not causal.whole_prompts([5, 6, 7, 8])
    assert other.whole_prompts([5, 6, 7, 8])


@pytest.mark.parametrize(
    ("sees", "tokens", "found"),
    [
        (lambda q, k: k <= q, 9, False),
        (lambda q, k: (k <= q) & (q - k < 4), 9, False),
        (lambda q, k: q - k < 4, 9, True),  # Gemma 4
        (lambda q, k: abs(q - k) < 4, 4, True),  # Gemma 3
        (lambda q, k: abs(q - k) < 4, 5, None),
        (lambda q, k: q == q, 4, True),  # Gemma 4 without towers
        (lambda q, k: q == q, 5, None),
        (lambda q, k: (k <= q) | (k // 2 == q // 2), 4, None),  # an image of two pieces
    ],
)
def test_what_memory_cannot_show_to_the_tokens_of_an_image_is_refused(
    sees: Callable[[Tensor, Tensor], Tensor], tokens: int, found: bool | None
) -> None:
    places = torch.arange(tokens)
    if found is not None:
        assert _looks_ahead(lambda _, __, q, k: sees(q, k), 4, places) == found
    else:
        with pytest.raises(ModelRefused, match="in one piece, and to fit in windows"):
            _looks_ahead(lambda _, __, q, k: sees(q, k), 4, places)


@pytest.mark.parametrize("together", [False, True])
def test_images_that_see_those_behind_them_are_refused(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    pictures = pictures_of("gemma3")
    vision = vision_of(pictures.model)
    assert vision is not None
    ids, starts = pictures.ids([pictures.one, [5, 6], pictures.one]), [0, pictures.one.rows + 2]
    twice, _ = vision.of_two(ids, inputs_of([pictures.one]))
    our_attention(vision.model)
    if together:  # all images of a prompt are one block, as in Molmo 2
        monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", lambda types, **_: types - 1)
        with pytest.raises(ModelRefused, match="images of a prompt see those behind them"):
            vision.check_apart(ids, twice, starts)
    else:
        vision.check_apart(ids, twice, starts)


def test_the_placeholder_may_be_in_a_map_of_the_vocabulary_and_has_to_be_named() -> None:
    vision = vision_of(network_of("chameleon"))
    assert vision is not None
    assert vision.placeholder == PLACEHOLDER
    nowhere = network_of("blip-2")
    nowhere.config.image_token_index = None
    with pytest.raises(ModelRefused, match="names no token that stands for a row"):
        vision_of(nowhere)


def test_heads_of_latent_attention_may_have_nothing_that_is_rotated(tmp_path: Path) -> None:
    model = network_of("glm5_next")
    assert model.config.text_config.head_dim == 0
    model.save_pretrained(tmp_path)
    assert load(tmp_path).model.config.text_config.head_dim == 0
