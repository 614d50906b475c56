"""shares: which part of a memory's cells and rows may be pinned, and which one tenant may have."""

from typing import TYPE_CHECKING, NamedTuple

from kvcellar.prefix.order import UNLIMITED, Part

if TYPE_CHECKING:
    from kvcellar.cache.memory import Memory

_FAR = 1 << 40  # a position behind every window


class Shares(NamedTuple):
    """`pins` of the cache may be pinned; what a tenant has beyond `tenant` of it is evicted first."""

    pins: float = 0.5
    tenant: float = 1.0


USUAL = Shares()


def part(memory: "Memory", share: float) -> Part:
    """A share of a memory as numbers: tokens, whose cells are those of the smallest unbounded group, and checkpoints,
    as many as have windows and rows. Half of the rows are for running sequences. 1: all of it."""
    if share >= 1:
        return UNLIMITED
    capacity, groups = memory.storage.capacity(), memory.storage.groups
    tokens = [capacity[group.name] for group in groups if not (group.bounded or group.of_input)]
    points = [capacity[name] // cells for name, cells in windows(memory).items()]
    if memory.rows.capacity is not None:
        points.append(memory.rows.capacity // 2)
    return Part(int(share * min(tokens)) if tokens else None, int(share * min(points)) if points else None)


def windows(memory: "Memory") -> dict[str, int]:
    """The most cells that a checkpoint holds in each bounded group."""
    return {group.name: group.layout.most_cells(_FAR, 0) for group in memory.storage.groups if group.bounded}
