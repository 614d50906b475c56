"""recorded_kernel: the compiled loop of a recorded step (`step.cpp`), and which operators it computes as torch does.

An operator is used natively only if its results were torch's, bit for bit, on a fixed set of inputs: both compute them
when it is first wanted for some types. Where they differ on this CPU or with this compiler, torch's own operator is
called instead. Operators on one bfloat16 tensor are tables of what torch computes for all 65536 values. Functions of
float32 (exponentials, sines, gates) are those that torch itself calls, of the libraries in its own shared library; each
is compared for lengths of all kinds.
"""

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.kernels.compiled import SOURCES, Native, address_of, library
from kvcellar.kernels.structures import structure

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
PIECES = (1, 2, 5, 8, 15, 16, 31, 33, 64, 100)
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
        if called is None or not same_bits(self._compute(line, called, inputs), torchs(inputs)):
            return None
        pieces = [inputs[length : 2 * length].clone() for length in PIECES]
        return Function(line, called, not all(same_bits(self._compute(line, called, x), torchs(x)) for x in pieces))

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


SOURCE = SOURCES / "step.cpp"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3}
ABSENT = -1  # the type of an input that an operator does not have
DIMS, INPUTS = 4, 3
WORDS = 4 + DIMS + (1 + INPUTS) * (3 + DIMS) + 2  # of an instruction, each of 8 bytes

Operand = tuple[int, ...]  # address, elements from row to row, strides of `DIMS` dimensions, type
NOTHING: Operand = (0,) * (2 + DIMS) + (ABSENT,)


_Rows = structure(SOURCE, "Rows")


class StepKernel:
    """The compiled loop, and the addresses of its operators. Raises `NotCompiled` if it cannot be compiled.

    Always true: a line, a reduction or a table that is returned computes what torch does.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        loaded = self._library = library(SOURCE, environment)
        loaded.kvcellar_line_of.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 4]
        loaded.kvcellar_run_of.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        loaded.kvcellar_line_of.restype = loaded.kvcellar_run_of.restype = ctypes.c_void_p
        loaded.kvcellar_instruction_size.restype = ctypes.c_int64
        assert loaded.kvcellar_instruction_size() == WORDS * 8, "`Instruction` has other fields in C++ than in Python"
        self.run = loaded.kvcellar_run  # (first, count, &failed, nanoseconds) -> 0 or an error
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self.run.restype = ctypes.c_int
        loaded.kvcellar_lanes.restype = ctypes.c_int64
        self.functions = Functions(self._line_of_floats, loaded.kvcellar_lanes(), self._compute)
        self.each, self.take, self.native = (self._runs(name, ABSENT) for name in ("each", "take", "native"))
        self._lines: dict[tuple[str, tuple[int, ...], bool], int] = {}
        self._reductions: dict[tuple[str, int], int] = {}
        self._tables: dict[object, tuple[Tensor, bool]] = {}
        self._numbers: dict[bytes, ctypes.c_float] = {}
        self.seconds = 0.0  # of CPU time that binding programs to it has taken

    def rows(self, rows: Tensor, plane: Tensor, values: Tensor, *, writes: bool) -> Native:
        """The call that copies the rows of `plane` [.,*shape] named by rows [n] to values [n,*shape], or from there,
        all contiguous. Row 0 is not written."""
        assert plane.is_contiguous()
        assert values.is_contiguous()
        assert plane.dtype is values.dtype
        places = rows.data_ptr(), plane.data_ptr(), values.data_ptr()
        call = _Rows(*places, rows.stride(0), len(values), plane.stride(0) * plane.itemsize, writes)
        return Native(address_of(self._library.kvcellar_rows), call, (self, rows, plane, values))

    def number(self, value: float) -> int:
        """The address of a number as float32, which stays."""
        made = ctypes.c_float(value)
        kept = self._numbers.setdefault(bytes(made), made)  # by bits: 0.0 equals -0.0, and NaN equals nothing
        return ctypes.addressof(kept)

    def line(self, name: str, inputs: Sequence[torch.dtype | None], out: torch.dtype) -> int:
        """The address of an elementwise operator on these types, of which None is a number; 0 where it is not known,
        or not as torch's."""
        types = tuple(TYPES.get(dtype or torch.float32, ABSENT) for dtype in inputs)
        if out not in TYPES or ABSENT in types:
            return 0
        key = name, (*types, *[ABSENT] * (INPUTS - len(types)), TYPES[out]), None in inputs
        if key not in self._lines:
            address = self._library.kvcellar_line_of(name.encode(), *key[1]) or 0
            right = address and (name == "table" or self._computes(name, address, inputs, out))
            self._lines[key] = address if right else 0
        return self._lines[key]

    def reduction(self, name: str, dtype: torch.dtype) -> int:
        """The address of a reduction over the last dimension; 0 as above."""
        key = name, TYPES.get(dtype, ABSENT)
        if key not in self._reductions:
            address = self._runs(*key)
            self._reductions[key] = address if address and self._reduces(name, address, dtype) else 0
        return self._reductions[key]

    def function(self, name: str, of: Callable[[Tensor], Tensor]) -> Function | None:
        """What computes an operator on one float32 tensor; None as above."""
        return self.functions.of(name, of, lambda: samples(torch.float32, 0))

    def _line_of_floats(self, name: str) -> int:
        return self._library.kvcellar_line_of(name.encode(), 0, ABSENT, ABSENT, 0) or 0

    def _compute(self, line: int, called: Addresses, x: Tensor) -> Tensor:
        made, at = torch.empty_like(x), (0, 0, 0, 1)
        operands = operand(made.data_ptr(), x.dtype, at), [operand(x.data_ptr(), x.dtype, at)]
        self._alone(self.each, line, (1, 1, 1, len(x)), *operands, of=ctypes.addressof(called))
        return made

    def table(self, key: object, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, bool]:
        """What `of` computes for each bfloat16, by its bits, and whether that depends on an element's place: torch
        may compute the last elements of a tensor, and those of strided tensors, in another way than the others."""
        if key not in self._tables:
            every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
            results, alone = of(every), of(every.expand(2, -1).T)[:, 0]
            self._tables[key] = results, not same_bits(results, alone)
        return self._tables[key]

    def _runs(self, name: str, type: int) -> int:
        return self._library.kvcellar_run_of(name.encode(), type) or 0

    def _computes(self, name: str, line: int, inputs: Sequence[torch.dtype | None], out: torch.dtype) -> bool:
        of = REFERENCES.get(name)
        number = torch.tensor(number_for(name, NUMBER, out), device="cpu")
        tensors = [number if dtype is None else samples(dtype, seed) for seed, dtype in enumerate(inputs)]
        if of is None:  # a copy
            expected = tensors[0].expand(SAMPLES).to(out)
        else:
            expected = of(*[NUMBER if dtype is None else x for x, dtype in zip(tensors, inputs, strict=True)])
        if expected.dtype != out:
            return False
        made = torch.empty_like(expected)
        operands = [operand(x.data_ptr(), x.dtype, (0, 0, 0, x.dim())) for x in tensors]
        self._alone(self.each, line, (1, 1, 1, len(made)), operand(made.data_ptr(), out, (0, 0, 0, 1)), operands)
        return same_bits(made, expected)

    def _reduces(self, name: str, run: int, dtype: torch.dtype) -> bool:
        for n in LENGTHS:
            x = samples(dtype, n, ordinary=True)[: 2 * n].view(2, n)
            expected = REFERENCES[name](x)
            made = torch.empty_like(expected)
            inside = operand(x.data_ptr(), dtype, (0, 0, n, 1))
            self._alone(run, 0, (1, 1, 2, n), operand(made.data_ptr(), dtype, (0, 0, 1, 0)), [inside])
            if not same_bits(made, expected):
                return False
        return True

    def _alone(
        self, run: int, line: int, size: Sequence[int], out: Operand, inputs: Sequence[Operand], of: int = 0
    ) -> None:
        words = array("q", instruction(run, line, size, out, inputs, of))
        assert self.run(words.buffer_info()[0], 1, ctypes.byref(ctypes.c_int64()), None) == 0


REFERENCES: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "minimum": lambda a, b: torch.clamp(a, max=b) if isinstance(b, float) else torch.minimum(a, b),
    "maximum": lambda a, b: torch.clamp(a, min=b) if isinstance(b, float) else torch.maximum(a, b),
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "square": lambda x: x.pow(2),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "where": torch.where,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: x.amax(-1),
}
NUMBER = 0.3
SAMPLES = 1 << 16
LENGTHS = (1, 3, 7, 8, 31, 32, 100, 513, 896, 2048, 4100, 20000)  # of reductions: all parts of the order of sums


def number_for(name: str, number: float, out: torch.dtype) -> float:
    """The number that torch computes with where one is added to tensors: it has their type. Others are float32."""
    return torch.tensor(number, dtype=out).item() if name in ("add", "sub") else number


def samples(dtype: torch.dtype, seed: int, *, ordinary: bool = False) -> Tensor:
    """`SAMPLES` values of that type, always the same: normal ones, and, unless they shall be ordinary, all bits."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(SAMPLES, generator=generator, device="cpu")
    if dtype == torch.bool:
        return normal > 0
    if dtype == torch.int64:
        return (normal * 1e6).to(dtype)
    if not ordinary:
        bits = torch.randint(-(1 << 31), 1 << 31, (SAMPLES // 2,), generator=generator).to(torch.int32)
        normal[::2] = bits.view(torch.float32)
    return normal.to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type are equal bit by bit, except that all NaNs are the same."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    bits = {4: torch.int32, 2: torch.int16}[one.itemsize]
    equal = (one.contiguous().view(bits) == other.contiguous().view(bits)) | (one.isnan() & other.isnan())
    return bool(equal.all())


def operand(address: int, dtype: torch.dtype, strides: Sequence[int], row: int = 0) -> Operand:
    """An `Operand` of C++: `row` and strides count elements."""
    return address, row, *strides, TYPES.get(dtype, ABSENT)


def instruction(
    run: int,
    line: int,
    size: Sequence[int],
    out: Operand = NOTHING,
    inputs: Sequence[Operand] = (),
    of: int = 0,
    count: int = 0,
) -> list[int]:
    """The words of an `Instruction`."""
    words = [run, line, 0, 0, *size, *out]
    for one in inputs:
        words += one
    words += NOTHING * (INPUTS - len(inputs))
    words += (of, count)
    return words


def span(instructions: int, rows: int) -> list[int]:
    """The instruction before those that run row by row."""
    return [0, 0, instructions, rows, *[0] * (WORDS - 4)]
