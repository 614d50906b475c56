"""The zoo's animals are alive: each hears every token it may see, every position, and nothing from the future."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo import (
    ARCHS,
    ATTENTION,
    KINDS,
    RECURRENT,
    REFUSED_OR_UNUSUAL,
    WINDOW,
    Arch,
    auto_config,
    layers,
    reference_logits,
    sweep,
)
from tests.zoo_test_support.sweep import NO_MODEL, of_type

LENGTH = 40
TOKENS = torch.randint(3, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
HEARD = 1e-2
SILENT = 1e-5
FAR = 4096  # wider than any context here

every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)


def moved(before: Tensor, after: Tensor) -> float:
    """The largest difference of logits, as a part of the largest logit."""
    return float((after - before).abs().max() / before.abs().max())


def changed(pos: int) -> list[int]:
    other = 3 + (TOKENS[pos] + 7) % 98
    return [*TOKENS[:pos], other, *TOKENS[pos + 1 :]]


def swapped(pos: int) -> list[int]:
    return [*TOKENS[:pos], TOKENS[pos + 1], TOKENS[pos], *TOKENS[pos + 2 :]]


def early(arch: Arch) -> int:
    """The second position, or where every layer looks through a window, the first that even one of them sees."""
    return LENGTH - WINDOW if arch.kinds == ("sliding",) else 1


@every_arch
def test_the_last_logits_hear_an_early_token_and_the_order_but_not_the_future(arch: Arch) -> None:
    model = arch.build()
    logits = reference_logits(model, TOKENS)
    assert logits.shape == (LENGTH, arch.vocab)
    assert logits.isfinite().all()
    assert moved(logits[-1], reference_logits(model, changed(early(arch)))[-1]) > HEARD
    # Two of them, because an index may see neither position of one.
    assert max(moved(logits[-1], reference_logits(model, swapped(LENGTH - back))[-1]) for back in (4, 10)) > HEARD
    assert moved(logits[:30], reference_logits(model, changed(30))[:30]) < SILENT


@every_arch
def test_positions_are_heard_by_those_that_are_told_them(arch: Arch) -> None:
    model = arch.build()
    halved = torch.arange(LENGTH)[None] // 2
    # All ones, because without a mask jumps in the positions are taken for borders between packed sequences.
    everything = torch.ones(1, LENGTH, dtype=torch.long)
    with torch.no_grad():
        ids = torch.tensor([TOKENS])
        logits = model(input_ids=ids, position_ids=halved, attention_mask=everything, use_cache=False).logits[0]
    told = not {"nope", "alibi"} & set(arch.kinds)
    assert (moved(reference_logits(model, TOKENS)[-1], logits[-1]) > HEARD) == told


WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
TEMPERATURE = ("llama_4_scaling_beta", "original_max_position_embeddings")


def without_window(arch: Arch) -> PreTrainedModel:
    config = arch.config()
    return arch.build(**{name: FAR for name in WINDOWS if getattr(config, name, None) is not None})


def without_sinks(arch: Arch) -> PreTrainedModel:
    model = arch.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.fill_(-1e4)
    return model


def without_temperature(arch: Arch) -> PreTrainedModel:
    rope = arch.config().rope_parameters | {"llama_4_scaling_beta": 0.0}
    return arch.build(attn_temperature_tuning=False, rope_parameters=rope)


def with_plain_rope(arch: Arch) -> PreTrainedModel:
    """The temperature of Ministral 3 lives in the rope parameters, and stays."""
    kept = {name: value for name, value in arch.config().rope_parameters.items() if name in TEMPERATURE}
    return arch.build(rope_parameters=kept | {"rope_type": "default", "rope_theta": 10000.0})


FORGET: dict[str, Callable[[Arch], PreTrainedModel]] = {
    "sliding": without_window,
    "chunked": lambda arch: arch.build(attention_chunk_size=FAR),
    "softcap": lambda arch: arch.build(attn_logit_softcapping=None),
    "sinks": without_sinks,
    "rope-scaled": with_plain_rope,
    "temperature": without_temperature,
    "indexed": lambda arch: arch.build(index_topk=FAR, index_topk_blocks=FAR),
}
# As wide as the window is a weight of theirs, so a wider one makes another network.
SHAPED = {("sliding", "inkling"), ("sliding", "inkling2")}
FORGETTING = [
    pytest.param(arch, kind, id=f"{arch.name}-{kind}")
    for arch in ARCHS.values()
    for kind in FORGET
    if kind in arch.kinds and (kind, arch.name) not in SHAPED
]


@pytest.mark.parametrize(("arch", "kind"), FORGETTING)
def test_who_forgets_a_kind_gets_other_logits(arch: Arch, kind: str) -> None:
    model, forgetful = arch.build(), FORGET[kind](arch)
    assert moved(reference_logits(model, TOKENS)[-1], reference_logits(forgetful, TOKENS)[-1]) > HEARD


@pytest.mark.parametrize("name", [name for name, arch in ARCHS.items() if arch.kinds == ("sliding",)])
def test_a_stack_of_windows_sees_so_far_and_no_further(name: str) -> None:
    model = ARCHS[name].build()
    first = LENGTH - 1 - model.config.num_hidden_layers * (WINDOW - 1)
    logits = reference_logits(model, TOKENS)[-1]
    assert moved(logits, reference_logits(model, changed(first - 1))[-1]) < SILENT
    assert moved(logits, reference_logits(model, changed(first))[-1]) > SILENT


def test_a_stack_of_chunks_sees_its_own_chunk() -> None:
    model = ARCHS["llama4"].build(layer_types=layers("CCCC"))
    first = (LENGTH - 1) // WINDOW * WINDOW
    logits = reference_logits(model, TOKENS)[-1]
    assert moved(logits, reference_logits(model, changed(first - 1))[-1]) < SILENT
    assert moved(logits, reference_logits(model, changed(first))[-1]) > HEARD


@every_arch
def test_kinds_are_what_config_and_modules_say(arch: Arch) -> None:
    model = arch.build()
    types = getattr(model.config, "layer_types", None) or []
    said = {
        "chunked": "chunked_attention" in types,
        "conv": "conv" in types
        or getattr(model.config, "conv_kernel_size", None) is not None
        or "cca_time0" in vars(model.config),
        "mla": getattr(model.config, "kv_lora_rank", None) is not None,
        "moe": any(name.endswith("experts") for name, _ in model.named_modules()),
        "shared-kv": "reuse" in getattr(model.config, "kv_sharing_modes", []),
        "sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
    }
    assert {kind for kind in said if kind in arch.kinds} == {kind for kind, there in said.items() if there}
    assert "sliding" in arch.kinds or not any("sliding" in layer_type for layer_type in types)
    assert set(arch.kinds) <= set(KINDS)
    assert model.config.vocab_size == arch.vocab


def test_every_animal_is_in_one_group() -> None:
    assert (*ATTENTION, *RECURRENT, *REFUSED_OR_UNUSUAL) == tuple(ARCHS)
    assert all(name == arch.name for name, arch in ARCHS.items())


def test_the_same_name_is_the_same_network_and_nobody_elses_draws_change() -> None:
    before = torch.get_rng_state()
    one, two = ARCHS["mamba2"].build(), ARCHS["mamba2"].build()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_reference_logits_are_eager_and_leave_the_implementation_as_it_was() -> None:
    model = ARCHS["llama"].build()
    eager = reference_logits(model, TOKENS)
    model.set_attn_implementation("sdpa")
    assert torch.equal(reference_logits(model, TOKENS), eager)
    assert model.config._attn_implementation == "sdpa"


def test_the_sweep_answers_for_every_causal_model_type() -> None:
    found = sweep()
    assert set(found) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {model_type for model_type, answer in found.items() if isinstance(answer, str)} == set(NO_MODEL)
    assert {arch.model_type for arch in ARCHS.values()} <= set(found) - set(NO_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NO_MODEL)))
def test_what_the_sweep_found_runs(model_type: str) -> None:
    model = AutoModelForCausalLM.from_config(auto_config(model_type), attn_implementation="eager").eval()
    assert reference_logits(model, TOKENS).isfinite().all()
    assert sum(weight.numel() for weight in model.parameters()) < 20e6


def test_a_table_of_sines_that_is_not_trained_stays_one() -> None:
    sines, cosines = of_type("roformer").get_parameter("roformer.encoder.embed_positions.weight").chunk(2, dim=1)
    torch.testing.assert_close(sines**2 + cosines**2, torch.ones_like(sines))
