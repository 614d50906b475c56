"""Directories with weights in fewer bits: what is stored, what is left, and what a loaded network computes with it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcellar.bench.network import SMALL, TINY, write
from kvcellar.engine.models import embedded
from kvcellar.engine.models.heads.assistant_head import load_assistant
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize.directory import quantize_directory
from kvcellar.engine.models.quantize.kinds import canonical_kind, report_lines
from kvcellar.engine.models.quantize.rounding import int4_groups, int8_rows, pack, unpack
from kvcellar.engine.models.quantize.selection import choose
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.progress import Progress, listening
from tests.models.assistants import saved as assistant
from tests.models.assistants import target as assistant_target
from tests.models.quantised import decoded, densified, quantization, saved, stored, types
from tests.zoo import reference_logits

TOKENS = list(range(3, 40))
KINDS = ("int8", "int4", "mixed")


def quantised(source: Path, kind: str, **how: Any) -> Path:
    into = source.with_name(f"{source.name}-{kind}")
    quantize_directory(source, into, kind, measure=False, **how)
    return into


def copied(path: Path, into: Path) -> Path:
    shutil.copytree(path, into, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return into


def same_network(one: Path, other: Path) -> None:
    ours, theirs = load(one), load(other)
    own, expected = ours.model.state_dict(), theirs.model.state_dict()
    assert set(own) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in own.items())
    assert torch.equal(reference_logits(ours.model, TOKENS), reference_logits(theirs.model, TOKENS))
    assert ours.model.dtype == theirs.model.dtype
    assert ours.notes == theirs.notes == ()


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = {
    "int8": ["int8", "q8", "q8_0", "fp8", "INT8", " Q8_0 "],
    "int4": ["int4", "q4", "fp4", "q4_0", "q4_k_s", "Q4_K_S"],
    "mixed": ["mixed", "q4_k_m", "Q4_K_M", "q4_K"],
    "bf16": ["bf16", "BF16"],
    "f16": ["f16", "F16"],
    "f32": ["F32"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_type_has_the_names_of_other_programs(kind: str, name: str) -> None:
    assert canonical_kind(name) == kind


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8", "int3", "", "q5_k_m"])
def test_other_types_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        canonical_kind(name)
    assert f"{name!r}" in str(refusal.value)
    assert "int8 (q8, q8_0, fp8), int4 (q4, fp4, q4_0, q4_k_s), mixed (q4_k_m, q4_k), bf16, f16, f32" in str(
        refusal.value
    )


# -- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_codes_are_the_nearest_to_each_weight(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 64, generator=draw, dtype=torch.float32) * 10.0 ** (seed - 2)
    before = weight.clone()
    codes, scales = int8_rows(weight)
    assert torch.equal(weight, before)
    gap = (codes * scales.float() - weight).abs() / scales.float()
    assert gap[codes.abs() < 127].max() <= 0.5001
    assert gap.max() < 127 / 256 + 0.5001  # a scale is rounded to 8 bits
    codes, scales = int4_groups(weight)
    spread = scales.float().repeat_interleave(32, 1)
    gap = (codes * spread - weight).abs() / spread.abs()
    assert gap[(codes > -8) & (codes < 7)].max() <= 0.5001
    assert gap.max() <= 1.04  # an element of the size of the largest, with the opposite sign, is 8


def test_the_element_of_largest_magnitude_gets_the_code_minus_8() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    codes, scales = int4_groups(weight)
    groups = weight.view(64, 4, 32)
    largest = groups.abs().argmax(-1, keepdim=True)
    assert (codes.view(64, 4, 32).gather(-1, largest) == -8).all()
    assert torch.equal(scales < 0, groups.gather(-1, largest)[..., 0] > 0)


def test_weights_of_zero_stay_zero() -> None:
    weight = torch.zeros(32, 64)
    for codes, scales in (int8_rows(weight), int4_groups(weight)):
        assert not codes.any()
        assert (scales == 1).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_codes_are_unpacked(bits: int) -> None:
    low = -(1 << bits - 1)
    codes = torch.randint(low, -low, (7, 64), generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    assert torch.equal(unpack(pack(codes, bits), bits) + low, codes.int())


# -- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "qwen2-moe", "lfm2", "gemma3", "qwen3.5", "deepseek-v3", "bamba", "olmoe"]
)
def test_a_quantised_network_is_that_of_its_decoded_weights(name: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit, with experts that are stored one by one, tied embeddings, and recurrent layers."""
    source = saved(tmp_path / "m", name)
    into = quantised(source, kind)
    assert any(name.endswith("_scale") for name in stored(into))
    same_network(into, densified(into, source, tmp_path / "dense"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_model_is_quantised(kind: str, tmp_path: Path) -> None:
    source = copied(embedded.path(), tmp_path / "m")
    into = quantised(source, kind)
    same_network(into, densified(into, source, tmp_path / "dense"))
    assert (into / "mtp.safetensors").stat().st_size > 1_000_000
    assert (into / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert load(into).text is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_of_another_type_keeps_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", dtype=dtype)
    same_network(into := quantised(source, kind), densified(into, source, tmp_path / "dense"))


def test_a_quantised_directory_is_loaded_in_any_float_type(tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    into = quantised(source, "mixed")
    values = decoded(into)
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        own = load(into, dtype=name).model.state_dict()
        assert all(torch.equal(own[one], value.to(dtype)) for one, value in values.items())


def test_files_of_several_shards_stay_shards(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")
    source = tmp_path / "m"
    with silence_transformers():
        AutoModelForCausalLM.from_pretrained(whole).save_pretrained(source, max_shard_size="50KB")
    into = quantised(source, "int4")
    assert sorted(file.name for file in into.glob("*.safetensors")) == sorted(
        file.name for file in source.glob("*.safetensors")
    )
    index = json.loads((into / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: file.name for file in into.glob("*.safetensors") for name in load_file(file)}
    same_network(into, quantised(whole, "int4"))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")])
def test_a_cast_changes_the_type_of_every_float(kind: str, dtype: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", dtype=torch.float32)
    into = quantised(source, kind)
    assert set(types(into).values()) == {dtype}
    assert "quantization_config" not in json.loads((into / "config.json").read_text())
    network = load(into).model
    assert network.dtype == {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    expected = load(source).model.to(network.dtype)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in network.state_dict().items())


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_embeddings_heads_norms_and_odd_shapes_are_left_and_named(tmp_path: Path) -> None:
    into = quantised(copied(embedded.path(), tmp_path / "m"), "int8")
    assert quantization(into)["ignore"] == [
        *("lm_head", "model.embed_tokens", "model.layers.0.conv.conv", "model.layers.1.self_attn.g_proj"),
        *("model.layers.2.conv.conv", "model.layers.3.self_attn.g_proj"),
    ]
    kept = {name for name, dtype in types(into).items() if dtype == "BF16" and not name.endswith("_scale")}
    assert {name for name in kept if not name.startswith("mtp.") and "norm" not in name} == {
        *("model.embed_tokens.weight", "model.layers.0.conv.conv.weight", "model.layers.1.self_attn.g_proj.weight"),
        *("model.layers.2.conv.conv.weight", "model.layers.3.self_attn.g_proj.weight"),
    }


def test_routers_are_left(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "qwen3-moe", num_experts=64, num_hidden_layers=2)
    into = quantised(source, "int4")
    routers = {name for name in stored(into) if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert stored(into)["model.layers.0.mlp.gate.weight"].shape == (64, 64)
    assert {name.removesuffix(".weight") for name in routers} < set(quantization(into)["ignore"])
    assert "model.layers.0.mlp.experts.63.down_proj.weight_packed" in stored(into)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "lfm2-moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_one_tensor_are_stored_one_by_one(name: str, kind: str, tmp_path: Path) -> None:
    """As those of a source that has them one by one."""
    single = saved(tmp_path / "single", name)
    joined = copied(single, tmp_path / "joined")
    model = load(single).model
    kept = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    save_file(dict(model.named_parameters()) | kept, joined / "model.safetensors", metadata={"format": "pt"})
    assert any(tensor.dim() == 3 for name, tensor in stored(joined).items() if ".experts." in name)
    into = quantised(joined, kind)
    expected = stored(quantised(single, kind))
    found = stored(into)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not [name for name in quantization(into)["ignore"] if "experts" in name and "shared" not in name]
    same_network(into, tmp_path / "single-mixed" if kind == "mixed" else tmp_path / f"single-{kind}")


@pytest.mark.parametrize("name", ["gpt-oss", "granitemoe"])
def test_joined_experts_without_names_of_their_own_are_left(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", name)
    into = tmp_path / "q"
    report = quantize_directory(source, into, "int4", measure=False)
    assert sum(report["left"].values()) + len([1 for name in stored(into) if name.endswith("_packed")]) == len(
        stored(source)
    )
    same_network(into, densified(into, source, tmp_path / "dense"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_assistant_of_another_model_is_quantised(kind: str, tmp_path: Path) -> None:
    source = assistant(tmp_path / "m", "gemma4_assistant", text={"hidden_size": 64})
    report = quantize_directory(source, tmp_path / "q", kind, draft=True)
    assert "harm" not in report
    assert sum(count for one, count in report["weights"].items() if one.startswith("int")) > 10_000
    dense = densified(tmp_path / "q", source, tmp_path / "dense")
    ours, theirs = (load_assistant(path, assistant_target()).network for path in (tmp_path / "q", dense))
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hidden_size": 32}, "the weights do not fit the config"), ({"hidden_activation": "none"}, "cannot build")],
)
def test_an_assistant_of_another_config_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = assistant(tmp_path / "m", "gemma4_assistant", text={"hidden_size": 64})
    config = json.loads((source / "config.json").read_text())
    config["text_config"] |= changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=reason):
        quantize_directory(source, tmp_path / "q", "int8", draft=True)


def test_a_tied_head_is_left(tmp_path: Path) -> None:
    into = quantised(saved(tmp_path / "m", vocab=128, tie_word_embeddings=True), "int8")
    assert types(into)["model.embed_tokens.weight"] == "BF16"
    assert {"lm_head", "model.embed_tokens"} <= set(quantization(into)["ignore"])


@pytest.mark.parametrize("tie", [True, False])
def test_of_a_draft_the_head_is_quantised_and_the_embedding_if_it_is_not_the_head(tie: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", vocab_size=128, tie_word_embeddings=tie)
    into = quantised(source, "int8", draft=True)
    assert (types(into)["model.embed_tokens.weight"] == "I8") == (not tie)
    assert types(into).get("lm_head.weight", "I8") == "I8"
    same_network(into, densified(into, source, tmp_path / "dense"))


@pytest.mark.parametrize(("layers", "promoted"), [(9, {0, 8}), (12, {0, 11})])
def test_mixed_has_the_first_and_the_last_layer_in_8_bits(layers: int, promoted: set[int], tmp_path: Path) -> None:
    into = quantised(saved(tmp_path / "m", num_hidden_layers=layers), "mixed")
    raised = {int(name.split(".")[2]) for name, dtype in types(into).items() if dtype == "I8"}
    packed = {int(name.split(".")[2]) for name in types(into) if name.endswith("_packed")}
    assert raised == promoted
    assert packed == set(range(layers)) - promoted
    assert quantization(into)["format"] == "mixed-precision"


def test_mixed_has_the_mixers_of_few_layers_in_8_bits(tmp_path: Path) -> None:
    into = quantised(saved(tmp_path / "m", "lfm2"), "mixed")
    raised = {name.split(".")[3] for name, dtype in types(into).items() if dtype == "I8"}
    assert raised == {"conv", "self_attn"}
    assert {name.split(".")[3] for name in types(into) if name.endswith("_packed")} == {"feed_forward"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {}),
        ("qwen2-moe", {}),
        ("llama", {"num_hidden_layers": 10}),
        ("mixtral", {"num_hidden_layers": 9, "num_local_experts": 2}),
    ],
)
def test_parts_that_are_joined_elsewhere_are_of_one_kind(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    into = quantised(saved(tmp_path / "m", name, **changes), "mixed")
    kinds: dict[tuple[str, str], set[str]] = {}
    for one in stored(into):
        if one.endswith("_scale"):
            _, _, layer, part, *_ = one.split(".")
            kind = "int4" if one.replace("_scale", "_packed") in stored(into) else "int8"
            kinds.setdefault((layer, part), set()).add(kind)
    assert all(len(found) == 1 for found in kinds.values())
    assert set().union(*kinds.values()) == {"int4", "int8"}


def test_the_bench_model_is_quantised_but_for_its_embedding(tmp_path: Path) -> None:
    """By its shapes: the files are too large for a test."""
    from kvcellar.engine.models.load import config_of, skeleton_of
    from kvcellar.engine.models.weights.config_file import config_fields
    from kvcellar.engine.models.weights.weights_files import opened

    (tmp_path / "m").mkdir()
    write(TINY, tmp_path / "m")
    with silence_transformers(), opened(tmp_path / "m") as weights:
        skeleton = skeleton_of(config_of(config_fields(tmp_path / "m"), weights), torch.bfloat16)
        choice = choose(skeleton, weights, "int8")
        assert set(weights.tensors) - set(choice.kinds) == set(choice.left)
        assert {name for name in choice.left if "norm" not in name} == {"model.embed_tokens.weight"}
    assert not [size for size in (SMALL.hidden, SMALL.intermediate, SMALL.kv_heads * SMALL.head_size) if size % 32]


# -- the directory ----------------------------------------------------------------------------------------------------


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    one, other = quantised(source, "mixed"), tmp_path / "again"
    quantize_directory(source, other, "mixed", measure=False)
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


def test_the_report_has_sizes_and_counts(tmp_path: Path) -> None:
    source, seen = saved(tmp_path / "m", vocab_size=128), list[Progress]()
    with listening(seen.append):
        report = quantize_directory(source, tmp_path / "q", "q4", measure=False)
    assert json.loads(json.dumps(report)) == report
    assert (report["kind"], report["method"]) == ("int4", "signed-max")
    first, *_ = report_lines(report, "Q4")
    assert first.startswith("Q4 (4-bit integers) by signed-max: 0.3 MB became 0.")
    assert report["source_bytes"] == (source / "model.safetensors").stat().st_size
    assert report["bytes"] == (tmp_path / "q" / "model.safetensors").stat().st_size < report["source_bytes"] / 2
    counted = sum(tensor.numel() for name, tensor in stored(source).items())
    assert sum(report["weights"].values()) == counted
    assert report["weights"]["int4"] == sum(
        8 * tensor.numel() for name, tensor in stored(tmp_path / "q").items() if name.endswith("_packed")
    )
    assert report["left"] == {"not a linear layer": 1, "not a matrix of weights": 9, "the output head": 1}
    done = [one.done for one in seen if one.stage == "quantising weights"]
    assert done == sorted(done)
    assert len(done) == len(stored(source))


def test_a_quantised_source_is_refused(tmp_path: Path) -> None:
    into = quantised(saved(tmp_path / "m"), "int8")
    with pytest.raises(ModelRefused, match="the weights of m-int8 are quantised already"):
        quantize_directory(into, tmp_path / "again", "int4")
    with pytest.raises(ModelRefused, match="the weights of m-int8 are quantised already"):
        quantize_directory(into, tmp_path / "again", "bf16")
    assert not (tmp_path / "again").exists()


def test_an_existing_directory_is_not_written_to(tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").write_text("x")
    with pytest.raises(BadRequest, match="exists"):
        quantize_directory(source, tmp_path / "q", "int8")
    assert os.listdir(tmp_path / "q") == ["mine"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "f16"])
def test_damaged_weights_are_refused_and_nothing_is_left(kind: str, value: float, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
        quantize_directory(source, tmp_path / "q", kind)
    assert not (tmp_path / "q").exists()


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"model.norm.weight has values that f16 cannot hold; use bf16"):
        quantize_directory(source, tmp_path / "q", "f16")


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="there is no method 'awq' of quantising"):
        quantize_directory(saved(tmp_path / "m"), tmp_path / "q", "int4", method="awq")
