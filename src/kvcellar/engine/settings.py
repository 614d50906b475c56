"""settings: what an engine is asked for, and what that came to on this machine, with the reason of each number."""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from kvcellar.engine.cpus import PER_CPU, control_groups, most_threads, read
from kvcellar.errors import BadRequest, CapacityTooSmall, shown
from kvcellar.layout import Layout
from kvcellar.shapes import StoredAs
from kvcellar.text.tokens import SHORT, bytes_for

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MOST_CAPTURES = 1024  # states kept to go back to
BYTES_PER_TOKEN = 8  # of text; twice as many as texts commonly have
USUAL_TEXT = 256 * 2**10  # bytes of a text that any engine should be able to tokenize
LEAST_TEXT_BYTES = 2 * bytes_for(SHORT)
MOST_TEXT_BYTES = 4 * 2**30  # unless more is asked for
SHARE_OF_FREE = {"cpu": 0.3, "cuda": 0.85}  # a CPU's memory is also everybody else's


def sized(count: int) -> str:
    """So many bytes, exactly, and as people say it: 800000000 bytes (800 MB)."""
    if count < 1000:
        return f"{count} bytes"
    shares = [(count / 1000**power, unit) for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)]
    size, unit = next((share for share in shares if share[0] < 999.5), shares[-1])
    return f"{count} bytes ({size:.3g} {unit})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine is asked for. Raises `BadRequest`, naming the field, for a value out of its bounds.

    docs/reference/settings.md is made from the comments.
    """

    # type that the model computes in; auto: the type of its weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"  # auto, cpu, cuda or cuda:N; auto: CUDA if there is a device
    cache_bytes: int | None = None  # bytes of K/V, steps and edits together; None: a share of free memory
    context: int | None = None  # tokens of one sequence; None: what the config of the model says
    max_sequences: int = 64  # completions that run at once
    step_tokens: int = 512  # new tokens in one step
    max_waiting: int = 512  # requests that wait for admission; more are refused with `Overloaded`
    text_bytes: int | None = None  # CPU memory for texts, half for tokenizing, half for prompts; None: by context
    attention: str | None = None  # name of an attention backend; None: the first that supports the model
    threads: int | None = None  # CPU threads of torch; None: its default, within the CPU quota
    kv_dtype: str | None = None  # storage of K/V: int8, or k=int8+hadamard,v=int4; None: as `dtype`
    pack: bool = True  # on CPUs, reorder the weights of linear layers for oneDNN at load; a given network's are copied

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise BadRequest(f"dtype must be auto, float32, bfloat16 or float16, not {shown(self.dtype)}", "dtype")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise BadRequest(f"device must be auto, cpu, cuda or cuda:N, not {shown(self.device)}", "device")
        for name in ("attention", "kv_dtype"):
            if not isinstance(value := getattr(self, name), str | None):
                raise BadRequest(f"{name} must be a name, not {shown(value)}", name)
        if not isinstance(self.pack, bool):
            raise BadRequest(f"pack must be True or False, not {shown(self.pack)}", "pack")
        if self.kv_dtype is not None:
            StoredAs.parse(self.kv_dtype)
        for name, least in (("max_sequences", 1), ("step_tokens", 1), ("max_waiting", 1)):
            self._whole(name, getattr(self, name), least)
        for name, least in (("cache_bytes", 1), ("context", 1), ("threads", 1), ("text_bytes", LEAST_TEXT_BYTES)):
            if getattr(self, name) is not None:
                self._whole(name, getattr(self, name), least)
        self._threads()

    def _threads(self) -> None:
        if self.threads is not None and self.threads > (most := most_threads()):
            raise BadRequest(
                f"threads is {self.threads}; at most {most} are allowed here, {PER_CPU} for each logical CPU", "threads"
            )

    def _whole(self, name: str, value: object, least: int) -> None:
        plain = int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else -1
        if not least <= plain < 2**63:
            raise BadRequest(f"{name} must be a whole number of at least {least}, not {shown(value)}", name)
        object.__setattr__(self, name, plain)  # an int of a subclass may compare as it likes


class EngineOptions(TypedDict, total=False):
    """The fields of `Settings`, where each has its comment, as keyword arguments."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: str
    cache_bytes: int | None
    context: int | None
    max_sequences: int
    step_tokens: int
    max_waiting: int
    text_bytes: int | None
    attention: str | None
    threads: int | None
    kv_dtype: str | None
    pack: bool


def text_bytes_of(settings: Settings, context: int) -> int:
    """Memory for texts: as was set, or enough to tokenize a prompt that fills the context with `BYTES_PER_TOKEN`."""
    if settings.text_bytes is not None:
        return settings.text_bytes
    return min(MOST_TEXT_BYTES, 2 * bytes_for(max(USUAL_TEXT, BYTES_PER_TOKEN * context)))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one group costs: its layout, and bytes by number of cells, of its planes and of an edit that is made.

    `undo` are the bytes of a cell whose keys are turned in place, by a context shift for which too few cells are free.
    """

    name: str
    layout: Layout
    bytes: Callable[[int], int]
    staging: Callable[[int], int]
    undo: int = 0

    def shifting(self, cells: int, context: int) -> int:
        """Bytes that a context shift keeps to be undone, of a sequence that is alone in so many cells and fills the
        context, at most: half of it moves, or all that a window holds."""
        held = self.layout.most_cells(context, 0)
        return self.undo * max(0, min(held, context - context // 2) - (cells - held))


@dataclass(frozen=True, slots=True)
class RowShare:
    """Rows of recurrent state. Each of `sequences` running at once has one and takes another in a step; as many as
    `captures` are kept to go back to, and as many sessions may rest, with a row each. What all of these leave free, but
    for a step's rows, is for more captures."""

    sequences: int
    captures: int = 0
    bytes_per_row: int = 0

    @property
    def rows(self) -> int:
        return 2 * self.sequences + 2 * self.captures if self.bytes_per_row else 0

    @property
    def most_checkpoints(self) -> int:
        """As many as are kept if all that may run does, and no session rests."""
        return self.rows - 2 * self.sequences

    @property
    def bytes(self) -> int:
        """With the null row."""
        return (self.rows + 1) * self.bytes_per_row


def share_rows(bytes_per_row: int, *, budget: int, because: str, max_sequences: int) -> RowShare:
    """How many rows of recurrent state to have: as many sequences as half of `budget` can serve, up to `max_sequences`,
    and captures in a sixteenth of it, but one for each of the sequences at least, and `MOST_CAPTURES` at most.

    Raises `CapacityTooSmall` if not even one sequence fits.
    """
    if not bytes_per_row:
        return RowShare(max_sequences)
    sequences = min(max_sequences, (budget // 2 // bytes_per_row - 1) // 4)
    if sequences < 1:
        raise CapacityTooSmall(
            f"{budget} bytes ({because}) are too few: a row of recurrent state has {bytes_per_row}, five are the least "
            f"that can work, and they may take half. Raise cache_bytes."
        )
    captures = max(sequences, min(MOST_CAPTURES, budget // 32 // bytes_per_row))
    return RowShare(sequences, captures, bytes_per_row)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Cells of each group, what they take, and why it came to that: `bytes + scratch + staging <= budget`."""

    cells: Mapping[str, int]
    by_group: Mapping[str, int]  # bytes of its planes, null cells and padding included
    states: RowShare
    scratch: int  # bytes of a step, or of what a context shift keeps to be undone, whichever are more
    staging: int  # bytes of an edit
    budget: int
    tokens: int  # of all sequences together that fit, windows and chunks taken into account; all, if there are no cells
    because: str

    @property
    def bytes(self) -> int:
        """Of all planes, and all states."""
        return sum(self.by_group.values()) + self.states.bytes

    @property
    def total(self) -> int:
        """The most that is there at once."""
        return self.bytes + self.scratch + self.staging

    @property
    def holds(self) -> str:
        """What there is room for, in tokenizer. Recurrent state does not grow with the text."""
        return f"{self.tokens} tokens" if self.cells else f"{self.states.sequences} sequences of any length"

    def __str__(self) -> str:
        shares = [f"{name}: {self.cells[name]} cells in {sized(size)}" for name, size in self.by_group.items()]
        if self.states.bytes:
            shares.append(f"recurrent: {self.states.rows} rows in {sized(self.states.bytes)}")
        groups = ", ".join(shares)
        return (
            f"{self.holds} in {sized(self.bytes)} ({groups}); with {sized(self.scratch)} for a step and "
            f"{sized(self.staging)} for edits that is {sized(self.total)} of {sized(self.budget)}, which is "
            f"{self.because}"
        )


def resolve_capacity(
    demands: Sequence[Demand],
    *,
    budget: int,
    because: str,
    scratch: Callable[[int, int, int], int],
    context: int,
    max_sequences: int,
    step_tokens: int,
    bytes_per_row: int = 0,
) -> Capacity:
    """Divide `budget` bytes among groups so that all of them are full at the same number of tokens in use.

    With `x` tokens in use, a group needs `min(x, max_sequences * resting + step_tokens)` cells, where `resting` is the
    most that one sequence holds between steps. The largest such `x` is taken, and no more than full contexts need.
    `scratch` says what a step takes of it, given how long one sequence may become, how many tokens fit, and how many
    sequences write; and the staging of one group is left for edits. Recurrent state, of `bytes_per_row` a sequence,
    comes first (`share_rows`). Without groups, tokens take nothing: a step may be as large as it is allowed to be.

    A sequence that can fill the context can be shifted there, alone in memory: what that takes beside cells goes into
    the bytes of a step, since the two never come together. If it does not fit, no sequence gets as long as the context.

    Raises `CapacityTooSmall`.
    """
    states = share_rows(bytes_per_row, budget=budget, because=because, max_sequences=max_sequences)
    max_sequences = states.sequences

    def capacity(tokens: int, why: str) -> Capacity:
        cells = {d.name: min(tokens, max_sequences * d.layout.most_cells(context, 0) + step_tokens) for d in demands}
        longest = _longest(demands, cells, context)
        shift = sum(d.shifting(cells[d.name], context) for d in demands) if longest == context else 0
        return Capacity(
            cells=cells,
            states=states,
            by_group={demand.name: demand.bytes(cells[demand.name]) for demand in demands},
            scratch=max(scratch(longest, tokens, max_sequences), shift),
            staging=max((demand.staging(cells[demand.name]) for demand in demands), default=0),
            budget=budget,
            tokens=tokens,
            because=why,
        )

    most = max_sequences * context + step_tokens
    if not demands:
        return _stepping(capacity(most, because))
    # From as many tokens on as let a sequence fill the context, a shift wants room, too: so more may fit where less do
    # not, but not on either side of that border.
    border = bisect_left(range(most), True, key=lambda n: all(d.layout.most_cells(context, 1) <= n for d in demands))
    low, high = (border, most) if capacity(border, because).total <= budget else (0, max(0, border - 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if capacity(middle, because).total <= budget else (low, middle - 1)
    if low < 2:
        least = capacity(2, because)
        raise CapacityTooSmall(
            f"{budget} bytes ({because}) hold {low} tokens of this model; two are the least that can work, which is "
            f"{least.total} bytes, {least.scratch} of them for a step. Raise cache_bytes."
        )
    why = because if low < most else f"all that {max_sequences} sequences of {context} tokens can use"
    return capacity(low, why)


def _stepping(capacity: Capacity) -> Capacity:
    """The same, of a model without cells, if its largest step goes into the budget."""
    if capacity.total > capacity.budget:
        raise CapacityTooSmall(
            f"{capacity.budget} bytes ({capacity.because}) are too few: {capacity.states.rows} rows of recurrent state "
            f"take {capacity.states.bytes}, and a step {capacity.scratch} more. Raise cache_bytes; or lower "
            f"step_tokens or max_sequences."
        )
    return capacity


def _longest(demands: Sequence[Demand], cells: Mapping[str, int], context: int) -> int:
    """The most tokens that one sequence can have, alone in so many cells."""

    def too_long(tokens: int) -> bool:
        return any(demand.layout.most_cells(tokens, 1) > cells[demand.name] for demand in demands)

    return max(1, bisect_left(range(1, context + 1), True, key=too_long))


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
    for folder, version in control_groups(root, "memory"):
        limit, used, files = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most = read(folder / limit)
        if most.isdigit():
            yield int(most) - int(read(folder / used) or 0) + _stat(folder / "memory.stat", files)


def _stat(file: Path, name: str) -> int:
    for line in read(file).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return 0
