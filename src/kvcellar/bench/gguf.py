"""gguf: a Llama or Qwen3 network of the bench as a GGUF file, as llama.cpp's converter writes it: Llama's rows of q and
k in pairs within each head, and norms in float32."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvcellar.bench.network import CHAT, words

ALIGNMENT = 32
TYPES = {torch.float32: 0, torch.bfloat16: 30}
FILE_TYPE = 32  # matrices in bfloat16
ARCHITECTURES = ("llama", "qwen3")  # as both sides call them
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class Signed(int):
    """A field that is stored as a signed number."""


def write_gguf(directory: Path) -> None:
    """Write `model.gguf` beside the model directory's `model.safetensors`, with matrices in bfloat16."""
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", framework="pt") as weights:  # pyright: ignore[reportUnknownVariableType]
        tensors = {_name(key): _stored(config, key, weights.get_tensor(key)) for key in sorted(weights.keys())}
    if (rope := config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _rope_factors(rope, config["head_dim"])
    offset, infos = 0, list[bytes]()
    for key, tensor in tensors.items():
        shape = tuple(reversed(tensor.shape))
        infos.append(_text(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[tensor.dtype], offset))
        offset += _padded(tensor.nbytes)
    fields = _fields(config)
    with (directory / "model.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        file.write(b"".join(_text(key) + _value(one) for key, one in fields.items()) + b"".join(infos))
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _name(key: str) -> str:
    base = key.removesuffix(".weight")
    if not base.startswith("model.layers."):
        return f"{NAMES[base]}.weight"
    layer, _, rest = base.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _stored(config: Mapping[str, Any], key: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor.to(torch.float32)
    if config["model_type"] == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
        paired = tensor.unflatten(0, (-1, 2, config["head_dim"] // 2)).transpose(1, 2)  # row i beside row i + size/2
        tensor = paired.reshape(tensor.shape)
    return tensor.contiguous()


def _rope_factors(rope: Mapping[str, Any], head: int) -> Tensor:
    """By which Llama 3 divides the frequencies: those of long waves by `factor`, those between smoothly."""
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head, 2) / head)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    at, head, rope = config["model_type"], config["head_dim"], config.get("rope_parameters") or {}
    tokens, merges = words(config["vocab_size"])
    return {
        "general.architecture": at,
        "general.file_type": FILE_TYPE,
        f"{at}.block_count": config["num_hidden_layers"],
        f"{at}.context_length": config["max_position_embeddings"],
        f"{at}.embedding_length": config["hidden_size"],
        f"{at}.feed_forward_length": config["intermediate_size"],
        f"{at}.attention.head_count": config["num_attention_heads"],
        f"{at}.attention.head_count_kv": config["num_key_value_heads"],
        f"{at}.attention.key_length": head,
        f"{at}.attention.value_length": head,
        f"{at}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        f"{at}.rope.dimension_count": head,
        f"{at}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        f"{at}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [Signed(1)] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT,
    }


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """The type and the bytes of a field."""
    if isinstance(value, Signed):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    elements = [_value(one) for one in value]
    return struct.pack("<I", 9) + elements[0][:4] + struct.pack("<Q", len(elements)) + b"".join(e[4:] for e in elements)
