"""mxfp4: experts of gpt-oss: 4-bit floats in groups of 32 inputs, each with an exponent of 2.

The experts W of a layer are `W_blocks` U8 [E,o,i/32,16] and `W_scales` U8 [E,o,i/32]; the network's tensor is [E,i,o].
"""

from collections.abc import Mapping
from typing import Any

from kvcellar.models.quantize.formats.blocked import Blocked, blocked_part
from kvcellar.models.quantize.formats.part import Part, check_dimensions, check_shape, stored_as
from kvcellar.models.weights_files import WeightsFiles

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


class Mxfp4:
    """The format of a directory of this method."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        del raw  # which has only names of modules that are not quantised, and those have no blocks

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight = name.removesuffix(_SCALES if name.endswith(_SCALES) else _BLOCKS)
        blocks, scales = f"{weight}{_BLOCKS}", f"{weight}{_SCALES}"
        if weight == name or (name == scales and blocks in weights.tensors):
            return None
        codes = stored_as(blocks, weights.tensors, "U8")
        check_dimensions(blocks, codes, 4)
        experts, outputs, groups, width = codes.shape
        check_shape(blocks, codes, (experts, outputs, groups, _GROUP // 2))
        check_shape(scales, stored_as(scales, weights.tensors, "U8"), (experts, outputs, groups))
        found = Blocked(blocks, scales, (experts, outputs, 2 * groups * width), (1, _GROUP), 4)
        return blocked_part(weight, found, weights, "mxfp4, one scale for 32 inputs", transposed=True, stacked=True)
