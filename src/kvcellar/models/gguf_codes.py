"""gguf_codes: tensors of a GGUF file whose blocks are codes of ours: Q4_0 and Q8_0 are written without decoding them.

A block has 32 values that share a scale, which is float16. So a matrix is one of compressed-tensors with groups of 32:
`X.weight_packed` of 4 bits or `X.weight` of 8, and `X.weight_scale`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcellar.models.gguf_models import Part
from kvcellar.models.quantize.layouts import pack
from kvcellar.models.quantize.tensor_file import Entry

GROUP = 32
BITS = {2: 4, 8: 8}  # by type: Q4_0 and Q8_0
_EMBEDDING = "model.embed_tokens.weight"  # rows of it are looked up, as numbers


def bits_of(part: Part) -> int | None:
    """Of the codes of a tensor; None: it is decoded."""
    plain = len(part.shape) != 2 or part.change is not None or not part.name.endswith(".weight")
    return None if plain or part.name == _EMBEDDING else BITS.get(part.stored.type)


def modules_of(parts: Sequence[Part]) -> dict[int, list[str]]:
    """The modules that keep their codes, by bits."""
    found: dict[int, list[str]] = {}
    for part in parts:
        if (bits := bits_of(part)) is not None:
            found.setdefault(bits, []).append(part.name.removesuffix(".weight"))
    return found


def entries(part: Part, bits: int) -> dict[str, Entry]:
    """What is written of it."""
    outputs, inputs = part.shape
    codes = Entry("I32", (outputs, inputs // 8)) if bits == 4 else Entry("I8", part.shape)
    return {_name(part, bits): codes, f"{part.name}_scale": Entry("F16", (outputs, inputs // GROUP))}


def coded(part: Part, bits: int, raw: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and content of what is written. `raw` are the bytes of all blocks."""
    outputs, inputs = part.shape
    blocks = raw.view(outputs, inputs // GROUP, -1)
    scales, rest = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
    if bits == 4:
        rest = torch.cat((rest & 15, rest >> 4), -1) - 8  # modulo 256, as I8 is
    codes = rest.contiguous().view(torch.int8).flatten(1)  # [o,i]
    if part.order is not None:
        codes, scales = part.order(codes), part.order(scales)
    yield _name(part, bits), pack(codes, bits) if bits == 4 else codes
    yield f"{part.name}_scale", scales


def _name(part: Part, bits: int) -> str:
    return f"{part.name}_packed" if bits == 4 else part.name
