"""`model.generate()` of transformers on our cells gives what it gives on its own cache, in every decoding mode."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.engine.models.generation import GenerationCache
from kvcellar.errors import BadRequest, CacheFull, ModelRefused
from tests.zoo import ARCHS

NAMES = ("llama", "gemma3", "gpt2", "gpt-oss", "deepseek-v3", "cohere2", "bloom")
PROMPT = torch.tensor([[5, 9, 22, 41, 7, 7, 3]])
HOW: dict[str, Any] = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beam search": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "several completions": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
MODES_OF_A_BATCH = [mode for mode in MODES if mode != "prompt lookup"]  # transformers supports it for one sequence only


def generate(model: PreTrainedModel, ids: Tensor, **how: Any) -> Tensor:
    torch.manual_seed(11)
    return model.generate(ids, **{**HOW, **how})  # type: ignore[return-value, operator]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    built = ARCHS[request.param].build()
    built.generation_config.eos_token_id = None
    return built


@pytest.mark.parametrize("mode", MODES)
def test_one_row_generates_the_same_tokens_as_with_transformers_cache(model: PreTrainedModel, mode: str) -> None:
    cache = GenerationCache.of(model, cells=256)
    ours = generate(model, PROMPT, past_key_values=cache, **MODES[mode])
    assert torch.equal(ours, generate(model, PROMPT, **MODES[mode]))
    cache.check()
    cache.reset()
    assert cache.memory.free() == cache.memory.storage.capacity()


@pytest.mark.parametrize("mode", MODES_OF_A_BATCH)
def test_a_padded_batch_generates_the_same_tokens_as_with_transformers_cache(model: PreTrainedModel, mode: str) -> None:
    ids = torch.tensor([[0, 0, 0, 11, 12], [8, 4, 90, 3, 2]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    cache = GenerationCache.of(model, cells=512)
    ours = generate(model, ids, attention_mask=mask, past_key_values=cache, **MODES[mode])
    assert torch.equal(ours, generate(model, ids, attention_mask=mask, **MODES[mode]))
    cache.check()


def test_assisted_generation_gives_the_same_tokens_as_with_transformers_caches() -> None:
    target, draft = (ARCHS["llama"].build() for _ in range(2))
    other = ARCHS["qwen3"].build()
    for assistant in (draft, other):
        cache = GenerationCache.of(target, cells=128)
        how = {"do_sample": False, "assistant_model": assistant}
        assert torch.equal(generate(target, PROMPT, past_key_values=cache, **how), generate(target, PROMPT, **how))
        cache.check()


def test_beams_share_the_cells_of_their_prompt() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=1000)
    long = torch.arange(1, 61)[None] % 90
    generate(model, long, past_key_values=cache, num_beams=4, do_sample=False)
    used = 1000 - min(cache.memory.free().values())
    assert used <= 60 + 4 * 14, f"{used} cells for four beams over one prompt of 60 tokens"


def test_a_second_generate_computes_only_new_tokens() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=128)
    first = generate(model, PROMPT, past_key_values=cache)
    held = cache.get_seq_length()
    assert held == first.shape[1] - 1
    longer = torch.cat([first, torch.tensor([[17, 18]])], dim=1)
    assert torch.equal(generate(model, longer, past_key_values=cache), generate(model, longer))
    cache.crop(-3)
    cache.check()
    with pytest.raises(BadRequest, match="crop"):
        cache.crop(5)


def test_a_failed_forward_leaves_nothing_behind() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=128)
    layer = sorted(cache._layers)[0]
    planes = cache.memory.storage.groups[0].planes
    k = torch.randn(1, planes[0].heads, 4, planes[0].size)
    cache.update(k, k, layer)  # the other layers never store
    assert torch.equal(generate(model, PROMPT, past_key_values=cache), generate(model, PROMPT))
    cache.check()


def test_a_prompt_that_does_not_fit_leaves_no_rows() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=32)
    with pytest.raises(CacheFull):
        generate(model, PROMPT.repeat(2, 3), past_key_values=cache)
    assert cache.rows == []
    cache.check()
    short = {"max_new_tokens": 5}
    assert torch.equal(generate(model, PROMPT, past_key_values=cache, **short), generate(model, PROMPT, **short))


def test_another_batch_size_is_accepted_after_a_failed_first_forward() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=256)
    first, plane = min(cache._layers), cache.memory.storage.groups[0].planes[0]
    k = torch.randn(1, plane.heads, 4, plane.size)
    cache.update(k, k, first)  # the other layers never store
    with pytest.raises(BadRequest):
        cache.update(k[:, :1], k, first)
    both = PROMPT.repeat(2, 1)
    assert torch.equal(generate(model, both, past_key_values=cache), generate(model, both))
    cache.check()


def test_another_batch_size_is_refused() -> None:
    model = ARCHS["llama"].build()
    cache = GenerationCache.of(model, cells=128)
    generate(model, PROMPT, past_key_values=cache)
    with pytest.raises(BadRequest, match="rows"):
        model(input_ids=PROMPT.expand(2, -1), past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "layers"), [("mamba", "0, 1, 2, 3"), ("lfm3", "0, 3"), ("qwen3.5", "0, 1, 2"), ("falcon-h1", "0, 1, 2, 3")]
)
def test_a_model_with_recurrent_layers_is_refused(name: str, layers: str) -> None:
    with pytest.raises(ModelRefused, match=rf"convolution state in layers \[{layers}\]"):
        GenerationCache.of(ARCHS[name].build(), cells=128)
