"""rope: how the stored planes of a model turn with position, found by watching and not by reading its config.

The same tokens are run at two places. A plane that comes out the same does not depend on position; else some frequency
table of the model, in one of the two pairings, at the first or the last elements, in one of the two directions, must
turn the one into the other. And the logits must be the same at both places: a model that uses positions in another way
too (learned embeddings, a temperature that grows with position) cannot be shifted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.attention.reference import attend_dense
from kvcellar.cache.layouts import Chunked
from kvcellar.cache.turn import turn
from kvcellar.errors import KvcellarError
from kvcellar.models.facts import context_of, first_position, random_text
from kvcellar.models.guest import Guest
from kvcellar.models.seam import Door, opened
from kvcellar.models.shape import Shape
from kvcellar.shapes import Rotation, Scoring

TOKENS = 12
NEAR = 37  # no multiple of any head size or window: a wrong frequency shows
BOUND: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3,
}  # fmt: skip


RECURRENT = "what was read cannot be taken out of the state of its recurrent layers"


@dataclass(slots=True)
class PlaceDoor(Door):
    """A forward of one fresh sequence whose first token is at `start`. Records what is stored; attends by reference."""

    guest: Guest
    positions: Tensor  # [T]
    stored: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # layer -> plane -> [T,heads,size]

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.stored[layer] = {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
        return k, v

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scoring: Scoring) -> Tensor:
        layer = self.guest.shape.bindings[module].layer
        layout = next(group.layout for group in self.guest.shape.groups if layer in group.layers)
        at = self.positions.tolist()
        seen = [[layout.lowest(pos) <= key <= pos for key in at] for pos in at]
        visible = torch.tensor(seen, device=q.device)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, visible, scoring).contiguous()[None]

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)

    def seen(self, layer: int) -> int | Tensor:
        return self.guest.seen(self.positions)


def with_rotations(guest: Guest) -> Shape:
    """The guest's shape, with the rotations of its planes, or with the reason why its positions cannot change."""
    try:
        found = _certify(guest) if guest.shape.recurrent is None else RECURRENT
    except (KvcellarError, RuntimeError, ValueError, TypeError, IndexError) as error:
        found = f"the probe that moves its tokens failed: {error}"
    if isinstance(found, str):
        groups = tuple(replace(group, no_shift=found) for group in guest.shape.groups)
    else:
        groups = tuple(
            replace(group, no_shift=None, rotations={layer: found[layer] for layer in group.layers if found[layer]})
            for group in guest.shape.groups
        )
    return replace(guest.shape, groups=groups)


def _certify(guest: Guest) -> dict[int, dict[str, Rotation]] | str:
    """The rotation of every plane that turns, by layer and plane; or why there is none."""
    if guest.mode != "flat":
        return "the model runs solo, with positions of its own"
    step = _step(guest)
    far = (context_of(guest.model) - TOKENS - 1) // step * step
    near = -(-NEAR // step) * step
    if far < near:
        return f"its context of {context_of(guest.model)} tokens is too short to try it"
    home, home_logits, _ = stored_at(guest, 0)
    moved, near_logits, _ = stored_at(guest, near)
    _, far_logits, _ = stored_at(guest, far)
    bound = BOUND[guest.dtype]
    for place, logits in ((near, near_logits), (far, far_logits)):
        gap = float((logits - home_logits).abs().max() / home_logits.abs().max().clamp(min=1.0))
        if gap > 3 * bound:
            return f"its logits change by {gap:.0e} when the same tokens stand {place} positions further on"
    tables = list(_tables(guest.model))
    found: dict[int, dict[str, Rotation]] = {}
    for layer, planes in home.items():
        found[layer] = {}
        for name, before in planes.items():
            rotation = _rotation(before, moved[layer][name], near, tables, bound)
            if isinstance(rotation, str):
                return f"{name} of layer {layer} {rotation}"
            if rotation is not None:
                found[layer][name] = rotation
    return found


def _step(guest: Guest) -> int:
    """Places that are as good as the beginning: multiples of this (the chunk size, where there are chunks)."""
    sizes = [group.layout.size for group in guest.shape.groups if isinstance(group.layout, Chunked)]
    return max(sizes, default=1)


@torch.inference_mode()
def stored_at(guest: Guest, place: int) -> tuple[dict[int, dict[str, Tensor]], Tensor, Tensor]:
    """When the probe's tokens begin at `place`: planes [T,heads,size] of every layer, logits [T,V], token ids [T]."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.tensor([random_text(guest.model, TOKENS, generator)], device=guest.device)
    positions = torch.arange(place, place + TOKENS, device=guest.device)
    door = PlaceDoor(guest, positions)
    with opened(door) as cache:
        out = guest.model(
            input_ids=ids,
            position_ids=positions[None] + first_position(guest.model),
            past_key_values=cache,
            use_cache=True,
        )
    return door.stored, out.logits[0].float(), ids[0]


def _tables(model: nn.Module) -> Iterator[tuple[float, ...]]:
    """Every frequency table that the model carries, once."""
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
    """The rotation that turns `before` into `after`; None if they are the same; else what is wrong."""
    before, after = before.double(), after.double()
    scale = after.abs().max().clamp(min=1e-6)

    def error(rotation: Rotation) -> float:
        return float((turn(before, rotation, by) - after).abs().max() / scale)

    if float((before - after).abs().max() / scale) <= bound:
        return None
    candidates = [
        Rotation(tuple(sign * f for f in table), interleaved, start)
        for table in tables
        for interleaved in (False, True)
        for start in {0, before.shape[-1] - 2 * len(table)}
        if 2 * len(table) <= before.shape[-1]
        for sign in (1.0, -1.0)
    ]
    best = min(candidates, key=error, default=None)
    if best is None:
        return "depends on position, and the model carries no table of frequencies"
    if error(best) > bound:
        return f"depends on position in a way that no table of frequencies explains (off by {error(best):.0e})"
    return best
