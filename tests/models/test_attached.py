"""`generate` of transformers beside a memory gives what it gives alone, and computes only what is not known."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import kvcellar
from kvcellar import Attached, BadRequest, MemoryCache, ModelRefused
from tests.images.seeing import pictures_of
from tests.zoo import ARCHS
from tests.zoo_test_support.images import PLACEHOLDER, inputs_of

KINDS = ("llama", "qwen2-sliding", "llama4", "lfm2", "mamba", "deepseek-v3", "bloom")
EVERY = tuple(name for name in ARCHS if name not in KINDS)
REFUSED = {
    "deepseek-v3.2": "DynamicIndexedLayer", "glm-moe-dsa": "DynamicIndexedLayer", "hy-v4": "DynamicIndexedLayer",
    "minimax-m3": "MiniMaxM3", "deepseek-v4": "DeepseekV4", "minimax-01": "outside", "rwkv": "outside",
    "xlstm": "outside", "openai-gpt": "elsewhere", "recurrent-gemma": "elsewhere",
}  # fmt: skip
SERVED = [name for name in EVERY if name not in REFUSED and name != "phi3-longrope-crossing"]
PROMPT = torch.arange(3, 43)[None] * 7 % 97 + 2
HOW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def built(name: str) -> PreTrainedModel:
    model = ARCHS[name].build()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return built(request.param)


def generate(model: PreTrainedModel, ids: Tensor, cache: MemoryCache | None = None, **how: Any) -> Tensor:
    torch.manual_seed(11)
    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    given = {"attention_mask": torch.ones_like(ids), **HOW, **how} | ({name: cache} if cache is not None else {})
    return model.generate(ids, **given)  # type: ignore[return-value, operator]


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """The tokens that each forward computes, padding included."""
    found: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: found.append([*args, kwargs.get("input_ids")][0].numel()),
        with_kwargs=True,
    )
    try:
        yield found
    finally:
        hook.remove()


def turns(model: PreTrainedModel, memory: Attached) -> None:
    """The same prompt twice, and one that continues the answer: tokens equal, and all but what is new is read."""
    answer = generate(model, PROMPT)
    longer = torch.cat([answer, PROMPT[:, :9]], 1)
    for ids, expected, read in ((PROMPT, answer, 0), (PROMPT, answer, 39), (longer, generate(model, longer), 45)):
        cache = memory.cache()
        assert torch.equal(generate(model, ids, cache), expected)
        assert cache.recalls[0].restored == read
        memory.check()


def test_it_generates_the_same_tokens_and_reads_what_earlier_calls_computed(model: PreTrainedModel) -> None:
    with kvcellar.attach(model, cache_bytes=32 << 20) as memory:
        turns(model, memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_so_it_does_with_every_architecture(name: str) -> None:
    model = built(name)
    with kvcellar.attach(model, cache_bytes=32 << 20) as memory:
        turns(model, memory)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_cache_cannot_be_shared_is_refused(name: str) -> None:
    model = built(name)
    with pytest.raises(ModelRefused, match=REFUSED[name]):
        kvcellar.attach(model)
    assert "generate" not in vars(model)


def test_a_text_beyond_the_context_is_neither_read_nor_kept() -> None:
    model = built("phi3-longrope-crossing")  # its frequencies change after 16 tokens
    memory = kvcellar.attach(model)
    for _ in range(2):
        cache = memory.cache()
        assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))
        assert cache.recalls[0].restored == 0
        assert not memory.prefixes.prefixes.tree.total().tokens


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2},
    "beam search": {"num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "several completions": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
}

ALONE = {  # what does not work without a memory, either
    ("mamba", "chunked prefill"), ("mamba", "prompt lookup"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_decoding_mode_gives_the_same_tokens(model: PreTrainedModel, mode: str) -> None:
    if (model.config.model_type, mode) in ALONE:
        pytest.skip("transformers refuses it")
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    expected = generate(model, PROMPT, **MODES[mode])
    for _ in range(2):
        assert torch.equal(generate(model, PROMPT, memory.cache(), **MODES[mode]), expected)
        memory.check()


def test_assisted_generation_gives_the_same_tokens() -> None:
    model, assistant = built("llama"), built("qwen3")
    memory = kvcellar.attach(model)
    expected = generate(model, PROMPT, assistant_model=assistant)
    for _ in range(2):
        assert torch.equal(generate(model, PROMPT, memory.cache(), assistant_model=assistant), expected)


def test_a_batch_with_padding_on_the_left_gives_the_same_tokens(model: PreTrainedModel) -> None:
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :13], mask[2, :4] = 0, 0
    ids = torch.cat([PROMPT, PROMPT.roll(13, 1), PROMPT.roll(1, 1)]) * mask
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    expected = generate(model, ids, attention_mask=mask)
    for read in (0, 39 - 13):
        cache = memory.cache()
        assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
        assert cache.recalls[1].restored == read
        memory.check()
    alone = memory.cache()  # a row of the batch, without its padding
    assert torch.equal(generate(model, ids[1:2, 13:], alone)[:, 27:], generate(model, ids[1:2, 13:])[:, 27:])
    assert alone.recalls[0].restored == 26


def test_a_short_row_of_which_nothing_is_known_is_computed_beside_one_that_is(model: PreTrainedModel) -> None:
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    generate(model, PROMPT, memory.cache())
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :30] = 0
    ids = torch.cat([PROMPT, PROMPT.roll(7, 1)]) * mask
    expected = generate(model, ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, memory.cache(), attention_mask=mask), expected)
    memory.check()


def test_a_batch_with_padding_on_the_right_gives_the_same_tokens() -> None:
    model = built("llama")
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    ids = PROMPT.repeat(2, 1) * mask
    memory = kvcellar.attach(model)
    for _ in range(2):
        assert torch.equal(
            generate(model, ids, memory.cache(), attention_mask=mask), generate(model, ids, attention_mask=mask)
        )
    assert torch.equal(generate(model, PROMPT, memory.cache()), generate(model, PROMPT))


def test_samples_of_one_prompt_compute_it_once(model: PreTrainedModel) -> None:
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    with counted(model) as tokens:
        generate(model, PROMPT, memory.cache(), num_return_sequences=4, do_sample=True, max_new_tokens=1)
        assert sum(tokens) == 39 + 4
        tokens.clear()
        generate(model, PROMPT.roll(5, 1).repeat(4, 1), memory.cache(), do_sample=True, max_new_tokens=1)
        assert sum(tokens) == 39 + 4


def test_a_loop_of_ones_own_reads_with_input_ids() -> None:
    model = built("qwen2-sliding")
    memory = kvcellar.attach(model)
    generate(model, PROMPT, memory.cache())
    cache = memory.cache(PROMPT)
    read = cache.get_seq_length()
    assert read == 39
    with torch.no_grad():
        logits = model(PROMPT[:, read:], past_key_values=cache).logits[:, -1]
        assert torch.allclose(logits, model(PROMPT).logits[:, -1], atol=1e-4)
    other = memory.cache()
    with torch.no_grad():
        model(PROMPT.roll(3, 1), past_key_values=other)
    assert [other.keep(), other.keep()] == [40, 0]
    assert memory.cache(torch.cat([PROMPT.roll(3, 1), PROMPT], 1)).get_seq_length() == 40


def test_a_cache_is_forked_rewound_and_used_again(model: PreTrainedModel) -> None:
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    cache = memory.cache()
    answer = generate(model, PROMPT, cache)
    more = torch.cat([answer, PROMPT[:, 5:8]], 1)
    twin = copy.deepcopy(cache)
    assert torch.equal(generate(model, more, twin), generate(model, more))
    assert torch.equal(generate(model, more.roll(1, 1), cache), generate(model, more.roll(1, 1)))  # another text
    cut = memory.cache()
    generate(model, PROMPT, cut)
    if memory.kept.anywhere:
        cut.crop(-20)
        again = torch.cat([PROMPT[:, :29], PROMPT[:, 3:9]], 1)
        assert torch.equal(generate(model, again, cut), generate(model, again))
        cut.keep()
        assert memory.cache(again).get_seq_length() == 34
    memory.check()


class Fails(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError


def test_an_error_leaves_a_memory_that_can_be_used(model: PreTrainedModel) -> None:
    memory = kvcellar.attach(model, cache_bytes=32 << 20)
    with pytest.raises(ZeroDivisionError):
        generate(model, PROMPT, memory.cache(), stopping_criteria=StoppingCriteriaList([Fails()]))
    memory.check()
    assert memory.cache(torch.cat([PROMPT, PROMPT[:, :9]], 1)).get_seq_length() >= 39  # what was computed is known
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-2]
    hook = last.register_forward_hook(lambda *_: 1 / 0)
    broken = memory.cache()
    with pytest.raises(ZeroDivisionError):
        generate(model, PROMPT.roll(7, 1), broken)
    hook.remove()
    assert broken.keep() == 0
    assert torch.equal(generate(model, PROMPT.roll(9, 1), broken), generate(model, PROMPT.roll(9, 1)))  # begins anew
    memory.check()
    assert torch.equal(generate(model, PROMPT, memory.cache()), generate(model, PROMPT))
    assert torch.equal(generate(model, PROMPT.roll(7, 1), memory.cache()), generate(model, PROMPT.roll(7, 1)))


def test_forward_and_training_are_what_they_were() -> None:
    alone, model = built("llama"), built("llama")
    memory = kvcellar.attach(model)
    for one in (alone, model):
        one.train()
        one(PROMPT, labels=PROMPT).loss.backward()
        one.eval()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(alone.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
    assert torch.equal(generate(model, PROMPT), generate(alone, PROMPT))
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(generate(twin, PROMPT), generate(alone, PROMPT))
    assert vars(copy.deepcopy(model))["generate"].__self__ is not model
    memory.detach()
    assert "generate" not in vars(model)
    assert not [*model._forward_pre_hooks, *model._forward_hooks]


def test_nothing_is_read_after_weights_have_changed() -> None:
    model = built("llama")
    memory = kvcellar.attach(model)
    generate(model, PROMPT, memory.cache())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
    cache = memory.cache()
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))
    assert cache.recalls[0].restored == 0
    assert memory.cache(PROMPT).get_seq_length() == 39
    memory.clear()
    assert memory.cache(PROMPT).get_seq_length() == 0
    generate(model, PROMPT, memory.cache(namespace="one"))
    assert [memory.cache(PROMPT, namespace=name).get_seq_length() for name in ("one", "two")] == [39, 0]


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "lfm2"])
def test_what_was_used_least_makes_room(name: str) -> None:
    model = built(name)
    memory = kvcellar.attach(model, cache_bytes=1 << 18)
    room = min(memory.memory.storage.capacity().values())
    ids = PROMPT
    for turn in range(room // 40 + 3):
        ids = (PROMPT * (turn + 2)) % 97 + 2
        with torch.no_grad():
            cache = memory.cache()
            model(ids, past_key_values=cache)
            assert cache.keep() >= 39
    memory.check()
    assert memory.cache(torch.cat([ids, ids], 1)).get_seq_length() == 40
    assert memory.prefixes.prefixes.tree.total().lost


def test_a_cache_does_what_transformers_does() -> None:
    """Any sequence of its operations gives the same keys, values, lengths and masks."""
    model = built("qwen2-sliding")
    memory = kvcellar.attach(model)
    draw = torch.Generator().manual_seed(5)
    for recorded in (False, True):
        ours, theirs = memory.cache(), DynamicCache(config=model.config)
        for cache in (ours, theirs):
            if recorded:
                cache.activate_past_recording()
        rows = 2
        for turn in range(60):
            act = int(torch.randint(0, 7 if recorded else 5, (), generator=draw))
            new = torch.randn(2, rows, 2, int(torch.randint(1, 12, (), generator=draw)), 16, generator=draw)
            index = torch.randint(0, rows, (rows,), generator=draw)
            for layer in range(4):
                found = [cache.update(new[0], new[1], layer) for cache in (ours, theirs)]
                assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
            for cache in (ours, theirs):
                if act == 1:
                    cache.reorder_cache(index)  # type: ignore[arg-type]
                elif act == 2 and turn % 7 == 0:
                    cache.reset()
                elif act > 4:
                    cache.crop(1 - new.shape[3])
            assert [ours.get_seq_length(i) for i in range(4)] == [theirs.get_seq_length(i) for i in range(4)]
            assert [ours.get_mask_sizes(3, i) for i in range(4)] == [theirs.get_mask_sizes(3, i) for i in range(4)]
            assert (ours.is_sliding, ours.is_initialized, ours.is_croppable) == (
                theirs.is_sliding, theirs.is_initialized, theirs.is_croppable,
            )  # fmt: skip
        assert ours.keep() == 0  # nothing says which tokens these are


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    model: Any = built("llama")
    memory = kvcellar.attach(model)
    with pytest.raises(BadRequest, match="DynamicCache"):
        model.generate(inputs_embeds=model.get_input_embeddings()(PROMPT), past_key_values=memory.cache(), **HOW)
    with pytest.raises(BadRequest, match="DynamicCache"):
        model(PROMPT, pixel_values=torch.zeros(1), past_key_values=memory.cache())
    twin = copy.deepcopy(model)
    with pytest.raises(BadRequest, match="another model"):
        twin(PROMPT, past_key_values=memory.cache())
    cache = memory.cache()
    generate(model, PROMPT.repeat(3, 1), cache)
    with pytest.raises(BadRequest, match="rows"):
        model(PROMPT.repeat(4, 1), past_key_values=cache)
    model.train()
    with pytest.raises(BadRequest, match="eval"):
        generate(model, PROMPT, memory.cache())
    model.eval()
    model.bfloat16()
    with pytest.raises(BadRequest, match=r"was cpu torch\.float32 when the memory was attached"):
        generate(model, PROMPT, memory.cache())
    model.float()
    model.generate = lambda: None
    with pytest.raises(BadRequest, match="a generate"):
        kvcellar.attach(model)


def test_what_is_computed_of_images_is_not_shared() -> None:
    pictures = pictures_of("llava")
    memory = kvcellar.attach(pictures.model)
    ids = torch.tensor([[5, 6, *[PLACEHOLDER] * pictures.one.rows, 7, 8]])
    images = inputs_of([pictures.one])
    with pytest.raises(BadRequest, match="pixel_values depends on more than tokens"):
        pictures.model.generate(ids, **images, past_key_values=memory.cache(), **HOW)
    assert memory.cache(ids).get_seq_length() == 0
    with pytest.raises(BadRequest, match="mm_encoder_outputs depends on more than tokens"):
        pictures.model(ids, mm_encoder_outputs={"image": 1}, past_key_values=memory.cache())


def test_a_model_has_one_memory_after_the_other_and_so_has_its_copy() -> None:
    model: Any = built("llama")
    first, expected = kvcellar.attach(model), generate(model, PROMPT)
    twin = copy.deepcopy(model)
    with pytest.raises(BadRequest, match="attached to this model already"):
        kvcellar.attach(model)
    first.detach()
    for one in (model, twin):
        with kvcellar.attach(one) as memory:
            turns(one, memory)
        assert {"generate", "_kvcellar_attached"}.isdisjoint(vars(one))
        assert not one._forward_hooks
        assert torch.equal(generate(one, PROMPT), expected)
    first.check()


def test_each_row_of_a_batch_is_compared_with_what_a_cache_has() -> None:
    model = built("llama")
    memory = kvcellar.attach(model)
    cache = memory.cache()
    answer = generate(model, PROMPT, cache)
    rows = torch.cat([torch.cat([one, PROMPT[:, 3:6]], 1) for one in (answer, answer.roll(1, 1), answer.roll(2, 1))])
    assert torch.equal(generate(model, rows, cache), generate(model, rows))
    memory.check()


def test_what_did_not_see_a_column_is_not_kept() -> None:
    model: Any = built("llama")
    memory = kvcellar.attach(model)
    cache = memory.cache(PROMPT)
    with torch.no_grad():
        model(PROMPT[:, :20], past_key_values=cache)
        mask = torch.ones(1, 40, dtype=torch.long)
        mask[:, 5] = 0
        model(PROMPT[:, 20:], attention_mask=mask, past_key_values=cache)
    assert cache.keep() == 0
    assert memory.cache(PROMPT).get_seq_length() == 0


def test_padding_is_that_of_the_model_where_a_config_does_not_say_it() -> None:
    model: Any = built("lfm2")
    model.generation_config.pad_token_id = 0
    rows = torch.cat([torch.cat([torch.zeros_like(PROMPT[:, :7]), PROMPT[:, :33]], 1), PROMPT])
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    expected = model.generate(rows, generation_config=config)
    memory = kvcellar.attach(model)
    for _ in range(2):
        assert torch.equal(model.generate(rows, generation_config=config, past_key_values=memory.cache()), expected)


def test_what_autocast_has_computed_is_not_read_without_it() -> None:
    model = built("llama")
    memory = kvcellar.attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, PROMPT, memory.cache())
    cache = memory.cache()
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))
    assert cache.recalls[0].restored == 0


def test_a_recurrent_cache_begins_anew_with_other_rows() -> None:
    model = built("lfm2")
    memory = kvcellar.attach(model)
    cache = memory.cache()
    generate(model, PROMPT, cache)
    rows = torch.cat([PROMPT.roll(at, 1) for at in (1, 2, 3)])
    assert torch.equal(generate(model, rows, cache), generate(model, rows))


LONG = torch.arange(3, 133)[None] * 7 % 97 + 2  # fewer than 64 new tokens are not stored


def stored(model: PreTrainedModel, place: Path) -> Attached:
    return kvcellar.attach(model, cache_bytes=32 << 20, store=place, store_bytes=1 << 26)


def restarted(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = generate(model, LONG)
    for read in (0, 129):
        with stored(copy.deepcopy(model), tmp_path) as memory:  # as loaded again: other tensors with the same content
            cache = memory.cache()
            assert torch.equal(generate(memory.model, LONG, cache), expected)
            assert cache.recalls[0].restored == read
            assert cache.recalls[0].sources == ((("disk", read),) if read else ())
            memory.check()


def test_a_later_process_reads_what_an_earlier_one_has_stored(model: PreTrainedModel, tmp_path: Path) -> None:
    restarted(model, tmp_path)
    alone = copy.deepcopy(model)
    with kvcellar.attach(alone, cache_bytes=32 << 20) as memory:
        assert memory.cache(LONG).get_seq_length() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERVED if name != "phi3-longrope"])  # its context is shorter
def test_so_does_one_with_every_architecture(name: str, tmp_path: Path) -> None:
    restarted(built(name), tmp_path)


def test_rows_of_a_batch_are_read_back_together(tmp_path: Path) -> None:
    model = built("qwen2-sliding")
    mask = torch.ones(3, 130, dtype=torch.long)
    mask[1, :20] = 0
    ids = torch.cat([LONG, LONG.roll(20, 1), LONG]) * mask
    expected = generate(model, ids, attention_mask=mask)
    for read in (0, 129):
        with stored(model, tmp_path) as memory:
            cache = memory.cache()
            assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
            assert cache.recalls[0].restored == read
            memory.check()


def other_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters())[5, 0] += 1


def other_config(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps *= 2


@pytest.mark.parametrize("change", [other_weights, other_config])
def test_what_another_network_has_stored_is_refused_by_name(
    change: Callable[[PreTrainedModel], None], tmp_path: Path
) -> None:
    first, second = built("llama"), built("llama")
    with stored(first, tmp_path) as memory:
        generate(first, LONG, memory.cache())
    change(second)
    with stored(second, tmp_path) as memory:
        cache = memory.cache()
        assert torch.equal(generate(second, LONG, cache), generate(second, LONG))
        assert (cache.recalls[0].restored, cache.recalls[0].reason) == (0, "other weights")


def a_hook(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0").register_forward_hook(lambda module, args, output: output)


def a_scaling(model: PreTrainedModel) -> None:
    vars(model.get_submodule("model.layers.0"))["scaling"] = {"default": 2.0}


def a_rope(model: PreTrainedModel) -> None:
    model.get_submodule("model.rotary_emb").get_buffer("inv_freq").mul_(0.5)


def a_class(model: PreTrainedModel) -> None:
    class Other(type(model)):
        pass

    Other.__qualname__ = type(model).__qualname__
    model.__class__ = Other


@pytest.mark.parametrize("change", [a_hook, a_scaling, a_rope, a_class])
def test_what_changes_a_network_beside_its_weights_has_entries_of_its_own(change: Any, tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        generate(model, LONG, memory.cache())
    other = built("llama")
    change(other)
    for read in (0, 129):
        with stored(other, tmp_path) as memory:
            assert memory.cache(LONG).get_seq_length() == read
            generate(other, LONG, memory.cache())


def test_what_a_cache_has_from_before_clear_is_not_stored_as_of_other_weights(tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        cache = memory.cache()
        longer = generate(model, LONG, cache)
        for weight in model.parameters():
            weight.data.mul_(1.5)
        memory.clear()
        generate(model, torch.cat([longer, LONG[:, :70]], 1), cache)
        assert torch.equal(generate(model, longer, memory.cache()), generate(model, longer))


def test_clear_outside_of_autocast_mixes_nothing(tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                generate(model, LONG, memory.cache())
            memory.clear()
        assert memory.cache(LONG).get_seq_length() == 0


def test_buffers_that_are_saved_with_weights_are_weights() -> None:
    model = built("deepseek-v3")
    with kvcellar.attach(model, cache_bytes=1 << 26) as memory:
        generate(model, LONG, memory.cache())
        assert memory.cache(LONG).get_seq_length() > 0
        with torch.no_grad():
            next(one for name, one in model.named_buffers() if "correction_bias" in name).add_(1.0)
        assert memory.cache(LONG).get_seq_length() == 0


def test_a_second_detach_leaves_the_next_memory_alone() -> None:
    model = built("llama")
    first = kvcellar.attach(model, cache_bytes=1 << 26)
    first.detach()
    with kvcellar.attach(model, cache_bytes=1 << 26) as second:
        first.detach()
        generate(model, LONG, second.cache())
        assert second.cache(LONG).get_seq_length() > 0


def test_a_store_that_could_not_be_opened_again_is_tried_again_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        generate(model, LONG, memory.cache())
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("kvcellar.engine.load.attach.network_of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                generate(model, LONG, memory.cache())
        memory.check()
        cache = memory.cache()
        assert torch.equal(generate(model, LONG, cache), generate(model, LONG))
        assert cache.recalls[0].restored == 129


def test_what_autocast_has_stored_is_refused_without_it(tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        for autocast, read in ((True, 0), (False, 0), (True, 129)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert memory.cache(LONG).get_seq_length() == read
                generate(model, LONG, memory.cache())
                memory.check()


def test_a_store_is_that_of_the_present_weights(tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        generate(model, LONG, memory.cache())
        for factor, read in ((2.0, 0), (0.5, 129)):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(factor)
            cache = memory.cache()
            assert torch.equal(generate(model, LONG, cache), generate(model, LONG))
            assert cache.recalls[0].restored == read
            memory.check()


def test_a_damaged_entry_is_computed_again(tmp_path: Path) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        generate(model, LONG, memory.cache())
    (entry,) = (path for path in (tmp_path / "data").rglob("*") if path.is_file())
    content = bytearray(entry.read_bytes())
    content[-9] ^= 1
    entry.write_bytes(content)
    with stored(model, tmp_path) as memory:
        cache = memory.cache()
        assert torch.equal(generate(model, LONG, cache), generate(model, LONG))
        assert (cache.recalls[0].restored, cache.recalls[0].reason) == (0, "damaged")
        memory.check()


def test_an_interrupted_call_reads_nothing_more_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    with stored(model, tmp_path) as memory:
        generate(model, LONG, memory.cache())
    with stored(model, tmp_path) as memory:
        monkeypatch.setattr(memory, "_posted", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            generate(model, LONG, memory.cache())
        monkeypatch.undo()
        memory.check()
        cache = memory.cache()
        assert torch.equal(generate(model, LONG, cache), generate(model, LONG))
        assert cache.recalls[0].restored == 129


class Interrupted:
    def get(self, timeout: float) -> None:
        raise KeyboardInterrupt
