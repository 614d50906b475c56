"""patches: convolutions over parts of an image that do not overlap, as products of matrices.

The first layer of most towers is one. On CPUs without instructions for bfloat16, torch computes it in bfloat16 about
ten times slower than the product.
"""

from math import prod

from torch import Tensor, nn
from torch.nn import functional


class Patches(nn.Module):
    """With the weights of a convolution, and its attributes that code of networks reads."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias  # [O,C,*K] and [O]
        self.in_channels, self.out_channels = convolution.in_channels, convolution.out_channels
        self.kernel_size, self.stride = convolution.kernel_size, convolution.stride

    def forward(self, image: Tensor) -> Tensor:
        """[B,C,*S] -> [B,O,*(S/K)]; what is left over at the ends is not read."""
        counts = [size // kernel for size, kernel in zip(image.shape[2:], self.kernel_size, strict=True)]
        axes, shape = len(counts), [*image.shape[:2]]
        for axis, (count, kernel) in enumerate(zip(counts, self.kernel_size, strict=True)):
            image = image.narrow(2 + axis, 0, count * kernel)
            shape += [count, kernel]
        at, inside = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
        rows = image.reshape(shape).permute(0, *at, 1, *inside).reshape(image.shape[0], prod(counts), -1)
        made = functional.linear(rows, self.weight.flatten(1), self.bias)  # [B,P,O]
        return made.transpose(1, 2).unflatten(2, counts).contiguous()  # as a convolution's: it may be viewed


def multiply_patches(network: nn.Module) -> None:
    """Replace such convolutions in place; the weights stay where they are."""
    for name, module in [*network.named_modules()]:
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if isinstance(module, nn.Conv2d | nn.Conv3d) and not hooked and _apart(module):
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, Patches(module))


def _apart(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether each input is read once, and by all outputs."""
    padded = convolution.padding != "valid" and any(one != 0 for one in convolution.padding)
    plain = convolution.groups == 1 and all(one == 1 for one in convolution.dilation) and not padded
    exact = type(convolution) in (nn.Conv2d, nn.Conv3d)  # a subclass may compute something else
    return exact and plain and convolution.kernel_size == convolution.stride and prod(convolution.kernel_size) > 1
