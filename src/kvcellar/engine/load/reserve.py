"""reserve: measures the scratch bytes of a step before the engine accepts requests.

Two kinds of step are run on a small memory of the model and abandoned: one that prefills long prompts, and one that
decodes a token of every sequence. Running them at full size would take seconds on a CPU, so steps of a few small sizes
are run, and their bytes are extrapolated linearly to the full size, in rows and in tokens in memory. For attention in
blocks or windows this is an upper bound. The measurements are saved for the next start (`step_bytes.py`).

A peak is the most bytes of tensors that a piece of code has at once, beside those that were allocated before it.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcellar.engine.core.scheduler import ROUND
from kvcellar.engine.load.capacity import Capacity
from kvcellar.engine.load.step_bytes import Measures
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.graphs import Graphs
from kvcellar.engine.sample.couple import Draft
from kvcellar.engine.sample.draw import MAX_VOCAB, Draws
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate.chain import PART
from kvcellar.errors import CapacityTooSmall
from kvcellar.kernels.layers import PanelWeight
from kvcellar.kernels.packed import with_padding
from kvcellar.memory.attention.blocks import PARTIAL_BYTES, SPLIT
from kvcellar.memory.attention.buckets import GATHERED
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.attention.triton import Triton
from kvcellar.memory.kv.history import SMALLEST
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from kvcellar.progress import report
from kvcellar.sampling_params import MAX_LOGPROBS, SamplingParams


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector within the block, so that equal steps take equal bytes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Meter:
    """`bytes` is the peak of allocated bytes, minus those allocated before."""

    bytes: int = 0


@contextmanager
def peak(device: torch.device) -> Iterator[Meter]:
    """Measures the peak bytes of tensors on `device` within the block."""
    if device.type != "cuda":
        with _Counted() as meter:
            yield meter
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, meter = torch.cuda.memory_allocated(device), Meter()
    yield meter
    torch.cuda.synchronize(device)
    meter.bytes = torch.cuda.max_memory_allocated(device) - before


class _Counted(TorchDispatchMode, Meter):
    """Counts the results of every operation from creation until they are freed. Temporary memory inside an operation is
    not counted; on a CPU it is small."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), ours=False)  # they existed before, also if they are written in place
        out = func(*args, **(kwargs or {}))
        self._see(out, ours=True)
        return out

    def _see(self, found: Any, *, ours: bool) -> None:
        """Count the new tensors in nested values, except packed weights, whose storage cannot be accessed."""
        for tensor in tree_leaves(found):
            if not isinstance(tensor, Tensor) or tensor.is_mkldnn or isinstance(tensor, PanelWeight):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                nbytes = storage.nbytes() if ours else 0
                self._known.add(storage._cdata)
                self._now += nbytes
                self.bytes = max(self.bytes, self._now)
                finalize(storage, self._gone, storage._cdata, nbytes)

    def _gone(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self._now -= nbytes


ROWS = (136, 160)  # of a prompt: both larger than the blocks of rows in which a backend computes scores
SCANNED = (258, 514)  # the same with recurrent layers: one row of its own, the others one more than chunks of a scan
WRITERS = (1, 3)
REMEMBERED = (15, 48)  # tokens in memory; with the new row 16 keys, which need no padding, and 49, padded the most
HUNGRY = SamplingParams(
    top_k=1000, top_p=0.9, typical_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1, logprobs=MAX_LOGPROBS
)


def scratch(
    guest: Guest, *, context: int, step_tokens: int, deepest: int = 0, measures: Measures | None = None
) -> Callable[[int, int, int], int]:
    """A function that returns the most bytes that a step takes beside weights and planes, draws included. Its arguments
    are the most tokens of one sequence (up to `context`), the tokens in memory at once, and the sequences in decode,
    which have up to `deepest` drafts each. A step whose size is in `measures` is not run.

    Where a model can leave checkpoints of recurrent state inside a step, prompts are measured with revertible feeds:
    these hold, until the step ends, what it takes to restore the state after any of their tokens, and no choice of
    checkpoints takes more.

    Attention of the rows of drafts takes no more than that of a prompt's rows, or of as many sequences; what they take
    beside it is added, since each of them is drawn.
    """
    steps = _Steps(guest, context, Measures() if measures is None else measures)

    def most(longest: int, tokens: int, sequences: int) -> int:
        rows = min(step_tokens, tokens if guest.mode == "flat" else longest)
        writers = min(sequences, step_tokens, tokens) if guest.mode == "flat" else 1
        drafted = min(writers * (1 + deepest), step_tokens, max(ROUND, writers))
        if guest.device.type == "cpu":
            writers, drafted = with_padding(writers), with_padding(drafted)  # measured numbers are too small for that
        prompts = continued(steps.read, (rows, longest), (steps.points, REMEMBERED))
        if _in_parts(guest) and guest.mode == "flat":  # what layers hold grows with the prompts in a step, too
            prompts += continued(steps.split, (max(1, min(sequences, rows // 2)), 1), (WRITERS, REMEMBERED))
        rest = _row_tables(guest, max(rows, drafted)) + (steps.drawn(drafted, beside=writers) if deepest else 0)
        before = max(1, longest - 1)
        if any(isinstance(one, Triton) for one in guest.backends.values()):
            rest += _key_tables(guest, writers, longest) + (PARTIAL_BYTES if longest > SPLIT else 0)
        if not _gathers(guest):
            decoding = continued(steps.write, (writers, before), (WRITERS, REMEMBERED))
            graphs = decoding if guest.recording is not None and guest.recording.executor.name == Graphs.name else 0
            if guest.recording is not None and guest.recording.decoding is not None:
                return rest + prompts + decoding  # each of its programs keeps memory of its own, as graphs do
            return rest + graphs + max(prompts, decoding)
        return rest + max(prompts, _gathered(steps.write, writers, before) + _tables(guest, writers, longest))

    return most


class _Steps:
    """Small steps, each run once."""

    def __init__(self, guest: Guest, context: int, known: Measures) -> None:
        self._guest, self._context, self._known = guest, context, known
        self.points = ROWS if guest.shape.recurrent is None else SCANNED

    @cached_property
    def _memory(self) -> Memory:  # allocated when the first step is run
        most = self.points[-1] + REMEMBERED[-1]
        made = self._guest.memory({group.name: most for group in self._guest.shape.groups}, rows=1)
        _define(made)
        return made

    def _tried(self, feeds: Sequence[Feed], **how: Any) -> int:
        report("measuring the largest steps")
        return _tried(self._guest, self._memory, feeds, **how)

    def read(self, rows: int, remembered: int) -> int:
        """Of prompts; `remembered` does not include `rows`."""
        end = min(remembered + rows, self._context)
        how = " in parts" if _in_parts(self._guest) else ""
        return self._known.of(f"{rows} rows to {end}{how}", lambda: self._tried(_prompts(self._guest, rows, end)))

    def write(self, writers: int, remembered: int) -> int:
        """Of sequences in decode."""
        end = min(remembered + 1, self._context)
        return self._known.of(f"{writers} writers at {end}", lambda: self._tried(_writers(writers, end)))

    def split(self, sequences: int, _: int) -> int:
        feeds = [Feed(seq, Span(0, 2), revertible=True) for seq in range(sequences)]
        return self._known.of(f"{sequences} pairs in parts", lambda: self._tried(feeds, wanted=0))

    def drawn(self, rows: int, *, beside: int) -> int:
        """Of so many rows with logits, beside fewer. Up to `PART` of them are drawn at once."""

        def at(count: int, *, draws: bool) -> int:
            measure = partial(self._logits, draws=draws)
            return continued(measure, (count, 1), (WRITERS, REMEMBERED))

        more, fewer = (at(count, draws=False) for count in (rows, beside))
        sizes = [min(count, PART) for count in (rows, beside)]
        draws, drawn = (at(count, draws=True) - at(count, draws=False) for count in sizes)
        return max(0, more - fewer) + max(0, draws - drawn)

    def _logits(self, rows: int, _: int, *, draws: bool) -> int:
        """Of rows with logits, of as many sequences or, solo, of one."""
        feeds = _writers(rows, 2) if self._guest.mode == "flat" else [Feed(0, Span(0, rows))]
        name = f"{rows} rows with logits" + (", drawn" if draws else "")
        return self._known.of(name, lambda: self._tried(feeds, wanted=rows, draws=draws, coupled=True))


def prove(
    guest: Guest, memory: Memory, *, context: int, max_sequences: int, step_tokens: int, deepest: int = 0
) -> None:
    """Run each kind of step at full size on the memory that will serve. Raises `CapacityTooSmall` if one does not fit.

    For devices with their own memory, which are fast enough for this.
    """
    cells = memory.storage.capacity()

    def held(end: int) -> bool:
        return all(g.layout.most_cells(end, min(step_tokens, end)) <= cells[g.name] for g in memory.storage.groups)

    end = bisect_left(range(1, context + 1), True, key=lambda end: not held(end))  # the longest that fits in all groups
    rows = min(step_tokens, end)
    writers = min(max_sequences, step_tokens) if guest.mode == "flat" else 1
    steps: list[tuple[list[Feed], int | None]] = []
    if end:
        steps += [(_prompts(guest, rows, end), None), (_writers(writers, end), None)]
    if deepest and end > deepest:
        each = max(1, min(writers, step_tokens // (1 + deepest), ROUND // (1 + deepest)))
        drafts = [Feed(seq, Span(end - 1 - deepest, end), revertible=True) for seq in range(each)]
        steps.append((drafts, each * (1 + deepest)))
    for feeds, rows in steps:
        try:
            _tried(guest, memory, feeds, wanted=rows)
        except torch.OutOfMemoryError as error:
            raise CapacityTooSmall(
                f"a step of {sum(len(feed.pos) for feed in feeds)} tokens at position {end} does not fit beside "
                f"{memory.storage.bytes} bytes of memory. Lower cache_bytes; lower step_tokens, max_sequences or "
                f"context to make a step smaller."
            ) from error


def _prompts(guest: Guest, rows: int, end: int) -> list[Feed]:
    """Feeds with `rows` rows together, of as few sequences as possible, each ending at `end`.

    Mixers run once per distinct feed length, on copies if there are several lengths. So that the copies are measured,
    one row belongs to a sequence of its own.
    """
    apart = int(guest.mode == "flat" and bool(guest.shape.mixers) and rows > 1)
    starts = range(0, rows - apart, end)
    feeds = [Feed(seq, Span(end - min(end, rows - apart - start), end)) for seq, start in enumerate(starts)]
    feeds += [Feed(len(feeds), Span(end - 1, end))] * apart
    return [feed._replace(revertible=_in_parts(guest)) for feed in feeds]


def _in_parts(guest: Guest) -> bool:
    """Whether steps can leave checkpoints of recurrent state inside the tokens of a sequence."""
    return guest.shape.recurrent is not None and guest.no_partial_commit is None


def _writers(writers: int, end: int) -> list[Feed]:
    return [Feed(seq, Span(end - 1, end)) for seq in range(writers)]


def _define(memory: Memory) -> None:
    """Write zeros to every cell. Otherwise routers and samplers would work on uninitialised values, and the bytes of a
    step would vary."""
    cells = min(memory.storage.capacity().values(), default=0)
    if not cells:
        return
    with memory.stepping(Batch((Feed(0, Span(0, cells)),))):
        for group in memory.storage.groups:
            for layer in () if group.of_input else group.layers:
                for plane in group.planes:
                    memory.put(layer, **{plane.name: torch.zeros(cells, plane.heads, plane.size, device=memory.device)})


def _tried(
    guest: Guest, memory: Memory, feeds: Sequence[Feed], *, wanted: int | None = None, draws: bool = True,
    coupled: bool = False,
) -> int:  # fmt: skip
    """The bytes that one reserved step takes, with logits and draws of as many rows as there are feeds, or of the
    first `wanted` rows, each of them `coupled` with a draft or not, without the step tables that it adds: these
    grow by powers of two, so they are not on a line through the measured steps (see `_row_tables`). The step is
    abandoned. Its bytes are those of a first one: memory that a recording or draws keep for later steps is a part
    of them."""
    if guest.recording is not None:
        guest.recording.clear()
    guest.draws.clear()
    batch, tables = Batch(tuple(feeds)), memory.storage.table_bytes
    with uncollected(), peak(guest.device) as meter, memory.stepping(batch, reserve=True) as plan:
        ids = torch.zeros(batch.tokens, dtype=torch.long, device=guest.device)
        count = len(feeds) if wanted is None else wanted
        logits = guest.forward(memory, plan, ids, torch.arange(count, device=guest.device))
        if draws and count:
            _draw(guest.draws, logits, coupled=coupled)
    return meter.bytes - (memory.storage.table_bytes - tables)


@torch.inference_mode()
def _draw(draws: Draws, logits: Tensor, *, coupled: bool = False) -> None:
    """Draw with all sampling options enabled. The logits [R,V] are overwritten with zeros first: cells may contain NaN,
    and drawing from NaN takes fewer bytes."""
    vocab = min(logits.shape[1], MAX_VOCAB)
    sampler = Sampler(HUNGRY, seed=0, index=0, prompt_ids=(), vocab_size=vocab, end_ids=frozenset())
    draft = Draft(0, torch.ones(vocab, dtype=torch.int64, device=logits.device)) if coupled else None
    for part in logits.zero_().split(PART):
        draws.draw(part, [sampler] * len(part), [0] * len(part), [draft] * len(part))


def continued(
    measure: Callable[[int, int], int], full: tuple[int, int], small: tuple[tuple[int, int], tuple[int, int]]
) -> int:
    """`measure` at `full`, extrapolated linearly in each argument from its values at the two `small` ones.

    An argument that is not larger than the second small one is measured directly.
    """
    (xs, us), (ys, vs) = (_points(end, ends) for end, ends in zip(full, small, strict=True))
    total = sum(u * v * measure(x, y) for x, u in zip(xs, us, strict=True) for y, v in zip(ys, vs, strict=True))
    return max(0, round(total))


def _gathers(guest: Guest) -> bool:
    """Whether attention gathers the keys of several sequences for one call (`memory/attention/buckets.py`)."""
    backends = guest.backends.values()  # none in a model of recurrent layers alone
    fused = bool(backends) and all(isinstance(one, Sdpa) and one.fuses(guest.device) for one in backends)
    return fused and guest.computed_keys != "expanded"


def _gathered(measure: Callable[[int, int], int], writers: int, remembered: int) -> int:
    """`measure` extrapolated, with a limit on the part that grows with both arguments: the gathered keys. One call
    gathers at most `GATHERED` keys, or the keys of one sequence if these are more."""

    def at(writers: int, remembered: int) -> int:
        return continued(measure, (writers, remembered), (WRITERS, REMEMBERED))

    alone = at(1, remembered) + at(writers, 1) - at(1, 1)
    share = min(1.0, max(remembered, GATHERED) / (writers * remembered))
    return alone + round((at(writers, remembered) - alone) * share)


def _row_tables(guest: Guest, rows: int) -> int:
    """Bytes of the step tables that grow with rows, in buckets of powers of two. They stay after the step.

    Of a row: id, position, wanted and storing row; in each group its cell, and what a kernel reads of it (a segment of
    4 numbers, a row of 3, and a run of 2 with its end).
    """
    return 2 * torch.int64.itemsize * (4 + 12 * len(guest.shape.groups)) * max(rows, SMALLEST)


def _tables(guest: Guest, writers: int, longest: int) -> int:
    """Bytes of the tables of cells and bias for all keys, in buckets of powers of two. They are kept after the step."""
    each = 2 * (torch.int64.itemsize + guest.dtype.itemsize)
    heads = sum(group.layout.most_cells(longest, 1) * group.planes[0].heads for group in guest.shape.groups)
    return writers * heads * each


def _key_tables(guest: Guest, writers: int, longest: int) -> int:
    """Bytes of the tables of cells of all keys, in buckets of powers of two (`memory/attention/blocks.py`)."""
    cells = sum(group.layout.most_cells(longest, 1) for group in guest.shape.groups)
    return 2 * torch.int64.itemsize * writers * cells


def _points(full: int, small: tuple[int, int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The points to measure, and the weight of each in the value at `full`."""
    a, b = small
    if full <= b:
        return (full,), (1.0,)
    slope = (full - a) / (b - a)
    return (a, b), (1 - slope, slope)


def check_room(capacity: Capacity, device: torch.device, free: int) -> None:
    """Raise `CapacityTooSmall` unless the planes, a step and an edit fit in `free` bytes."""
    if capacity.total > free:
        raise CapacityTooSmall(
            f"{capacity.bytes} bytes for {capacity.holds} ({capacity.because}) cannot be had on {device}: a "
            f"step takes {capacity.scratch} more, an edit {capacity.staging}, and {free} are free. Lower cache_bytes; "
            f"or lower step_tokens, max_sequences or context, which makes a step smaller."
        )
