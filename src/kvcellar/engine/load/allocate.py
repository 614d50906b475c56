"""allocate: divides the granted bytes between the memory of the model and that of what drafts for it, and allocates it.

Always true: the bytes of both memories, with their steps and edits, are at most `cache_bytes` without `host_bytes` of
CPU memory. What drafts has as many bytes as `draft_bytes` says, or a share by what a token takes in each memory; what
it cannot use is the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcellar.engine.load.capacity import Capacity, Demand, resolve_capacity
from kvcellar.engine.load.machine import free_cpu_bytes
from kvcellar.engine.load.reserve import check_room
from kvcellar.engine.load.settings import SHARE_OF_FREE, Settings, step_tokens_of
from kvcellar.engine.models.guest import Guest
from kvcellar.errors import BadRequest, CapacityTooSmall
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory

MOST_IMAGES = 256 << 20  # bytes of features of images, unless `image_bytes` says otherwise
MOST_SHARE = 0.5  # of the bytes, for what drafts, unless `draft_bytes` says otherwise

Scratch = Callable[[int, int, int], int]  # see `resolve_capacity`


@dataclass(frozen=True, slots=True)
class Needs:
    """What one of the two memories takes on a kind of `device`. `context` is the most tokens of one of its sequences;
    `shifts`: whether their texts can be shifted."""

    groups: tuple[Group, ...]
    itemsize: int
    device: str
    bytes_per_row: int
    context: int
    scratch: Scratch
    shifts: bool = False

    @classmethod
    def of(cls, guest: Guest, context: int, scratch: Scratch, *, shifts: bool = False) -> "Needs":
        recurrent = guest.shape.recurrent
        row = recurrent.bytes if recurrent is not None else 0
        size, kind = guest.dtype.itemsize, guest.device.type
        return cls(guest.shape.groups, size, kind, row, context, scratch, shifts)

    def demands(self) -> list[Demand]:
        size = self.itemsize
        return [
            Demand(
                group.name,
                group.layout,
                bytes=lambda cells, group=group: group.bytes(cells, size),
                staging=lambda cells, group=group: group.staging(cells, size),
                undo=group.undo(size) if self.shifts and group.no_shift is None else 0,
            )
            for group in self.groups
        ]

    def each(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, with the rows that it takes at most."""
        cells = sum(g.layout.most_cells(tokens, 0) * g.bytes_per_cell(self.itemsize) for g in self.groups)
        return cells + 4 * self.bytes_per_row


def image_bytes(settings: Settings, device: torch.device, *, crossed: bool) -> int:
    """Most bytes of the features of images, with keys and values where layers attend to them (`crossed`). Raises
    `BadRequest`."""
    budget, because = _budget(settings, device.type, _free(device))
    if settings.image_bytes is None:
        return budget // 8 if crossed else min(budget // 8, MOST_IMAGES)
    if settings.image_bytes >= budget:
        raise BadRequest(f"image_bytes is {settings.image_bytes} of the {budget} bytes of {because}", "image_bytes")
    return settings.image_bytes


def divided(
    needs: Needs, draft: Needs | None, settings: Settings, device: torch.device, images: int = 0
) -> tuple[Capacity, Capacity | None]:
    """Capacities of the model's memory and of what drafts, beside so many bytes for features of `images`. Raises
    `CapacityTooSmall`, `BadRequest`."""
    free = _free(device)
    if draft is None and settings.draft is not None and settings.draft_bytes is not None:
        raise BadRequest("draft_bytes is set, but what drafts has no memory of its own; leave it out", "draft_bytes")
    budget, because = _budget(settings, device.type, free)
    if images:
        budget, because, free = budget - images, f"{because} without {images} for images", free - images
    drafts = None if draft is None else _for_drafts(needs, draft, settings, budget, because)
    if drafts is not None:
        budget, because = budget - drafts.total, f"{because} without {drafts.total} for drafts"
        free -= drafts.total
    capacity = _resolved(needs, settings, budget, because)
    check_room(capacity, device, free)
    return capacity, drafts


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_cpu_bytes()


def _budget(settings: Settings, kind: str, free: int) -> tuple[int, str]:
    """Bytes for everything, and what they are."""
    if settings.cache_bytes is not None:
        budget, because = settings.cache_bytes, "cache_bytes"
    else:
        budget, because = int(free * SHARE_OF_FREE[kind]), f"{SHARE_OF_FREE[kind]:.0%} of the memory that is free"
    if kind == "cpu" and settings.host_bytes:
        if settings.host_bytes >= budget:
            raise BadRequest(f"host_bytes is {settings.host_bytes} of the {budget} bytes of {because}", "host_bytes")
        budget, because = budget - settings.host_bytes, f"{because} without host_bytes"
    return budget, because


def _for_drafts(needs: Needs, draft: Needs, settings: Settings, budget: int, because: str) -> Capacity:
    size, what = settings.draft_bytes, "draft_bytes"
    if size is not None and size >= budget:
        raise BadRequest(f"draft_bytes is {size} of the {budget} bytes of {because}", "draft_bytes")
    whole = _resolved(needs, settings, budget, because) if size is None else None
    try:
        if whole is not None:
            size, what = _share(needs, draft, settings, budget, because, whole), f"a share of {because}"
        assert size is not None
        return _resolved(draft, settings, size, what)
    except CapacityTooSmall as error:
        raise CapacityTooSmall(f"the memory of the draft model: {error} Or set draft_bytes.") from error


def _share(needs: Needs, draft: Needs, settings: Settings, budget: int, because: str, whole: Capacity) -> int:
    """Bytes with which both hold about as many tokens: each has its steps and edits, and of the rest a part as large as
    its part of the bytes of a long sequence."""
    most = int(MOST_SHARE * budget)
    half = _resolved(draft, settings, most, f"half of {because}")
    tokens, steps = min(needs.context, draft.context), half.scratch + half.staging
    ours, theirs = needs.each(tokens), draft.each(tokens)
    rest = max(0, budget - whole.scratch - whole.staging - steps)
    return min(most, steps + rest * theirs // (ours + theirs))


def _resolved(needs: Needs, settings: Settings, budget: int, because: str) -> Capacity:
    return resolve_capacity(
        needs.demands(),
        budget=budget,
        because=because,
        scratch=needs.scratch,
        context=needs.context,
        max_sequences=settings.max_sequences,
        step_tokens=step_tokens_of(settings, needs.device),
        bytes_per_row=needs.bytes_per_row,
    )


def allocated(make: Callable[..., Memory], capacity: Capacity, context: int, device: torch.device) -> Memory:
    """The memory that `make`, the method of a guest or a head, makes. Raises `CapacityTooSmall`."""
    rows = {"rows": capacity.states.rows} if capacity.states.rows else {}
    try:
        memory = make(capacity.cells, limits=context, max_bytes=capacity.budget, **rows)
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise either
        raise CapacityTooSmall(
            f"{capacity.bytes} bytes for {capacity.holds} ({capacity.because}) cannot be had on {device}: "
            f"{str(error).splitlines()[0]}. Lower cache_bytes."
        ) from error
    memory.storage.leave_room(capacity.scratch)
    return memory
