"""Files of quantised weights as other programs write them, with random codes, and the weights that they stand for.

Each writer packs codes and computes weights by the formula of its format, one number or one column after the other: it
shares no code with what it tests. It returns the stored tensors of a weight, and its dense values in float32.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], np.ndarray]
Draw = np.random.Generator
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def directory(source: Path, into: Path, tensors: dict[str, Tensor], method: Any, **more: Any) -> Path:
    """The model directory `source` with these tensors, and with `method` as its `quantization_config`."""
    metadata = more.pop("metadata", {})
    into.mkdir()
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt", **metadata})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": method} | more
    (into / "config.json").write_text(json.dumps(config))
    return into


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [r,n] as words [r,w], one after the other, the lowest bits first; a code may cross two words."""
    out = np.zeros((len(codes), math.ceil(codes.shape[1] * bits / 32)), dtype=np.uint64)
    for n in range(codes.shape[1]):
        for bit in range(bits):
            at = n * bits + bit
            out[:, at // 32] |= (codes[:, n].astype(np.uint64) >> np.uint64(bit) & np.uint64(1)) << np.uint64(at % 32)
    return out.astype(np.uint32)


def words(codes: np.ndarray, bits: int) -> Tensor:
    return torch.from_numpy(stream(codes, bits).view(np.int32).copy())


def nibbles(codes: np.ndarray, *, high_first: bool = False) -> Tensor:
    """Codes [...,n] as bytes [...,n/2]."""
    first, second = codes[..., ::2], codes[..., 1::2]
    low, high = (second, first) if high_first else (first, second)
    return torch.from_numpy((low + 16 * high).astype(np.uint8))


def e2m1(codes: np.ndarray) -> np.ndarray:
    return np.array([[(-1 if code > 7 else 1) * E2M1[code % 8] for code in row] for row in codes], dtype=np.float32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Bytes as floats of 4 bits of exponent and 3 of mantissa."""
    table = []
    for code in range(256):
        exponent, mantissa = code // 8 % 16, code % 8
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table.append(-value if code > 127 else value)
    return np.array(table, dtype=np.float32)[codes]


def eights(draw: Draw, *shape: int) -> np.ndarray:
    """Random bytes that are no NaN."""
    codes = draw.integers(0, 256, shape)
    return np.where(codes % 128 == 127, 0, codes)


def scales(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, np.ndarray]:
    """As stored, and as float32."""
    stored = torch.from_numpy(draw.normal(0, 0.02, shape)).to(dtype)
    return stored, stored.float().numpy()


def spread(values: np.ndarray, rows: int, columns: int, block: tuple[int, int]) -> np.ndarray:
    """A value of each block, for each element of a matrix."""
    return np.array([[values[r // block[0], c // block[1]] for c in range(columns)] for r in range(rows)])


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


# -- floats ------------------------------------------------------------------------------------------------------------


def fp8(
    weight: str,
    shape: tuple[int, int],
    draw: Draw,
    block: tuple[int, int] | None,
    suffix: str,
    stored_shape: Any = None,
) -> Written:
    """8-bit floats and a scale for each block; None: one scale. `stored_shape` is another one for the scales."""
    found = block or shape
    codes = eights(draw, *shape)
    stored, values = scales(draw, *blocks(shape, found))
    stored = stored.reshape(stored.shape if stored_shape is None else stored_shape)
    return {
        weight: torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn),
        f"{weight}{suffix}": stored,
    }, e4m3(codes) * spread(values, *shape, found)


def mx(draw: Draw, *shape: int) -> tuple[Tensor, np.ndarray]:
    """Exponents, and the powers of 2 that they mean."""
    raw = draw.integers(110, 130, shape).astype(np.uint8)
    return torch.from_numpy(raw), np.ldexp(np.float32(1), raw.astype(int) - 127).astype(np.float32)


def mxfp8(weight: str, shape: tuple[int, int], draw: Draw, suffix: str) -> Written:
    codes = eights(draw, *shape)
    stored, values = mx(draw, shape[0], shape[1] // 32)
    tensors = {weight: torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn), f"{weight}{suffix}": stored}
    return tensors, e4m3(codes) * spread(values, *shape, (1, 32))


def mxfp4(weight: str, shape: tuple[int, int], draw: Draw) -> Written:
    codes = draw.integers(0, 16, shape)
    stored, values = mx(draw, shape[0], shape[1] // 32)
    tensors = {f"{weight}_packed": nibbles(codes), f"{weight}_scale": stored}
    return tensors, e2m1(codes) * spread(values, *shape, (1, 32))


def nvfp4(weight: str, shape: tuple[int, int], draw: Draw, *, modelopt: bool) -> Written:
    codes, raw = draw.integers(0, 16, shape), eights(draw, shape[0], shape[1] // 16)
    number = np.float32(draw.uniform(100, 5000))
    factor = np.float32(1) / number if modelopt else number
    inner = e4m3(raw) * factor if modelopt else e4m3(raw) / factor
    stored = torch.from_numpy(raw.astype(np.uint8)).view(torch.float8_e4m3fn)
    names = ("", "_scale_2") if modelopt else ("_packed", "_global_scale")
    outer = torch.tensor(factor) if modelopt else torch.tensor([factor])
    tensors = {f"{weight}{names[0]}": nibbles(codes), f"{weight}_scale": stored, f"{weight}{names[1]}": outer}
    return tensors, e2m1(codes) * spread(inner, *shape, (1, 16))


def gpt_oss(weight: str, shape: tuple[int, int, int], draw: Draw) -> Written:
    """Experts of the shape [E,i,o]."""
    experts, inputs, outputs = shape
    codes = draw.integers(0, 16, (experts, outputs, inputs))
    stored, values = mx(draw, experts, outputs, inputs // 32)
    dense = [
        (e2m1(code) * spread(value, outputs, inputs, (1, 32))).T for code, value in zip(codes, values, strict=True)
    ]
    packed = nibbles(codes).reshape(experts, outputs, inputs // 32, 16)
    return {f"{weight}_blocks": packed, f"{weight}_scales": stored}, np.stack(dense)


# -- integers in words -------------------------------------------------------------------------------------------------


def gptq(
    weight: str, shape: tuple[int, int], draw: Draw, bits: int, group: int | None, *, offset: int, order: bool | None
) -> Written:
    """`order`: groups of inputs in random order; None: the file has no `g_idx`."""
    module, (outputs, inputs) = weight.removesuffix(".weight"), shape
    size = group or inputs
    count = math.ceil(inputs / size)
    codes = draw.integers(0, 1 << bits, shape)
    zeros = draw.integers(offset, 1 << bits, (outputs, count))
    stored, values = scales(draw, count, outputs, dtype=torch.float16)
    columns = np.arange(inputs) // size
    if order:
        draw.shuffle(columns)
    dense = np.zeros(shape, dtype=np.float32)
    for c in range(inputs):
        dense[:, c] = (codes[:, c] - zeros[:, columns[c]]).astype(np.float32) * values[columns[c]]
    tensors = {
        f"{module}.qweight": words(codes, bits).T.contiguous(),
        f"{module}.qzeros": words(zeros.T - offset, bits),
        f"{module}.scales": stored,
    }
    return tensors | ({} if order is None else {f"{module}.g_idx": torch.from_numpy(columns.astype(np.int32))}), dense


def awq(weight: str, shape: tuple[int, int], draw: Draw, group: int | None) -> Written:
    module, (outputs, inputs) = weight.removesuffix(".weight"), shape
    size = group or inputs
    codes, zeros = draw.integers(0, 16, shape), draw.integers(0, 16, (outputs, math.ceil(inputs / size)))
    stored, values = scales(draw, zeros.shape[1], outputs, dtype=torch.float16)
    dense = np.zeros(shape, dtype=np.float32)
    for c in range(inputs):
        dense[:, c] = (codes[:, c] - zeros[:, c // size]).astype(np.float32) * values[c // size]
    order = [n + one for n in range(0, outputs, 8) for one in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        f"{module}.qweight": words(codes.T[:, order], 4),
        f"{module}.qzeros": words(zeros.T[:, order], 4),
        f"{module}.scales": stored,
    }, dense


def mlx(weight: str, shape: tuple[int, int], draw: Draw, bits: int, group: int, biases: str = "biases") -> Written:
    module = weight.removesuffix(".weight")
    codes = draw.integers(0, 1 << bits, shape)
    stored, values = scales(draw, shape[0], shape[1] // group, dtype=torch.bfloat16)
    other, least = scales(draw, shape[0], shape[1] // group, dtype=torch.bfloat16)
    tensors = {
        weight: torch.from_numpy(stream(codes, bits)),
        f"{module}.scales": stored,
        f"{module}.{biases}": other,
    }
    product = codes.astype(np.float32) * spread(values, *shape, (1, group))
    return tensors, product + spread(least, *shape, (1, group))


def mlx_floats(weight: str, shape: tuple[int, int], draw: Draw, mode: str) -> Written:
    module, (bits, group) = weight.removesuffix(".weight"), {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = eights(draw, *shape) if bits == 8 else draw.integers(0, 16, shape)
    stored, values = mx(draw, shape[0], shape[1] // group)
    if mode == "nvfp4":
        raw = eights(draw, shape[0], shape[1] // group)
        stored, values = torch.from_numpy(raw.astype(np.uint8)), e4m3(raw)
    tensors = {weight: torch.from_numpy(stream(codes, bits)), f"{module}.scales": stored}
    return tensors, (e4m3 if bits == 8 else e2m1)(codes) * spread(values, *shape, (1, group))


# -- others ------------------------------------------------------------------------------------------------------------


def bnb4(weight: str, shape: tuple[int, int], draw: Draw, kind: str, block: int, *, nested: bool) -> Written:
    count = shape[0] * shape[1]
    codes = draw.integers(0, 16, count + count % 2)
    table = np.sort(draw.uniform(-1, 1, 16)).astype(np.float32)
    needed = math.ceil(count / block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    absmax = np.abs(draw.normal(0, 0.02, needed)).astype(np.float32)
    tensors = {f"{weight}.absmax": torch.from_numpy(absmax), f"{weight}.quant_map": torch.from_numpy(table)}
    if nested:
        raw, inner = draw.integers(0, 256, needed), draw.uniform(-1, 1, 256).astype(np.float32)
        outer = draw.uniform(0.01, 0.1, math.ceil(needed / 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
        absmax = np.array([inner[one] * outer[n // 256] + np.float32(0.03125) for n, one in enumerate(raw)])
        tensors |= {
            f"{weight}.absmax": torch.from_numpy(raw.astype(np.uint8)),
            f"{weight}.nested_absmax": torch.from_numpy(outer),
            f"{weight}.nested_quant_map": torch.from_numpy(inner),
        }
    dense = np.array([table[codes[n]] * absmax[n // block] for n in range(count)], dtype=np.float32)
    about = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {weight: nibbles(codes, high_first=True)[:, None], f"{weight}.quant_state.bitsandbytes__{kind}": about}
    return tensors, dense.reshape(shape)


def bnb8(weight: str, shape: tuple[int, int], draw: Draw) -> Written:
    codes = draw.integers(-127, 128, shape).astype(np.int8)
    largest = np.abs(draw.normal(1, 0.2, shape[0])).astype(np.float32)
    tensors = {
        weight: torch.from_numpy(codes),
        f"{weight.removesuffix('weight')}SCB": torch.from_numpy(largest),
        f"{weight}_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.astype(np.float32) * (largest / np.float32(127))[:, None]


def torchao(weight: str, shape: tuple[int, int], draw: Draw, kind: str, block: tuple[int, int]) -> Written:
    """Its metadata is `torchao_metadata`."""
    start = weight.removesuffix("weight") + "_weight"
    grid = blocks(shape, block)
    stored, values = scales(draw, *grid)
    if kind == "Float8Tensor":
        raw = eights(draw, *shape)
        tensors = {f"{start}_qdata": torch.from_numpy(raw.astype(np.uint8)).view(torch.float8_e4m3fn)}
        dense = e4m3(raw) * spread(values, *shape, block)
    else:
        codes, zeros = draw.integers(-8, 8, shape), draw.integers(-3, 4, grid)
        dense = (codes - spread(zeros, *shape, block)).astype(np.float32) * spread(values, *shape, block)
        tensors = {
            f"{start}_qdata": torch.from_numpy(codes.astype(np.int8)),
            f"{start}_zero_point": torch.from_numpy(zeros.astype(np.int8)),
        }
    return tensors | {f"{start}_scale": stored}, dense.astype(np.float32)


def torchao_metadata(kind: str, block: tuple[int, int], weights: list[str]) -> dict[str, str]:
    about = json.dumps({"_type": kind, "_data": {"block_size": list(block)}, "_tensor_data_names": ["qdata", "scale"]})
    return {"tensor_names": json.dumps(weights), **dict.fromkeys(weights, about)}


def bitnet(weight: str, shape: tuple[int, int], draw: Draw, *, divides: bool) -> Written:
    codes, quarter = draw.integers(0, 3, shape), shape[0] // 4
    packed = sum(codes[n * quarter : (n + 1) * quarter] << 2 * n for n in range(4))
    scale = torch.tensor([float(draw.uniform(0.5, 40))])
    factor = np.float32(1) / scale.numpy() if divides else scale.numpy()
    assert isinstance(packed, np.ndarray)
    return {
        weight: torch.from_numpy(packed.astype(np.uint8)),
        f"{weight}_scale": scale,
    }, (codes - 1).astype(np.float32) * factor


def gemma(
    weight: str, shape: tuple[int, int], draw: Draw, bits: int, names: tuple[str, str] = ("weight", "weight_scale")
) -> Written:
    module = weight.removesuffix(".weight")
    codes = draw.integers(0, 1 << bits, shape)
    per = 8 // bits
    packed = sum(codes[:, n::per] << bits * n for n in range(per))
    stored, values = scales(draw, shape[0], 1)
    signed = codes - (1 << bits - 1)
    raw = signed.astype(np.int8) if bits == 8 else np.asarray(packed).astype(np.uint8)
    tensors = {f"{module}.{names[0]}": torch.from_numpy(raw), f"{module}.{names[1]}": stored}
    return tensors, signed.astype(np.float32) * values


Writer = Callable[[str, tuple[int, int], Draw], Written]
