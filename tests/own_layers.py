"""Tests of bits, and of packed experts, need linear layers of our own."""

import os

import pytest
import torch

from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import FOREIGN, PanelKernel


def need_own_layers(dtype: torch.dtype) -> None:
    """Skip the test where layers of this type are left to torch."""
    try:
        kernel = PanelKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))
    if dtype is torch.bfloat16 and kernel.multiplies == FOREIGN:
        pytest.skip("bfloat16 is left to oneDNN on this CPU")
