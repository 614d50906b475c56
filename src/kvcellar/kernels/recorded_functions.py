"""recorded_functions: functions of float32 (exponentials, sines, gates) in a recorded step, by the functions that torch
itself calls: those of the libraries in its own shared library.

Always true: a function that is returned gave torch's bits on a fixed set of inputs, for lengths of all kinds.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
LENGTHS = (1, 2, 5, 8, 15, 16, 31, 33, 64, 100)
Candidate = tuple[str, ...]  # a line of the compiled loop, and the functions that it calls, with `{}` for their lanes

CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "aten.exp.default": (("of lines", "VMSEXP_"), ("of vectors", "Sleef_expf{}_u10")),
    "aten.sin.default": (("of lines", "VMSSIN_"), ("of vectors", "Sleef_sinf{}_u35")),
    "aten.cos.default": (("of lines", "VMSCOS_"), ("of vectors", "Sleef_cosf{}_u35")),
    "aten.tanh.default": (("of lines", "VMSTANH_"), ("of vectors", "Sleef_tanhf{}_u10")),
    "aten.log.default": (("of lines", "VMSLN_"), ("of vectors", "Sleef_logf{}_u10")),
    "aten.log1p.default": (("of vectors", "Sleef_log1pf{}_u10"), ("of lines", "VMSLOG1P_")),
    "aten.erf.default": (("of lines", "VMSERF_"), ("of vectors", "Sleef_erff{}_u10")),
    "aten.sigmoid.default": (("sigmoid", "Sleef_expf{}_u10"),),
    "aten.silu.default": (("silu", "Sleef_expf{}_u10"),),
    "aten.softplus.default": (("softplus", "Sleef_expf{}_u10", "Sleef_log1pf{}_u10"),),
}


class Addresses(ctypes.Structure):
    """`Functions` in C++."""

    _fields_ = (("at", ctypes.c_void_p * 2),)


class Function(NamedTuple):
    """`placed`: torch computes elements at the end of a tensor in another way."""

    line: int
    called: Addresses
    placed: bool


Compute = Callable[[int, Addresses, Tensor], Tensor]  # of a line and what it calls, on a contiguous tensor
Lines = Callable[[str], int]  # the address of a line; 0 where the compiled loop has none of that name


class Functions:
    """The functions of one compiled loop. Each is compared with torch's when it is first wanted."""

    def __init__(self, lines: Lines, lanes: int, compute: Compute, library: Path = LIBRARY) -> None:
        """`lanes` of the loop's vectors; 0 where it has none."""
        self._lines, self.lanes, self._compute = lines, lanes, compute
        self._found: dict[str, Function | None] = {}
        try:
            self._library: ctypes.CDLL | None = ctypes.CDLL(str(library))
        except OSError:
            self._library = None

    def of(self, name: str, torchs: Callable[[Tensor], Tensor], inputs: Callable[[], Tensor]) -> Function | None:
        """The function that computes what the operator of that name does; None where none has its bits on what `inputs`
        returns, whose number is a multiple of every vector's."""
        if name not in self._found:
            given = inputs()
            made = (self._made(one, torchs, given) for one in CANDIDATES.get(name, ()))
            self._found[name] = next((one for one in made if one is not None), None)
        return self._found[name]

    def _made(self, candidate: Candidate, torchs: Callable[[Tensor], Tensor], inputs: Tensor) -> Function | None:
        name, *symbols = candidate
        line = self._lines(name)
        called = self._called(symbols) if line else None
        if called is None or not _same(self._compute(line, called, inputs), torchs(inputs)):
            return None
        pieces = [inputs[length : 2 * length].clone() for length in LENGTHS]
        return Function(line, called, not all(_same(self._compute(line, called, x), torchs(x)) for x in pieces))

    def _called(self, symbols: list[str]) -> Addresses | None:
        addresses = Addresses()
        for place, symbol in enumerate(symbols):
            if self._library is None or ("{}" in symbol and not self.lanes):
                return None
            try:
                function = self._library[symbol.format(self.lanes)]
            except AttributeError:
                return None
            addresses.at[place] = ctypes.cast(function, ctypes.c_void_p).value
        return addresses


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal, except that all NaNs are the same."""
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())).all())
