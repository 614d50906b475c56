"""States that say whose they are: every element is ±1, a bit of the hash of all tokens before it, layer and plane.

Exact in every float type. A state of another prefix, of another layer or of another plane is another one; that of no
tokens is zero, like a row that was not written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import StateSegment
from kvcellar.memory.shapes import Recurrent, StatePlane
from tests.laws.watch import everything

Tokens = tuple[int, ...]

RECURRENT = Recurrent(
    {
        3: (StatePlane("conv 0", (5, 2), "bfloat16"), StatePlane("recurrent 0", (2, 3, 4), "float32")),
        8: (StatePlane("conv 0", (5, 2), "float16"), StatePlane("conv 1", (7, 3), "float64")),
        9: (StatePlane("recurrent 0", (2, 3, 4), "float32"),),
    }
)


@lru_cache(100_000)
def spelled(tokens: Tokens, layer: int, plane: StatePlane) -> Tensor:
    """[*shape]; not to be changed."""
    dtype = getattr(torch, plane.kind)
    if not tokens:
        return torch.zeros(plane.shape, dtype=dtype)
    size = prod(plane.shape)
    said = repr((tokens, layer, plane.name)).encode()
    blocks = (sha256(said + bytes([i])).digest() for i in range(-(-size // 256)))
    bits = int.from_bytes(b"".join(blocks), "big")
    return torch.tensor([2.0 * (bits >> i & 1) - 1 for i in range(size)], dtype=dtype).reshape(plane.shape)


def states(prefixes: Sequence[Tokens], layer: int, recurrent: Recurrent = RECURRENT) -> dict[str, Tensor]:
    """By plane [B,*shape]: what a layer remembers after each of these."""
    return {
        plane.name: torch.stack([spelled(tokens, layer, plane) for tokens in prefixes])
        for plane in recurrent.layers[layer]
    }


def assert_states(found: Mapping[str, Tensor], prefixes: Sequence[Tokens], layer: int) -> None:
    wanted = states(prefixes, layer)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), f"layer {layer} remembers other tokens in {name}"


def remembered(memory: Memory, seq: int, layer: int) -> dict[str, Tensor]:
    """What a layer remembers of a sequence at rest: read as a step would that begins where it ends."""
    record = memory._sequences.records.get(seq)
    row = record.states.row if record is not None else 0
    return {name: plane[[row]] for name, plane in memory.states.planes(layer).items()}


def all_of(memory: Memory) -> list[Any]:
    """The whole state of a memory, with its rows and the content of every row that a sequence holds."""
    rows = memory.states.rows
    known = everything(memory)
    states = {seq: record.states for seq, record in memory._sequences.records.items()}
    known.append({seq: (one.end, one.row, dict(one.checkpoints)) for seq, one in states.items()})
    known += [rows.capacity, rows.free, rows.kept]
    held = sorted({row for one in states.values() for row in (one.row, *one.checkpoints.values())} | {0})
    for planes in memory.states._planes.values():
        known += [plane[held].contiguous().view(torch.uint8).numpy().tobytes() for plane in planes.values()]
    return known


class Broken(RuntimeError):
    """An operation on tensors did not work."""


class FailsAt(TorchDispatchMode):
    """While it is entered, operation number `n` on tensors, from 1, raises `Broken`; `reached`: whether it did."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.reached = n, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n -= 1
        if not self.n:
            self.reached = True
            raise Broken(str(func))
        return func(*args, **(kwargs or {}))


class Made(TorchDispatchMode):
    """`uploads` is how many tensors were made of numbers while it was entered: each is a wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.uploads += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def failures() -> Iterator[FailsAt]:
    """One that fails at the first operation, at the second, and so on, until one was not reached."""
    for n in count(1):
        failing = FailsAt(n)
        yield failing
        if not failing.reached:
            return


def grouped(segments: Iterable[StateSegment], order: int) -> list[list[StateSegment]]:
    """Segments as mixers get them: by length, in an order of groups and within them that depends on `order`."""
    by_length: dict[int, list[StateSegment]] = {}
    for segment in segments:
        by_length.setdefault(segment.length, []).append(segment)
    groups = list(by_length.values())
    if order & 1:
        groups.reverse()
    for group in groups:
        turn = (order >> 1) % len(group)
        group[:] = group[turn:] + group[:turn]
    if order & 2 and len(groups[0]) > 1:
        groups[:1] = [groups[0][:1], groups[0][1:]]
    return groups
