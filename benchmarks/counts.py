"""counts: the numbers of kvcellar's Python calls and of torch operations per layer of a decode step.

Both are the same in every run. A step is counted in networks of different depth; the difference, divided by the number
of additional layers, is the count of one layer.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

import kvcellar
from kvcellar.bench.network import TINY, write
from kvcellar.engine.models import seam
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import load
from kvcellar.kernels import layers, packed
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec
from kvcellar.memory.spans import Span

DEPTHS = (2, 6)
SEQUENCES = (1, 8, 32)
SPEC = AttentionSpec(TINY.query_heads, TINY.kv_heads, TINY.head_size, TINY.head_size, dtype="bfloat16", device="cpu")
PROMPT = 40  # tokens of the first sequence; each has one more than the one before
OURS = str(Path(kvcellar.__file__).parent)
LINEAR = (packed.__file__, layers.__file__)  # calls of the network to packed linear layers


class Counts(NamedTuple):
    """Per layer, in a step of one token per sequence."""

    calls: float  # of Python functions of kvcellar, without linear layers
    operations: float  # torch operations of these functions, including views


class _Operations(TorchDispatchMode):
    """Counts operations issued while the network is inside a function of `engine/models/seam.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.found = self._inside = 0

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_filename == seam.__file__:
            self._inside += {"call": 1, "return": -1}.get(event, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.found += self._inside > 0
        return func(*args, **(kwargs or {}))


def all_counts() -> dict[str, dict[int, Counts]]:
    """By name of the backend, for backends that can run here, and number of sequences."""
    sides: Mapping[str, Backend] = {"cpu": Cpu(), "sdpa": Sdpa(), "sdpa off the CPU": Sdpa(fused=True)}
    serving = {name: backend for name, backend in sides.items() if backend.refuse(SPEC) is None}
    return {name: {n: counts(backend, n) for n in SEQUENCES} for name, backend in serving.items()}


def counts(backend: Backend, sequences: int) -> Counts:
    """For `backend`, in a step of `sequences` sequences."""
    shallow, deep = (_of_network(backend, sequences, depth) for depth in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    return Counts((deep.calls - shallow.calls) / layers, (deep.operations - shallow.operations) / layers)


def _of_network(backend: Backend, sequences: int, layers: int) -> Counts:
    """For the whole forward of a network with `layers` layers."""
    with tempfile.TemporaryDirectory() as directory:
        write(replace(TINY, layers=layers), Path(directory))
        network = load(Path(directory), device="cpu").model
    packed.pack(network)
    guest = build_guest(network, [backend])
    memory = guest.memory({group.name: sequences * (PROMPT + sequences + 9) for group in guest.shape.groups})

    def step(tokens: Mapping[int, int]) -> None:
        starts = {seq: memory.length(seq) if memory.has(seq) else 0 for seq in tokens}
        plan = memory.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in tokens.items())))
        guest.forward(memory, plan, [7] * plan.tokens, [0])
        memory.commit()

    for seq in range(sequences):
        step({seq: PROMPT + seq})
    decode = dict.fromkeys(range(sequences), 1)
    step(decode)  # the first step of a layer creates objects that later steps reuse
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and name.startswith(OURS) and name not in LINEAR

    _profiled(count, lambda: step(decode))
    operations = _Operations()
    with operations:
        _profiled(operations.watch, lambda: step(decode))
    return Counts(calls, operations.found)


def _profiled(profiler: Callable[[FrameType, str, Any], None], run: Callable[[], None]) -> None:
    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        run()
    finally:
        sys.setprofile(before)


def lines(found: Mapping[str, Mapping[int, Counts]]) -> list[str]:
    """A line for each backend and number of sequences."""
    return [
        f"{name:20} {one.calls:5.0f} calls and {one.operations:5.0f} torch operations per layer, {n} sequence(s)"
        for name, by_number in found.items()
        for n, one in by_number.items()
    ]
