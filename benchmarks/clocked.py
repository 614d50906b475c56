"""clocked: the compiled loop of recorded steps, with the time of each of its instructions, by what it computes."""

import ctypes
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvcellar.kernels.recorded_kernel import WORDS, StepKernel

OTHERS = "small operators"
PARTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("kvcellar_linear", "kvcellar_quantised", "kvcellar_experts"), "linear layers"),
        **dict.fromkeys(("kvcellar_attend", "kvcellar_store"), "attention"),
    }
)  # by the name of a kernel's function
OVERHEAD = "overhead"  # of the clock itself


class _Symbol(ctypes.Structure):
    """`Dl_info` of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class ClockedKernel(StepKernel):
    """The loop, which calls `spend` with a part and seconds. Raises `NotCompiled` as `StepKernel` does."""

    def __init__(self, environment: Mapping[str, str], spend: Callable[[str, float], None]) -> None:
        super().__init__(environment)
        self._spend, self._compiled, self._parts = spend, self.run, dict[int, str]()
        self._find = ctypes.CDLL(None).dladdr
        self._find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
        self.run: Any = self._clocked

    def _clocked(self, first: int, count: int, failed: Any, _: None) -> int:
        took = (ctypes.c_int64 * count)()  # of a span: at its beginning
        error: int = self._compiled(first, count, failed, took)
        done = time.perf_counter()
        words = (ctypes.c_int64 * (count * WORDS)).from_address(first)
        for at, nanoseconds in enumerate(took):
            if nanoseconds:
                run, function = words[at * WORDS : at * WORDS + 2]
                self._spend(self._part(function) if run == self.native else OTHERS, nanoseconds * 1e-9)
        self._spend(OVERHEAD, time.perf_counter() - done)
        return error

    def _part(self, function: int) -> str:
        if function not in self._parts:
            found = _Symbol()
            self._find(function, ctypes.byref(found))
            self._parts[function] = PARTS.get((found.name or b"").decode(), OTHERS)
        return self._parts[function]
