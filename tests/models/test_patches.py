"""Convolutions over parts that do not overlap are products of matrices with the same results."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvcellar.engine.models.weights.patches import Patches, multiply_patches


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (lambda: nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 8)),
        (lambda: nn.Conv2d(3, 8, (4, 2), (4, 2), bias=False), (1, 3, 13, 9)),  # with a border that is not read
        (lambda: nn.Conv2d(3, 8, 4, 4, padding="valid"), (1, 3, 8, 8)),
        (lambda: nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (5, 3, 2, 4, 4)),
    ],
)
def test_the_results_are_those_of_the_convolution(convolution: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(convolution())
    image = torch.randn(shape)
    expected, weight = network(image), network[0].weight
    multiply_patches(network)
    assert isinstance(network[0], Patches)
    assert network[0].weight is weight
    assert network(image).shape == expected.shape
    torch.testing.assert_close(network(image), expected)


@pytest.mark.parametrize(
    "convolution",
    [
        lambda: nn.Conv2d(4, 8, 3, 1),
        lambda: nn.Conv2d(4, 8, 2, 2, padding=1),
        lambda: nn.Conv2d(4, 8, 2, 2, dilation=2),
        lambda: nn.Conv2d(4, 8, 2, 2, groups=2),
        lambda: nn.Conv2d(4, 8, 1, 1),
        lambda: nn.Conv1d(4, 8, 2, 2),
    ],
)
def test_others_stay(convolution: Callable[[], nn.Module]) -> None:
    network = nn.Sequential(convolution())
    kept = network[0]
    multiply_patches(network)
    assert network[0] is kept
