"""rope: how the stored planes of a model rotate with position (RoPE), found by running it, not by reading its config.

The same tokens are run at several start positions. A plane that stays the same does not depend on position. Every other
plane must be explained by one of the model's frequency tables, with some pairing of elements, offset and direction. And
the logits must stay the same: a model that uses absolute positions otherwise (learned embeddings, a temperature that
grows with position) cannot be shifted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import context_of, first_position, random_tokens
from kvcellar.engine.models.registered import opened_cache
from kvcellar.engine.models.seam import Door, Extras, scoring_of
from kvcellar.engine.models.shape import Shape
from kvcellar.errors import KvcellarError
from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.cells.layouts import Chunked
from kvcellar.memory.kv.pool import rope_rotated
from kvcellar.memory.shapes import Rotation

TOKENS = 12
NEAR = 37  # no multiple of any head size or window, so that a wrong frequency shows
BOUND: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3,
}  # fmt: skip
RECURRENT = "tokens cannot be removed from the state of its recurrent layers"


@dataclass(slots=True)
class PlaceDoor(Door):
    """A forward of one fresh sequence at `positions`. Records what is stored; attends with the reference backend."""

    guest: Guest
    positions: Tensor  # [T]
    stored: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # layer -> plane -> [T,heads,size]

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        self.stored[layer] = {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
        return k, v

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        if module in self.guest.shape.crossing:
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        layer = self.guest.shape.bindings[module].layer
        layout = next(group.layout for group in self.guest.shape.groups if layer in group.layers)
        at = self.positions.tolist()
        visible = torch.tensor([[layout.lowest(pos) <= key <= pos for key in at] for pos in at], device=q.device)
        scoring = scoring_of(q, extras)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, visible, scoring).contiguous()[None]

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)

    def past_length(self, layer: int) -> int | Tensor:
        return self.guest.past_length(self.positions)


def with_rotations(guest: Guest) -> Shape:
    """The guest's shape, with the rotations of its planes, or with the reason why its positions cannot change."""
    try:
        found = _rotations(guest) if guest.shape.recurrent is None else RECURRENT
    except (KvcellarError, RuntimeError, ValueError, TypeError, IndexError) as error:
        found = f"the probe at other positions failed: {error}"
    if isinstance(found, str):
        groups = tuple(replace(group, no_shift=found) for group in guest.shape.groups)
    else:
        groups = tuple(
            replace(group, no_shift=None, rotations={layer: found[layer] for layer in group.layers if found[layer]})
            for group in guest.shape.groups
        )
    return replace(guest.shape, groups=groups)


def _rotations(guest: Guest) -> dict[int, dict[str, Rotation]] | str:
    """The rotation of every plane that rotates, by layer and plane; or why there is none."""
    if guest.mode != "flat":
        return "the model runs solo, with positions of its own"
    step = _period(guest)
    far = (context_of(guest.model) - TOKENS - 1) // step * step
    near = -(-NEAR // step) * step
    if far < near:
        return f"its context of {context_of(guest.model)} tokens is too short to test it"
    before, logits, _ = stored_at(guest, 0)
    after, near_logits, _ = stored_at(guest, near)
    _, far_logits, _ = stored_at(guest, far)
    bound = BOUND[guest.dtype]
    for by, moved in ((near, near_logits), (far, far_logits)):
        gap = float((moved - logits).abs().max() / logits.abs().max().clamp(min=1.0))
        if gap > 3 * bound:
            return f"its logits change by {gap:.0e} when the same tokens are {by} positions further on"
    tables = list(_frequency_tables(guest.model))
    found: dict[int, dict[str, Rotation]] = {layer: {} for layer in before}
    for layer, name in ((layer, name) for layer, planes in before.items() for name in planes):
        rotation = _rotation(before[layer][name], after[layer][name], near, tables, bound)
        if isinstance(rotation, str):
            return f"{name} of layer {layer} {rotation}"
        if rotation is not None:
            found[layer][name] = rotation
    return found


def _period(guest: Guest) -> int:
    """A start position that is a multiple of this sees what position 0 sees: the chunk size, where there are chunks."""
    sizes = [group.layout.size for group in guest.shape.groups if isinstance(group.layout, Chunked)]
    return max(sizes, default=1)


@torch.inference_mode()
def stored_at(guest: Guest, start: int) -> tuple[dict[int, dict[str, Tensor]], Tensor, Tensor]:
    """Of `TOKENS` tokens from position `start` on: planes [T,heads,size] by layer, logits [T,V], token ids [T]."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.tensor([random_tokens(guest.model, TOKENS, generator)], device=guest.device)
    positions = torch.arange(start, start + TOKENS, device=guest.device)
    door = PlaceDoor(guest, positions)
    with opened_cache(door) as cache:
        out = guest.model(
            input_ids=ids,
            position_ids=positions[None] + first_position(guest.model),
            use_cache=True,
            **{guest.cache_name: cache},
        )
    return door.stored, out.logits[0].float(), ids[0]


def _frequency_tables(model: nn.Module) -> Iterator[tuple[float, ...]]:
    """The distinct frequency tables in the model's buffers."""
    seen: set[tuple[float, ...]] = set()
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1:
            table = tuple(buffer.double().tolist())
            if table not in seen:
                seen.add(table)
                yield table


def _rotation(
    before: Tensor, after: Tensor, by: int, tables: Sequence[tuple[float, ...]], bound: float
) -> Rotation | str | None:
    """The rotation by `by` positions that gives `after` from `before`; None if they are equal; else what is wrong."""
    before, after = before.double(), after.double()
    scale = after.abs().max().clamp(min=1e-6)

    def error(rotation: Rotation) -> float:
        return float((rope_rotated(before, rotation, by) - after).abs().max() / scale)

    if float((before - after).abs().max() / scale) <= bound:
        return None
    best = min(_candidates(before.shape[-1], tables), key=error, default=None)
    if best is None:
        return "depends on position, and the model has no frequency table"
    if error(best) > bound:
        return f"depends on position in a way that no frequency table explains (off by {error(best):.0e})"
    return best


def _candidates(size: int, tables: Sequence[tuple[float, ...]]) -> Iterator[Rotation]:
    """Each table on the first or the last elements, in both pairings and both directions."""
    for table in (table for table in tables if 2 * len(table) <= size):
        for interleaved in (False, True):
            for start in {0, size - 2 * len(table)}:
                for sign in (1.0, -1.0):
                    yield Rotation(tuple(sign * f for f in table), interleaved, start)
