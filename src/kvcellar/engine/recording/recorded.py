"""recorded: a recorded forward, bound to fixed memory for the sizes that steps have, and run by a compiled loop.

A binding holds for one number of rows and one of wanted rows: instructions for the loop, and calls. Those used last are
kept, `KEPT` of them, since decoding comes back to few numbers, and chunks of prompts have one usual length; binding
takes milliseconds, and costs a step that is rare less than padding would. All share one arena, as large as the largest
of them needs; when it has to grow, earlier bindings are freed with it.

Values whose sizes depend on symbols without a number are *late*: tensors of their own that are made in each run, where
their operators are called. All others are in the arena.

Groups are the operators of a recorded step that run together, row by row; lives say when a storage is in use.

Always true (`check`):
  * there are at most `kept` bindings, all in the one arena;
  * no caller has a tensor of an arena: inputs are copied in, outputs are copied out.
"""

import ctypes
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.recording.program import Op, Size, Sizes, resolved, size_of
from kvcellar.engine.recording.recorded_kernel import WORDS, StepKernel, instruction, span
from kvcellar.engine.recording.recorded_lowering import Lowering
from kvcellar.engine.recording.recorded_operators import ALIGNED, Life, Small, Take, View, placed, viewed
from kvcellar.engine.recording.recorded_outline import (
    Bound,
    Call,
    Handler,
    Outline,
    computed,
    is_late,
    is_torch,
    of_native,
    of_torch,
    with_numbers,
)
from kvcellar.kernels.compiled import Native, error_of

Layout = tuple[int, int, torch.dtype] | None  # of a storage in rows: elements of a row, rows, type; None: of no rows


@dataclass(slots=True)
class Group:
    """Operators that run together: small ones, row by row if there are several `rows`; else one of any kind.

    Always true: if there are several rows, then each storage that is written here is written and read in one layout,
    so that a row neither reads nor overwrites what belongs to another.
    """

    small: list[Small] = field(default_factory=list)
    rows: int = 1
    of: str | None = None  # the expression of the number of rows
    layouts: dict[int, Layout] = field(default_factory=dict)  # by storage
    written: set[int] = field(default_factory=set)
    lone: Take | None = None
    op: Op | None = None  # called

    def join(self, one: Small) -> bool:
        """Add an operator, if it can run row by row together with those before it."""
        rows = one.rows
        if rows == 1 or (self.small and (rows, one.out.rows) != (self.rows, self.of)):
            return False
        more: dict[int, Layout] = {}
        for view in one.views():
            stride = view.row_stride()
            layout = (stride, rows, view.dtype) if stride else None
            same = more.get(view.storage, self.layouts.get(view.storage, layout)) == layout
            more[view.storage] = layout if same else None
        written, out = self.written, one.out.storage
        if any(layout is None and (storage in written or storage == out) for storage, layout in more.items()):
            return False
        self.small.append(one)
        self.rows, self.of = rows, one.out.rows
        self.written.add(out)
        self.layouts |= more
        return True

    def views(self, views: Sequence[View | None]) -> Iterator[View]:
        """What it reads and writes in fixed memory. `views` are those of values; None: somewhere else."""
        if self.op is not None:
            for value in (*self.op.reads, *self.op.outputs):
                if value is not None and (view := views[value]) is not None:
                    yield view
        elif self.lone is not None:
            yield from self.lone.views()
        for one in self.small:
            yield from one.views()

    def of_one_row(self, lives: dict[int, Life], at: int) -> set[int]:
        """Storages that need memory for one row only: those that this group alone uses, whose index is `at`."""
        if len(self.small) < 2:
            return set()
        alone = {storage for storage in self.written if lives[storage].first == lives[storage].last == at}
        return {storage for storage in alone if self.layouts[storage] is not None}


def grouped(items: Iterable[Small | Take | Op]) -> list[Group]:
    """Operators in groups, in the same order."""
    groups: list[Group] = []
    for item in items:
        if isinstance(item, Small):
            if groups and groups[-1].small and groups[-1].join(item):
                continue
            group = Group()
            if not group.join(item):
                group.small.append(item)
            groups.append(group)
        elif isinstance(item, Take):
            groups.append(Group(lone=item))
        else:
            groups.append(Group(op=item))
    return groups


def lives(
    groups: Sequence[Group], views: Sequence[View | None], given: Iterable[View], wanted: Iterable[View]
) -> dict[int, Life]:
    """The life of each storage that groups use, `given` before the first and `wanted` after the last of them."""
    sizes, first, last = dict[int, int](), dict[int, int](), dict[int, int]()

    def used(view: View, at: int) -> None:
        storage, size = view.storage, view.bytes
        if size >= sizes.get(storage, 0):
            sizes[storage] = size
        first.setdefault(storage, at)
        last[storage] = at

    for view in given:
        used(view, -1)
    for at, group in enumerate(groups):
        for view in group.views(views):
            used(view, at)
    for view in wanted:
        used(view, len(groups))
    return {storage: Life(size, first[storage], last[storage]) for storage, size in sizes.items()}


Arena = Callable[[int], Tensor]  # at least so many bytes, aligned
Part = tuple[int, int] | Call  # the first instruction and how many there are; or a call


class Binding:
    """A program at fixed addresses. Fill `inputs`, `run`, read `outputs`.

    Always true: instructions stay where they are, and what they point to lives as long as the binding.
    """

    def __init__(
        self, kernel: StepKernel, words: "array[int]", parts: Sequence[Part], late: "Late",
        arena: Tensor, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], alive: Sequence[Any],
    ) -> None:  # fmt: skip
        self.arena, self.inputs, self.outputs = arena, inputs, outputs
        self._kernel, self._words, self._parts, self._late, self._alive = kernel, words, parts, late, alive
        self._failed = ctypes.c_int64()

    @property
    def bytes(self) -> int:
        """Of its instructions."""
        return len(self._words) * self._words.itemsize

    def run(self, sizes: Sizes) -> None:
        """Raises what an operator raises, `IndexError` for an index of a row that is not there, and `MemoryError`."""
        self._late.sizes = sizes
        first, failed = self._words.buffer_info()[0], ctypes.byref(self._failed)
        try:
            for part in self._parts:
                if isinstance(part, tuple):
                    error = self._kernel.run(first + part[0] * WORDS * 8, part[1], failed, None)
                    if error:
                        raise error_of(error)
                else:
                    part()
        finally:
            self._late.made.clear()


@dataclass(slots=True)
class Late:
    """The sizes of the running step, and its late storages."""

    sizes: Sizes
    made: dict[int, Tensor]


class Binder:
    """Makes one binding. Raises what a handler raises."""

    def __init__(
        self, outline: Outline, sizes: Sizes, kernel: StepKernel, handlers: Mapping[str, Handler], arena: Arena
    ) -> None:
        self._outline, self._sizes, self._kernel, self._handlers = outline, sizes, kernel, handlers
        self._values = outline.program.values
        self._numbers: dict[Size, int] = {}
        self._views = [None if late else self._view(value) for value, late in enumerate(outline.late)]
        self._memory: dict[int, tuple[Tensor, int]] = {}  # by storage: a tensor, and bytes before the storage in it
        for storage, tensor in outline.constants.items():
            self._memory[storage] = tensor, int(tensor.storage_offset()) * tensor.itemsize
        self._late = Late(sizes, {})
        self._alive: list[Any] = []
        self._words = array("q")
        self._parts: list[Part] = []
        self._arena = arena
        self._used = torch.empty(0, dtype=torch.uint8, device="cpu")

    def bound(self) -> Binding:
        self._fold()
        program = self._outline.program
        groups = grouped(self._items())
        given, wanted = (self._fixed(of.values()) for of in (program.inputs, program.outputs))
        found = lives(groups, self._views, given, wanted)
        rows = [group.of_one_row(found, at) for at, group in enumerate(groups)]
        self._place(found, groups, rows)
        for group in groups:
            self._encode(group)
        inputs = {name: self._tensor(view) for name, view in zip(program.inputs, given, strict=True)}
        outputs = {name: self._tensor(view) for name, view in zip(program.outputs, wanted, strict=True)}
        return Binding(self._kernel, self._words, self._parts, self._late, self._used, inputs, outputs, self._alive)

    def _number(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        found = self._numbers.get(size)
        if found is None:
            found = self._numbers[size] = size_of(size, self._sizes)
        return found

    def _view(self, index: int) -> View:
        value, row = self._values[index], self._outline.rows[index]
        return View(
            value.storage,
            self._number(value.offset),
            tuple(map(self._number, value.shape)),
            tuple(map(self._number, value.strides)),
            getattr(torch, value.dtype),
            *(row or (None, None)),
        )

    def _fixed(self, values: Iterable[int]) -> list[View]:
        found = [self._views[value] for value in values]
        assert all(view is not None for view in found), "inputs and outputs have sizes that are known before a run"
        return [view for view in found if view is not None]

    def _items(self) -> Iterator[Small | Take | Op]:
        lowering = Lowering(self._kernel)
        for index, op in enumerate(self._outline.program.ops):
            if index in self._outline.folded:
                continue
            values = (*self._outline.reads[index], *(value for value in op.outputs if value is not None))
            found = None
            if is_torch(op) and all(self._views[value] is not None for value in values):
                args = [resolved(one, self._views.__getitem__, self._sizes) for one in op.args]
                kwargs = {name: resolved(one, self._views.__getitem__, self._sizes) for name, one in op.kwargs.items()}
                outputs = [None if value is None else self._views[value] for value in op.outputs]
                found = lowering(op.name, args, kwargs, outputs)
            yield from (op,) if found is None else found

    def _fold(self) -> None:
        """Compute, once, what does not depend on a step."""
        ops = [self._outline.program.ops[index] for index in sorted(self._outline.folded)]
        made = computed(self._outline.program, ops, self._outline.constants, self._sizes)
        self._memory.update((storage, (tensor, 0)) for storage, tensor in made.items())
        self._alive += made.values()

    def _place(self, found: Mapping[int, Life], groups: Sequence[Group], rows: Sequence[set[int]]) -> None:
        """Give every storage that is in use its place in the arena, and those of one row in `rows` memory for one."""
        lives = {storage: life for storage, life in found.items() if storage not in self._memory}
        for group, one_row in zip(groups, rows, strict=True):
            sizes: dict[int, int] = {}
            if one_row:
                group.small = [one.in_memory_of(one_row) for one in group.small]
            for small in group.small if one_row else ():
                for view in small.views():
                    if view.storage in one_row:
                        sizes[view.storage] = max(sizes.get(view.storage, 0), view.bytes)
            for storage, size in sizes.items():
                lives[storage] = lives[storage]._replace(bytes=size)
        offsets, total = placed(list(lives.values()))
        arena = self._arena(total)
        self._used = arena
        for storage, offset in zip(lives, offsets, strict=True):
            self._memory[storage] = arena, int(arena.storage_offset()) + offset

    def _encode(self, group: Group) -> None:
        if group.op is not None:
            self._call(group.op)
        elif group.lone is not None:
            self._add(group.lone.words(self._address))
        elif len(group.small) == 1:
            self._add(group.small[0].words(self._address, self._kernel.number, by_row=False))
        else:
            self._add(span(len(group.small), group.rows))
            for one in group.small:
                self._add(one.words(self._address, self._kernel.number, by_row=True))
        self._alive += [one.alive for one in group.small if one.alive is not None]

    def _add(self, words: Sequence[int]) -> None:
        """Add an instruction to the last part, if that is one of instructions."""
        last = self._parts[-1] if self._parts else None
        at = len(self._words) // WORDS
        if isinstance(last, tuple):
            self._parts[-1] = last[0], last[1] + 1
        else:
            self._parts.append((at, 1))
        self._words.extend(words)

    def _call(self, op: Op) -> None:
        if is_late(op, self._outline.late, self._sizes.keys()):
            self._parts.append(lambda: self._now(op))
        elif is_torch(op):
            self._parts.append(self._torch(op, self._sizes))
        else:
            bound = self._handled(op, self._sizes)
            if callable(bound):
                self._parts.append(bound)
                return
            self._alive.append(bound)
            for native in (bound,) if isinstance(bound, Native) else bound:
                self._add(instruction(self._kernel.native, native.function, (1, 1, 1, 1), of=native.address))

    def _torch(self, op: Op, sizes: Sizes) -> Call:
        return of_torch(op, *self._tensors(op), sizes)

    def _handled(self, op: Op, sizes: Sizes) -> Bound:
        handler = self._handlers.get(op.name)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise ValueError(f"{op.name} is no operator of torch and has no handler; there are handlers of {known}")
        return handler(with_numbers(op, sizes), *self._tensors(op))

    def _now(self, op: Op) -> None:
        """Call a late operator, in a run."""
        sizes = self._late.sizes
        if is_torch(op):
            self._torch(op, sizes)()
            return
        bound = self._handled(op, sizes)
        if callable(bound):
            bound()
        else:
            for native in (bound,) if isinstance(bound, Native) else bound:
                of_native(native)()

    def _tensors(self, op: Op) -> tuple[list[Tensor], list[Tensor | None]]:
        """Its inputs and outputs."""
        inputs = [self._value(value) for value in op.reads]
        return inputs, [None if value is None else self._value(value) for value in op.outputs]

    def _value(self, index: int) -> Tensor:
        if (view := self._views[index]) is not None:
            return self._tensor(view)
        view = viewed(self._values[index], self._late.sizes)
        made = self._late.made.get(view.storage)
        if made is None:
            made = self._late.made[view.storage] = torch.empty(view.bytes, dtype=torch.uint8, device="cpu")
        return view.tensor(made, 0)

    def _tensor(self, view: View) -> Tensor:
        return view.tensor(*self._memory[view.storage])

    def _address(self, view: View) -> int:
        memory, before = self._memory[view.storage]
        return memory.untyped_storage().data_ptr() + before + view.offset * view.dtype.itemsize


FIXED = ("T", "W")  # symbols that a binding has numbers for
KEPT = 96  # bindings


class Recorded:
    """A program of a network, ready to run. One run at a time."""

    def __init__(
        self,
        outline: Outline,
        handlers: Mapping[str, Handler],
        kernel: StepKernel,
        kept: int = KEPT,
    ) -> None:
        """`outline`: of the program, for the symbols `FIXED`. Its constants must stay where they are."""
        self._outline, self._handlers, self._kernel, self._kept = outline, handlers, kernel, kept
        self._bindings: OrderedDict[tuple[int, ...], Binding] = OrderedDict()
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")

    def run(self, sizes: Sizes, inputs: Mapping[str, Tensor], variant: int = 0) -> dict[str, Tensor]:
        """The outputs of a step. `sizes` has a number for each symbol; bindings of another `variant` are others, where
        handlers bind otherwise. Raises what an operator raises."""
        with torch.inference_mode():
            binding = self._binding(sizes, variant)
            for name, tensor in inputs.items():
                binding.inputs[name].copy_(tensor)
            binding.run(sizes)
            return {name: tensor.clone() for name, tensor in binding.outputs.items()}

    def clear(self) -> None:
        """Free all bindings: after a change of what handlers bind to, cells that moved, say."""
        self._bindings.clear()
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def bytes(self) -> int:
        """Memory of all kept bindings, without constants that are computed for each."""
        return self._arena.nbytes + sum(binding.bytes for binding in self._bindings.values())

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._bindings) <= self._kept
        arena = self._arena.untyped_storage().data_ptr()
        for binding in self._bindings.values():
            assert binding.arena is self._arena
            assert all(one.untyped_storage().data_ptr() == arena for one in binding.inputs.values())

    def _binding(self, sizes: Sizes, variant: int) -> Binding:
        key = variant, *(sizes[name] for name in FIXED if name in sizes)
        found = self._bindings.get(key)
        if found is None:
            began = time.thread_time()
            fixed = {name: size for name, size in sizes.items() if name in FIXED}
            found = Binder(self._outline, fixed, self._kernel, self._handlers, self._place).bound()
            while len(self._bindings) >= self._kept:
                self._bindings.popitem(last=False)
            self._bindings[key] = found
            self._kernel.seconds += time.thread_time() - began
        self._bindings.move_to_end(key)
        return found

    def _place(self, size: int) -> Tensor:
        """The arena, at least so large. To grow, it is freed before, with all bindings."""
        if self._arena.nbytes < size:
            self.clear()
            whole = torch.empty(size + ALIGNED, dtype=torch.uint8, device="cpu")
            start = -whole.data_ptr() % ALIGNED
            self._arena = whole[start : start + size]
        return self._arena
