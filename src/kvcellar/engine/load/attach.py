"""attach: a memory for a network of transformers that its user has loaded and keeps running (`models/attached.py`)."""

import json
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcellar.engine.load.capacity import Demand, resolve_capacity
from kvcellar.engine.load.open_store import Post, Source, open_store
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.attached import STEP, Attached, autocast_of, check_attachable
from kvcellar.engine.models.attached_layers import kept_of
from kvcellar.engine.models.input_limits import context_of
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restores import Evict
from kvcellar.memory.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCES = 64  # texts of the whole context, or windows, at most, that cells are allocated for


def attach(
    model: "PreTrainedModel",
    *,
    cache_bytes: int = 1 << 30,
    store: str | Path | None = None,
    store_bytes: int = 10 * 10**9,
    store_key: bytes | None = None,
) -> Attached:
    """A memory of `cache_bytes` beside a loaded model, which stays as it is.

        memory = kvcellar.attach(model)
        model.generate(**inputs, past_key_values=memory.cache())

    In the directory `store`, of at most `store_bytes`, a later process finds what this one has computed with the same
    weights. With `store_key`, 32 bytes, it is encrypted.

    Raises `ModelRefused` for a model that keeps what no memory can share, `BadRequest` for one in training mode,
    with a memory or with a `generate` of its own, or for settings out of their bounds, and `CapacityTooSmall`.
    """
    place = None if store is None else str(store)
    settings = Settings(store=place, store_bytes=store_bytes, store_key=store_key, host_bytes=0)
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

    def opened(memory: Memory, prefixes: Prefixes, evict: Evict, *, post: Post) -> Store | None:
        with ExitStack() as opened:
            source = Source((), "attached", network=network_of(model))
            found = open_store(
                memory, prefixes, evict, source=source, settings=settings, post=post, opened=opened, share=1.0
            )
            opened.pop_all()  # the end of the store closes its tiers
            return found

    return Attached(model, kept, memory, None if store is None else opened)


def network_of(model: "PreTrainedModel") -> str:
    """A digest of what decides the keys and values of a network: its class, its config, its weights and buffers, how it
    attends, and what autocast computes in. It reads all weights."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    how = [type(model).__qualname__, config, model.config._attn_implementation, autocast_of(model.device)]
    digest = blake2b(json.dumps(how, sort_keys=True, default=str).encode(), digest_size=32)
    seen = set[tuple[int, torch.Size]]()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if (one := (tensor.data_ptr(), tensor.shape)) not in seen:  # tied weights are read once
            seen.add(one)
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
