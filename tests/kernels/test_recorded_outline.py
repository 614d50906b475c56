"""What a recorded program computes from constants alone, and functions that torch computes with several threads."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kvcellar.engine.recording.recorded import FIXED, Recorded
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recorded_outline import outlined
from kvcellar.kernels.compiled import NotCompiled
from tests.kernels.traced import data_of, traced


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernel() -> StepKernel:
    try:
        return StepKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(str(error))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: F.silu(x), "softplus": lambda x: F.softplus(x), "sigmoid": torch.sigmoid,
}  # fmt: skip


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_torch_divides_among_threads_have_its_bits(name: str, kernel: StepKernel) -> None:
    """Torch computes the end of each thread's part in another way, and a third of these rows is no whole vectors."""
    x = torch.randn(100, 8192, generator=torch.Generator().manual_seed(0)) * 3
    program = traced(FUNCTIONS[name], [x])
    made = Recorded(outlined(program, data_of(program), FIXED), {}, kernel)
    for rows in (100, 2):
        (found,) = made.run({"T": rows}, {"x0": x[:rows]}).values()
        assert torch.equal(found, FUNCTIONS[name](x[:rows]))


def test_what_has_one_value_for_all_sizes_is_computed_once(kernel: StepKernel) -> None:
    """Not once for each number of rows: 96 bindings would keep a copy each."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(x.shape[0], 1).cumprod(0)
        return x * (torch.arange(64.0).cumsum(0)[None] + 1)[0] * rows

    program = traced(scaled, [torch.ones(5, 64)])
    with Counted() as counted:
        made = Recorded(outlined(program, data_of(program), FIXED), {}, kernel)
        for rows in (1, 2, 7):
            x = torch.randn(rows, 64)
            (found,) = made.run({"T": rows}, {"x0": x}).values()
            assert torch.equal(found, scaled(x))
            counted.calls["aten.cumsum.default"] -= 1  # that of `scaled` itself
            made.check()
    assert counted.calls["aten.cumsum.default"] == 1
    assert counted.calls["aten.cumprod.default"] > 3, "what depends on sizes is computed for each of them"
