"""attach: a memory for a network of transformers that its user has loaded and keeps running (`models/attached.py`)."""

from typing import TYPE_CHECKING

from kvcellar.engine.load.capacity import Demand, resolve_capacity
from kvcellar.engine.models.attached import STEP, Attached, check_attachable
from kvcellar.engine.models.attached_layers import kept_of
from kvcellar.engine.models.input_limits import context_of
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.memory import Memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCES = 64  # texts of the whole context, or windows, at most, that cells are allocated for


def attach(model: "PreTrainedModel", *, cache_bytes: int = 1 << 30) -> Attached:
    """A memory of `cache_bytes` beside a loaded model, which stays as it is.

        memory = kvcellar.attach(model)
        model.generate(**inputs, past_key_values=memory.cache())

    Raises `ModelRefused` for a model that keeps what no memory can share, `BadRequest` for one in training mode,
    with a memory or with a `generate` of its own, and `CapacityTooSmall`.
    """
    check_attachable(model)
    kept, device = kept_of(model), model.device
    row, size = (kept.recurrent.bytes if kept.recurrent is not None else 0), kept.dtype.itemsize
    capacity = resolve_capacity(
        [
            Demand(group.name, group.layout, lambda n, group=group: group.bytes(n, size), staging=lambda n: 0)
            for group in kept.groups
        ],
        budget=cache_bytes,
        because="cache_bytes",
        scratch=lambda *_: 0,
        context=context_of(model),
        max_sequences=SEQUENCES,
        step_tokens=STEP,
        bytes_per_row=row,
    )
    memory = Memory(
        kept.groups,
        cells=capacity.cells,
        dtype=kept.dtype,
        device=device,
        backend=Sdpa(),  # attention is transformers' own: it only says how planes are arranged
        recurrent=kept.recurrent,
        rows=capacity.states.rows,
    )
    return Attached(model, kept, memory)
