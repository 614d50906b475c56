"""Snapshots with random content, and the directory of a store that is as small as tests need it."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.snapshot import Snapshot, key_after
from kvcellar.memory.spans import Span
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.objects import Objects
from kvcellar.memory.tiers.remote import MOST_LISTED
from kvcellar.memory.tiers.tier import Entry, Tier

IDENTITY = bytes(range(32))


def sizes_of(objects: Objects) -> dict[str, int]:
    """The bytes of all objects that are not empty."""
    names = objects.names(MOST_LISTED)
    return {name: found[1] for name, found in zip(names, objects.read(names, 1), strict=True) if found is not None}


def whole(objects: Objects, name: str) -> bytes | None:
    (found,) = objects.read([name], 1 << 30)
    return None if found is None else found[0]


def store(directory: Path, **options: Any) -> DiskTier:
    given = {"identity": IDENTITY, "max_bytes": 1 << 20, "share_of_free": 1.0}
    return DiskTier(directory, **(given | options))


def made(seed: int, parent: Snapshot | None = None, *, tokens: int = 3, size: int = 40) -> tuple[Snapshot, list[bytes]]:
    """A snapshot, and its two chunks. The same seed after the same parent gives the same one."""
    rng = random.Random(f"{seed} {parent.key.hex() if parent else ''}")
    ids = key_of(rng.randrange(1000) for _ in range(tokens))
    start = parent.span.end if parent else 0
    before = parent.key if parent else None
    key = key_after(before, identity=IDENTITY, namespace="n", tokens=ids)
    chunks = [rng.randbytes(size), rng.randbytes(size // 2)]
    sizes = tuple(map(len, chunks))
    return Snapshot(key, before, "n", Span(start, start + tokens), ids, rng.randbytes(9), sizes), chunks


def content(tier: Tier, key: bytes) -> tuple[Snapshot, list[bytes]] | None:
    found = tier.get(key)
    return None if found is None else (found.snapshot, list(found.chunks))


def chains(entries: Iterable[Entry]) -> list[Entry]:
    """Each key once, parents before the snapshots that continue them; what continues nothing here is left out."""
    catalogue, found = Catalogue(anywhere=True), dict[bytes, Entry]()
    for entry in entries:
        catalogue.stored("disk", *entry)
        found[entry.snapshot.key] = entry
    return [found[snapshot.key] for snapshot in catalogue]
