"""A model with code that does something unusual is served solo with right logits, or refused with the reason."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import sharing_weights
from kvcellar.engine.models.registered import ATTENTION
from kvcellar.engine.models.seam import scoring_of
from kvcellar.engine.models.shape import recognise
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends, named
from kvcellar.memory.cells.layouts import Causal, Sliding
from tests.models.timeline import BOUND, Timeline, guest_and_reference, read, relative, run, small_memory
from tests.zoo import ARCHS, reference_logits

Wrap = Callable[..., Any]


def llama() -> PreTrainedModel:
    return ARCHS["llama"].build()


def around(module: nn.Module, wrap: Callable[..., Any]) -> None:
    """Replace the module's forward by `wrap(forward, ...)`."""
    module.forward = functools.partial(wrap, module.forward)


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("self_attn")]


def served_right(build: Callable[[], PreTrainedModel]) -> str:
    """Assert that it is served solo, with right logits over a timeline; returns why it is not served flat."""
    guest = build_guest(build(), backends())
    timeline = Timeline(guest, build(), seed=0)
    timeline.play()
    assert timeline.worst_difference() <= BOUND
    assert guest.mode == "solo"
    return str(guest.refused)


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(ModelRefused) as refused:
        build_guest(model, backends())
    assert model.config._attn_implementation == "eager", "a refused model has working attention"
    return str(refused.value)


# -- what its attention is called with --------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [torch.ones(4), 0.5, "deep", [1], True], ids=repr)
def test_an_unknown_keyword_of_attention_prevents_flat(extra: object) -> None:
    def build() -> PreTrainedModel:
        model = llama()
        around(attentions(model)[2], lambda forward, *args, **kw: forward(*args, temperature=extra, **kw))
        return model

    assert "called with ['temperature'], which is not supported" in served_right(build)


def test_attention_keywords_without_effect_are_accepted() -> None:
    q = torch.zeros(1, 2, 3, 16)
    message = scoring_of(q, {"position_bias": None, "cu_seq_lens_q": False, "dropout": 0.0, "sliding_window": 8})
    assert (message.scale, message.softcap, message.sinks) == (0.25, None, None)
    with pytest.raises(ModelRefused, match=r"\['block_indices', 'position_bias'\]"):
        scoring_of(q, {"position_bias": q, "block_indices": q, "scaling": 1.0})


# -- masks ------------------------------------------------------------------------------------------------------------


def masked(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Llama makes its causal masks with these additional rules."""
    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kw: original(*args, **kw, **how))


def every_second(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (q - k) % 2 == 0


def four_and_a_window(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (k < 4) | (k > q - 8)


def a_window_from_afar(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (q < 200) | (k > q - 100)


@pytest.mark.parametrize(
    ("rule", "sees"),
    [
        (every_second, "position 1 sees [1]"),
        (four_and_a_window, "position 12 sees [0, 1, 2, 3, 5, 6, 7, 8]"),
        (a_window_from_afar, "position 255 sees [156, 157"),
    ],
)
def test_a_mask_of_no_known_layout_is_served_solo(rule: Wrap, sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masked(monkeypatch, and_mask_function=rule)
    message = served_right(llama)
    assert "neither causal, nor sliding, nor chunked" in message
    assert sees in message


def test_a_layout_is_recognised_at_long_contexts_with_few_keys() -> None:
    def window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert k.numel() < 2000
        return (k <= q) & (k > q - 100_000)

    assert recognise(window, 100_000, 1 << 24, torch.device("cpu")) == Sliding(100_000)
    with pytest.raises(ModelRefused, match="neither causal"):
        recognise(window, 100_001, 1 << 24, torch.device("cpu"))
    with pytest.raises(ModelRefused, match="neither causal"):
        recognise(window, None, 1 << 24, torch.device("cpu"))
    assert recognise(window, 100_000, 100_000, torch.device("cpu")) == Causal()


def test_a_mask_that_sees_later_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    masked(monkeypatch, or_mask_function=lambda batch, head, q, k: k <= q + 1)
    message = refusal(llama())
    assert "position 0 sees [0, 1]" in message
    assert "solo: its logits differ" in message


def with_mask(change: Callable[[Any], Any]) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        model = llama()

        def forward(original: Wrap, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kw: Any) -> Any:
            return original(hidden_states, *args, attention_mask=change(attention_mask), **kw)

        around(attentions(model)[1], forward)
        return model

    return build


def without_its_diagonal(mask: Any) -> Any:
    """The last row does not see the key before its own."""
    hidden = torch.zeros(mask.shape, dtype=torch.bool)
    if mask.shape[-1] > 1:
        hidden[..., -1, -2] = True
    return mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def changed_in_place(mask: Any) -> Any:
    return mask.copy_(without_its_diagonal(mask))


@pytest.mark.parametrize("change", [lambda mask: mask.clone(), lambda mask: mask.repeat(1, 1, 1, 1)])
def test_a_mask_made_by_the_model_is_served_solo(change: Wrap) -> None:
    assert "a mask that the model made or changed by itself" in served_right(with_mask(change))


@pytest.mark.parametrize("change", [without_its_diagonal, changed_in_place, lambda mask: None])
def test_a_mask_that_depends_on_the_forward_is_refused(change: Wrap) -> None:
    message = refusal(with_mask(change)())
    assert "a mask that the model made or changed by itself" in message
    assert "solo: its logits differ" in message


def test_a_slice_of_the_mask_is_recognised() -> None:
    model = with_mask(lambda mask: mask[:, :, :, : mask.shape[-1]])()
    assert build_guest(model, backends()).mode == "flat"


# -- positions --------------------------------------------------------------------------------------------------------


def test_frequencies_that_depend_on_the_longest_sequence_are_refused() -> None:
    def stretched(original: Wrap, x: Tensor, position_ids: Tensor) -> Any:
        return original(x, position_ids / (1 + position_ids.max() / 64))

    model = llama()
    around(model.model.rotary_emb, stretched)
    message = refusal(model)
    assert "depend on how far other tokens are" in message
    assert "solo: its logits differ" in message


def scaled_by_past(temperature: Callable[[Any, int], Tensor]) -> Callable[[], PreTrainedModel]:
    """A model whose first layer scales its output by a temperature [T] of the cache's past length."""

    def build() -> PreTrainedModel:
        model = llama()

        def forward(original: Wrap, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kw: Any) -> Any:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            out, weights = original(hidden_states, *args, past_key_values=past_key_values, **kw)
            return out * temperature(past, hidden_states.shape[1])[None, :, None], weights

        around(attentions(model)[0], forward)
        return model

    return build


def by_range(past: Any, rows: int) -> Tensor:
    """Only after 100 positions, which a short test would not detect."""
    return 1 + torch.div(torch.arange(past, past + rows), 100, rounding_mode="floor").float()


def by_sum(past: Any, rows: int) -> Tensor:
    return 1 + torch.div(torch.arange(rows) + past, 10, rounding_mode="floor").float()


def test_the_past_length_is_that_of_each_sequence() -> None:
    build = scaled_by_past(by_sum)
    guest = build_guest(build(), backends())
    timeline = Timeline(guest, build(), seed=0)
    timeline.play()
    assert guest.mode == "flat"
    assert timeline.worst_difference() <= BOUND


# -- storing ----------------------------------------------------------------------------------------------------------


def test_a_layer_that_stores_twice_is_refused() -> None:
    model = llama()
    attentions(model)[3].layer_idx = 2
    assert "layer 2 stores keys and values twice" in refusal(model)


def test_a_layer_that_attends_twice_is_served_solo() -> None:
    assert ARCHS["diffllama"].build().config.model_type == "diffllama"
    assert "attends twice" in served_right(ARCHS["diffllama"].build)


def test_keys_used_outside_attention_are_served_solo() -> None:
    """A layer that adds the mean of all its keys so far, which needs the keys of one sequence, in order."""

    def build() -> PreTrainedModel:
        model = llama()

        def forward(original: Wrap, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kw: Any) -> Any:
            out, weights = original(hidden_states, *args, past_key_values=past_key_values, **kw)
            k = hidden_states[:, None]
            if past_key_values is not None:
                k, _ = past_key_values.update(k, k, 9)
            rows, keys = hidden_states.shape[1], k.shape[2]
            means = k[0, 0].cumsum(0) / torch.arange(1, keys + 1)[:, None]
            return out + means[None, keys - rows :], weights

        around(attentions(model)[0], forward)
        return model

    assert "layers [9] store keys that no attention call was seen to read" in served_right(build)


def test_a_model_that_ignores_the_wanted_rows_is_refused() -> None:
    model = llama()
    original = model.forward

    def forward(input_ids: Any, position_ids: Any = None, logits_to_keep: Any = 0, **kw: Any) -> Any:
        return original(input_ids=input_ids, position_ids=position_ids, **kw)

    model.forward = forward
    assert "its logits differ" in refusal(model)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinite_weights_are_refused(value: float) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = value
    assert "its logits are not finite: the weights are damaged" in refusal(model)


def test_float16_that_overflows_is_refused() -> None:
    model = llama().to(torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(60000)
    assert "torch.float16 is too narrow" in refusal(model)


def test_float64_is_served() -> None:
    guest = build_guest(llama().double(), backends())
    assert guest.mode == "flat"
    assert guest.verdict is not None
    assert guest.verdict.difference < 1e-6  # both are compared as float32


def test_the_model_of_a_guest_uses_our_attention_and_eval_mode() -> None:
    model = llama().train()
    guest = build_guest(model, backends())
    assert guest.model is model
    assert model.config._attn_implementation == ATTENTION
    assert not model.training


# -- more than one ----------------------------------------------------------------------------------------------------


def test_several_guests_on_shared_weights_are_right() -> None:
    model = llama()
    guests = [build_guest(sharing_weights(model), named(name)) for name in ("sdpa", "reference", None)]
    for guest in guests:
        timeline = Timeline(guest, llama(), seed=1)
        timeline.play()
        assert timeline.worst_difference() <= BOUND


def test_guests_in_several_threads_are_independent() -> None:
    names = ("llama", "gemma3", "gpt-oss", "bloom")
    timelines = [Timeline(build_guest(ARCHS[name].build(), backends()), ARCHS[name].build(), seed=2) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(Timeline.play, timelines))
    assert all(timeline.worst_difference() <= BOUND for timeline in timelines)


def test_two_memories_of_one_guest_are_independent() -> None:
    guest, reference = guest_and_reference("gemma3")
    texts = {
        seed: torch.randint(3, 101, (30,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)
    }
    memories = {seed: small_memory(guest, 40) for seed in texts}
    logits: dict[int, list[Tensor]] = {seed: [] for seed in texts}
    for a, b in ((0, 12), (12, 13), (13, 30)):
        for seed, text in texts.items():
            logits[seed] += read(guest, memories[seed], (1, text[a:b]))
    assert all(
        relative(torch.cat(logits[seed]), reference_logits(reference, text)) <= BOUND for seed, text in texts.items()
    )


def test_a_failed_step_can_be_abandoned() -> None:
    model = llama()
    guest = build_guest(model, backends())
    memory = small_memory(guest, 40)
    tokens = list(range(3, 33))
    logits = read(guest, memory, (1, tokens[:20]))
    layer = attentions(model)[2]
    original, layer.forward = layer.forward, raises
    with pytest.raises(MemoryError):
        run(guest, memory, [(1, tokens[20:25]), (2, tokens)])
    layer.forward = original
    memory.abandon()
    memory.check()
    assert memory.sequences == (1,)
    logits += read(guest, memory, (2, tokens[::-1]), (1, tokens[20:]))[1:]
    assert relative(torch.cat(logits), reference_logits(llama(), tokens)) <= BOUND


def raises(*args: Any, **kw: Any) -> Any:
    raise MemoryError("no room for scores")
