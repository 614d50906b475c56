"""What a recorded program computes from constants alone."""

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.recorded import Recorded
from kvcellar.kernels.recorded_kernel import StepKernel
from tests.kernels.traced import data_of, traced


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_what_has_one_value_for_all_sizes_is_computed_once() -> None:
    """Not once for each number of rows: 96 bindings would keep a copy each."""
    try:
        kernel = StepKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(x.shape[0], 1).cumprod(0)
        return x * (torch.arange(64.0).cumsum(0)[None] + 1)[0] * rows

    program = traced(scaled, [torch.ones(5, 64)])
    with Counted() as counted:
        made = Recorded(program, data_of(program), {}, kernel)
        for rows in (1, 2, 7):
            x = torch.randn(rows, 64)
            (found,) = made.run({"T": rows}, {"x0": x}).values()
            assert torch.equal(found, scaled(x))
            counted.calls["aten.cumsum.default"] -= 1  # that of `scaled` itself
            made.check()
    assert counted.calls["aten.cumsum.default"] == 1
    assert counted.calls["aten.cumprod.default"] > 3, "what depends on sizes is computed for each of them"
