"""gguf_models: the architectures of GGUF files that are imported: config, and the names of tensors in transformers.

Files are written by llama.cpp's converter, which renames tensors, permutes rows of some, and adds 1 to the norms of
Gemma. What it does is undone here, per architecture. A tensor or a field that has no place here refuses the file.

Rotary embeddings, as a GGUF file describes them, become `rope_parameters` of transformers.

Each field of the metadata of an architecture is checked as it is read, and none is left out.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from torch import Tensor

from kvcellar.engine.models.gguf.gguf_file import Header, Stored
from kvcellar.errors import ModelRefused, first_few, shown

_MOST = 1 << 24  # of a whole number
_LESS = {"block_count": 10_000, "expert_count": 1 << 12}  # of others: so many records are made for a file
_WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})


class Fields:
    """The fields `ARCHITECTURE.*`. Those that were not read when all are refused by name."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._read: set[str] = set(_WITHOUT_EFFECT)
        found = header.fields.get("general.architecture")
        if not isinstance(found, str):
            raise ModelRefused(f"{header.name} has no general.architecture")
        self.architecture = found

    def raw(self, key: str) -> Any:
        """None where the file does not have it."""
        self._read.add(key)
        return self._header.fields.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; that of all layers where the file has one for each."""
        found = self.raw(key)
        if isinstance(found, list) and found and found.count(found[0]) == len(found):
            found = found[0]
        if found is None and default is not None:
            return default
        most = _LESS.get(key, _MOST)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
            raise self.wrong(key, found, f"a whole number from 1 to {most} is needed")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.raw(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise self.wrong(key, found, "a number is needed")
        return float(str(numpy.float32(found)))  # the decimal that was meant: 1e-06, not 9.99999997e-07

    def must_be(self, key: str, expected: Any) -> None:
        """Refuse a field with another value."""
        found = self.raw(key)
        if found is not None and found != expected:
            raise self.wrong(key, found, f"only {expected} is supported")

    def check_all_read(self) -> None:
        prefix = f"{self.architecture}."
        keys = (key for key in self._header.fields if key.startswith(prefix))
        if unread := sorted(key for key in keys if key.removeprefix(prefix) not in self._read):
            raise ModelRefused(
                f"{self._header.name} has fields that are not followed here, and that could change what it generates: "
                f"{', '.join(unread[:8])}"
            )

    def wrong(self, key: str, found: Any, why: str) -> ModelRefused:
        return ModelRefused(f"{self._header.name}: {self.architecture}.{key} is {shown(found)}; {why}")


_NEAR = 1e-4  # relative: factors are float32
_LOW, _HIGH = 1.0, 4.0  # of all models with llama3 scaling


def rope_parameters(fields: Fields, *, default_theta: float = 10000.0) -> dict[str, Any]:
    """What the fields say, without the tensors of factors."""
    theta = fields.number("rope.freq_base", default_theta)
    if theta <= 0:
        raise fields.wrong("rope.freq_base", theta, "a number above 0 is needed")
    linear = fields.number("rope.scale_linear", 1.0)  # of files before `rope.scaling.factor`
    factor = fields.number("rope.scaling.factor", linear)
    kind = fields.raw("rope.scaling.type") or ("linear" if factor not in (0.0, 1.0) else "none")
    original = fields.raw("rope.scaling.original_context_length")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn") and factor <= 0:
        raise fields.wrong("rope.scaling.factor", factor, "a number above 0 is needed")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        if original is None:
            raise fields.wrong("rope.scaling.original_context_length", None, "YaRN needs it")
        found = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        found["original_max_position_embeddings"] = fields.whole("rope.scaling.original_context_length")
        fields.must_be("rope.scaling.yarn_ext_factor", 1.0)
        fields.must_be("rope.scaling.yarn_log_multiplier", 0.0)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if fields.raw(f"rope.scaling.{key}") is not None:
                found[name] = fields.number(f"rope.scaling.{key}")
        if (scale := fields.number("rope.scaling.attn_factor", 1.0)) != 1.0:
            found["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
        return found
    raise fields.wrong("rope.scaling.type", kind, "none, linear, and yarn are supported")


def llama3_parameters(theta: float, factors: Sequence[float], name: str) -> dict[str, Any]:
    """The llama3 scaling that has these factors: a GGUF file stores them in a tensor, without what they come from."""
    if not all(math.isfinite(one) and one > 0 for one in factors):
        raise ModelRefused(f"{name}: its rope_freqs.weight has a factor that is not a number above 0")
    factor = max(factors)
    for power in range(4, 24):
        found = {
            "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH, "original_max_position_embeddings": 1 << power,
        }  # fmt: skip
        made = _llama3_factors(found, len(factors))
        if all(math.isclose(one, other, rel_tol=_NEAR) for one, other in zip(made, factors, strict=True)):
            return found
    raise ModelRefused(f"{name}: its rope_freqs.weight is not of llama3 scaling, and cannot be followed")


def _llama3_factors(parameters: Mapping[str, Any], count: int) -> list[float]:
    """What each wavelength is multiplied by."""
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    found: list[float] = []
    for index in range(count):
        turns = original / (2 * math.pi * parameters["rope_theta"] ** (index / count))  # within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(\w+(?:\.\w+)?)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_FREQUENCIES = "rope_freqs.weight"
_MOST_EXPERTS = 1 << 17  # of all layers
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_GEMMA = {
    **_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PHI3 = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the imported model. `change`: of its values, in float32. `order`: of its elements."""

    name: str
    stored: Stored
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor] | None = None
    order: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """A model in a GGUF file. `factors`: the tensor of factors of rotary frequencies, if it has one."""

    config: dict[str, Any]
    parts: tuple[Part, ...]
    factors: Stored | None


@dataclass(frozen=True, slots=True)
class _Architecture:
    model_type: str
    layers: Mapping[str, str]  # names of the tensors of a layer
    config: Callable[[Fields, Header], dict[str, Any]]
    norm: str = "output_norm"  # the name of the last norm
    norm_name: str = "model.norm"
    permuted: bool = False  # rows of q and k, within each head
    norms_plus_one: bool = False


def imported(header: Header) -> Imported:
    """Raises `ModelRefused` with what is supported, or with what of the file is not followed."""
    fields = Fields(header)
    found = ARCHITECTURES.get(fields.architecture)
    if found is None:
        raise ModelRefused(
            f"{header.name} has the architecture {fields.architecture}; these are imported: {', '.join(ARCHITECTURES)}"
        )
    _check_whole(header)
    config = {"model_type": found.model_type, "dtype": "bfloat16", **_common(fields, header)}
    config |= found.config(fields, header)
    if "num_experts" not in config:
        fields.must_be("expert_count", 0)
        fields.must_be("expert_used_count", 0)
    fields.check_all_read()
    parts = tuple(part for stored in header.tensors.values() for part in _parts(stored, found, config, header))
    _check_complete(header, found, config)
    factors = header.tensors.get(_FREQUENCIES)
    if factors is not None and factors.shape != (config["head_dim"] // 2,):
        raise ModelRefused(f"{header.name}: {_FREQUENCIES} has the shape {factors.shape}, not half of a head's")
    return Imported(config, parts, factors)


def with_factors(config: dict[str, Any], factors: list[float], name: str) -> dict[str, Any]:
    """The config of a model whose file has a tensor of factors of rotary frequencies."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") != "default":
        raise ModelRefused(f"{name}: {_FREQUENCIES} with {rope.get('rope_type', 'several')} scaling is not supported")
    if all(factor == 1.0 for factor in factors):
        return config
    return {**config, "rope_parameters": llama3_parameters(rope["rope_theta"], factors, name)}


def _check_whole(header: Header) -> None:
    if header.fields.get("split.count", 1) not in (0, 1):
        raise ModelRefused(f"{header.name} is one of several parts; join them first (llama-gguf-split --merge)")
    if header.fields.get("general.type", "model") != "model":
        raise ModelRefused(f"{header.name} is of type {header.fields['general.type']}, not a model")


def _check_complete(header: Header, found: _Architecture, config: Mapping[str, Any]) -> None:
    """Each layer has the tensors that others of its kind have."""
    blocks = [_BLOCK.fullmatch(name) for name in header.tensors]
    has = {(int(block[1]), f"{block[2]}.{block[3]}") for block in blocks if block}
    layers = range(config["num_hidden_layers"])
    kinds = config["layer_types"] if found.model_type == "lfm2" else [""] * len(layers)
    all_of = {kind: {name for layer, name in has if kinds[layer] == kind} for kind in set(kinds)}
    names = [
        f"blk.{layer}.{name}" for layer in layers for name in sorted(all_of[kinds[layer]]) if (layer, name) not in has
    ]
    if f"{found.norm}.weight" not in header.tensors:
        names.append(f"{found.norm}.weight")
    if names:
        raise ModelRefused(f"{header.name} lacks the tensor {first_few(names)}")


# -- configs -------------------------------------------------------------------------------------------------------


def _common(fields: Fields, header: Header) -> dict[str, Any]:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelRefused(f"{header.name} has no token_embd.weight with rows of tokens")
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    fields.must_be("attention.causal", True)
    head_dim = fields.whole("attention.key_length", max(1, hidden // heads))
    fields.must_be("attention.value_length", head_dim)
    fields.must_be("rope.dimension_count", head_dim)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_tokens(header),
    }


def _tokens(header: Header) -> dict[str, Any]:
    """Ids of the first, last and padding token."""
    ids = {name: header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = list(dict.fromkeys(one for one in (ids["eos"], ids["eot"]) if isinstance(one, int)))
    end = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": end}


def _dense(fields: Fields) -> dict[str, Any]:
    return {
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_key_value_heads": fields.whole("attention.head_count_kv", fields.whole("attention.head_count")),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _has(header: Header, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in header.tensors)


def _llama(fields: Fields, header: Header) -> dict[str, Any]:
    biases = {"attention_bias": _has(header, "attn_q.bias"), "mlp_bias": _has(header, "ffn_up.bias")}
    return {**_dense(fields), **biases, "rope_parameters": rope_parameters(fields)}


def _smollm3(fields: Fields, header: Header) -> dict[str, Any]:
    layers = fields.whole("block_count")  # llama.cpp leaves every fourth layer without positions
    return {**_llama(fields, header), "no_rope_layers": [int((n + 1) % 4 != 0) for n in range(layers)]}


def _granite(fields: Fields, header: Header) -> dict[str, Any]:
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    width = fields.whole("attention.key_length", hidden // heads)
    multipliers = {
        "attention_multiplier": fields.number("attention.scale", width**-0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }
    return {**_llama(fields, header), **multipliers}


def _qwen(fields: Fields, header: Header) -> dict[str, Any]:
    return {**_dense(fields), "rope_parameters": rope_parameters(fields), "use_sliding_window": False}


def _qwen3_moe(fields: Fields, header: Header) -> dict[str, Any]:
    if (count := fields.whole("expert_count") * fields.whole("block_count")) > _MOST_EXPERTS:
        raise fields.wrong("expert_count", fields.whole("expert_count"), f"{count} in all layers are too many")
    experts = {
        "num_experts": fields.whole("expert_count"),
        "num_experts_per_tok": fields.whole("expert_used_count"),
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {**_qwen(fields, header), **experts}


def _gemma(fields: Fields, largest: int) -> dict[str, Any]:
    """`largest`: layers of the one model whose queries are scaled by the size of the embedding per head."""
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", hidden // heads)
    scalar = hidden // heads if fields.whole("block_count") == largest else head_dim
    window = fields.whole("attention.sliding_window")
    return {**_dense(fields), "query_pre_attn_scalar": scalar, "sliding_window": window}


def _gemma2(fields: Fields, header: Header) -> dict[str, Any]:
    return {
        **_gemma(fields, 46),
        "rope_parameters": rope_parameters(fields),
        "layer_types": _sliding(fields.whole("block_count"), 2),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields, header: Header) -> dict[str, Any]:
    pattern = fields.whole("attention.sliding_window_pattern", 6)
    fields.must_be("final_logit_softcapping", 0.0)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    return {
        **_gemma(fields, 62),
        "rope_parameters": {
            "full_attention": rope_parameters(fields, default_theta=1e6), "sliding_attention": local,
        },
        "layer_types": _sliding(fields.whole("block_count"), pattern),
    }  # fmt: skip


def _sliding(layers: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees everything."""
    return ["full_attention" if (n + 1) % pattern == 0 else "sliding_attention" for n in range(layers)]


def _phi3(fields: Fields, header: Header) -> dict[str, Any]:
    if _has(header, "rope_factors_long.weight"):
        raise ModelRefused(f"{header.name} has two sets of rotary factors (longrope), which are not imported")
    window = fields.raw("attention.sliding_window")
    return {
        **_dense(fields),
        "rope_parameters": rope_parameters(fields),
        "sliding_window": window or None,
        "original_max_position_embeddings": fields.whole("context_length"),
    }


def _lfm2(fields: Fields, header: Header) -> dict[str, Any]:
    heads, layers = fields.raw("attention.head_count_kv"), fields.whole("block_count")
    if not isinstance(heads, list) or len(heads) != layers or len(set(heads) - {0}) != 1:
        raise fields.wrong("attention.head_count_kv", heads, "a list is needed, with 0 for each convolution")
    return {
        "intermediate_size": fields.whole("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_key_value_heads": max(heads),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.whole("shortconv.l_cache"),
        "rope_parameters": rope_parameters(fields, default_theta=1e6),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


# -- tensors -------------------------------------------------------------------------------------------------------


def _parts(stored: Stored, found: _Architecture, config: Mapping[str, Any], header: Header) -> Iterator[Part]:
    """The tensors of the model that one tensor of the file holds."""
    top = {"token_embd": "model.embed_tokens", "output": "lm_head", found.norm: found.norm_name}
    base, _, kind = stored.name.rpartition(".")
    block = _BLOCK.fullmatch(stored.name)
    if stored.name == _FREQUENCIES:
        return
    if base in top and kind in ("weight", "bias"):
        yield _part(f"{top[base]}.{kind}", stored, found, base, config)
    elif block and int(block[1]) < config["num_hidden_layers"] and block[2] in found.layers:
        yield _part(f"model.layers.{int(block[1])}.{found.layers[block[2]]}.{kind}", stored, found, block[2], config)
    elif block and "num_experts" in config and (expert := _EXPERTS.fullmatch(block[2])):
        yield from _experts(f"model.layers.{int(block[1])}.mlp.experts", f"{expert[1]}_proj", stored, config, header)
    else:
        raise ModelRefused(f"{header.name} has the tensor {stored.name}, which {found.model_type} does not have here")


def _part(name: str, stored: Stored, found: _Architecture, base: str, config: Mapping[str, Any]) -> Part:
    part = Part(name, stored, stored.shape)
    if found.norms_plus_one and base.endswith("_norm"):
        part = replace(part, change=lambda values: values - 1)
    if found.permuted and base in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if base == "attn_q" else "num_key_value_heads"]
        if stored.shape[0] != heads * config["head_dim"] or config["head_dim"] % 2:
            raise ModelRefused(f"{stored.name} has {stored.shape[0]} rows, not those of {heads} heads")
        part = replace(part, order=lambda rows: _unpermuted(rows, heads))
    if base == "shortconv.conv":
        part = replace(part, shape=(stored.shape[0], 1, *stored.shape[1:]))
    return part


def _experts(layer: str, name: str, stored: Stored, config: Mapping[str, Any], header: Header) -> Iterator[Part]:
    """A tensor [E,R,C] holds a matrix for each expert."""
    count = config["num_experts"]
    if len(stored.shape) != 3 or stored.shape[0] != count:
        raise ModelRefused(f"{header.name}: {stored.name} has the shape {stored.shape}, not one of {count} experts")
    size = stored.bytes // count
    for expert in range(count):
        one = Stored(stored.name, stored.shape[1:], stored.type, stored.offset + expert * size, size)
        yield Part(f"{layer}.{expert}.{name}.weight", one, one.shape)


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp has the two halves of each head interleaved."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", _LLAMA, _llama, permuted=True),
    "qwen2": _Architecture("qwen2", _LLAMA, _qwen),
    "qwen3": _Architecture("qwen3", {**_LLAMA, **_QK_NORMS}, _qwen),
    "qwen3moe": _Architecture(
        "qwen3_moe", {**_ATTENTION, **_QK_NORMS, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
        _qwen3_moe,
    ),
    "gemma2": _Architecture("gemma2", _GEMMA, _gemma2, norms_plus_one=True),
    "gemma3": _Architecture("gemma3_text", {**_GEMMA, **_QK_NORMS}, _gemma3, norms_plus_one=True),
    "phi3": _Architecture("phi3", _PHI3, _phi3),
    "granite": _Architecture("granite", _LLAMA, _granite, permuted=True),
    "smollm3": _Architecture("smollm3", _LLAMA, _smollm3, permuted=True),
    "lfm2": _Architecture("lfm2", _LFM2, _lfm2, norm="token_embd_norm", norm_name="model.embedding_norm"),
}  # fmt: skip
