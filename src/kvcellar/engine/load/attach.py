"""attach: a memory for a network of transformers that its user has loaded and keeps running (`models/attached.py`)."""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcellar.engine.load.capacity import Demand, resolve_capacity
from kvcellar.engine.load.open_store import Post, Source, open_store
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.attached import ATTACHED, STEP, Attached, autocast_of, check_attachable
from kvcellar.engine.models.attached_layers import kept_of
from kvcellar.engine.models.input_limits import context_of
from kvcellar.errors import ModelRefused
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
    """A digest of what decides the keys and values of a network: its config, its weights and buffers, the classes and
    plain attributes of its modules, what hooks they have, how it attends, and what autocast computes in. It reads all
    weights. What a hook or a class computes is not known beyond its name and source. Raises `ModelRefused`."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    how = [config, model.config._attn_implementation, autocast_of(model.device)]
    how += [(name, *_described(module)) for name, module in model.named_modules()]
    digest = blake2b(json.dumps(how, sort_keys=True, default=str).encode(), digest_size=32)
    seen = set[int]()
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ModelRefused(f"a store needs plain tensors, and {name} is a {type(tensor).__name__}")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if id(tensor) not in seen:  # tied weights are read once
            seen.add(id(tensor))
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(module: torch.nn.Module) -> Iterator[Any]:
    """Its class, its attributes that are numbers, texts or of these, as adapters have, and its hooks."""
    yield from _code_of(type(module))
    others = vars(torch.nn.Module()).keys() | {ATTACHED, "name_or_path", "warnings_issued"}
    yield {name: value for name, value in vars(module).items() if name not in others and _plain(value)}
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not str(getattr(hook, "__module__", "")).startswith("kvcellar."):  # those of a memory
            yield from _code_of(hook)


def _code_of(code: Any) -> Iterator[str]:
    """The name of a class or function, and its source where it is of none of the packages that the store knows."""
    module = str(getattr(code, "__module__", ""))
    yield f"{module}.{getattr(code, '__qualname__', type(code).__qualname__)}"
    if module.partition(".")[0] not in ("torch", "transformers", "kvcellar"):
        with suppress(OSError, TypeError):
            yield inspect.getsource(code)


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(one, int | float | bool) for one in value.values())
    several = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(one, int | float | bool | str) for one in several)
