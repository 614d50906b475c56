"""recorded_repeats: values of a recorded step whose elements repeat along a dimension are stored once along it.

A network often expands a number per head to all elements of a state before it computes with it: an exponential of
200 000 elements is one of 24. Where all inputs of an operator on elements repeat along a dimension, its output does,
too, and is given the stride 0 there. Torch, if it has to be called with such a value, gets a copy as the program has
it, since its results may depend on where an element is.

Always true: only operators on elements read what is stored once.
"""

from collections.abc import Collection, Mapping

from kvcellar.kernels.program import Program, Value
from kvcellar.kernels.recorded_memory import View

Dims = tuple[int | None, ...]  # of each dimension of a value, that of the written value; None: it has one element
Views = Mapping[int, Dims]  # by value


def repeatable(program: Program, elementwise: Collection[str]) -> dict[int, Views]:
    """By written value that may be stored once along some dimensions: all values of its storage, which only operators
    named in `elementwise` read."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, set[str]] = {}
    used: dict[int, set[int]] = {}
    for op in program.ops:
        for value in (*op.reads, *(one for one in op.outputs if one is not None)):
            used.setdefault(program.values[value].storage, set()).add(value)
        for value in op.reads:
            readers.setdefault(program.values[value].storage, set()).add(op.name)
        for value in op.outputs:
            if value is not None:
                writers.setdefault(program.values[value].storage, []).append(value)
    kept = {program.values[value].storage for value in (*program.inputs.values(), *program.outputs.values())}
    kept |= program.constants.keys()
    found: dict[int, Views] = {}
    for storage, values in writers.items():
        if len(values) == 1 and storage not in kept and readers.get(storage, set()) <= set(elementwise):
            dims = {one: _dims(program.values[one], program.values[values[0]]) for one in used[storage]}
            views = {one: of for one, of in dims.items() if of is not None}
            if len(views) == len(dims):
                found[values[0]] = views
    return found


def _dims(value: Value, written: Value) -> Dims | None:
    """The dimensions of `written` that a view of it has; None if it is another part or order of elements."""
    if value.offset != written.offset or value.dtype != written.dtype:
        return None
    places = {of: place for place, of in enumerate(zip(written.shape, written.strides, strict=True)) if of[0] != 1}
    found: list[int | None] = []
    for of in zip(value.shape, value.strides, strict=True):
        if of[0] != 1 and of not in places:
            return None
        found.append(places.get(of) if of[0] != 1 else None)
    all_of_it = {place for place in found if place is not None} == set(places.values())
    return tuple(found) if all_of_it else None


def stored_once(views: Mapping[int, View], dims: Views, written: int, repeats: Collection[int]) -> dict[int, View]:
    """Views with the stride 0 along dimensions `repeats` of the written value, and others close together."""
    whole, strides, count = views[written], [0] * len(views[written].shape), 1
    for dim in sorted(range(len(strides)), key=lambda dim: whole.strides[dim]):
        if dim not in repeats:
            strides[dim] = count
            count *= whole.shape[dim]
    return {
        index: view._replace(
            strides=tuple(1 if dim is None else strides[dim] for dim in dims[index]), whole=view.strides
        )
        for index, view in views.items()
    }
