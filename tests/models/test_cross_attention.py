"""Cross-attention: `model.generate()` on our cells gives what it gives on transformers' own caches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from kvcellar.engine.models.generation import DecoderCache, cross_attention_cache
from kvcellar.errors import BadRequest, CacheFull, ModelRefused, NotSupported
from kvcellar.memory.kv import inputs as inputs_module
from kvcellar.memory.kv.history import write_planes
from tests.zoo import ARCHS
from tests.zoo_test_support.initialise import initialise

NEW = 8
HOW: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beam search": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "several completions": {"do_sample": True, "num_return_sequences": 3},
}
SIDES: dict[str, Any] = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of model: how it is built, and inputs of one row (number 0 or 1) or of two unequal ones."""

    build: Callable[[], PreTrainedModel]
    one: Callable[[int], dict[str, Tensor]]
    two: Callable[[], dict[str, Tensor]]


def bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(**SIDES, max_position_embeddings=64, forced_eos_token_id=None))


def marian() -> PreTrainedModel:
    return MarianMTModel(
        MarianConfig(**SIDES, max_position_embeddings=64, pad_token_id=0, decoder_start_token_id=0, eos_token_id=2)
    )


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def whisper() -> PreTrainedModel:
    places = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 40}
    names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = WhisperForConditionalGeneration(WhisperConfig(**SIDES, **places, **names))
    model.generation_config.begin_suppress_tokens = None
    return model


def mllama() -> PreTrainedModel:
    text = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "cross_attention_layers": [1, 2],
        "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 16, "vision_output_dim": 32, "image_size": 8, "patch_size": 4, "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0],
    }  # fmt: skip
    return MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text, image_token_index=99))


def sentence(number: int) -> dict[str, Tensor]:
    ids = torch.tensor([[11, 12, 13, 14, 15, 2], [40, 13, 77, 8, 90, 2]][number : number + 1])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def sentences() -> dict[str, Tensor]:
    ids = torch.tensor([[11, 12, 2, 0, 0, 0], [40, 13, 77, 8, 90, 2]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def sound(number: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(number))}


def sounds() -> dict[str, Tensor]:
    return {"input_features": torch.cat([sound(0)["input_features"], sound(1)["input_features"]])}


def pictures(rows: int, numbers: tuple[int, ...]) -> dict[str, Tensor]:
    ids = torch.tensor([[99, 5, 6, 7, 8], [0, 0, 99, 21, 22]][:rows])
    mask = (ids > 0).long()
    pixels = [torch.randn(1, 2, 3, 8, 8, generator=torch.Generator().manual_seed(number)) for number in numbers]
    tiles = torch.ones(rows, 5, 1, 2, dtype=torch.long) * mask[:, :, None, None]
    return {
        "input_ids": ids, "attention_mask": mask, "pixel_values": torch.stack(pixels),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, 2, dtype=torch.long), "cross_attention_mask": tiles,
    }  # fmt: skip


KINDS: Mapping[str, Kind] = {
    "bart": Kind(bart, sentence, sentences),
    "marian": Kind(marian, sentence, sentences),
    "t5": Kind(t5, sentence, sentences),
    "whisper": Kind(whisper, sound, sounds),
    "mllama": Kind(mllama, lambda number: pictures(1, (number,)), lambda: pictures(2, (0, 1))),
}


@cache
def built(name: str) -> PreTrainedModel:
    """With weights and gates for which the encoder's output changes the generated tokens."""
    torch.manual_seed(5)
    model = KINDS[name].build().eval()
    initialise(model, 5)
    with torch.no_grad():
        for at, weight in model.named_parameters():
            if "gate" in at and weight.numel() == 1:
                weight.fill_(1.0)
    model.generation_config.eos_token_id = None
    return model


def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor], **how: Any) -> Tensor:
    torch.manual_seed(11)
    return model.generate(**inputs, **{**HOW, **how})  # type: ignore[return-value, operator, arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_one_row_generates_the_same_tokens_as_with_transformers_caches(name: str, mode: str) -> None:
    model, inputs = built(name), KINDS[name].one(0)
    ours = cross_attention_cache(model, cells=200, input_cells=60)
    assert torch.equal(
        generate(model, inputs, past_key_values=ours, **MODES[mode]), generate(model, inputs, **MODES[mode])
    )
    ours.check()
    ours.reset()
    assert ours.memory.free() == ours.memory.storage.capacity()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_a_padded_batch_generates_the_same_tokens_as_with_transformers_caches(name: str, mode: str) -> None:
    model, inputs = built(name), KINDS[name].two()
    ours = cross_attention_cache(model, cells=200, input_cells=60)
    assert torch.equal(
        generate(model, inputs, past_key_values=ours, **MODES[mode]), generate(model, inputs, **MODES[mode])
    )
    ours.check()


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_a_padded_batch_equal_those_with_transformers_caches(name: str) -> None:
    model, inputs = built(name), KINDS[name].two()
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    ours: Any = generate(model, inputs, past_key_values=cross_attention_cache(model, cells=200, input_cells=60), **how)
    theirs: Any = generate(model, inputs, **how)
    assert len(ours.logits) == NEW
    for mine, others in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=1e-4)
    assert torch.stack(theirs.logits).std(0).max() > 0.1, "the steps differ"
    assert (theirs.logits[0][0] - theirs.logits[0][1]).abs().max() > 0.1, "the rows differ"


@pytest.mark.parametrize("name", KINDS)
def test_logits_depend_on_the_input(name: str) -> None:
    model = built(name)
    ours = cross_attention_cache(model, cells=200, input_cells=60)
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    first: list[Tensor] = []  # logits of the first token, which depend on the input alone
    for number in (0, 1, 0):
        found: Any = generate(model, KINDS[name].one(number), past_key_values=ours, **how)
        first.append(found.logits[0])
        ours.reset()
    assert (first[0] - first[1]).abs().max() > 0.1
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("name", KINDS)
def test_an_input_is_written_once_and_beams_share_its_cells(name: str) -> None:
    model = built(name)
    ours = cross_attention_cache(model, cells=300, input_cells=200)
    inputs = {group.name for group in ours.memory.storage.groups if group.of_input}
    of_input = [
        ours.memory.layers[layer].planes
        for group in ours.memory.storage.groups
        if group.of_input
        for layer in group.layers
    ]
    writes: list[int] = []

    def counted(planes: Any, *rest: Any) -> None:
        writes.append(of_input.index(planes))
        write_planes(planes, *rest)

    with mock.patch.object(inputs_module, "write_planes", counted):
        generate(model, KINDS[name].two(), past_key_values=ours, num_beams=4, do_sample=False)
    assert sorted(writes) == sorted(2 * [*range(len(of_input))]), "two inputs, each layer of each written once"
    free, n = ours.memory.free(), ours.memory.inputs.length(ours.rows[0])
    assert len(ours.rows) == 8
    assert n > 0
    assert {free[at] for at in inputs} <= {200 - n, 200 - 2 * n}, "all beams share the inputs of the two prompts"


@pytest.mark.parametrize("name", ["bart", "mllama"])
def test_equal_inputs_of_a_batch_share_cells(name: str) -> None:
    model, two = built(name), KINDS[name].two()
    inputs = {key: torch.cat([x, x, x[:1]]) for key, x in two.items()}  # rows 0, 1, 0, 1, 0
    ours = cross_attention_cache(model, cells=300, input_cells=60)
    assert torch.equal(generate(model, inputs, past_key_values=ours), generate(model, inputs))
    free, n = ours.memory.free(), ours.memory.inputs.length(ours.rows[0])
    assert len(ours.rows) == 5
    assert {free[group.name] for group in ours.memory.storage.groups if group.of_input} == {60 - 2 * n}
    ours.check()


def test_a_failed_forward_leaves_nothing_behind() -> None:
    model = built("bart")
    ours = cross_attention_cache(model, cells=100, input_cells=30)
    with (
        mock.patch.object(model.model.decoder.layers[1], "forward", side_effect=ArithmeticError("half way")),
        pytest.raises(ArithmeticError),
    ):
        generate(model, sentence(1), past_key_values=ours)
    assert torch.equal(generate(model, sentence(0), past_key_values=ours), generate(model, sentence(0)))
    ours.check()


def test_the_input_of_a_failed_forward_is_dropped() -> None:
    model = built("mllama")
    text = {name: pictures(1, (0,))[name][:, 1:] for name in ("input_ids", "attention_mask")}
    ours = cross_attention_cache(model, cells=100, input_cells=60)
    layer = model.model.language_model.layers[3]
    with mock.patch.object(layer, "forward", side_effect=ArithmeticError("late")), pytest.raises(ArithmeticError):
        generate(model, pictures(1, (0,)), past_key_values=ours)
    assert torch.equal(generate(model, text, past_key_values=ours), generate(model, text))
    ours.check()
    assert ours.memory.inputs.length(ours.rows[0]) == 0


def test_reordered_rows_keep_their_inputs() -> None:
    model = built("bart")
    ours = cross_attention_cache(model, cells=100, input_cells=30)
    generate(model, sentences(), past_key_values=ours)
    before = [ours.cross_attention_cache.layers[at].keys.clone() for at in (0, 1)]
    assert not torch.equal(before[1][0], before[1][1])
    ours.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(ours.cross_attention_cache.layers[1].keys, before[1].flip(0))
    ours.batch_repeat_interleave(2)
    assert torch.equal(ours.cross_attention_cache.layers[0].keys, before[0].flip(0).repeat_interleave(2, 0))
    ours.check()


@pytest.mark.parametrize("name", KINDS)
def test_after_an_input_that_does_not_fit_the_cache_is_as_new(name: str) -> None:
    model = built(name)
    one, two = KINDS[name].one(0), KINDS[name].two()
    probe = cross_attention_cache(model, cells=200, input_cells=60)
    fresh = generate(model, one, past_key_values=probe)
    ours = cross_attention_cache(model, cells=200, input_cells=probe.memory.inputs.length(probe.rows[0]))
    with pytest.raises(CacheFull):
        generate(model, two, past_key_values=ours)
    ours.check()
    assert ours.rows == []
    assert ours.memory.free() == ours.memory.storage.capacity()
    assert torch.equal(generate(model, one, past_key_values=ours), fresh)


def test_an_input_that_does_not_fit_removes_only_the_tokens_of_its_forward() -> None:
    model = built("mllama")
    first, last = torch.tensor([[5, 6, 7]]), torch.tensor([[21, 22]])
    ours, fresh = (cross_attention_cache(model, cells=100, input_cells=1) for _ in range(2))
    with torch.no_grad():
        model(input_ids=first, past_key_values=ours)
        model(input_ids=first, past_key_values=fresh)
        both = pictures(1, (0,)) | {"attention_mask": torch.ones(1, 8, dtype=torch.long)}
        with pytest.raises(BadRequest, match="an input of 10 positions"):
            model(**both, past_key_values=ours)
        ours.check()
        assert ours.memory.length(ours.rows[0]) == 3
        logits = [model(input_ids=last, past_key_values=each).logits for each in (ours, fresh)]
    assert torch.equal(*logits)


def test_a_forward_that_fails_between_its_last_two_stores_leaves_nothing_behind() -> None:
    model = built("bart")
    ours = cross_attention_cache(model, cells=100, input_cells=30)
    late = model.model.decoder.layers[1].encoder_attn
    with mock.patch.object(late, "forward", side_effect=ArithmeticError("late")), pytest.raises(ArithmeticError):
        generate(model, sentence(1), past_key_values=ours)
    assert torch.equal(generate(model, sentence(0), past_key_values=ours), generate(model, sentence(0)))
    ours.check()


def test_a_second_input_and_another_number_of_rows_are_refused() -> None:
    model = built("mllama")
    ours = cross_attention_cache(model, cells=100, input_cells=60)
    assert isinstance(ours, DecoderCache)
    first = generate(model, pictures(1, (0,)), past_key_values=ours)
    with pytest.raises(NotSupported, match="already have an input"):
        model(**pictures(1, (1,)), past_key_values=ours)
    with pytest.raises(BadRequest, match="crop"):
        ours.crop(5)
    ours.reset()
    assert torch.equal(generate(model, pictures(1, (0,)), past_key_values=ours), first)
    with pytest.raises(BadRequest, match="rows"):
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=ours)


def test_a_model_without_cross_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="encoder"):
        cross_attention_cache(ARCHS["llama"].build(), cells=10, input_cells=10)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_assisted_generation_gives_the_same_tokens_as_with_transformers_caches(name: str) -> None:
    model, inputs = built(name), sentence(0)
    how = {"do_sample": False, "assistant_model": model}
    ours = cross_attention_cache(model, cells=200, input_cells=60)
    assert torch.equal(generate(model, inputs, past_key_values=ours, **how), generate(model, inputs, **how))
    ours.check()
