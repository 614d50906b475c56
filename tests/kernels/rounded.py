"""The inputs of quantised layers as their kernel rounds them, computed in the obvious way, and layers that do so."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels.codes import Codes
from kvcellar.kernels.quantised import QuantisedLinear


def rounded(x: Tensor, codes: Codes) -> Tensor:
    """Inputs [n,in] as the kernel rounds them, F64: in blocks of 32, or 16 where scales are for an odd number of 16."""
    step = 16 if codes.scales.shape[1] > 1 and codes.group % 32 else 32
    ordered = x.float() if codes.order is None else x.float()[:, codes.order]
    blocks = F.pad(ordered, (0, -x.shape[1] % 32)).unflatten(1, (-1, step))
    largest = blocks.abs().amax(-1, keepdim=True)
    by = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, 127) / largest)
    found = ((blocks * by).round().double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]
    return found if codes.order is None else torch.empty_like(found).index_copy_(1, codes.order, found)


class Emulated(nn.Module):
    """A quantised layer in float64, of the same codes."""

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        self.codes = layer._coded()[0].codes()
        self.dense = self.codes.dense().double()
        self.bias = None if layer.bias is None else layer.bias.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = rounded(x.reshape(-1, x.shape[-1]), self.codes)
        return F.linear(rows, self.dense, self.bias).to(x.dtype).view(*x.shape[:-1], -1)
