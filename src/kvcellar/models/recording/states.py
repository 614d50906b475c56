"""states: recurrent states in a recorded step in which each sequence has one new token: native copies of state rows.

Always true: the numbers of the rows of a step are at the same address in each step of so many sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.kernels.native import Native
from kvcellar.kernels.program import Op, Program
from kvcellar.kernels.recorded_kernel import StepKernel
from kvcellar.models.recording.recording import RecordedStep

READS = "kvcellar.states"


class States:
    """Binds the operators of a program that read and store states."""

    def __init__(self, program: Program, kernel: StepKernel) -> None:
        self._kernel = kernel
        self._layers = [op.args[0] for op in program.ops if op.name == READS]
        self._rows: dict[int, Tensor] = {}  # by the number of sequences: rows that are read, and written [2,n]
        self._memory: Memory | None = None  # of the running step

    def begin(self, step: RecordedStep) -> None:
        if self._layers:
            segments = step.plan.states
            rows = torch.tensor([[one.read for one in segments], [one.write for one in segments]], device="cpu")
            self._rows.setdefault(len(segments), rows).copy_(rows)
            self._memory = step.memory

    def end(self) -> None:
        self._memory = None

    def written(self, step: RecordedStep) -> None:
        """Note what a step stored."""
        for layer in self._layers:
            assert isinstance(layer, int)
            step.memory.states.written(layer, step.plan.states)

    def bind(self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> list[Native]:
        layer, writes = op.args[-1], op.name != READS
        assert self._memory is not None, "a step is open"
        assert isinstance(layer, int)
        planes, values = self._memory.states.planes(layer).values(), inputs if writes else outputs
        used = [(plane, one) for plane, one in zip(planes, values, strict=True) if one is not None]
        return [self._kernel.rows(self._rows[len(one)][int(writes)], plane, one, writes=writes) for plane, one in used]
