"""passes: make a program shorter without changing a bit of what it computes.

  * an operator that copies its argument as it is (a factor of 1, a conversion to the same type) is left out;
  * linear layers with the same input become one operator, and their results views of its result;
  * operators whose results are not read are left out.

Always true: a storage that more than one operator writes is left as it is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvcellar.engine.recording.program import CONVOLVE, SCAN_STATES, Argument, Op, Program, Ref, Size, Value

_EFFECTS = frozenset({
    "kvcellar.put", "kvcellar.keep_states", "kvcellar.scan", CONVOLVE, SCAN_STATES, "kvcellar.mix", "kvcellar.module",
})  # fmt: skip
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default"})
VECTORS = 64  # elements of the largest step of torch's loops over vectors
_EXACT = frozenset({  # they give the same bits for an element wherever it is in memory
    "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.neg.default", "aten.cat.default",
    "aten.pow.Tensor_Scalar", "aten._to_copy.default", "aten.clone.default", "kvcellar.put", "kvcellar.attend",
    "kvcellar.attend_dense", "kvcellar.attend_latent", "kvcellar.heads",
})  # fmt: skip
_FACTORS = frozenset({"aten.mul.Tensor", "aten.div.Tensor"})


def simplified(program: Program) -> Program:
    made = _numbered(_live(_merged(_numbered(_without_copies(program)))))
    made.check()
    return made


def _written(program: Program) -> Counter[int]:
    """How many operators write each storage; an input or a constant counts as written."""
    counts = Counter(program.values[value].storage for op in program.ops for value in op.outputs if value is not None)
    counts.update(program.constants.keys())
    counts.update({program.values[value].storage for value in program.inputs.values()})
    return counts


def _used(program: Program) -> set[int]:
    """Values that operators or the caller read or write."""
    named = (*program.inputs.values(), *program.outputs.values())
    return {value for op in program.ops for value in (*op.reads, *op.outputs) if value is not None} | set(named)


# -- copies -------------------------------------------------------------------------------------------------------


def _without_copies(program: Program) -> Program:
    written, values, ops = _written(program), list(program.values), list[Op]()
    for op in program.ops:
        source = _copied(op, values)
        if source is None or op.outputs[0] is None:
            ops.append(op)
            continue
        into, of = values[op.outputs[0]], values[source]
        if written[into.storage] != 1 or written[of.storage] != 1 or not _same_order(into, of):
            ops.append(op)
            continue
        for index, value in enumerate(values):
            if value.storage == into.storage:
                values[index] = replace(value, storage=of.storage, offset=_sum(value.offset, of.offset))
    return replace(program, values=tuple(values), ops=tuple(ops))


def _copied(op: Op, values: list[Value]) -> int | None:
    """The value that an operator copies."""
    match op:
        case Op(name, (Ref(source),)) if name in _COPIES:
            return source
        case Op(name, (Ref(source), int() | float() as factor)) if name in _FACTORS and factor == 1:
            return source
        case Op("aten.add.Tensor", (Ref(source), int() as term)) if term == 0 and values[source].dtype == "int64":
            return source
        case _:
            return None


def _same_order(a: Value, b: Value) -> bool:
    return (a.dtype, a.shape, a.strides, a.offset) == (b.dtype, b.shape, b.strides, 0)


def _sum(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else a if b == 0 else f"({a} + {b})"


# -- linear layers ------------------------------------------------------------------------------------------------


def _merged(program: Program) -> Program:
    written, used = _written(program), _used(program)
    groups: dict[int, list[int]] = {}  # operators by the value that they read
    for number, op in enumerate(program.ops):
        match op:
            case Op("kvcellar.linear", (Ref(x), _), _, (int(out),)) if written[program.values[out].storage] == 1:
                groups.setdefault(x, []).append(number)
            case _:
                continue
    readers = _readers(program)
    values, ops = list(program.values), dict(enumerate(program.ops))
    for numbers in groups.values():
        rows = [_Rows(number, _out(ops[number]), values, used) for number in numbers]
        some = [one for one in rows if one.can_move and all(_exact(values[i], readers.get(i, ())) for i in one.views)]
        if len(some) > 1:
            _merge(values, ops, some)
    return replace(program, values=tuple(values), ops=tuple(ops.values()))


def _readers(program: Program) -> dict[int, set[str]]:
    """Names of the operators that read a value."""
    found: dict[int, set[str]] = {}
    for op in program.ops:
        for value in op.reads:
            found.setdefault(value, set()).add(op.name)
    return found


def _exact(value: Value, readers: Iterable[str]) -> bool:
    """Whether operators that read rows with a gap behind each give the same bits. Functions of torch compute what is
    left behind the last whole vector of a tensor, or of each row if there are gaps, in another way."""
    width = value.shape[-1] if value.shape else 0
    return (isinstance(width, int) and width % VECTORS == 0) or _EXACT.issuperset(readers)


class _Rows:
    """The result of a linear operator, and the views of it that are used."""

    def __init__(self, number: int, out: int, values: list[Value], used: set[int]) -> None:
        width = values[out].shape[-1]
        self.number, self.out, self.width = number, out, width if isinstance(width, int) else 0
        self.views = {i: values[i] for i in used if values[i].storage == values[out].storage}

    @property
    def can_move(self) -> bool:
        return self.width > 0 and all(_moved(view, self.width, self.width, 0, 0) for view in self.views.values())


def _merge(values: list[Value], ops: dict[int, Op], some: list[_Rows]) -> None:
    """Let the first of some operators compute the results of all."""
    first, total, column = some[0], sum(one.width for one in some), 0
    whole = values[first.out]
    for one in some:
        for index, view in one.views.items():
            moved = _moved(view, one.width, total, column, whole.storage)
            assert moved is not None
            values[index] = moved
        column += one.width
    shape = (*whole.shape[:-1], total)
    values.append(Value(whole.dtype, shape, _row_major(shape), whole.storage))
    op, paths = ops[first.number], tuple(path for one in some for path in _paths(ops[one.number]))
    ops[first.number] = replace(op, args=(op.args[0], paths), outputs=(len(values) - 1,))
    for one in some[1:]:
        del ops[one.number]


def _out(op: Op) -> int:
    out = op.outputs[0]
    assert out is not None
    return out


def _paths(op: Op) -> tuple[Argument, ...]:
    paths = op.args[1]
    assert isinstance(paths, tuple)
    return paths


def _moved(value: Value, width: int, total: int, column: int, storage: int) -> Value | None:
    """A view of rows of `width` elements, where the rows begin at `column` of rows of `total`. None if a dimension of
    it goes from one row to the next."""
    if not isinstance(value.offset, int):
        return None
    row, place = divmod(value.offset, width)
    last, strides = place, list[Size]()
    for size, stride in zip(value.shape, value.strides, strict=True):
        if size == 1:
            strides.append(total)  # not used
        elif isinstance(stride, int) and stride % width == 0:
            strides.append(stride // width * total)
        elif isinstance(stride, int) and isinstance(size, int):
            strides.append(stride)
            last += (size - 1) * stride
        else:
            return None
    if last >= width:
        return None
    return replace(value, strides=tuple(strides), storage=storage, offset=row * total + column + place)


def _row_major(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    strides: list[Size] = [1]
    for size in shape[:0:-1]:
        last = strides[-1]
        strides.append(size * last if isinstance(size, int) and isinstance(last, int) else f"({size} * {last})")
    return tuple(reversed(strides))


# -- what is not read ---------------------------------------------------------------------------------------------


def _live(program: Program) -> Program:
    read = {program.values[value].storage for value in program.outputs.values()}
    kept: list[Op] = []
    for op in reversed(program.ops):
        written = {program.values[value].storage for value in op.outputs if value is not None}
        if op.name in _EFFECTS or written & read:
            kept.append(op)
            read |= {program.values[value].storage for value in op.reads}
    return replace(program, ops=tuple(reversed(kept)))


def _numbered(program: Program) -> Program:
    """The same program with only the values and storages that it uses, each value once."""
    used = dict.fromkeys(program.values[value] for value in sorted(_used(program)))
    storages = {storage: n for n, storage in enumerate(dict.fromkeys(value.storage for value in used))}
    numbers = {value: n for n, value in enumerate(used)}
    number = {index: numbers[value] for index, value in enumerate(program.values) if value in numbers}

    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(number[argument.value])
        return tuple(map(renamed, argument)) if isinstance(argument, tuple) else argument

    def named(some: Mapping[str, int]) -> dict[str, int]:
        return {name: number[value] for name, value in some.items()}

    def outputs(values: Iterable[int | None]) -> tuple[int | None, ...]:
        return tuple(None if value is None else number[value] for value in values)

    return Program(
        program.symbols,
        tuple(replace(value, storage=storages[value.storage]) for value in used),
        {storages[storage]: constant for storage, constant in program.constants.items() if storage in storages},
        named(program.inputs),
        tuple(
            Op(
                op.name,
                tuple(map(renamed, op.args)),
                {k: renamed(a) for k, a in op.kwargs.items()},
                outputs(op.outputs),
            )
            for op in program.ops
        ),
        named(program.outputs),
    )
