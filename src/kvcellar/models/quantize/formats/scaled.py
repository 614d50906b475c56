"""scaled: 8-bit floats with scales, as publishers store them, and the files of NVIDIA's ModelOpt.

The scale of a weight W is `W_scale_inv`, which multiplies, despite its name, or `W_scale`.
"""

from collections.abc import Mapping
from typing import Any

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.quantize.formats.blocked import Block, eights, fours
from kvcellar.models.quantize.formats.part import EIGHT_BITS, Part
from kvcellar.models.quantize.schemes import block_of
from kvcellar.models.weights_files import WeightsFiles

_SCALES = ("_scale_inv", "_scale")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "MIXED_PRECISION")
_ROTATED = ".pre_quant_scale"


class ScaledFloats:
    """fp8, mxfp8 and fbgemm_fp8: every weight of 8-bit floats has a scale. `weight_block_size` is that of blocks."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._method = str(raw["quant_method"])
        block = raw.get("weight_block_size") or ([1, 32] if self._method == "mxfp8" else None)
        self._block: Block | None = None if block is None else block_of(block)

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight = _weight(name)
        if weight not in weights.tensors or weights.tensors[weight].dtype not in EIGHT_BITS:
            return None
        return eights(weight, name, weights, self._block, self._method)


class ModelOpt:
    """8-bit floats, and 4-bit floats in groups of 16 (nvfp4), perhaps both in one directory."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        algorithm = raw.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
            raise ModelRefused(
                f"its weights are quantised by ModelOpt as {shown(algorithm)}; read are {', '.join(_ALGORITHMS)}"
            )

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if name.endswith(_ROTATED):
            raise ModelRefused("inputs are scaled before they are multiplied (pre_quant_scale), which is not supported")
        weight = _weight(name)
        if not name.endswith(".weight_scale") or weight not in weights.tensors:
            return None
        if weights.tensors[weight].dtype == "U8":
            outer = f"{weight}_scale_2"
            return fours(
                weight, weight, name, weights, 16, "ModelOpt nvfp4, one scale for 16 inputs of an output",
                types=("F8_E4M3",), outer=outer,
            )  # fmt: skip
        exponents = weights.tensors[name].dtype == "U8"
        return eights(weight, name, weights, (1, 32) if exponents else _block_of(name, weights), "ModelOpt fp8")


def _weight(scale: str) -> str:
    """The name of the weight of a scale; empty for names of others."""
    return next((scale.removesuffix(suffix) for suffix in _SCALES if scale.endswith(suffix)), "")


def _block_of(scale: str, weights: WeightsFiles) -> Block | None:
    """ModelOpt's blocks are 128 x 128, and known by four dimensions."""
    return (128, 128) if len(weights.tensors[scale].shape) == 4 else None
