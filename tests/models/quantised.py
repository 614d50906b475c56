"""Decoders of quantised directories that are written to be obvious, not fast, and directories to try them on."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcellar.engine.models.hf_globals import silence_transformers
from tests.zoo import ARCHS


def saved(path: Path, name: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A model directory of an architecture of the zoo."""
    with silence_transformers():
        ARCHS[name].build(**changes).to(dtype).save_pretrained(path)
    return path


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def codes_of(words: Tensor, bits: int, count: int) -> np.ndarray:
    """Unsigned codes [o,count] of words I32 [o,w], one after the other."""
    unsigned = words.numpy().view(np.uint32)
    per = 32 // bits
    columns = [(unsigned[:, n // per] >> (bits * (n % per))) % (1 << bits) for n in range(count)]
    return np.stack(columns, 1).astype(np.int64)


def words_of(codes: np.ndarray, bits: int) -> Tensor:
    """The opposite, padded with zeros."""
    per = 32 // bits
    out = np.zeros((len(codes), math.ceil(codes.shape[1] / per)), dtype=np.uint64)
    for n in range(codes.shape[1]):
        out[:, n // per] += codes[:, n].astype(np.uint64) << np.uint64(bits * (n % per))
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def decoded(path: Path) -> dict[str, Tensor]:
    """The tensors that a directory of 8-bit codes per output and 4-bit codes in groups of 32 stands for, in float32
    where they were quantised."""
    tensors = stored(path)
    out = dict(tensors)
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        scales = out.pop(name).float().numpy()
        if f"{module}.weight_packed" in tensors:
            outputs, inputs = out.pop(f"{module}.weight_shape").tolist()
            codes = codes_of(out.pop(f"{module}.weight_packed"), 4, inputs) - 8
            values = np.zeros((outputs, inputs), dtype=np.float32)
            for column in range(inputs):
                values[:, column] = codes[:, column] * scales[:, column // 32]
        else:
            values = tensors[f"{module}.weight"].numpy().astype(np.float32) * scales
        out[f"{module}.weight"] = torch.from_numpy(values)
    return out


def densified(path: Path, source: Path, into: Path) -> Path:
    """`source` with the weights that the quantised directory `path` stands for, in the types of the source."""
    into.mkdir()
    values = decoded(path)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            own = {name: values[name].to(tensor.dtype) for name, tensor in load_file(file).items()}
            save_file(own, into / file.name, metadata={"format": "pt"})
        elif file.is_file():
            (into / file.name).write_bytes(file.read_bytes())
    return into


def quantization(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def types(path: Path) -> dict[str, str]:
    """The stored type of each tensor."""
    found: dict[str, str] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_slice(name).get_dtype() for name in handle.keys()}
    return found
