"""gguf: the weights of a Llama network of the bench as a GGUF file, as llama.cpp's converter writes it: the rows of q
and k in pairs within each head, and norms in float32."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvcellar.bench.network import CHAT, Size, words

ALIGNMENT = 32
TYPES = {torch.float32: 0, torch.bfloat16: 30}
FILE_TYPE = 32  # matrices in bfloat16
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class Signed(int):
    """A field that is stored as a signed number."""


def write_gguf(size: Size, directory: Path) -> None:
    """Write `model.gguf` beside the model directory's `model.safetensors`, with matrices in bfloat16."""
    with safe_open(directory / "model.safetensors", framework="pt") as weights:  # pyright: ignore[reportUnknownVariableType]
        tensors = {_name(key): _stored(size, key, weights.get_tensor(key)) for key in sorted(weights.keys())}
    offset, infos = 0, list[bytes]()
    for key, tensor in tensors.items():
        shape = tuple(reversed(tensor.shape))
        infos.append(_text(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[tensor.dtype], offset))
        offset += _padded(tensor.nbytes)
    fields = _fields(size)
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


def _stored(size: Size, key: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor.to(torch.float32)
    if key.endswith(("q_proj.weight", "k_proj.weight")):  # [heads*size,hidden]: row i beside row i + size/2
        paired = tensor.unflatten(0, (-1, 2, size.head_size // 2)).transpose(1, 2)
        tensor = paired.reshape(tensor.shape)
    return tensor.contiguous()


def _fields(size: Size) -> Mapping[str, Any]:
    tokens, merges = words(size.vocabulary)
    return {
        "general.architecture": "llama",
        "general.file_type": FILE_TYPE,
        "llama.block_count": size.layers,
        "llama.context_length": size.context,
        "llama.embedding_length": size.hidden,
        "llama.feed_forward_length": size.intermediate,
        "llama.attention.head_count": size.query_heads,
        "llama.attention.head_count_kv": size.kv_heads,
        "llama.attention.key_length": size.head_size,
        "llama.attention.value_length": size.head_size,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": size.head_size,
        "llama.rope.freq_base": 10_000.0,
        "llama.vocab_size": size.vocabulary,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [Signed(1)] * size.vocabulary,
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
