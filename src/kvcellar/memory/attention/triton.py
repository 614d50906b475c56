"""triton: new rows of each sequence over its cells, read in place on a GPU (`kernels/triton_attention.py`).

Any number of rows of any number of sequences, any storage that is not float64, windows, chunks, inputs, sinks and soft
caps: one launch a layer where no sequence has many rows or all have, two where some have, and one more that merges long
histories which many programs have read. Keys that are computed from stored planes (MLA) go to `sdpa`.

Tables are at fixed addresses, and a launch depends on `Prepared.key` only: so it can be captured in a CUDA graph and
replayed in later steps with the same key.

Always true: the result for a row does not depend on other rows, whether of its sequence or of others, nor on how long
histories are divided among programs. Only its rounding depends on whether its sequence has more than `FEW` rows in the
step.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from kvcellar.memory.attention.blocks import Call, Prepared, prepared
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import GroupStep, LayerHistory, StepTables
from kvcellar.memory.plan import GroupPlan
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Scoring

LARGEST = 512  # elements of a head
Attend = Callable[[Call], None]  # computes a layer

SHARING = 16  # query heads that can share a KV head


class Triton:
    """Attention on a GPU."""

    name = "triton"
    arrangement: Arrangement = "head"
    kinds = frozenset[Kind](("float32", "bfloat16", "float16", "int8", "int4", "fp8"))

    def __init__(self, attend: Attend | None = None, device: str = "cuda") -> None:
        """`attend` computes; None: the kernel. Triton's interpreter can run it on another `device`."""
        self._attend, self._device, self._portable = attend, device, Sdpa(fused=True)

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.device.partition(":")[0] != self._device:
            return f"it runs on {self._device}, not on {spec.device}"
        if (reason := self._portable.refuse(spec) or spec.unreadable(self.kinds)) is not None:
            return reason
        if spec.dtype == "float64":
            return "it computes in float32 at most, not in float64"
        if max(spec.key_size, spec.value_size) > LARGEST:
            return f"its heads have up to {LARGEST} elements, not {max(spec.key_size, spec.value_size)}"
        if spec.query_heads // spec.kv_heads > SHARING:
            return f"up to {SHARING} query heads can share a KV head, not {spec.query_heads // spec.kv_heads}"
        if self._attend is None and importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        return None

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Prepared:
        return prepared(plan, tables)

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        keys, values = history.planes["k"], history.planes["v"]
        rows = keys.meet(q[0]) if keys.storage.hadamard else q[0]
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_zeros(*rows.shape[:2], values.plane.size)  # [T,H,Dv]
        if self._attend is None:
            from kvcellar.memory.attention.triton_launch import launch  # not at the top: it imports triton

            self._attend = launch
        with torch.cuda.device_of(rows):  # Triton launches on the current device; on a CPU this does nothing
            self._attend(Call(rows, out, keys, values, scoring, history.step.prepared))
        return out[None]

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        return self._portable.attend_latent(q, history, scoring)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        return self._portable.attend_dense(q, k, v, step, scoring)
