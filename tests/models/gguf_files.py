"""Writes GGUF files as llama.cpp's converter does: names, permuted rows, norms plus 1, metadata; and quantised blocks.

Independent of the importer: the names and the layouts of blocks are written down here once more, the other way round.
"""

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, BF16, TQ1_0, TQ2_0, MXFP4 = 10, 11, 12, 13, 14, 20, 30, 34, 35, 39
ALIGNMENT = 32
Fields = dict[str, Any]


@dataclass(frozen=True)
class Blocks:
    """The bytes of a tensor with this shape."""

    type: int
    shape: tuple[int, ...]
    raw: bytes


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """The type and the bytes of a metadata value."""
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, int):
        return struct.pack("<II", 4, found) if found >= 0 else struct.pack("<Ii", 5, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str | bytes):
        return struct.pack("<I", 8) + text(found)
    elements = [value(one) for one in found]
    kind = elements[0][:4] if elements else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(elements)) + b"".join(one[4:] for one in elements)


def header(fields: Mapping[str, Any], infos: Iterable[bytes], *, version: int = 3) -> bytes:
    tensors = list(infos)
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    return start + b"".join(text(key) + value(one) for key, one in fields.items()) + b"".join(tensors)


def info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def padded(raw: bytes, alignment: int = ALIGNMENT) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def write(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Blocks]) -> Path:
    alignment = fields.get("general.alignment", ALIGNMENT)
    infos, data = [], b""
    for name, one in tensors.items():
        infos.append(info(name, one.shape, one.type, len(data)))
        data = padded(data + one.raw, alignment)
    path.write_bytes(padded(header(fields, infos), alignment) + data)
    return path


# -- blocks --------------------------------------------------------------------------------------------------------


def _half(number: float) -> bytes:
    return struct.pack("<e", number)


def stored(tensor: Tensor, kind: int) -> Blocks:
    """A tensor as blocks of this type; as float32 where its rows are no multiple of a block, or it is a vector."""
    shape = tuple(tensor.shape)
    if kind not in (F32, F16, BF16) and (len(shape) < 2 or shape[-1] % 32):
        kind = F32
    plain = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
    if kind in plain:
        return Blocks(kind, shape, tensor.to(plain[kind]).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    rows = tensor.float().reshape(-1, 32).tolist()
    return Blocks(kind, shape, b"".join(map({Q8_0: _q8_0, Q4_0: _q4_0}[kind], rows)))


def _q8_0(row: list[float]) -> bytes:
    scale = struct.unpack("<e", _half(max(map(abs, row)) / 127))[0] or 1.0
    return _half(scale) + struct.pack("<32b", *(max(-127, min(127, round(one / scale))) for one in row))


def _q4_0(row: list[float]) -> bytes:
    scale = struct.unpack("<e", _half(max(row, key=abs) / -8))[0] or 1.0
    codes = [max(0, min(15, round(one / scale) + 8)) for one in row]
    return _half(scale) + bytes(low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True))


def read_block(kind: int, raw: bytes) -> list[float]:
    """The values of a block, one by one, as the format's description says."""
    return _READ[kind](raw)


def _float(raw: bytes, at: int) -> float:
    return struct.unpack_from("<e", raw, at)[0]


def _nibbles(raw: bytes) -> list[int]:
    return [one & 15 for one in raw] + [one >> 4 for one in raw]


def _bit(raw: bytes, index: int) -> int:
    return raw[index // 8] >> index % 8 & 1


def _scale_min(raw: bytes, group: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of one of the 8 groups of Q4_K and Q5_K, from 12 bytes."""
    if group < 4:
        return raw[group] & 63, raw[group + 4] & 63
    high, low = raw[group + 4], raw[group - 4]
    return high & 15 | low >> 6 << 4, high >> 4 | raw[group] >> 6 << 4


def _read_q4_k(raw: bytes) -> list[float]:
    found = []
    for group in range(8):
        scale, least = _scale_min(raw[4:16], group)
        for index in range(32):
            byte = raw[16 + group // 2 * 32 + index]
            code = byte >> 4 if group % 2 else byte & 15
            found.append(_float(raw, 0) * scale * code - _float(raw, 2) * least)
    return found


def _read_q5_k(raw: bytes) -> list[float]:
    found = []
    for group in range(8):
        scale, least = _scale_min(raw[4:16], group)
        for index in range(32):
            byte = raw[48 + group // 2 * 32 + index]
            code = (byte >> 4 if group % 2 else byte & 15) + 16 * (raw[16 + index] >> group & 1)
            found.append(_float(raw, 0) * scale * code - _float(raw, 2) * least)
    return found


def _read_q6_k(raw: bytes) -> list[float]:
    found = []
    for index in range(256):
        half, place = divmod(index, 128)
        quarter, at = divmod(place, 32)
        low = raw[half * 64 + quarter % 2 * 32 + at]
        high = raw[128 + half * 32 + at] >> 2 * quarter & 3
        code = (low >> 4 if quarter > 1 else low & 15) + 16 * high - 32
        found.append(_float(raw, 208) * struct.unpack_from("b", raw, 192 + index // 16)[0] * code)
    return found


def _read_q2_k(raw: bytes) -> list[float]:
    found = []
    for index in range(256):
        half, place = divmod(index, 128)
        code = raw[16 + half * 32 + place % 32] >> 2 * (place // 32) & 3
        scale = raw[index // 16]
        found.append(_float(raw, 80) * (scale & 15) * code - _float(raw, 82) * (scale >> 4))
    return found


def _read_q3_k(raw: bytes) -> list[float]:
    found = []
    for index in range(256):
        half, place = divmod(index, 128)
        code = raw[32 + half * 32 + place % 32] >> 2 * (place // 32) & 3
        code -= 0 if raw[place % 32] >> (half * 4 + place // 32) & 1 else 4
        group = index // 16
        low = raw[96 + group % 8] >> 4 * (group // 8) & 15
        scale = low | (raw[104 + group % 4] >> 2 * (group // 4) & 3) << 4
        found.append(_float(raw, 108) * (scale - 32) * code)
    return found


def _read_tq1_0(raw: bytes) -> list[float]:
    found = []
    for start, width, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for digit in range(digits):
            for index in range(width):
                rest = raw[start + index] * 3**digit % 256
                found.append(_float(raw, 52) * (rest * 3 // 256 - 1))
    return found


def _read_tq2_0(raw: bytes) -> list[float]:
    places = [(start + index, 2 * pair) for start in (0, 32) for pair in range(4) for index in range(32)]
    return [_float(raw, 64) * ((raw[at] >> shift & 3) - 1) for at, shift in places]


def _read_mxfp4(raw: bytes) -> list[float]:
    values = (0, 1, 2, 3, 4, 6, 8, 12)
    return [(-1 if code > 7 else 1) * values[code % 8] / 2 * 2.0 ** (raw[0] - 127) for code in _nibbles(raw[1:])]


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_READ: dict[int, Callable[[bytes], list[float]]] = {
    Q8_0: lambda raw: [_float(raw, 0) * code for code in struct.unpack("<32b", raw[2:])],
    Q4_0: lambda raw: [_float(raw, 0) * (code - 8) for code in _nibbles(raw[2:])],
    Q4_1: lambda raw: [_float(raw, 0) * code + _float(raw, 2) for code in _nibbles(raw[4:])],
    Q5_0: lambda raw: [
        _float(raw, 0) * (code + 16 * _bit(raw[2:6], index) - 16) for index, code in enumerate(_nibbles(raw[6:]))
    ],
    Q5_1: lambda raw: [
        _float(raw, 0) * (code + 16 * _bit(raw[4:8], index)) + _float(raw, 2)
        for index, code in enumerate(_nibbles(raw[8:]))
    ],
    IQ4_NL: lambda raw: [_float(raw, 0) * _IQ4[code] for code in _nibbles(raw[2:])],
    Q2_K: _read_q2_k,
    Q3_K: _read_q3_k,
    Q4_K: _read_q4_k,
    Q5_K: _read_q5_k,
    Q6_K: _read_q6_k,
    TQ1_0: _read_tq1_0,
    TQ2_0: _read_tq2_0,
    MXFP4: _read_mxfp4,
}  # fmt: skip
BLOCKS = {  # elements, bytes, and where the half-precision numbers of a block are
    Q8_0: (32, 34, (0,)), Q4_0: (32, 18, (0,)), Q4_1: (32, 20, (0, 2)), Q5_0: (32, 22, (0,)), Q5_1: (32, 24, (0, 2)),
    IQ4_NL: (32, 18, (0,)), Q2_K: (256, 84, (80, 82)), Q3_K: (256, 110, (108,)), Q4_K: (256, 144, (0, 2)),
    Q5_K: (256, 176, (0, 2)), Q6_K: (256, 210, (208,)), TQ1_0: (256, 54, (52,)), TQ2_0: (256, 66, (64,)),
    MXFP4: (32, 17, ()),
}  # fmt: skip


def random_block(kind: int, generator: torch.Generator, scale: float = 0.01) -> bytes:
    """A block of random bits, with scales of this size."""
    _, size, halves = BLOCKS[kind]
    raw = bytearray(torch.randint(0, 256, (size,), generator=generator).tolist())
    for at in halves:
        raw[at : at + 2] = _half(scale * torch.rand((), generator=generator).item())
    if kind == MXFP4:
        raw[0] = 115 + raw[0] % 8  # an exponent
    return bytes(raw)


# -- models --------------------------------------------------------------------------------------------------------

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
NAMES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
PERMUTED = ("llama", "granite", "smollm3")


def renamed(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model as llama.cpp's converter changes and names them."""
    kind, found = model.config.model_type, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for other, changed in _changed(kind, name, tensor.detach(), model.config):
            found[other] = changed.contiguous()
    return found


def _changed(kind: str, name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer and layer[2] == "mlp.experts.gate_up_proj":
        yield f"blk.{layer[1]}.ffn_gate_exps.weight", tensor.chunk(2, 1)[0]
        yield f"blk.{layer[1]}.ffn_up_exps.weight", tensor.chunk(2, 1)[1]
        return
    if layer and layer[2] == "mlp.experts.down_proj":
        yield f"blk.{layer[1]}.ffn_down_exps.weight", tensor
        return
    base, _, end = (layer[2] if layer else name).rpartition(".")
    table = {**_LAYER, **_GEMMA} if kind.startswith("gemma") else _LAYER
    if kind == "lfm2" and name == "model.embedding_norm.weight":
        other = "token_embd_norm.weight"
    else:
        other = f"blk.{layer[1]}.{table[base]}.{end}" if layer else f"{_TOP[base]}.{end}"
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if kind in PERMUTED and base in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if base == "conv.conv":
        tensor = tensor.squeeze(1)
    yield other, tensor


def metadata(model: PreTrainedModel, **more: Any) -> Fields:
    """The fields of the architecture."""
    config = model.config
    kind = NAMES.get(config.model_type, config.model_type)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps if kind == "lfm2" else config.rms_norm_eps,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {"general.architecture": kind, **{f"{kind}.{key}": one for key, one in {**found, **more}.items()}}


def convert(model: PreTrainedModel, path: Path, kind: int = F32, extra: Fields | None = None, **more: Any) -> Path:
    """Write a model with tensors of this type; `more`: fields of its architecture, `extra`: others."""
    tensors = {name: stored(tensor, kind) for name, tensor in renamed(model).items()}
    return write(path, {**metadata(model, **more), **(extra or {})}, tensors)
