"""settings: what an engine is asked for, and what that came to on this machine, with the reason of each number."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcellar.contracts import Layout, StoredAs
from kvcellar.errors import BadRequest, CapacityTooSmall

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
SHARE_OF_FREE = {"cpu": 0.3, "cuda": 0.85}  # a CPU's memory is also everybody else's


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine may be told. Raises `BadRequest`, naming the field, for what cannot be."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: as stored
    device: str = "auto"  # auto: CUDA if there is one
    cache_bytes: int | None = None  # None: what is free, but no more than max_sequences full contexts take
    context: int | None = None  # tokens of one sequence; None: what the model is made for
    max_sequences: int = 64  # answers being written at once
    step_tokens: int = 512  # new tokens in one step
    max_waiting: int = 512  # requests that wait for admission
    attention: str | None = None  # an attention backend by name; None: the first that can
    threads: int | None = None  # torch's CPU threads; None: leave them as they are
    kv_dtype: str | None = None  # like int8 or k=int8+hadamard,v=int4 (`StoredAs.parse`); None: as the model computes
    pack: bool = True  # let oneDNN reorder the weights of linear layers once, on CPUs

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise BadRequest(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}", "dtype")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise BadRequest(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}", "device")
        for name in ("attention", "kv_dtype"):
            if not isinstance(value := getattr(self, name), str | None):
                raise BadRequest(f"{name} must be a name, not {value!r}", name)
        if not isinstance(self.pack, bool):
            raise BadRequest(f"pack must be True or False, not {self.pack!r}", "pack")
        if self.kv_dtype is not None:
            StoredAs.parse(self.kv_dtype)
        for name, least in (("max_sequences", 1), ("step_tokens", 1), ("max_waiting", 1)):
            self._whole(name, getattr(self, name), least)
        for name in ("cache_bytes", "context", "threads"):
            if getattr(self, name) is not None:
                self._whole(name, getattr(self, name), 1)

    def _whole(self, name: str, value: object, least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise BadRequest(f"{name} must be a whole number of at least {least}, not {value!r}", name)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one group costs: bytes of a cell in all its layers, and its layout. Places are a multiple of `padding`, and
    `fixed` bytes are there however many they are."""

    name: str
    layout: Layout
    bytes_per_cell: int
    padding: int = 1
    fixed: int = 0

    def bytes(self, cells: int) -> int:
        """Bytes of so many cells, with the null cell, the padding and what is fixed."""
        return -(-(cells + 1) // self.padding) * self.padding * self.bytes_per_cell + self.fixed


@dataclass(frozen=True, slots=True)
class Capacity:
    """Cells of each group, the bytes they take (null cells included), and why it came to that."""

    cells: Mapping[str, int]
    bytes: int
    tokens: int  # tokens of all sequences together that fit, windows and chunks taken into account
    because: str


def resolve_capacity(
    demands: Sequence[Demand], *, budget: int, because: str, context: int, max_sequences: int, step_tokens: int
) -> Capacity:
    """Divide `budget` bytes among groups so that all of them are full at the same number of tokens in use.

    With `x` tokens in use, a group needs `min(x, max_sequences * resting + step_tokens)` cells, where `resting` is the
    most that one sequence holds between steps. The largest such `x` is taken, and no more than full contexts need.
    """

    def cells(demand: Demand, tokens: int) -> int:
        resting = demand.layout.most_cells(context, 0)
        return min(tokens, max_sequences * resting + step_tokens)

    def size(tokens: int) -> int:
        return sum(demand.bytes(cells(demand, tokens)) for demand in demands)

    low, high = 0, max_sequences * context + step_tokens
    most = high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
    if low < 2:
        raise CapacityTooSmall(
            f"{budget} bytes ({because}) hold {low} tokens of this model; two are the least that can work, which is "
            f"{size(2)} bytes. Raise cache_bytes."
        )
    why = because if low < most else f"all that {max_sequences} sequences of {context} tokens can use"
    return Capacity({d.name: cells(d, low) for d in demands}, size(low), low, why)


def free_cpu_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: of the machine, or of a control group above it if that is less.

    `root` is where the kernel's `proc` and `sys` are.
    """
    return max(0, min([_free_of_machine(root), *_free_of_groups(root)]))


def _free_of_machine(root: Path) -> int:
    """What the kernel says is available: files that it keeps in memory only because there is room count as free."""
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a system that does not say: assume half


def _free_of_groups(root: Path) -> Iterator[int]:
    """What each control group with a limit that this process is in, the nearest first, has left."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, limit, used, files = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            top, files = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top.parent:
                break
            most = _text(folder / limit)
            if most.isdigit():
                yield int(most) - int(_text(folder / used) or 0) + _stat(folder / "memory.stat", files)


def _stat(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return 0


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
