"""open_store: opens the store on disk of an engine. Its identity is everything that decides the bytes of stored memory.

A model that was given as an object has no files to be identified by, so it has no store.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from kvcellar.engine.manager import SequenceManager
from kvcellar.engine.settings import Settings
from kvcellar.engine.store import Store
from kvcellar.errors import BadRequest
from kvcellar.models.guest import Guest
from kvcellar.models.load import Loaded
from kvcellar.places import NoPlace, cache
from kvcellar.progress import report
from kvcellar.tiers.disk import DiskTier, StoreUnusable
from kvcellar.tiers.identity import FileDigests, identity
from kvcellar.tiers.tier import Why

log = logging.getLogger("kvcellar.engine")

FORMAT = "1"  # raised when the meaning of what is stored changes
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json")


def open_store(
    loaded: Loaded,
    guest: Guest,
    manager: SequenceManager,
    settings: Settings,
    post: Callable[[Callable[[], None]], None],
) -> Store | None:
    """The store, with what is in it; None without one. A directory that cannot be a store is reported, and the engine
    runs without: it can be lost at any later time, too. Raises `BadRequest` for a model without files."""
    if settings.store is None:
        return None
    if loaded.path is None:
        raise BadRequest("a model that was given as an object has no files, by which a store would know it", "store")
    report("opening the store")
    try:
        name = _identity(loaded.path, guest, manager.memory.claims.shape)
        gone = deque[tuple[bytes, Why]]()
        tier = DiskTier(
            Path(settings.store),
            identity=name,
            max_bytes=settings.store_bytes,
            removed=lambda key, why: gone.append((key, why)),
        )
    except (OSError, StoreUnusable) as error:
        log.warning("running without a store: %s", error)
        return None
    store = Store(tier, manager.memory, manager.prefixes, identity=name, post=post, evict=manager.evict, gone=gone)
    store.load()
    return store


def _identity(path: Path, guest: Guest, shape: str) -> bytes:
    directory = None
    with suppress(NoPlace):
        directory = cache(os.environ)
    digests = FileDigests(directory)
    texts = [path / name for name in TEXT_FILES if (path / name).is_file()]
    return identity(
        {
            "format": FORMAT,
            "weights": digests.of(sorted(path.glob("*.safetensors"))),
            "config": digests.of([path / "config.json"]),
            "tokenizer": digests.of(texts),
            "dtype": str(guest.dtype),
            "shape": shape,
            "device": guest.device.type,
            "kvcellar": version("kvcellar"),
            "torch": version("torch"),
            "transformers": version("transformers"),
        }
    )
