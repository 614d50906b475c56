"""cpu: a few new rows of each sequence over its cells, read once and in place, by a kernel (`kernels.attention`).

Keys and values are bfloat16 or float32, sums are float32: scores are as exact as in `sdpa`, and weights have the type
that they have there. Longer blocks of rows, and keys that are computed from what is stored (MLA), go to `sdpa`.

Always true: what a sequence's rows answer depends on its own queries and cells alone, not by a bit on other sequences
or on threads.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.attention.sdpa import Part, Sdpa, part
from kvcellar.contracts import History
from kvcellar.errors import NoBackend
from kvcellar.kernels.attention import Kernel, Table
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.plan import GroupPlan
from kvcellar.shapes import Arrangement, AttentionSpec, Kind, Scoring

SHORT = 16  # rows of a sequence up to which the kernel serves them


class Prepared(NamedTuple):
    """What all layers of a group share in a step: the rows for the kernel, and those for `sdpa`."""

    table: Table
    parts: list[Part]


class Cpu:
    """Decoding on a CPU, in float32 or bfloat16."""

    name = "cpu"
    arrangement: Arrangement | Mapping[str, Arrangement] = "head"
    padding = 1
    kinds = frozenset[Kind]({"float32", "bfloat16"})

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` names the compiler, and where its work is kept (`kvcellar.kernels.compiled`)."""
        self._environment, self._products = environment, Sdpa()
        self._kernel: Kernel | None = None

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"it runs on a CPU, not on {spec.device}"
        if (reason := self._products.refuse(spec) or spec.unreadable(self.kinds)) is not None:
            return reason
        try:
            self._compiled()
        except NotCompiled as error:
            return str(error)
        return None

    def _compiled(self) -> Kernel:
        if self._kernel is None:
            self._kernel = Kernel(self._environment)
        return self._kernel

    def prepare(self, plan: GroupPlan, device: torch.device) -> Prepared:
        prepared = Prepared(Table(), [])
        for segment in plan.segments:
            if len(segment.pos) > SHORT:
                prepared.parts.append(part(plan.layout, segment, device))
            else:
                prepared.table.add(plan.layout, segment)
        return prepared

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        prepared: Prepared = history.prepared
        out = q.new_empty(q.shape[0], q.shape[1], history.stored("v").plane.size)  # [T,H,Dv]
        if prepared.parts:
            self._products.attend_parts(q, history, scoring, prepared.parts, out)
        if prepared.table.segments:
            try:
                kernel = self._compiled()
            except NotCompiled as error:
                raise NoBackend("this step", {self.name: str(error)}) from error
            kernel.attend(q, history.stored("k"), history.stored("v"), scoring, prepared.table, out)
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        return self._products.attend_dense(q, k, v, visible, scoring)
