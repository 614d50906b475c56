"""Where tests run the kernels of GPUs: on a CUDA device if there is one, else by Triton's interpreter on the CPU."""

import importlib.util
import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHY = "" if importlib.util.find_spec("triton") else "the package triton is not installed (docs/howto/cuda.md)"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: at their first import

interpreted = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.fixture
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies bfloat16 as if the bits were integers: these products are made in float32."""
    if WHY or DEVICE != "cpu":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    plain: Any = interpreter.InterpreterBuilder.create_dot

    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return plain(self, *wide, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
