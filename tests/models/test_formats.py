"""Weights files of other programs: decoded exactly, as an independent decoder does, or refused by name."""

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize.directory import quantize_directory
from kvcellar.engine.models.quantize.formats.part import Decoded, as_floats, e2m1, looked_up, shown_part
from kvcellar.engine.models.quantize.reading import format_in
from kvcellar.engine.models.quantize.rounding import unpack
from kvcellar.engine.models.weights.weights_bytes import bytes_in_memory, weights_of
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused
from kvcellar.kernels.codes import Coded, Codes
from tests.models import foreign
from tests.models.foreign import Writer, directory
from tests.models.quantised import saved, stored
from tests.zoo import reference_logits

TOKENS = list(range(3, 40))
LINEAR = "_proj.weight"
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **more}


def compressed(form: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": bits, "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def per_channel(weight: str, shape: tuple[int, int], draw: foreign.Draw, flat: bool = False) -> foreign.Written:
    return foreign.fp8(weight, shape, draw, (1, shape[1]), "_scale", (shape[0],) if flat else None)


def modelopt_blocks(weight: str, shape: tuple[int, int], draw: foreign.Draw) -> foreign.Written:
    rows, columns = foreign.blocks(shape, (128, 128))
    return foreign.fp8(weight, shape, draw, (128, 128), "_scale", (rows, 1, columns, 1))


def torchao_rows(weight: str, shape: tuple[int, int], draw: foreign.Draw, kind: str) -> foreign.Written:
    return foreign.torchao(weight, shape, draw, kind, (1, shape[1]))


BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 64]}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
GPTQ = foreign.gptq
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 blocks": (BLOCK, partial(foreign.fp8, block=(40, 64), suffix="_scale_inv")),
    "fp8 scalar": (FP8, partial(foreign.fp8, block=None, suffix="_scale_inv", stored_shape=())),
    "fp8 AutoFP8": (FP8 | {"ignored_layers": ["lm_head"]}, partial(foreign.fp8, block=None, suffix="_scale")),
    "fp8 of one block": (BLOCK, partial(foreign.fp8, block=None, suffix="_scale_inv", stored_shape=(1,))),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, per_channel),
    "mxfp8": ({"quant_method": "mxfp8"}, partial(foreign.mxfp8, suffix="_scale_inv")),
    "CT fp8 tensor": (
        compressed("float-quantized", 8, "tensor"),
        partial(foreign.fp8, block=None, suffix="_scale", stored_shape=(1,)),
    ),
    "CT fp8 channel": (compressed("float-quantized", 8, "channel"), per_channel),
    "CT fp8 naive": (compressed("naive-quantized", 8, "channel"), per_channel),
    "CT fp8 block": (
        compressed("float-quantized", 8, "block", block_structure=[128, 128]),
        partial(foreign.fp8, block=(128, 128), suffix="_scale"),
    ),
    "CT mxfp8": (compressed("mxfp8-quantized", 8, "group", group_size=32), partial(foreign.mxfp8, suffix="_scale")),
    "CT mxfp4": (compressed("mxfp4-pack-quantized", 4, "group", group_size=32), foreign.mxfp4),
    "CT nvfp4": (
        compressed("nvfp4-pack-quantized", 4, "tensor_group", group_size=16), partial(foreign.nvfp4, modelopt=False),
    ),
    "ModelOpt fp8": (MODELOPT, partial(foreign.fp8, block=None, suffix="_scale", stored_shape=())),
    "ModelOpt fp8 channel": (MODELOPT, partial(per_channel, flat=True)),
    "ModelOpt fp8 blocks": (MODELOPT | {"quant_algo": "fp8_pb_wo"}, modelopt_blocks),
    "ModelOpt mxfp8": (MODELOPT | {"quant_algo": "MXFP8"}, partial(foreign.mxfp8, suffix="_scale")),
    "ModelOpt nvfp4": (MODELOPT | {"quant_algo": "NVFP4"}, partial(foreign.nvfp4, modelopt=True)),
    **{
        f"GPTQ {bits} bits, {group}": (
            gptq_config(bits, group or -1), partial(GPTQ, bits=bits, group=group, offset=1, order=False),
        )
        for bits in (2, 3, 4, 8)
        for group in (None, 32)
    },
    "GPTQ v2": (
        gptq_config(4, 32, checkpoint_format="gptq_v2"), partial(GPTQ, bits=4, group=32, offset=0, order=None),
    ),
    "GPTQ desc_act": (gptq_config(4, 32, desc_act=True), partial(GPTQ, bits=4, group=32, offset=1, order=True)),
    "GPTQ with a smaller last group": (gptq_config(4, 64), partial(GPTQ, bits=4, group=64, offset=1, order=None)),
    "AutoRound": (
        ROUND | {"packing_format": "auto_round:auto_gptq"}, partial(GPTQ, bits=4, group=32, offset=1, order=None),
    ),
    "AutoRound as AWQ": (ROUND | {"packing_format": "auto_round:auto_awq"}, partial(foreign.awq, group=32)),
    "AWQ": (AWQ | {"group_size": 32}, partial(foreign.awq, group=32)),
    "AWQ per output": (AWQ | {"group_size": -1}, partial(foreign.awq, group=None)),
    **{
        f"bitsandbytes {kind}{', nested' if nested else ''}, {block}": (
            BNB, partial(foreign.bnb4, kind=kind, block=block, nested=nested),
        )
        for kind, block, nested in (("nf4", 64, False), ("nf4", 64, True), ("fp4", 128, False), ("fp4", 4096, True))
    },
    "bitsandbytes int8": (BNB | {"load_in_4bit": False, "load_in_8bit": True}, foreign.bnb8),
    **{
        f"MLX {bits} bits, {group}": (
            {"bits": bits, "group_size": group}, partial(foreign.mlx, bits=bits, group=group),
        )
        for bits, group in ((2, 32), (3, 32), (4, 32), (5, 32), (6, 32), (8, 32), (4, 16))
    },
    "metal": (
        {"quant_method": "metal", "bits": 4, "group_size": 32},
        partial(foreign.mlx, bits=4, group=32, biases="qbiases"),
    ),
    **{
        f"MLX {mode}": ({"bits": 4, "group_size": 32, "mode": mode}, partial(foreign.mlx_floats, mode=mode))
        for mode in ("mxfp4", "mxfp8", "nvfp4")
    },
    "BitNet": ({"quant_method": "bitnet"}, partial(foreign.bitnet, divides=True)),
    "BitNet that multiplies": (
        {"quant_method": "bitnet", "linear_class": "autobitlinear"}, partial(foreign.bitnet, divides=False),
    ),
    **{
        f"Gemma {bits} bits": ({"quant_method": "gemma", "num_bits": bits}, partial(foreign.gemma, bits=bits))
        for bits in (2, 4, 8)
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("formats") / "m", "llama", torch.bfloat16, **SIZES)


def quantised(source: Path, writer: Writer, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a source with random codes for its linear layers, and the weights that these stand for."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in stored(source).items():
        if name.endswith(LINEAR):
            more, values = writer(name, (tensor.shape[0], tensor.shape[1]), draw)
            tensors |= more
            dense[name] = torch.from_numpy(values)
        else:
            tensors[name] = tensor
    return tensors, dense


@pytest.mark.parametrize("what", FORMATS)
def test_weights_are_those_of_an_independent_decoder(what: str, source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS[what]
    tensors, dense = quantised(source, writer)
    path = directory(source, tmp_path / "q", tensors, method)
    loaded = load(path, dtype="float32")
    own = loaded.model.state_dict()
    assert all(torch.equal(own[name], values) for name, values in dense.items())
    assert sum(loaded.stored.values()) == len(dense)
    assert loaded.notes == ()


@pytest.mark.parametrize("what", ["fp8 blocks", "CT nvfp4", "GPTQ desc_act", "AWQ", "bitsandbytes nf4, nested, 64"])
def test_logits_are_those_of_the_dense_weights(what: str, source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS[what]
    tensors, dense = quantised(source, writer)
    own = load(directory(source, tmp_path / "q", tensors, method)).model
    plain = stored(source) | {name: values.to(torch.bfloat16) for name, values in dense.items()}
    other = load(directory(source, tmp_path / "dense", plain, None)).model
    assert own.dtype is torch.bfloat16
    assert torch.equal(reference_logits(own, TOKENS), reference_logits(other, TOKENS))


# -- torchao and other places of the description -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"])
@pytest.mark.parametrize("group", [None, 32])
def test_classes_of_torchao_are_read(kind: str, group: int | None, source: Path, tmp_path: Path) -> None:
    def writer(weight: str, shape: tuple[int, int], draw: foreign.Draw) -> foreign.Written:
        return foreign.torchao(weight, shape, draw, kind, (1, group or shape[1]))

    tensors, dense = quantised(source, writer)
    metadata: dict[str, str] = {}
    for name, values in dense.items():
        metadata |= foreign.torchao_metadata(kind, (1, group or values.shape[1]), [name])
    path = directory(source, tmp_path / "q", tensors, {"quant_method": "torchao"}, metadata=metadata)
    own = load(path, dtype="float32").model.state_dict()
    assert all(torch.equal(own[name], values) for name, values in dense.items())


@pytest.mark.parametrize("about", [None, "Int4Tensor", "{"])
def test_other_classes_of_torchao_are_refused(about: str | None, source: Path, tmp_path: Path) -> None:
    tensors, dense = quantised(source, partial(torchao_rows, kind="Int8Tensor"))
    metadata = {} if about is None else foreign.torchao_metadata(about, (1, 32), list(dense))
    metadata = dict.fromkeys(dense, about) if about == "{" else metadata
    path = directory(source, tmp_path / "q", tensors, {"quant_method": "torchao"}, metadata=metadata)
    with pytest.raises(ModelRefused, match=r"_qdata, but .*metadata describes it as .*; read are Int8Tensor, Intx"):
        load(path)


@pytest.mark.parametrize("where", ["compression_config", "quantization", "hf_quant_config.json"])
def test_the_description_may_be_in_another_place(where: str, source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS["ModelOpt nvfp4"]
    tensors, dense = quantised(source, writer)
    if where == "hf_quant_config.json":
        path = directory(source, tmp_path / "q", tensors, None)
        own = {key: value for key, value in method.items() if key != "quant_method"}
        (path / where).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    else:
        path = directory(source, tmp_path / "q", tensors, None, **{where: method})
    own = load(path, dtype="float32").model.state_dict()
    assert all(torch.equal(own[name], values) for name, values in dense.items())


def test_modules_that_config_leaves_are_read_as_they_are(source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS["fp8 blocks"]
    left = "model.layers.0.self_attn.q_proj.weight"
    tensors, dense = quantised(source, writer)
    del tensors[f"{left}_scale_inv"], dense[left]
    tensors[left] = stored(source)[left]
    listed = {**method, "modules_to_not_convert": ["lm_head", left.removesuffix(".weight")]}
    own = load(directory(source, tmp_path / "q", tensors, listed)).model.state_dict()
    assert torch.equal(own[left], tensors[left])
    assert all(torch.equal(own[name], values.to(torch.bfloat16)) for name, values in dense.items())


@pytest.mark.parametrize("kind", ["GPTQ dynamic", "AutoRound", "MLX", "Gemma"])
def test_modules_with_other_bits_are_read(kind: str, source: Path, tmp_path: Path) -> None:
    def writer(weight: str, shape: tuple[int, int], draw: foreign.Draw) -> foreign.Written:
        bits = 8 if ".mlp." in weight else 4
        if kind == "MLX":
            return foreign.mlx(weight, shape, draw, bits, 32)
        if kind == "Gemma":
            return foreign.gemma(weight, shape, draw, bits)
        return GPTQ(weight, shape, draw, bits, 32, offset=1, order=None)

    tensors, dense = quantised(source, writer)
    mlps = [name.removesuffix(".weight") for name in dense if ".mlp." in name]
    method = {
        "GPTQ dynamic": gptq_config(4, 32, dynamic={r"+:.*\.mlp\..*": {"bits": 8}}),
        "AutoRound": ROUND | {"extra_config": {name: {"bits": 8} for name in mlps}},
        "MLX": {
            "bits": 4,
            "group_size": 32,
            "lm_head": False,
            **{name: {"bits": 8} for name in mlps},
        },
        "Gemma": {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": {r"\.mlp\.": {"num_bits": 8}}},
    }[kind]
    own = load(directory(source, tmp_path / "q", tensors, method), dtype="float32").model.state_dict()
    assert all(torch.equal(own[name], values) for name, values in dense.items())


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_layers_that_have_none_are_left_out_if_they_are_zero(
    value: float, source: Path, tmp_path: Path
) -> None:
    """AutoGPTQ wrote a bias for every layer."""
    method, writer = FORMATS["GPTQ 4 bits, 32"]
    tensors, dense = quantised(source, writer)
    biases = {name.replace(".weight", ".bias"): torch.zeros(len(one)) for name, one in dense.items()}
    biases["model.layers.1.mlp.up_proj.bias"][-1] = value
    path = directory(source, tmp_path / "q", tensors | biases, method)
    if value:
        with pytest.raises(
            ModelRefused, match=r"1 tensors that have no place in it \(model\.layers\.1\.mlp\.up_proj\.bias"
        ):
            load(path)
    else:
        (note,) = load(path).notes
        assert note.startswith(f"{len(dense)} stored tensors are not used: LlamaForCausalLM ignores ")


# -- experts, embeddings and layers that have their weights transposed -------------------------------------------------


@pytest.mark.parametrize("what", ["fp8 blocks", "GPTQ 4 bits, 32", "CT mxfp4", "CT nvfp4"])
def test_experts_that_are_stored_one_by_one_are_joined(what: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "mixtral", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    method, writer = FORMATS[what]
    draw, tensors, plain = np.random.default_rng(1), {}, {}
    for name, tensor in stored(source).items():
        if ".experts." in name:
            more, values = writer(name, (tensor.shape[0], tensor.shape[1]), draw)
            tensors |= more
            plain[name] = torch.from_numpy(values).to(torch.bfloat16)
        else:
            tensors[name] = plain[name] = tensor
    own = load(directory(source, tmp_path / "q", tensors, method)).model
    other = load(directory(source, tmp_path / "dense", plain, None)).model
    assert any(".experts." in name and name not in tensors for name in plain) or what == "fp8 blocks"
    assert torch.equal(reference_logits(own, TOKENS), reference_logits(other, TOKENS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_gpt_oss_are_read(dtype: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "gpt-oss", hidden_size=64, intermediate_size=96)
    draw, tensors, plain = np.random.default_rng(2), {}, {}
    for name, tensor in stored(source).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            more, values = foreign.gpt_oss(name, tuple(tensor.shape), draw)  # type: ignore[arg-type]
            tensors |= more
            plain[name] = torch.from_numpy(values).contiguous()
        else:
            tensors[name] = plain[name] = tensor
    assert any(name.endswith("_blocks") for name in tensors)
    own = load(directory(source, tmp_path / "q", tensors, {"quant_method": "mxfp4"}), dtype=dtype).model
    other = load(directory(source, tmp_path / "dense", plain, None), dtype=dtype).model
    assert torch.equal(reference_logits(own, TOKENS), reference_logits(other, TOKENS))


def test_stacked_experts_of_eight_bit_floats_are_read(tmp_path: Path) -> None:
    """Files that transformers writes have the experts of a layer in one tensor."""
    source = saved(tmp_path / "m", "mixtral", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    plain = {name: tensor for name, tensor in stored(source).items() if ".experts." not in name}
    model = load(source).model.state_dict()
    draw, tensors = np.random.default_rng(3), dict(plain)
    for name in [name for name in model if ".experts." in name]:
        experts, outputs, inputs = model[name].shape
        written = [foreign.fp8("w", (outputs, inputs), draw, (40, 64), "_scale_inv") for _ in range(experts)]
        plain[name] = torch.stack([torch.from_numpy(values).to(torch.bfloat16) for _, values in written])
        raw = torch.stack([found["w"].view(torch.uint8) for found, _ in written])
        tensors[name] = raw.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.stack([found["w_scale_inv"] for found, _ in written])
    own = load(directory(source, tmp_path / "q", tensors, BLOCK)).model.state_dict()
    assert all(torch.equal(own[name], plain[name]) for name in model if ".experts." in name)


def test_embeddings_of_gemma_are_read(source: Path, tmp_path: Path) -> None:
    tensors = stored(source)
    name = "model.embed_tokens.weight"
    shape = (tensors[name].shape[0], tensors[name].shape[1])
    names = ("embedding_quantized", "embedding_scale")
    more, values = foreign.gemma(name, shape, np.random.default_rng(4), 4, names)
    del tensors[name]
    path = directory(source, tmp_path / "q", tensors | more, {"quant_method": "gemma", "quantize_embeddings": True})
    assert torch.equal(load(path, dtype="float32").model.state_dict()[name], torch.from_numpy(values))


def test_layers_that_have_their_weights_transposed_are_refused(tmp_path: Path) -> None:
    """Squares would fit."""
    source = saved(tmp_path / "m", "gpt2")
    tensors = stored(source)
    name = next(name for name in tensors if name.endswith("attn.c_proj.weight"))
    shape = (tensors[name].shape[0], tensors[name].shape[1])
    more, _ = GPTQ(name, shape, np.random.default_rng(5), 4, 32, offset=1, order=None)
    del tensors[name]
    with pytest.raises(ModelRefused, match=r"attn\.c_proj\.weight quantised \(GPTQ, 4 bits.* belongs to a Conv1D"):
        load(directory(source, tmp_path / "q", tensors | more, gptq_config(4, 32)))


# -- damage ------------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]
UP = "model.layers.1.mlp.up_proj"


def put(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{UP}.{suffix}": tensor})


def without(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{suffix}")


def filled(suffix: str, value: float) -> Change:
    """One number of a tensor, changed."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensor = tensors[f"{UP}.{suffix}"]
        flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
        flat.flatten()[-1] = value

    return change


def cut(suffix: str, axis: int = 0) -> Change:
    """A tensor without its last element in one dimension."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{UP}.{suffix}"
        tensors[name] = tensors[name].narrow(axis, 0, tensors[name].shape[axis] - 1).contiguous()

    return change


def state(**changes: Any) -> Change:
    """Changed fields of a state of bitsandbytes; None removes one."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
        found = json.loads(bytes(tensors[name].tolist())) | changes
        kept = {key: value for key, value in found.items() if value is not None}
        tensors[name] = torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)

    return change


NF4, DESC, MX = "bitsandbytes nf4, nested, 64", "GPTQ desc_act", "CT mxfp4"
DAMAGE: list[tuple[str, Change, str]] = [
    ("fp8 blocks", filled("weight_scale_inv", math.nan), "weight_scale_inv has a scale of nan"),
    ("fp8 blocks", filled("weight_scale_inv", 1e9), "weight_scale_inv has a scale of 1000000000.0; at most 65536"),
    ("fp8 blocks", cut("weight_scale_inv"), "weight_scale_inv is [3, 2]; [4, 2] or [4, 1, 2, 1] is needed"),
    ("fp8 blocks", without("weight_scale_inv"), f"holds {UP}.weight as F8_E4M3"),
    ("fp8 blocks", put("weight_scale_inv", torch.zeros(4, 2, dtype=torch.int32)), "weight_scale_inv is I32, not BF16"),
    ("fp8 blocks", cut("weight"), "up_proj.weight is [159, 96] in the weights and [160, 96] by the config"),
    ("fp8 AutoFP8", put("weight_scale", torch.zeros(160, 2)), "weight_scale is [160, 2]; [1, 1] or [1] or [] or"),
    ("CT fp8 channel", put("weight_scale", torch.ones(3, 1)), "weight_scale is [3, 1]"),
    ("mxfp8", filled("weight_scale_inv", 255), "weight_scale_inv has a scale of inf"),
    (MX, filled("weight_scale", 200), "weight_scale has a scale of 9.44"),
    (MX, without("weight_packed"), f"there is no {UP}.weight_packed"),
    (MX, cut("weight_scale", 1), "weight_scale is [160, 2]; [160, 3] is needed"),
    (MX, put("weight_packed", torch.zeros(160, 48, dtype=torch.int8)), "weight_packed is I8, not U8"),
    ("CT nvfp4", put("weight_global_scale", torch.tensor([0.0])), "weight_global_scale is 0.0, which scales cannot"),
    ("CT nvfp4", put("weight_global_scale", torch.tensor([math.nan])), "weight_global_scale is nan"),
    ("CT nvfp4", put("weight_global_scale", torch.tensor([1e-9])), "weight_scale has a scale of "),
    ("CT nvfp4", without("weight_global_scale"), "there is no"),
    ("CT nvfp4", filled("weight_scale", 127), "weight_scale has a scale of nan"),
    ("ModelOpt nvfp4", put("pre_quant_scale", torch.ones(96)), "inputs are scaled before they are multiplied"),
    ("ModelOpt nvfp4", without("weight_scale_2"), f"there is no {UP}.weight_scale_2"),
    (DESC, filled("g_idx", 3), "g_idx has indices from 0 to 3; there are 3 groups"),
    (DESC, filled("g_idx", -1), "g_idx has indices from -1 to 2"),
    (DESC, without("g_idx"), f"there is no {UP}.g_idx"),
    (DESC, cut("g_idx"), "g_idx is [95]; [96] is needed"),
    (DESC, filled("scales", math.inf), "scales has a scale of inf"),
    (DESC, cut("scales"), "scales is [2, 160]; [3, 160] is needed"),
    (DESC, cut("qzeros", 1), "qzeros is [3, 19]; [3, 20] is needed"),
    (DESC, without("qzeros"), f"there is no {UP}.qzeros"),
    (DESC, put("qweight", torch.zeros(12, 160, dtype=torch.int16)), "qweight is I16, not I32"),
    (DESC, put("qweight", torch.zeros(0, 160, dtype=torch.int32)), "qweight is [0, 160]; two dimensions"),
    ("GPTQ 3 bits, 32", cut("qweight"), "integers of 3 bits do not fill"),
    ("AWQ", cut("qweight"), "up_proj.weight is [160, 95] in the weights"),
    ("AWQ", cut("qzeros"), "qzeros is [2, 20]; [3, 20] is needed"),
    ("AWQ", filled("scales", math.nan), "scales has a scale of nan"),
    (NF4, without("weight.absmax"), f"there is no {UP}.weight.absmax"),
    (NF4, without("weight.quant_state.bitsandbytes__nf4"), "quant_state.bitsandbytes__nf4, which describes it"),
    (NF4, state(shape=[1 << 30, 1 << 30]), "weight is [7680, 1]; [576460752303423488, 1] is needed"),
    (NF4, state(shape=[96, 160]), "up_proj.weight is [96, 160] in the weights and [160, 96] by the config"),
    (NF4, state(shape=[15360]), "Expected `array` of length 2 - at `$.shape`"),
    (NF4, state(blocksize=0), "Invalid enum value 0 - at `$.blocksize`"),
    (NF4, state(blocksize=32), "weight.absmax is [240]; [480] is needed"),
    (NF4, state(nested_blocksize=None), "has no nested_blocksize"),
    (NF4, state(nested_offset="a"), "got `str` - at `$.nested_offset`"),
    (NF4, state(nested_offset=10**400), "Number out of range"),
    (NF4, state(nested_offset=math.nan), "JSON is malformed"),
    (NF4, state(blocksize=64.0), "got `float` - at `$.blocksize`"),
    (NF4, state(nested_blocksize=256.0), "got `float` - at `$.nested_blocksize`"),
    (NF4, filled("weight.nested_absmax", math.nan), "weight.absmax has a scale of nan"),
    (NF4, filled("weight.quant_map", math.nan), "weight.quant_map has a scale of nan"),
    (NF4, put("weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8)), "JSON is malformed"),
    (NF4, put("weight.quant_state.bitsandbytes__nf4", torch.zeros(9999, dtype=torch.uint8)), "at most 4096 bytes"),
    ("bitsandbytes int8", cut("SCB"), "SCB is [159]; [160] is needed"),
    ("bitsandbytes int8", filled("weight_format", 2), "weight_format is not 0"),
    ("bitsandbytes int8", without("SCB"), f"{UP}.weight as I8"),
    ("MLX 4 bits, 32", without("biases"), f"there is no {UP}.biases"),
    ("MLX 4 bits, 32", cut("scales", 1), "scales is [160, 2]; [160, 3] is needed"),
    ("MLX 4 bits, 32", cut("weight", 1), "weight is [160, 11], no whole groups of 32 of 4 bits"),
    ("MLX 4 bits, 32", filled("biases", math.nan), "biases has a scale of nan"),
    ("BitNet", put("weight_scale", torch.tensor([0.0])), "weight_scale has a scale of inf"),
    ("BitNet", without("weight_scale"), f"{UP}.weight is [40, 96] in the weights and [160, 96]"),
    ("BitNet", put("weight_scale", torch.ones(2)), "weight_scale is [2]; [1] or [] is needed"),
    ("Gemma 4 bits", put("weight_scale", torch.ones(159, 1)), "weight_scale is [159, 1] for 160 outputs of 96 inputs"),
    ("Gemma 4 bits", filled("weight_scale", math.nan), "weight_scale has a scale of nan"),
]


@pytest.mark.parametrize(("what", "change", "named"), DAMAGE, ids=[f"{n} {one[0]}" for n, one in enumerate(DAMAGE)])
def test_damage_is_refused_by_name_and_reason(
    what: str, change: Change, named: str, source: Path, tmp_path: Path
) -> None:
    method, writer = FORMATS[what]
    tensors, _ = quantised(source, writer)
    change(tensors)
    with pytest.raises(ModelRefused) as refusal:
        load(directory(source, tmp_path / "q", tensors, method))
    assert named in str(refusal.value)
    assert UP in str(refusal.value)


def test_a_truncated_file_is_refused(source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS["AWQ"]
    path = directory(source, tmp_path / "q", quantised(source, writer)[0], method)
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(raw[:-100])
    with pytest.raises(ModelRefused, match=r"model\.safetensors is not a whole safetensors file"):
        load(path)


def test_gpt_oss_experts_that_are_damaged_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "gpt-oss", hidden_size=64, intermediate_size=96)
    tensors = stored(source)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    more, _ = foreign.gpt_oss(name, tuple(tensors.pop(name).shape), np.random.default_rng(6))  # type: ignore[arg-type]
    for number, (changed, reason) in enumerate([
        ({f"{name}_scales": more[f"{name}_scales"][:, :1].contiguous()}, "_scales is ["),
        ({f"{name}_blocks": more[f"{name}_blocks"][..., :8].contiguous()}, "_blocks is ["),
        ({f"{name}_scales": torch.full_like(more[f"{name}_scales"], 255)}, "has a scale of inf"),
        ({f"{name}_scales": None}, f"there is no {name}_scales"),
        ({f"{name}_blocks": None}, f"there is no {name}_blocks"),
    ]):  # fmt: skip
        kept = {key: value for key, value in (tensors | more | changed).items() if value is not None}
        with pytest.raises(ModelRefused) as refusal:
            load(directory(source, tmp_path / f"q{number}", kept, {"quant_method": "mxfp4"}))
        assert reason in str(refusal.value)


CHANGED = ("fp8 blocks", "CT nvfp4", DESC, "AWQ", NF4, "MLX 4 bits, 32", "BitNet", "Gemma 4 bits")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", CHANGED)
def test_a_file_with_any_tensor_changed_is_loaded_or_refused(
    what: str, seed: int, source: Path, tmp_path: Path
) -> None:
    """Never another error."""
    method, writer = FORMATS[what]
    tensors, _ = quantised(source, writer)
    draw = random.Random(f"{what} {seed}")
    for turn in range(4):
        changed = dict(tensors)
        for name in draw.sample(sorted(set(tensors) - set(stored(source))) or sorted(tensors), 2):
            one = tensors[name]
            changed[name] = draw.choice([
                *(one.flatten()[: draw.randrange(1, 9)].clone(), one[None].clone(), one.reshape(-1)[:0].clone()),
                *(one.reshape(one.shape[::-1]), one.to(torch.float32), one.to(torch.uint8), torch.full_like(one, 3)),
            ])  # fmt: skip
            if draw.random() < 0.3:
                changed[f"{name}{draw.choice(['_scale', '_2', '.absmax'])}"] = changed.pop(name)
        with suppress(ModelRefused):
            assert load(directory(source, tmp_path / f"q{turn}", changed, method)).model.dtype is torch.bfloat16


# -- what else sees such directories -----------------------------------------------------------------------------------


def test_quantised_weights_are_not_quantised_again(source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS["AWQ"]
    path = directory(source, tmp_path / "q", quantised(source, writer)[0], method)
    with pytest.raises(ModelRefused, match="the weights of q are quantised already"):
        quantize_directory(path, tmp_path / "again", "int8", measure=False)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("what", FORMATS)
def test_decoded_weights_count_before_they_are_loaded(what: str, source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS[what]
    tensors, _ = quantised(source, writer)
    path = directory(source, tmp_path / "q", tensors, method)
    assert weights_of(path).elements >= weights_of(source).elements
    assert weights_of(source).kind in ("BF16", "F32")
    assert weights_of(path).kind not in ("", "BF16", "F32")
    assert 3 * bytes_in_memory(source) > bytes_in_memory(path) >= bytes_in_memory(source)


# -- parts of decoders -------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 1 << 30))
def test_codes_that_cross_words_are_unpacked(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count))
    found = unpack(foreign.words(codes, bits), bits)[:, :count]
    assert found.tolist() == codes.tolist()


def test_numbers_of_few_bits() -> None:
    raw = torch.arange(256, dtype=torch.uint8)[None]
    assert e2m1(raw)[0].tolist() == [x for b in range(256) for x in foreign.e2m1(np.array([[b % 16, b // 16]]))[0]]
    table = torch.arange(16.0)
    assert looked_up(raw, table, high_first=True)[0].tolist() == [x for b in range(256) for x in (b // 16, b % 16)]
    assert as_floats(raw[0])[:255].tolist() == [math.ldexp(1.0, n - 127) for n in range(255)]
    assert as_floats(raw[0])[255] == math.inf
    assert as_floats(raw[0, :255].view(torch.float8_e8m0fnu)).tolist() == as_floats(raw[0])[:255].tolist()


TYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64",
}  # fmt: skip


def decoded(tensors: dict[str, Tensor], method: dict[str, Any]) -> Decoded:
    """The only weight of these stored tensors."""
    named = {name: Stored("a file", tuple(one.shape), TYPES[one.dtype]) for name, one in tensors.items()}
    files, form = WeightsFiles(Path(), named, tensors, {}), format_in({"quantization_config": method})
    assert form is not None
    (part,) = filter(None, (form.part(name, files) for name in tensors))
    part.check(tensors.__getitem__)
    return shown_part(part, tensors)


DENSE = (
    *("fp8", "fbgemm", "mxfp8", "CT fp8", "CT mxfp8", "ModelOpt fp8", "ModelOpt mxfp8", "MLX mxfp8"),
    *("bitsandbytes nf4", "bitsandbytes fp4"),
)
EIGHT_BITS = ("GPTQ 8", "MLX 5", "MLX 6", "MLX 8", "Gemma 8", "bitsandbytes int8")


@pytest.mark.parametrize("what", FORMATS)
def test_codes_stand_for_the_same_weights(what: str) -> None:
    method, writer = FORMATS[what]
    tensors, dense = writer("x.weight", (160, 96), np.random.default_rng(7))
    found = decoded(tensors, method)
    assert isinstance(found, Coded) != what.startswith(DENSE)
    if isinstance(found, Coded):
        codes = found.codes()
        if what == "GPTQ with a smaller last group":
            assert codes == "its groups have from 32 to 64 inputs"
        else:
            assert isinstance(codes, Codes)
            codes.check()
            assert (codes.table is None) == what.startswith(EIGHT_BITS)
            torch.testing.assert_close(codes.dense(), torch.tensor(dense), rtol=1e-6, atol=1e-5)


SERVED = ("GPTQ desc_act", "AWQ", "CT nvfp4", "MLX 4 bits, 32", "bitsandbytes int8", "fp8 blocks")


@pytest.mark.parametrize("what", SERVED)
def test_linear_layers_compute_with_the_codes_of_files(what: str, source: Path, tmp_path: Path) -> None:
    method, writer = FORMATS[what]
    tensors, dense = quantised(source, writer)
    path = directory(source, tmp_path / "q", tensors, method)
    loaded = load(path, dtype="float32", weights="auto")
    for name, values in dense.items():
        weight: Any = loaded.model.get_submodule(name.removesuffix(".weight")).weight
        torch.testing.assert_close(weight, values, rtol=1e-6, atol=1e-5)
    if what.startswith(DENSE):  # rounded like any dense weights, if that is wanted
        assert loaded.served is None
        assert load(path, weights="int8").served is not None
    else:
        assert loaded.served is not None
        assert loaded.served.layers[8 if what == "bitsandbytes int8" else 4] >= len(dense)
        assert not loaded.served.dense


def test_dense_weights_beside_codes_are_finite_in_the_dtype_of_the_network(source: Path, tmp_path: Path) -> None:
    """A weight whose groups have different sizes is not served from its codes, and its scale overflows float16."""
    method, writer = FORMATS[DESC]
    tensors, _ = quantised(source, writer)
    groups = tensors[f"{UP}.g_idx"]
    groups[groups.argmax()] = 0
    path = directory(source, tmp_path / "q", tensors, method)
    served = load(path, dtype="float16", weights="auto").served
    assert served is not None
    assert set(served.dense) == {f"{UP}.weight"}
    tensors[f"{UP}.scales"].fill_(60000)
    with pytest.raises(ModelRefused, match=rf"{UP}\.weight holds NaN or infinity as torch\.float16.* float32"):
        load(directory(source, tmp_path / "damaged", tensors, method), dtype="float16", weights="auto")


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(SHAPES, SHAPES, st.integers(0, 1 << 30))
def test_blocks_of_any_size_are_decoded(shape: tuple[int, int], block: tuple[int, int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    tensors, dense = foreign.fp8("x.weight", shape, draw, block, "_scale_inv")
    assert torch.equal(decoded(tensors, BLOCK | {"weight_block_size": list(block)})[...], torch.tensor(dense))


WORDS = st.tuples(st.integers(1, 5), st.integers(1, 6))


@given(WORDS, st.sampled_from([2, 3, 4, 8]), st.integers(1, 96), st.booleans(), st.integers(0, 99))
def test_gptq_of_any_shape_is_decoded(size: tuple[int, int], bits: int, group: int, ordered: bool, seed: int) -> None:
    shape = (32 * size[0], 32 * size[1])
    tensors, dense = GPTQ("x.weight", shape, np.random.default_rng(seed), bits, group, offset=1, order=ordered)
    assert torch.equal(decoded(tensors, gptq_config(bits, group))[...], torch.tensor(dense))


@given(SHAPES, st.sampled_from([16, 32, 64]), st.booleans(), st.integers(0, 99))
def test_nf4_of_any_shape_is_decoded(shape: tuple[int, int], block: int, nested: bool, seed: int) -> None:
    tensors, dense = foreign.bnb4("x.weight", shape, np.random.default_rng(seed), "nf4", block, nested=nested)
    assert torch.equal(decoded(tensors, BNB)[...], torch.tensor(dense))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_the_description_may_be_that_of_the_text_model(key: str) -> None:
    method, _ = FORMATS["AWQ"]
    assert format_in({"text_config": {key: FORMATS["AWQ"][0] | {"group_size": 32}}}) is not None
    with pytest.raises(ModelRefused, match="describes quantised weights twice"):
        format_in({"text_config": {key: method}, "quantization": method | {"group_size": 64}})


@pytest.mark.parametrize("what", [what for what in FORMATS if what.startswith("CT")])
def test_compressed_tensors_itself_computes_the_same(what: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="optional: compressed-tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    method, writer = FORMATS[what]
    tensors, _ = writer("x.weight", (160, 96), np.random.default_rng(8))
    scheme = method["config_groups"]["group_0"]
    about = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**scheme["weights"])
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme["format"])
    plain = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    theirs = compressor.decompress(plain, about)["weight"].to(torch.bfloat16)
    assert torch.equal(theirs, decoded(tensors, method)[...].to(torch.bfloat16))


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_that_compressed_tensors_packs_are_read(bits: int) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="optional")
    half = 1 << bits - 1
    codes = torch.from_numpy(np.random.default_rng(bits).integers(-half, half, (24, 100))).to(torch.int8)
    scales = torch.rand(24, 1)
    tensors = {
        "x.weight_packed": packing.pack_to_int32(codes, bits),
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([24, 100]),
    }
    method = compressed("pack-quantized", bits, "channel", type="int")
    assert torch.equal(decoded(tensors, method)[...], codes.float() * scales)
