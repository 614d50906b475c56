"""open_store: opens the tiers of an engine. Their identity is everything that decides the bytes of stored memory.

A model that was given as an object has no files to be identified by: what it computes is kept in host memory at most.
"""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

from kvcellar.engine.machine import free_cpu_bytes
from kvcellar.engine.manager import SequenceManager
from kvcellar.engine.settings import Settings, conversation_bytes, host_bytes_of
from kvcellar.engine.store import Store
from kvcellar.engine.store_key import cipher_of, secret_of
from kvcellar.errors import BadRequest
from kvcellar.models.guest import Guest
from kvcellar.models.load import Loaded
from kvcellar.places import NoPlace, cache
from kvcellar.progress import report
from kvcellar.snapshot import KEY
from kvcellar.tiers.codec import Cipher
from kvcellar.tiers.disk import DiskTier, StoreUnusable
from kvcellar.tiers.host import HostTier
from kvcellar.tiers.identity import FileDigests, identity
from kvcellar.tiers.locations import Locations
from kvcellar.tiers.objects import RemoteFailed, open_objects
from kvcellar.tiers.remote import RemoteTier, prefix_of
from kvcellar.tiers.tier import Tier

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
    """The tiers, with what is in them; None without any. A directory or server that cannot be used is reported, and the
    engine runs without: it can be lost at any later time, too. Raises `BadRequest` for settings that cannot be met."""
    cipher = cipher_of(settings)
    host = host_bytes_of(settings, guest.device.type, free_cpu_bytes())
    outside = settings.store is not None or settings.store_remote is not None
    if not (host or outside):
        return None
    if outside and loaded.path is None:
        raise BadRequest("a model that was given as an object has no files, by which a store would know it", "store")
    report("opening the store")
    name, locations = secrets.token_bytes(KEY), Locations(manager.events)
    tiers: list[Tier] = []
    if host:
        quota = int(settings.tenant_share * host)
        tiers.append(HostTier(host, quota=quota, removed=partial(locations.removed, HostTier.name)))
    if outside and loaded.path is not None:
        try:
            name = _identity(loaded.path, guest, manager.memory.claims.shape)
            tiers += _outside(settings, name, cipher, locations)
        except OSError as error:
            log.warning("running without a store: %s", error)
    if not tiers:
        return None
    store = Store(
        tiers,
        manager.memory,
        manager.prefixes,
        identity=name,
        secret=secret_of(settings),
        staging=settings.staging_bytes,
        locations=locations,
        post=post,
        evict=partial(manager.evict, restores=False),
    )
    store.load()
    return store


def _outside(settings: Settings, name: bytes, cipher: Cipher, locations: Locations) -> list[Tier]:
    """The tiers that outlive the engine, as far as they can be opened."""
    found: list[Tier] = []
    share = settings.tenant_share
    if settings.store is not None:
        try:
            disk = DiskTier(
                Path(settings.store),
                identity=name,
                max_bytes=settings.store_bytes - conversation_bytes(settings),
                quota=int(share * settings.store_bytes),
                cipher=cipher,
                removed=partial(locations.removed, DiskTier.name),
            )
            found.append(disk)
        except (OSError, StoreUnusable) as error:
            log.warning("running without a store: %s", error)
    if settings.store_remote is not None:
        cap = settings.store_remote_bytes
        try:
            objects = open_objects(settings.store_remote, prefix_of(name))
        except RemoteFailed as error:
            log.warning("running without the remote store: %s", error)
        except ImportError as error:
            needs = f"store_remote needs a package that is not installed: {error}. Install kvcellar[remote]"
            raise BadRequest(needs, "store_remote") from error
        except ValueError as error:
            raise BadRequest(f"store_remote cannot be opened: {error}", "store_remote") from error
        else:
            removed = partial(locations.removed, RemoteTier.name)
            found.append(
                RemoteTier(objects, identity=name, cap=cap, quota=int(share * cap), cipher=cipher, removed=removed)
            )
    return found


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
