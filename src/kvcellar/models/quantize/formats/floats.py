"""floats: numbers of 8 and fewer bits, as float32."""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def looked_up(raw: Tensor, table: Tensor, *, high_first: bool = False) -> Tensor:
    """Bytes U8 [...,w] that hold two codes of 4 bits each -> F32 [...,2w]: what `table` [16] has for them. The code in
    the lowest bits is the first one, or the second one (`high_first`).

    Both values of a byte are looked up at once, as the halves of a 64-bit number.
    """
    low, high = table.float().repeat(16), table.float().repeat_interleave(16)
    both = torch.stack((high, low) if high_first else (low, high), 1).view(torch.float64).flatten()  # [256]
    found = both.index_select(0, raw.reshape(-1).to(torch.int32))
    return found.view(torch.float32).view(*raw.shape[:-1], -1)


def e2m1(raw: Tensor) -> Tensor:
    """Bytes U8 [...,w] of two 4-bit floats each, the first one in the lowest bits -> F32 [...,2w]."""
    return looked_up(raw, torch.tensor(E2M1, device="cpu"))


def as_floats(scales: Tensor) -> Tensor:
    """F32 of scales: bytes and F8_E8M0 are exponents of 2, plus 127; 255 becomes infinite."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.to(torch.float32)
    exponents = scales.view(torch.uint8).to(torch.int32)
    lowest = torch.full_like(exponents, 1 << 22)  # 2^-127, which is subnormal
    return torch.where(exponents == 0, lowest, exponents << 23).view(torch.float32)
