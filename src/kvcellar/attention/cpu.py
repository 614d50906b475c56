"""cpu: a few new rows of each sequence over its cells, read once and in place, by a kernel (`kernels.attention`).

Keys and values are bfloat16 or float32, sums are float32: scores are as exact as in `sdpa`, and weights have the type
that they have there. Longer blocks of rows, and keys that are computed from what is stored (MLA), go to `sdpa`.

Always true: what a sequence's rows answer depends on its own queries and cells alone, not by a bit on other sequences
or on threads.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kvcellar.attention.products import Products, part
from kvcellar.attention.sdpa import Sdpa
from kvcellar.contracts import History, StepTables
from kvcellar.errors import NoBackend
from kvcellar.kernels.attention import Kernel, Table, table
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.plan import GroupPlan
from kvcellar.shapes import Arrangement, AttentionSpec, Kind, Scoring

SHORT = 16  # rows of a sequence up to which the kernel serves them


class Prepared(NamedTuple):
    """What all layers of a group share in a step: the rows for the kernel, and those for products."""

    table: Table | None
    products: Products | None


class Cpu:
    """Decoding on a CPU, in float32 or bfloat16."""

    name = "cpu"
    arrangement: Arrangement | Mapping[str, Arrangement] = "head"
    padding = 1
    kinds = frozenset[Kind]({"float32", "bfloat16"})

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` names the compiler, and where its work is kept (`kvcellar.kernels.compiled`)."""
        self._environment, self._portable = environment, Sdpa()
        self._kernel: Kernel | None = None

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"it runs on a CPU, not on {spec.device}"
        if (reason := self._portable.refuse(spec) or spec.unreadable(self.kinds)) is not None:
            return reason
        try:
            self._kernel = self._kernel or Kernel(self._environment)
        except NotCompiled as error:
            return str(error)
        return None

    def _compiled(self) -> Kernel:
        """Raises `NoBackend`."""
        try:
            self._kernel = Kernel(self._environment)
        except NotCompiled as error:
            raise NoBackend("this step", {self.name: str(error)}) from error
        return self._kernel

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Prepared:
        short = [segment for segment in plan.segments if len(segment.pos) <= SHORT]
        long = [part(plan.layout, segment, tables.device) for segment in plan.segments if len(segment.pos) > SHORT]
        return Prepared(table(plan.layout, short, tables) if short else None, Products(long) if long else None)

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        prepared: Prepared = history.step.prepared
        planes = history.planes
        out = q.new_empty(*q.shape[:3], planes["v"].plane.size)  # [1,T,H,Dv]
        if prepared.products is not None:
            prepared.products.attend_into(q, history, scoring, out)
        if prepared.table is not None:
            kernel = self._kernel or self._compiled()
            kernel.attend(q, planes["k"], planes["v"], scoring, prepared.table, out)
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        return self._portable.attend_dense(q, k, v, visible, scoring)
