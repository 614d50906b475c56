"""Adapters of files: read as `peft` means them, or refused with the reason before anything is read."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvcellar.engine.models.adapters.adapters import Adapter, check_adapter, linear_layers, read_adapter, sizes_of
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.errors import AdapterRefused
from tests.models.lora import ends_with, layers_of, saved
from tests.zoo import ARCHS

MANY = 1 << 30


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return ARCHS["llama"].build()


def read(network: PreTrainedModel, *paths: Path, most: int = MANY) -> Adapter:
    return read_adapter(paths, network, most_bytes=lambda: most)


def product(adapter: Adapter, layer: str) -> torch.Tensor:
    return adapter.loras[layer].b @ adapter.loras[layer].a


def stored(path: Path, layer: str) -> torch.Tensor:
    tensors = load_file(path / "adapter_model.safetensors")
    name = f"base_model.model.{layer}"
    return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 4.0), ({"use_rslora": True}, 16 / math.sqrt(4)), ({"alpha_pattern": {r"0\.self_attn\..*_proj": 2}}, 0.5)],
)
def test_an_adapter_is_scaled_as_its_config_says(
    llama: PreTrainedModel, tmp_path: Path, fields: dict[str, Any], scale: float
) -> None:
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")), **fields)
    name = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(product(read(llama, path), name), scale * stored(path, name))


Q0, Q1 = (f"model.layers.{n}.self_attn.q_proj" for n in (0, 1))
SELECTIONS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "a list": ({"target_modules": ["q_proj", "down_proj"]}, ends_with("q_proj", "down_proj")),
    "a whole name": ({"target_modules": [Q1]}, lambda name: name == Q1),
    "a pattern": (
        {"target_modules": r"(?!.*[1-3]\.).*\.(q|k)_proj"},
        lambda name: ".0." in name and ends_with("q_proj", "k_proj")(name),
    ),
    "all-linear": ({"target_modules": "all-linear"}, lambda name: name != "lm_head"),
    "the head": ({"target_modules": ["lm_head"]}, ends_with("lm_head")),
    "excluded": ({"exclude_modules": ["v_proj"]}, ends_with("q_proj")),
    "excluded by a pattern": (
        {"exclude_modules": r".*\.0\..*"},
        lambda name: ".0." not in name and ends_with("q_proj", "v_proj")(name),
    ),
    "some layers": ({"layers_to_transform": [1]}, lambda name: ".1." in name and ends_with("q_proj", "v_proj")(name)),
    "one layer of a list": (
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        lambda name: ".0." in name and ends_with("q_proj", "v_proj")(name),
    ),
}


@pytest.mark.parametrize("kind", SELECTIONS)
def test_the_layers_that_a_config_selects_are_changed_and_no_others(
    llama: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    fields, selects = SELECTIONS[kind]
    layers = layers_of(llama, selects)
    assert layers
    assert read(llama, saved(tmp_path / "a", layers, **fields)).loras.keys() == layers.keys()


def test_ranks_may_differ_by_layer(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = layers_of(llama, ends_with("q_proj", "v_proj"))
    ranks = {name: 7 for name in layers if name.endswith("q_proj")}
    path = saved(tmp_path / "a", layers, ranks=ranks, rank_pattern={r"layers\.\d+\.self_attn\.q_proj": 7})
    adapter = read(llama, path)
    assert {name: len(one.a) for name, one in adapter.loras.items()} == {name: ranks.get(name, 4) for name in layers}
    torch.testing.assert_close(product(adapter, Q0), 16 / 7 * stored(path, Q0))
    assert adapter.rank == 7
    assert adapter.bytes == sum(one.a.nbytes + one.b.nbytes for one in adapter.loras.values())


def test_several_adapters_are_their_sum(llama: PreTrainedModel, tmp_path: Path) -> None:
    one = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj")), target_modules=["q_proj"])
    other = saved(
        tmp_path / "b",
        layers_of(llama, ends_with("q_proj", "k_proj")),
        seed=1,
        r=2,
        target_modules=["q_proj", "k_proj"],
    )
    both = read(llama, one, other)
    torch.testing.assert_close(product(both, Q0), 4 * stored(one, Q0) + 8 * stored(other, Q0))
    assert len(both.loras[Q0].a) == 6
    assert both.loras.keys() == read(llama, other).loras.keys()


def test_the_digest_tells_adapters_by_what_they_compute(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = layers_of(llama, ends_with("q_proj", "v_proj"))
    first = read(llama, saved(tmp_path / "a", layers)).digest
    assert (
        read(llama, saved(tmp_path / "renamed", layers, base_model_name_or_path="other", lora_dropout=0.0)).digest
        == first
    )
    others = [
        read(llama, saved(tmp_path / "b", layers, seed=1)).digest,
        read(llama, saved(tmp_path / "c", layers, lora_alpha=17)).digest,
        read(llama, saved(tmp_path / "d", layers_of(llama, ends_with("q_proj")), target_modules=["q_proj"])).digest,
        read(llama, tmp_path / "a", tmp_path / "b").digest,
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_matrices_are_read_as_float32(llama: PreTrainedModel, tmp_path: Path, dtype: torch.dtype) -> None:
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")), dtype=dtype)
    lora = read(llama, path).loras[Q0]
    assert {lora.a.dtype, lora.b.dtype} == {torch.float32}


# -- refusals ----------------------------------------------------------------------------------------------------------

FIELDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "another task": ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "dora": ({"use_dora": True}, "use_dora is set.*DoRA"),
    "biases of its own": ({"lora_bias": True}, "lora_bias is set"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    "parameters": ({"target_parameters": ["experts.w"]}, "target_parameters is set"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is set: it changes embeddings"),
    "repeated layers": ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
    "a part of the text": ({"alora_invocation_tokens": [3]}, "aLoRA"),
    "weights of the base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes weights"),
    "an unknown field": ({"new_method": {"x": 1}}, "sets 'new_method', which is unknown"),
    "no rank": ({"r": 0}, r"Expected `int` >= 1 - at `\$.r`"),
    "a rank that is none": ({"rank_pattern": {"q_proj": "4"}}, r"Expected `int`, got `str` - at `\$.rank_pattern"),
    "no number": ({"lora_alpha": "x"}, r"Expected `float`, got `str` - at `\$.lora_alpha`"),
    "infinity": ({"alpha_pattern": {"q_proj": float("inf")}}, r"Expected `float` <= 1.* at `\$.alpha_pattern"),
    "no targets": ({"target_modules": None}, r"got `null` - at `\$.target_modules`"),
    "no pattern": ({"target_modules": "(q"}, "is not a regular expression"),
    "layers of a pattern": ({"target_modules": ".*_proj", "layers_to_transform": [0]}, "needs a list"),
    "no layers": ({"layers_to_transform": ["0"]}, r"Expected `int`, got `str` - at `\$.layers_to_transform"),
    "no list": ({"layers_to_transform": [0], "layers_pattern": "(l"}, r"matching regex .* at `\$.layers_pattern`"),
    "an embedding": (
        {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        "selects model.embed_tokens, a Embedding",
    ),
    "a norm": ({"target_modules": ["q_proj", "v_proj", "norm"]}, "selects model.norm"),
    "no module": ({"target_modules": ["c_attn"]}, "does not select model.layers.0.self_attn.q_proj"),
    "another rank": ({"r": 8}, r"q_proj.lora_A.weight is \[4, 64\], and \[8, 64\] is expected"),
    "a module too many": (
        {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        "lacks model.layers.0.self_attn.k_proj.lora_A",
    ),
    "one too few": ({"target_modules": ["q_proj"]}, "does not select model.layers.0.self_attn.v_proj"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_config_that_is_not_supported_is_refused_by_name(llama: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    fields, reason = FIELDS[kind]
    path = saved(tmp_path / "style", layers_of(llama, ends_with("q_proj", "v_proj")), rank=4, **fields)
    with pytest.raises(AdapterRefused, match=f"the adapter style cannot be used: .*{reason}"):
        read(llama, path)


def test_an_adapter_of_another_model_is_refused_with_the_one_it_was_made_for(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    wider = ARCHS["llama"].build(hidden_size=96)
    path = saved(tmp_path / "a", layers_of(wider, ends_with("q_proj", "v_proj")))
    with pytest.raises(AdapterRefused, match=r"lora_A.weight is \[4, 96\], and \[4, 64\].*made for somewhere/base"):
        read(llama, path)
    gpt = ARCHS["gpt2"].build()
    path = saved(tmp_path / "b", layers_of(gpt, ends_with("c_attn")), target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(AdapterRefused, match=r"no linear layers transformer.h.0.attn.c_attn.*made for somewhere/base"):
        read(llama, path)
    assert read(gpt, path).loras.keys() == layers_of(gpt, ends_with("c_attn")).keys(), "a Conv1D"


TENSORS: Mapping[str, tuple[str, str]] = {
    "a magnitude": (f"{Q0}.lora_magnitude_vector", "is DoRA"),
    "an embedding": ("model.embed_tokens.lora_embedding_A", "is an adapter of embeddings"),
    "a bias": (f"{Q0}.lora_B.bias", "is a bias of its own"),
    "a module": ("lm_head.modules_to_save.weight", "is a whole module"),
    "anything": (f"{Q0}.extra", "is not a matrix of a LoRA"),
    "an unknown layer": ("model.layers.9.self_attn.q_proj.lora_A.weight", "no linear layers model.layers.9"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_would_not_be_used_are_refused(llama: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    name, reason = TENSORS[kind]
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")))
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.zeros(4, 64)}, file)
    with pytest.raises(AdapterRefused, match=reason):
        read(llama, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_the_name_of_the_tensor(
    llama: PreTrainedModel, tmp_path: Path, value: float
) -> None:
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")))
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{Q1}.lora_B.weight"][3, 2] = value
    save_file(tensors, file)
    with pytest.raises(AdapterRefused, match=r"layers.1.self_attn.q_proj.lora_B.weight holds NaN or infinity"):
        read(llama, path)


def test_files_that_are_missing_cut_or_of_another_kind_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = layers_of(llama, ends_with("q_proj", "v_proj"))
    with pytest.raises(AdapterRefused, match=r"has no adapter_config.json"):
        read(llama, tmp_path)
    path = saved(tmp_path / "a", layers)
    file = path / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(AdapterRefused, match="is not a whole safetensors file"):
        read(llama, path)
    file.unlink()
    with pytest.raises(AdapterRefused, match=r"has no adapter_model.safetensors"):
        read(llama, path)
    (path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterRefused, match="only pickled weights"):
        read(llama, path)
    (path / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterRefused, match="holds a list, not an object"):
        read(llama, path)


def test_an_adapter_over_the_cap_is_refused_before_its_tensors_are_read(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")))
    size = read(llama, path).bytes
    assert read(llama, path, most=size).bytes == size
    monkeypatch.setattr("kvcellar.engine.models.adapters.adapters._Part.read", None)
    with pytest.raises(AdapterRefused, match=f"it takes {size} bytes, and {size - 1} are left for it"):
        read(llama, path, most=size - 1)


def test_integers_in_place_of_floats_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = saved(tmp_path / "a", layers_of(llama, ends_with("q_proj", "v_proj")), dtype=torch.int8)
    with pytest.raises(AdapterRefused, match="is stored as I8"):
        read(llama, path)


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    moe = ARCHS["qwen3-moe"].build()
    name = "model.layers.0.mlp.experts.0.gate_proj"
    path = saved(tmp_path / "a", {name: (64, 32)}, target_modules=["gate_proj"])
    with pytest.raises(AdapterRefused, match=f"the model has no linear layers {name}"):
        read(moe, path)
    router = saved(tmp_path / "b", {}, target_modules=[r"gate"])
    with pytest.raises(AdapterRefused, match=r"selects model.layers.0.mlp.gate, a \w+; only linear layers"):
        read(moe, router)


# -- without the weights of the model ----------------------------------------------------------------------------------


def test_an_adapter_is_checked_without_the_models_weights(llama: PreTrainedModel, tmp_path: Path) -> None:
    with silence_transformers():
        llama.save_pretrained(tmp_path / "model")
    layers = layers_of(llama, ends_with("q_proj", "v_proj"))
    check_adapter(tmp_path / "model", saved(tmp_path / "good", layers))
    other = saved(tmp_path / "bad", layers, rank=4, r=8)
    with pytest.raises(AdapterRefused, match=r"the adapter bad cannot be used: .*is expected"):
        check_adapter(str(tmp_path / "model"), str(other))
    broken = json.loads((other / "adapter_config.json").read_text()) | {"use_dora": True}
    (other / "adapter_config.json").write_text(json.dumps(broken))
    with pytest.raises(AdapterRefused, match="DoRA"):
        check_adapter(tmp_path / "model", other)


def test_layers_have_the_sizes_of_their_inputs_and_outputs(llama: PreTrainedModel) -> None:
    layer = linear_layers(llama)["model.layers.0.mlp.down_proj"]
    assert sizes_of(layer) == (llama.config.intermediate_size, llama.config.hidden_size)
