"""Files of compressed-tensors, of this package and of others: decoded exactly, or refused by name."""

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize.directory import quantize_directory
from kvcellar.engine.models.quantize.reading import FORMATS, format_in
from kvcellar.errors import ModelRefused
from kvcellar.memory.tiers.identity import FileDigests
from tests.models.quantised import saved, stored, words_of
from tests.zoo import reference_logits

TOKENS = list(range(3, 40))
LINEAR = "_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("quantised") / "m", num_hidden_layers=2, intermediate_size=128)


@pytest.fixture(scope="module")
def written(source: Path) -> dict[str, Path]:
    """Its directories in int8 and int4."""
    into = {kind: source.with_name(kind) for kind in ("int8", "int4", "mixed")}
    for kind, path in into.items():
        quantize_directory(source, path, kind, measure=False)
    return into


def group(form: str, targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "format": form, "weights": {"type": "int", "symmetric": True, **weights}}


def directory(source: Path, into: Path, tensors: dict[str, Tensor], *groups: dict[str, Any], **more: Any) -> Path:
    """`source` with these tensors and config groups."""
    into.mkdir()
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    named = {f"group_{n}": one for n, one in enumerate(groups)}
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization | more}
    (into / "config.json").write_text(json.dumps(config))
    return into


def spread(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.stack([values[:, one] for one in columns], 1)


def foreign(
    name: str, weight: Tensor, form: str, bits: int, size: int | None, symmetric: bool, ordered: bool, dtype: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes and scales of one module, as a foreign file stores them, and the weights that they stand for."""
    draw = np.random.default_rng(abs(hash((form, bits, size, symmetric, ordered))) % 1000 + len(name))
    outputs, inputs = weight.shape
    count = 1 if size is None else inputs // size
    half = 1 << (bits - 1)
    unsigned = draw.integers(0, 1 << bits, (outputs, inputs))
    scales = torch.from_numpy(draw.normal(0, 0.02, (outputs, count))).to(dtype)
    zeros = draw.integers(0, 1 << bits, (outputs, count)) if not symmetric else np.full((outputs, count), half)
    columns = np.arange(inputs) // (inputs // count)
    if ordered:
        draw.shuffle(columns)
    dense = (unsigned - spread(zeros, columns)).astype(np.float32) * spread(scales.float().numpy(), columns)
    module = name.removesuffix(".weight")
    tensors = {f"{module}.weight_scale": scales}
    if form == "pack-quantized":
        tensors[f"{module}.weight_packed"] = words_of(unsigned, bits)
        tensors[f"{module}.weight_shape"] = torch.tensor([outputs, inputs])
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    else:
        tensors[name] = torch.from_numpy((unsigned - half).astype(np.int8))
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = torch.from_numpy((zeros - half).astype(np.int8))
    if ordered:
        tensors[f"{module}.weight_g_idx"] = torch.from_numpy(columns.astype(np.int32))
    return tensors, torch.from_numpy(dense)


FORMS = [
    (form, bits, size, symmetric, ordered)
    for form in ("pack-quantized", "int-quantized")
    for bits in (2, 4, 8)
    for size in (None, 32, 64)
    for symmetric in (True, False)
    for ordered in (False, True)
    if not (ordered and size is None)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "bits", "size", "symmetric", "ordered"), FORMS)
def test_files_of_other_programs_are_decoded(
    form: str, bits: int, size: int | None, symmetric: bool, ordered: bool, dtype: Any, source: Path, tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in stored(source).items():
        if name.endswith(LINEAR):
            more, dense[name] = foreign(name, tensor, form, bits, size, symmetric, ordered, dtype)
            tensors |= more
        else:
            tensors[name] = tensor
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    path = directory(source, tmp_path / "q", tensors, group(form, num_bits=bits, symmetric=symmetric, **strategy))
    own = load(path, dtype="float32").model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in dense.items())


def test_each_module_is_decoded_by_the_group_that_names_it(source: Path, tmp_path: Path) -> None:
    """By shapes alone, 4 bits in groups of 64 and 8 bits in groups of 32 could be either."""
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in stored(source).items():
        if ".mlp." in name:
            more, dense[name] = foreign(name, tensor, "pack-quantized", 4, 64, True, False, torch.bfloat16)
        elif name.endswith(LINEAR):
            more, dense[name] = foreign(name, tensor, "pack-quantized", 8, 32, True, False, torch.bfloat16)
        else:
            more = {name: tensor}
        tensors |= more
    groups = [
        group("pack-quantized", num_bits=8, strategy="group", group_size=32),
        group("pack-quantized", [r"re:.*\.mlp\..*"], num_bits=4, strategy="group", group_size=64),
    ]
    own = load(directory(source, tmp_path / "q", tensors, *groups), dtype="float32").model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in dense.items())


def test_scales_of_activations_are_not_used_and_noted(source: Path, written: dict[str, Path], tmp_path: Path) -> None:
    tensors = stored(written["int8"]) | {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    quantization = json.loads((written["int8"] / "config.json").read_text())["quantization_config"]
    path = directory(source, tmp_path / "q", tensors, *quantization["config_groups"].values())
    (note,) = load(path).notes
    assert note == (
        "1 stored tensors are not used, since activations are not quantised: model.layers.0.mlp.up_proj.input_scale"
    )


def test_a_shape_in_the_file_is_not_believed(source: Path, written: dict[str, Path], tmp_path: Path) -> None:
    shapes = {name: torch.tensor([1 << 40, 1 << 40]) for name in stored(written["int4"]) if name.endswith("_shape")}
    groups = json.loads((written["int4"] / "config.json").read_text())["quantization_config"]["config_groups"]
    path = directory(source, tmp_path / "q", stored(written["int4"]) | shapes, *groups.values())
    ours, theirs = load(path).model, load(written["int4"]).model
    assert torch.equal(reference_logits(ours, TOKENS), reference_logits(theirs, TOKENS))


# -- damage -----------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]
UP = "model.layers.1.mlp.up_proj"


def scaled(value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"][3, 0] = value

    return change


def put(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{UP}{suffix}": tensor})


DAMAGE: dict[str, tuple[str, Change, str]] = {
    "NaN": ("int4", scaled(math.nan), f"{UP}.weight_scale has a scale of nan"),
    "infinity": ("int8", scaled(math.inf), f"{UP}.weight_scale has a scale of inf"),
    "absurd": ("int4", scaled(-1e30), f"{UP}.weight_scale has a scale of "),
    "fewer scales": ("int4", put(".weight_scale", torch.ones(128, 1, dtype=torch.bfloat16)), "its scales are [128, 1]"),
    "more scales": ("int8", put(".weight_scale", torch.ones(128, 2, dtype=torch.bfloat16)), "its scales are [128, 2]"),
    "scales of integers": ("int8", put(".weight_scale", torch.ones(128, 1, dtype=torch.int32)), "is I32, not BF16"),
    "longer rows": ("int4", put(".weight_packed", torch.zeros(128, 16, dtype=torch.int32)), "its scales are [128, 2]"),
    "fewer rows": ("int4", put(".weight_packed", torch.zeros(64, 8, dtype=torch.int32)), "its scales are [128, 2]"),
    "a flat weight": ("int4", put(".weight_packed", torch.zeros(8, dtype=torch.int32)), "two dimensions are needed"),
    "no rows": ("int8", put(".weight", torch.zeros(0, 64, dtype=torch.int8)), "two dimensions are needed"),
    "codes of floats": ("int8", put(".weight", torch.zeros(128, 64, dtype=torch.bfloat16)), "is BF16, not I8"),
    "no codes": ("int4", lambda tensors: tensors.pop(f"{UP}.weight_packed"), f"there is no {UP}.weight_packed"),
    "indices out of range": (
        "int4",
        put(".weight_g_idx", torch.full((64,), 2, dtype=torch.int32)),
        "weight_g_idx has indices from 2 to 2; there are 2 groups",
    ),
    "fewer indices": ("int4", put(".weight_g_idx", torch.zeros(8, dtype=torch.int32)), "not one for each of 64 inputs"),
    "no scales": (
        "int8",
        lambda tensors: tensors.pop(f"{UP}.weight_scale"),
        f"model.safetensors holds {UP}.weight as I8",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused_by_name(what: str, written: dict[str, Path], tmp_path: Path) -> None:
    kind, change, named = DAMAGE[what]
    tensors = load_file(written[kind] / "model.safetensors")
    change(tensors)
    groups = json.loads((written[kind] / "config.json").read_text())["quantization_config"]["config_groups"]
    path = directory(written[kind], tmp_path / "q", tensors, *groups.values())
    with pytest.raises(ModelRefused) as refusal:
        load(path)
    assert named in str(refusal.value)
    assert UP in str(refusal.value)


def test_a_matrix_of_another_size_than_the_network_has_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(written["int4"] / "model.safetensors")
    tensors[f"{UP}.weight_packed"] = torch.zeros(128, 64, dtype=torch.int32)
    tensors[f"{UP}.weight_scale"] = torch.ones(128, 16, dtype=torch.bfloat16)
    groups = json.loads((written["int4"] / "config.json").read_text())["quantization_config"]["config_groups"]
    with pytest.raises(ModelRefused, match=r"up_proj.weight is \[128, 512\] in the weights and \[128, 64\]"):
        load(directory(written["int4"], tmp_path / "q", tensors, *groups.values()))


CONFIGS: dict[str, tuple[Any, str]] = {
    "hqq": ({"quant_method": "hqq"}, "its weights are quantised (hqq)"),
    "quark": ({"quant_method": "quark"}, "quantised by one of: compressed-tensors, gptq, awq"),
    "no name": ({"quant_method": "a b"}, "its weights are quantised ('a b')"),
    "no method": ({"bits": 4}, "its weights are quantised (None)"),
    "text": ("int8", "its weights are quantised (int8)"),
    "a number": (8, "its weights are quantised (8)"),
    "gptq of 5 bits": ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "(gptq) to 5 bits"),
    "gptq without groups": ({"quant_method": "gptq", "bits": 4}, "in groups of None inputs"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        "by GPTQ, as 'marlin'",
    ),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "by AWQ, as 'gemv'"),
    "awq of 8 bits": ({"quant_method": "awq", "bits": 8, "group_size": 128}, "(awq) to 8 bits; read are 4"),
    "a group of 0": ({"quant_method": "awq", "bits": 4, "group_size": 0}, "in groups of 0 inputs"),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:mx_fp"},
        "by AutoRound, as 'auto_round:mx_fp'",
    ),
    "auto-round of floats": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "nv_fp"},
        "of type 'nv_fp'",
    ),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "the config has blocks of [128]"),
    "fp8 blocks of 0": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two sizes from 1 to"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "by ModelOpt as 'W4A8_AWQ'; read are FP8"),
    "MLX": ({"group_size": 48, "bits": 4}, "by MLX to 4 bits in groups of 48"),
    "MLX bits": ({"group_size": 64, "bits": 7}, "by MLX to 7 bits in groups of 64"),
    "MLX of a module": ({"group_size": 64, "bits": 4, "lm_head": {"bits": 1}}, "weights of 'lm_head' are quantised"),
    "MLX mode": ({"group_size": 64, "bits": 4, "mode": "lut"}, "by MLX as 'lut'"),
    "online": ({"quant_method": "bitnet", "quantization_mode": "online"}, "BitNet as 'bitlinear', 'online'"),
    "rms": ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm True"),
    "gemma of 3 bits": ({"quant_method": "gemma", "num_bits": 3}, "(gemma) to 3 bits"),
    "gemma pattern": ({"quant_method": "gemma", "module_quant_configs": {"(a+)+b": {}}}, "too complex a pattern"),
    "floats": ({"config_groups": {"g": group("float-quantized", num_bits=8)}}, "'float-quantized' of type 'int'"),
    "nvfp4": ({"config_groups": {"g": group("nvfp4-pack-quantized", num_bits=4)}}, "'nvfp4-pack-quantized'"),
    "no groups": ({}, "needs config_groups"),
    "too many": ({"config_groups": {str(n): {} for n in range(100)}}, "one to 64 of them"),
    "9 bits": ({"config_groups": {"g": group("pack-quantized", num_bits=9)}}, "numbers of 9 bits"),
    "blocks": ({"config_groups": {"g": group("int-quantized", num_bits=8, strategy="block")}}, "scales by 'block'"),
    "group of 0": (
        {"config_groups": {"g": group("int-quantized", num_bits=8, strategy="group", group_size=0)}},
        "groups of 0 inputs",
    ),
    "a rotation": (
        {"transform_config": {"config_groups": {}}, "config_groups": {"g": group("int-quantized", num_bits=8)}},
        "quantization_config has transform_config",
    ),
    "no expression": ({"config_groups": {"g": group("int-quantized", ["re:("], num_bits=8)}}, "no regular expression"),
    "a slow expression": (
        {"config_groups": {"g": group("int-quantized", ["re:(a+)+b"], num_bits=8)}},
        "too complex a pattern",
    ),
    "many repetitions": (
        {"config_groups": {"g": group("int-quantized", ["re:.*.*.*.*.*b"], num_bits=8)}},
        "too complex a pattern",
    ),
}


@pytest.mark.parametrize("what", CONFIGS)
@pytest.mark.parametrize("where", ["quantization_config", "compression_config", "text_config"])
def test_configs_that_cannot_be_read_are_refused_by_name(what: str, where: str) -> None:
    config, named = CONFIGS[what]
    if isinstance(config, dict) and not {"quant_method", "bits"} & config.keys():
        config = {"quant_method": "compressed-tensors", **config}
    with pytest.raises(ModelRefused) as refusal:
        format_in({where: {"quantization_config": config} if where == "text_config" else config})
    assert named in str(refusal.value)


WORDS = st.sampled_from([
    *("targets", "weights", "format", "config_groups", "g", "num_bits", "symmetric", "strategy", "group_size", "type"),
    *("Linear", "re:.*mlp.*", "re:(", "pack-quantized", "int-quantized", "group", "channel", "tensor", "int", "float"),
    *("quant_method", "bits", "weight_block_size", "module_quant_configs", "mode", "compressed-tensors", "ignore"),
    *("transform_config", "sparsity_config", "dense", ""),
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 4, 8, 32, 1 << 70]) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=20,
)


@given(st.sampled_from(sorted(FORMATS)), VALUES, VALUES, VALUES)
def test_any_config_is_read_or_refused(method: str, weights: Any, targets: Any, raw: Any) -> None:
    groups = {"g": {"targets": targets, "weights": weights, "format": "pack-quantized"}}
    base = {"quant_method": method}
    more = raw if isinstance(raw, dict) else {}
    for one in (raw, {**base, **more}, {**base, "config_groups": groups}, {**base, "config_groups": raw}):
        with suppress(ModelRefused):
            assert format_in({"quantization_config": one}) is not None or not one


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_file_with_any_tensor_changed_is_loaded_or_refused(
    kind: str, seed: int, written: dict[str, Path], tmp_path: Path
) -> None:
    """Never another error, and never an allocation that its size does not suggest."""
    draw = random.Random(seed)
    tensors = load_file(written[kind] / "model.safetensors")
    for name in draw.sample(sorted(tensors), 2):
        one = tensors[name]
        tensors[name] = draw.choice([
            *(one.flatten()[: draw.randrange(1, 9)].clone(), one[None].clone(), one[:0].clone()),
            *(one.reshape(one.shape[::-1]), one.to(torch.float32), one.to(torch.int32), torch.cat([one, one])),
            torch.full_like(one, 3),
        ])  # fmt: skip
        if draw.random() < 0.3:
            tensors[draw.choice([f"{name}_scale", f"{name.removesuffix('_scale')}_zero_point", f"x.{name}"])] = (
                tensors.pop(name)
            )
    groups = json.loads((written[kind] / "config.json").read_text())["quantization_config"]["config_groups"]
    path = directory(written[kind], tmp_path / "q", tensors, *groups.values())
    with suppress(ModelRefused):
        assert load(path).model.dtype in (torch.bfloat16, torch.float32)


def test_two_different_descriptions_are_refused() -> None:
    one, other = (
        {"quant_method": "compressed-tensors", "config_groups": {"g": group("int-quantized", num_bits=bits)}}
        for bits in (4, 8)
    )
    assert format_in({"quantization_config": one, "compression_config": one}) is not None
    with pytest.raises(ModelRefused, match="describes quantised weights twice"):
        format_in({"quantization_config": one, "compression_config": other})


def test_a_config_without_quantisation_is_none() -> None:
    assert format_in({"quantization_config": None, "text_config": {}}) is None


# -- elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4", "mixed"])
def test_plain_transformers_loads_the_same_weights(kind: str, written: dict[str, Path]) -> None:
    pytest.importorskip("compressed_tensors", reason="optional: pip install compressed-tensors")
    with silence_transformers():
        plain = AutoModelForCausalLM.from_pretrained(written[kind])
        with torch.no_grad():
            plain(torch.tensor([TOKENS]))  # it decodes weights in the first forward
    own = load(written[kind]).model.state_dict()
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in own.items())


def test_stored_memory_is_that_of_one_form_of_the_weights(source: Path, written: dict[str, Path]) -> None:
    """The identity of a store has the digest of the weights' files: those of each type are others."""
    digests = {FileDigests(None).of([path / "model.safetensors"]) for path in (source, *written.values())}
    assert len(digests) == 4
