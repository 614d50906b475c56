"""A GGUF file becomes a model directory with the same model, or is refused with the reason."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar.engine.models.gguf.gguf_file import TYPES
from kvcellar.engine.models.gguf.gguf_import import BITS, decode, import_gguf
from kvcellar.engine.models.gguf.gguf_models import ARCHITECTURES, llama3_parameters
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize.served import kernels_for
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnExperts
from kvcellar.kernels.quantised import QuantisedLinear
from tests.models import gguf_files as gguf
from tests.zoo import ARCHS, reference_logits

TOKENS = list(range(3, 43))
MULTIPLIERS = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.0}
MODELS: dict[str, dict[str, Any]] = {  # of the zoo: what the converter adds to the fields that all have
    "llama": {},
    "llama-rope-linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama-rope-yarn": {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3": {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3},
    "phi3": {"rope.scaling.original_context_length": 256, "attention.sliding_window": 0},
    "granite": MULTIPLIERS,
    "smollm3": {},
    "lfm2": {"attention.head_count_kv": [0, 0, 2, 0, 2], "feed_forward_length": 256, "shortconv.l_cache": 3},
}  # fmt: skip


def rounded(name: str, **changes: Any) -> PreTrainedModel:
    """A model of the zoo whose weights are exact in bfloat16."""
    model = ARCHS[name].build(**changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def loaded(file: Path, tmp_path: Path) -> PreTrainedModel:
    into = tmp_path / "model"
    into.mkdir()
    import_gguf(file, into)
    return load(into, dtype="float32").model


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return torch.equal(reference_logits(one, TOKENS), reference_logits(other, TOKENS))


def test_all_architectures_are_tried() -> None:
    assert {gguf.NAMES.get(ARCHS[name].build().config.model_type, name.split("-")[0]) for name in MODELS} == set(
        ARCHITECTURES
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    model = rounded(name, **({"norm_topk_prob": True} if name == "qwen3-moe" else {}))
    assert same(model, loaded(gguf.convert(model, tmp_path / "m.gguf", **MODELS[name]), tmp_path))


def test_factors_of_rotary_frequencies_are_llama3_scaling(tmp_path: Path) -> None:
    model = rounded("llama-rope-llama3")
    rope = model.config.rope_parameters
    turns = [32 / (2 * torch.pi * rope["rope_theta"] ** (2 * index / 16)) for index in range(8)]
    smooth = [min(1.0, max(0.0, (one - 1.0) / 3.0)) for one in turns]
    factors = torch.tensor([1 / ((1 - one) / 4.0 + one) for one in smooth])
    tensors = {name: gguf.stored(tensor, gguf.F32) for name, tensor in gguf.renamed(model).items()}
    tensors["rope_freqs.weight"] = gguf.stored(factors, gguf.F32)
    file = gguf.write(tmp_path / "m.gguf", gguf.metadata(model), tensors)
    assert same(model, loaded(file, tmp_path))
    tensors["rope_freqs.weight"] = gguf.stored(factors[1:], gguf.F32)
    with pytest.raises(ModelRefused, match=r"has the shape \(7,\), not half of a head's"):
        import_gguf(gguf.write(file, gguf.metadata(model), tensors), tmp_path)
    tensors["rope_freqs.weight"] = gguf.stored(factors**2, gguf.F32)
    with pytest.raises(ModelRefused, match=r"rope_freqs\.weight is not of llama3 scaling"):
        import_gguf(gguf.write(file, gguf.metadata(model), tensors), tmp_path)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_cannot_be_are_refused(factor: float) -> None:
    with pytest.raises(ModelRefused, match=r"m: its rope_freqs\.weight has a factor that is not a number above 0"):
        llama3_parameters(10000.0, [1.0, factor], "m")


@pytest.mark.parametrize("kind", [gguf.F16, gguf.BF16, gguf.Q8_0, gguf.Q4_0])
def test_decoded_weights_are_those_that_the_blocks_hold(kind: int, tmp_path: Path) -> None:
    model = rounded("llama")
    file = gguf.convert(model, tmp_path / "m.gguf", kind)
    state = model.state_dict()
    for name, tensor in state.items():
        blocks = gguf.stored(tensor, kind)
        if blocks.type in gguf.BLOCKS:
            _, size, _ = gguf.BLOCKS[blocks.type]
            parts = [blocks.raw[at : at + size] for at in range(0, len(blocks.raw), size)]
            values = [one for part in parts for one in gguf.read_block(blocks.type, part)]
            state[name] = torch.tensor(values).reshape(tensor.shape)
        else:
            state[name] = tensor.half().float() if kind == gguf.F16 else tensor
    kept = {name for name, tensor in state.items() if kind in BITS and tensor.dim() == 2 and "embed" not in name}
    model.load_state_dict(
        {name: tensor if name in kept else tensor.bfloat16().float() for name, tensor in state.items()}
    )
    assert same(model, loaded(file, tmp_path))
    import_gguf(file, tmp_path / "decoded", codes=False)
    decoded, ours = (load(tmp_path / part).model.state_dict() for part in ("decoded", "model"))
    assert all(torch.equal(one, ours[name]) for name, one in decoded.items())
    assert "quantization_config" not in json.loads((tmp_path / "decoded" / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("kind", [gguf.Q8_0, gguf.Q4_0])
def test_blocks_of_8_and_4_bits_are_multiplied_as_they_are(name: str, kind: int, tmp_path: Path) -> None:
    """Rows of q and k are in the order of the network, and experts are joined. Routers are dense, and reported."""
    if isinstance(kernels_for(torch.device("cpu"), os.environ), str):
        pytest.skip("there is no compiler")
    model = rounded(name, **({"norm_topk_prob": True} if name == "qwen3-moe" else {}))
    loaded(gguf.convert(model, tmp_path / "m.gguf", kind, **MODELS[name]), tmp_path)
    ours, dense = (load(tmp_path / "model", dtype="float32", weights=weights) for weights in ("auto", "dense"))
    assert ours.served is not None
    routers = [one for one in ours.model.state_dict() if one.endswith(".mlp.gate.weight")]
    assert [*ours.served.dense] == routers
    assert bool(routers) == (name == "qwen3-moe")
    bits = BITS[kind]
    assert set(ours.served.layers) <= {bits, 8}
    plain = dict(dense.model.named_parameters())
    for place, module in ours.model.named_modules():
        if isinstance(module, QuantisedLinear):
            assert module.bits == bits
            assert torch.equal(module.weight, plain[f"{place}.weight"])
        if isinstance(module, OwnExperts):
            for expert, layer in enumerate(module.layers):
                assert torch.equal(layer.weight, plain[place][expert])
    assert sum(isinstance(one, QuantisedLinear) for one in ours.model.modules()) > len(ours.model.model.layers) * 4


@pytest.mark.parametrize("kind", [gguf.Q2_K, gguf.Q3_K, gguf.Q4_K, gguf.Q5_K, gguf.Q6_K])
def test_a_model_of_k_blocks_is_decoded(kind: int, tmp_path: Path) -> None:
    model = rounded("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(kind)
    tensors, state = {}, model.state_dict()
    names = {tensor.data_ptr(): name for name, tensor in state.items()}
    _, size, _ = gguf.BLOCKS[kind]
    for name, tensor in gguf.renamed(model).items():
        tensors[name] = gguf.stored(tensor, gguf.F32)
        if name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight"):
            raw = b"".join(gguf.random_block(kind, generator, 1e-4) for _ in range(tensor.numel() // 256))
            tensors[name] = gguf.Blocks(kind, tuple(tensor.shape), raw)
            values = [one for at in range(0, len(raw), size) for one in gguf.read_block(kind, raw[at : at + size])]
            state[names[tensor.data_ptr()]] = torch.tensor(values).reshape(tensor.shape).bfloat16().float()
    model.load_state_dict(state)
    assert same(model, loaded(gguf.write(tmp_path / "m.gguf", gguf.metadata(model), tensors), tmp_path))


@pytest.mark.parametrize("kind", gguf.BLOCKS, ids=lambda kind: TYPES[kind][0])
def test_blocks_are_decoded_as_their_description_says(kind: int) -> None:
    generator = torch.Generator().manual_seed(kind)
    blocks = [gguf.random_block(kind, generator) for _ in range(20)]
    found = decode(torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8), kind)
    expected = torch.tensor([one for block in blocks for one in gguf.read_block(kind, block)])
    assert TYPES[kind][1:] == gguf.BLOCKS[kind][:2]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    model = rounded("llama", tie_word_embeddings=True)
    file = gguf.convert(model, tmp_path / "m.gguf")
    found = loaded(file, tmp_path)
    assert json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"] is True
    assert same(model, found)


TOKENIZER = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}
BPE = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
SCALED = {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.factor": 0.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, r"has the architecture mamba; these are imported: llama, .*lfm2"),
    ({"general.architecture": 5}, r"no general\.architecture"),
    ({"split.count": 2}, "one of several parts"),
    ({"general.type": "adapter"}, "of type adapter"),
    ({"llama.expert_count": 4}, "expert_count is 4; only 0"),
    ({"llama.attention.sliding_window": 8}, r"are not followed here.*llama\.attention\.sliding_window"),
    ({"llama.attention.value_length": 8}, "value_length is 8; only 16"),
    ({"llama.rope.dimension_count": 8}, "dimension_count is 8; only 16"),
    ({"llama.rope.scaling.type": "longrope"}, "none, linear, and yarn"),
    ({"llama.rope.scaling.type": "yarn"}, "YaRN needs it"),
    ({"llama.embedding_length": 0}, "embedding_length is 0; a whole number from 1"),
    ({"llama.block_count": 10_001}, "a whole number from 1 to 10000"),
    ({"llama.block_count": "four"}, "block_count is 'four'; a whole number"),
    ({"llama.block_count": 3}, r"blk\.3\..* which llama does not have"),
    ({"llama.attention.head_count": 8}, "64 rows, not those of 8 heads|only 8 is supported"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a number is needed"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer of type 'bert'; these types are imported: gpt2, llama"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"}, "splits text as 'new' does"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.tokens is no list of str"),
    ({**TOKENIZER, "tokenizer.ggml.tokens": ["a" * 4097]}, "more than 4096 characters"),
    ({**TOKENIZER, "tokenizer.ggml.scores": [0.0, 1.0]}, "2 elements for 1 tokens"),
    ({**TOKENIZER, "tokenizer.ggml.eos_token_id": 9}, "eos_token_id is 9; there are 1 tokens"),
    ({**TOKENIZER, "tokenizer.ggml.model": ["x"]}, r"ggml\.model is \['x'\]; a text is needed"),
    (TOKENIZER, r"ggml\.scores is missing; a tokenizer of type llama needs it"),
    ({**TOKENIZER, "tokenizer.ggml.merges": ["a a"]}, r"has 'a a', and 'aa' is no token of the file"),
    ({**BPE, "tokenizer.ggml.pre": ["x"]}, r"ggml\.pre is \['x'\]; a text is needed"),
    (BPE, r"ggml\.merges is missing; a tokenizer of type gpt2 needs it"),
    ({**BPE, "tokenizer.ggml.merges": ["a b", "b a"]}, "has 'b a', and 'ba' is no token of the file"),
    ({**BPE, "tokenizer.ggml.merges": ["a c"]}, "has 'a c', and 'c' is no token of the file"),
    ({**BPE, "tokenizer.ggml.merges": ["ab"]}, "has 'ab', which is not two tokens with a space between them"),
    ({**BPE, "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.add_bos_token": "yes"}, "'yes'; true or false is"),
    ({"llama.rope.freq_base": 0.0}, r"freq_base is 0\.0; a number above 0"),
    ({"llama.rope.freq_base": -5.0}, r"freq_base is -5\.0; a number above 0"),
    ({**SCALED, "llama.rope.scaling.type": "linear"}, r"scaling\.factor is 0\.0; a number above 0"),
    ({**SCALED, "llama.rope.scaling.type": "yarn"}, r"scaling\.factor is 0\.0; a number above 0"),
]  # fmt: skip


def test_too_many_experts_are_refused(tmp_path: Path) -> None:
    more = {**MODELS["qwen3-moe"], "expert_count": 4096, "block_count": 33}
    file = gguf.convert(ARCHS["qwen3-moe"].build(), tmp_path / "m.gguf", **more)
    with pytest.raises(ModelRefused, match="135168 in all layers are too many"):
        import_gguf(file, tmp_path)


@pytest.mark.parametrize(("extra", "why"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_is_not_followed_is_refused_by_name(extra: dict[str, Any], why: str, tmp_path: Path) -> None:
    file = gguf.convert(ARCHS["llama"].build(), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelRefused, match=why):
        import_gguf(file, tmp_path)


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    model = ARCHS["llama"].build()
    tensors = {name: gguf.stored(tensor, gguf.F32) for name, tensor in gguf.renamed(model).items()}
    for name in ("blk.0.attn_sinks.weight", "v.patch_embd.weight", "blk.00.attn_q.weight", "output.scale"):
        file = gguf.write(
            tmp_path / "m.gguf", gguf.metadata(model), {**tensors, name: gguf.stored(torch.ones(2), gguf.F32)}
        )
        with pytest.raises(ModelRefused, match=f"has the tensor {name}, which llama does not have"):
            import_gguf(file, tmp_path)
    del tensors["token_embd.weight"]
    with pytest.raises(ModelRefused, match=r"no token_embd\.weight"):
        import_gguf(gguf.write(tmp_path / "m.gguf", gguf.metadata(model), tensors), tmp_path)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "blk.3.attn_norm.weight", "output_norm.weight"])
def test_a_missing_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = ARCHS["llama"].build()
    tensors = {name: gguf.stored(tensor, gguf.F32) for name, tensor in gguf.renamed(model).items()}
    del tensors[name]
    file = gguf.write(tmp_path / "m.gguf", gguf.metadata(model), tensors)
    with pytest.raises(ModelRefused, match=f"lacks the tensor {name}"):
        import_gguf(file, tmp_path)
    with pytest.raises(ModelRefused, match=r"lacks the tensor blk\.4\."):
        import_gguf(gguf.convert(model, file, block_count=5), tmp_path)


def test_a_layer_of_another_kind_lacks_no_tensor(tmp_path: Path) -> None:
    model, more = ARCHS["lfm2"].build(), MODELS["lfm2"]
    tensors = {name: gguf.stored(tensor, gguf.F32) for name, tensor in gguf.renamed(model).items()}
    del tensors["blk.1.shortconv.out_proj.weight"]
    file = gguf.write(tmp_path / "m.gguf", gguf.metadata(model, **more), tensors)
    with pytest.raises(ModelRefused, match=r"lacks the tensor blk\.1\.shortconv\.out_proj\.weight$"):
        import_gguf(file, tmp_path)


def test_sampling_parameters_and_ends_become_a_generation_config(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 1,
        "general.sampling.temp": 0.5, "general.sampling.top_k": 20,
    }  # fmt: skip
    file = gguf.convert(ARCHS["llama"].build(), tmp_path / "m.gguf", extra=extra)
    (tmp_path / "model").mkdir()
    import_gguf(file, tmp_path / "model")
    found = load(tmp_path / "model")
    assert found.end_ids == {2, 7}
    assert (found.defaults["temperature"], found.defaults["top_k"]) == (0.5, 20)
    assert struct.pack("<I", 3) in file.read_bytes()[:8]
