"""The architectures of the zoo are sensitive: logits depend on every visible token and position, on no later token."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.selection import HELD
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
SENSITIVE = 1e-2
INSENSITIVE = 1e-5
FAR = 4096  # wider than any context here

every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)


def moved(before: Tensor, after: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return float((after - before).abs().max() / before.abs().max())


def changed(pos: int) -> list[int]:
    other = 3 + (TOKENS[pos] + 7) % 98
    return [*TOKENS[:pos], other, *TOKENS[pos + 1 :]]


def swapped(pos: int) -> list[int]:
    return [*TOKENS[:pos], TOKENS[pos + 1], TOKENS[pos], *TOKENS[pos + 2 :]]


def early(arch: Arch) -> int:
    """The second position; if all layers have windows, the first position that a single layer sees."""
    return LENGTH - WINDOW if arch.kinds == ("sliding",) else 1


@every_arch
def test_logits_depend_on_early_tokens_and_their_order_but_not_on_later_tokens(arch: Arch) -> None:
    model = arch.build()
    logits = reference_logits(model, TOKENS)
    assert logits.shape == (LENGTH, arch.vocab)
    assert logits.isfinite().all()
    assert moved(logits[-1], reference_logits(model, changed(early(arch)))[-1]) > SENSITIVE
    # At two places, because an index may select neither position of one.
    assert max(moved(logits[-1], reference_logits(model, swapped(LENGTH - back))[-1]) for back in (4, 10)) > SENSITIVE
    assert moved(logits[:30], reference_logits(model, changed(30))[:30]) < INSENSITIVE


@every_arch
def test_position_ids_change_logits_unless_the_model_uses_none(arch: Arch) -> None:
    model = arch.build()
    halved = torch.arange(LENGTH)[None] // 2
    # All ones, because without a mask jumps in the positions are taken for boundaries of packed sequences.
    everything = torch.ones(1, LENGTH, dtype=torch.long)
    with torch.no_grad():
        ids = torch.tensor([TOKENS])
        logits = model(input_ids=ids, position_ids=halved, attention_mask=everything, use_cache=False).logits[0]
    uses_positions = not {"nope", "alibi"} & set(arch.kinds)
    assert (moved(reference_logits(model, TOKENS)[-1], logits[-1]) > SENSITIVE) == uses_positions


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
    """The temperature of Ministral 3 is in the rope parameters, and is kept."""
    kept = {name: value for name, value in arch.config().rope_parameters.items() if name in TEMPERATURE}
    return arch.build(rope_parameters=kept | {"rope_type": "default", "rope_theta": 10000.0})


WITHOUT: dict[str, Callable[[Arch], PreTrainedModel]] = {
    "sliding": without_window,
    "chunked": lambda arch: arch.build(attention_chunk_size=FAR),
    "softcap": lambda arch: arch.build(attn_logit_softcapping=None),
    "sinks": without_sinks,
    "rope-scaled": with_plain_rope,
    "temperature": without_temperature,
    "indexed": lambda arch: arch.build(index_topk=FAR, index_topk_blocks=FAR),
}
# A weight of these is as wide as the window, so another window is another network.
SHAPED = {("sliding", "inkling"), ("sliding", "inkling2")}
WITHOUT_A_FEATURE = [
    pytest.param(arch, kind, id=f"{arch.name}-{kind}")
    for arch in ARCHS.values()
    for kind in WITHOUT
    if kind in arch.kinds and (kind, arch.name) not in SHAPED
]


@pytest.mark.parametrize(("arch", "kind"), WITHOUT_A_FEATURE)
def test_logits_differ_without_a_feature(arch: Arch, kind: str) -> None:
    model, changed_model = arch.build(), WITHOUT[kind](arch)
    assert moved(reference_logits(model, TOKENS)[-1], reference_logits(changed_model, TOKENS)[-1]) > SENSITIVE


def test_all_kinds_are_described_and_are_those_of_some_architecture() -> None:
    assert {kind for arch in ARCHS.values() for kind in arch.kinds} == set(KINDS)
    assert set(KINDS) >= set(HELD)


@pytest.mark.parametrize("name", [name for name, arch in ARCHS.items() if arch.kinds == ("sliding",)])
def test_a_stack_of_sliding_layers_sees_exactly_its_receptive_field(name: str) -> None:
    model = ARCHS[name].build()
    first = LENGTH - 1 - model.config.num_hidden_layers * (WINDOW - 1)
    logits = reference_logits(model, TOKENS)[-1]
    assert moved(logits, reference_logits(model, changed(first - 1))[-1]) < INSENSITIVE
    assert moved(logits, reference_logits(model, changed(first))[-1]) > INSENSITIVE


def test_a_stack_of_chunked_layers_sees_only_its_chunk() -> None:
    model = ARCHS["llama4"].build(layer_types=layers("CCCC"))
    first = (LENGTH - 1) // WINDOW * WINDOW
    logits = reference_logits(model, TOKENS)[-1]
    assert moved(logits, reference_logits(model, changed(first - 1))[-1]) < INSENSITIVE
    assert moved(logits, reference_logits(model, changed(first))[-1]) > SENSITIVE


@every_arch
def test_kinds_match_config_and_modules(arch: Arch) -> None:
    model = arch.build()
    types = getattr(model.config, "layer_types", None) or []
    message = {
        "chunked": "chunked_attention" in types,
        "conv": "conv" in types
        or getattr(model.config, "conv_kernel_size", None) is not None
        or "cca_time0" in vars(model.config),
        "mla": getattr(model.config, "kv_lora_rank", None) is not None,
        "moe": any(name.endswith("experts") for name, _ in model.named_modules()),
        "shared-kv": "reuse" in getattr(model.config, "kv_sharing_modes", []),
        "sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
    }
    assert {kind for kind in message if kind in arch.kinds} == {kind for kind, there in message.items() if there}
    assert "sliding" in arch.kinds or not any("sliding" in layer_type for layer_type in types)
    assert set(arch.kinds) <= set(KINDS)
    assert model.config.vocab_size == arch.vocab


def test_every_architecture_is_in_one_list() -> None:
    assert (*ATTENTION, *RECURRENT, *REFUSED_OR_UNUSUAL) == tuple(ARCHS)
    assert all(name == arch.name for name, arch in ARCHS.items())


def test_a_build_is_deterministic_and_leaves_the_global_generator_unchanged() -> None:
    before = torch.get_rng_state()
    one, two = ARCHS["mamba2"].build(), ARCHS["mamba2"].build()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_reference_logits_use_eager_attention_and_restore_the_implementation() -> None:
    model = ARCHS["llama"].build()
    eager = reference_logits(model, TOKENS)
    model.set_attn_implementation("sdpa")
    assert torch.equal(reference_logits(model, TOKENS), eager)
    assert model.config._attn_implementation == "sdpa"


def test_the_sweep_covers_every_causal_model_type() -> None:
    found = sweep()
    assert set(found) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {model_type for model_type, config in found.items() if isinstance(config, str)} == set(NO_MODEL)
    assert {arch.model_type for arch in ARCHS.values()} <= set(found) - set(NO_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NO_MODEL)))
def test_every_swept_config_runs(model_type: str) -> None:
    model = AutoModelForCausalLM.from_config(auto_config(model_type), attn_implementation="eager").eval()
    assert reference_logits(model, TOKENS).isfinite().all()
    assert sum(weight.numel() for weight in model.parameters()) < 20e6


def test_fixed_sinusoidal_tables_keep_their_values() -> None:
    sines, cosines = of_type("roformer").get_parameter("roformer.encoder.embed_positions.weight").chunk(2, dim=1)
    torch.testing.assert_close(sines**2 + cosines**2, torch.ones_like(sines))
