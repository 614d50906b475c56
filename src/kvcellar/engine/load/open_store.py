"""open_store: opens the tiers of an engine. Their identity is everything that decides the bytes of stored memory.

An engine's model that was given as an object has no files to be identified by: what it computes is kept in host memory
at most. The network of an attached memory is identified by its weights as they are.
"""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from kvcellar.engine.load.machine import free_cpu_bytes
from kvcellar.engine.load.settings import DOCUMENTS, Settings, cipher_of, document_bytes, host_bytes_of, secret_of
from kvcellar.errors import BadRequest
from kvcellar.memory.kv.record import positions
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefix.kv_events import KvEvents
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restores import Evict
from kvcellar.memory.snapshot import KEY
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.codec import Cipher
from kvcellar.memory.tiers.disk import DiskTier, StoreUnusable
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.identity import FileDigests, identity
from kvcellar.memory.tiers.objects import open_objects, opening
from kvcellar.memory.tiers.remote import RemoteTier, prefix_of
from kvcellar.memory.tiers.tier import Tier
from kvcellar.places import NoPlace, cache
from kvcellar.progress import report

log = logging.getLogger("kvcellar.engine")

_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")

PAGED_IN = 256 << 20  # bytes of memory, at most, that are allocated at once for what is going to be restored
FORMAT = "2"  # raised when the meaning of what is stored changes
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json")


Post = Callable[[Callable[[], None]], None]  # lets the engine's thread run a call


class Source(NamedTuple):
    """What decides the bytes of a memory: the directories of all weights that are run to fill it, none if these have no
    files; what it is for, if it is not the target's; how its weights are multiplied, if not as dense ones; what is
    attended to, if not keys and values: latents give later layers other bits than expanding them; and, of a network
    without files, a digest of all that it computes with."""

    paths: tuple[Path, ...]
    role: str = ""
    weights: str = ""
    attends: str = ""
    network: str = ""


def open_store(
    memory: Memory,
    prefixes: Prefixes,
    evict: Evict,
    *,
    source: Source,
    settings: Settings,
    post: Post,
    opened: ExitStack,
    share: float,
    events: KvEvents | None = None,
) -> Store | None:
    """The tiers of a memory, with what is in them; None without any. A directory or server that cannot be used is
    reported, and the engine runs without: it can be lost at any later time, too. `opened` closes them, unless its
    callbacks are dropped. Raises `BadRequest` for settings that cannot be met.

    The memory has this `share` of the bytes that are set for tiers, but for a directory, whose cap holds for all that
    use it."""
    outside = settings.store is not None or settings.store_remote is not None
    if outside and not (source.paths or source.role):
        raise BadRequest("a model that was given as an object has no files, by which a store would know it", "store")
    cipher = cipher_of(settings)
    host = int(share * host_bytes_of(settings, memory.device.type, free_cpu_bytes()))
    name = secrets.token_bytes(KEY)
    tiers: list[Tier] = []
    if host:
        tiers.append(HostTier(host, quota=int(settings.tenant_share * host)))
    if outside and (source.paths or source.network):
        report("opening the store")
        try:
            name = identity_of(memory, source)
        except OSError as error:
            log.warning("running without a store: %s", error)
        else:
            tiers += _outside(settings, share, name, cipher, opened)
    if not tiers:
        return None
    made = partial(
        Store,
        tiers,
        memory,
        prefixes,
        identity=name,
        secret=secret_of(settings),
        staging=int(share * settings.staging_bytes),
        catalogue=Catalogue(anywhere=prefixes.anywhere, positions=positions, watch=events),
        post=post,
        evict=evict,
    )
    store = opened.enter_context(closing(made()))
    store.load()
    memory.storage.page_in(2 * sum(len(snapshot.span) for snapshot in store.of_texts()), int(share * PAGED_IN))
    return store


def _outside(settings: Settings, share: float, name: bytes, cipher: Cipher, opened: ExitStack) -> list[Tier]:
    """The tiers that outlive the engine, as far as they can be opened."""
    found: list[Tier] = []
    quota = settings.tenant_share
    if settings.store is not None:
        try:
            disk = partial(
                DiskTier,
                Path(settings.store),
                identity=name,
                max_bytes=settings.store_bytes - DOCUMENTS * document_bytes(settings.store_bytes),
                quota=int(quota * settings.store_bytes),
                cipher=cipher,
            )
            found.append(opened.enter_context(closing(disk())))
        except (OSError, StoreUnusable) as error:
            log.warning("running without a store: %s", error)
    if settings.store_remote is not None:
        cap = int(share * (settings.store_remote_bytes - DOCUMENTS * document_bytes(settings.store_remote_bytes)))
        try:
            with opening(settings.store_remote):
                objects = open_objects(settings.store_remote, prefix_of(name))
        except OSError as error:
            log.warning("running without the remote store: %s", error)
        else:
            remote = partial(RemoteTier, objects, cap=cap, quota=int(quota * cap), cipher=cipher)
            found.append(opened.enter_context(closing(remote(identity=name, secret=secret_of(settings)))))
    return found


def identity_of(memory: Memory, source: Source) -> bytes:
    directory = None
    with suppress(NoPlace):
        directory = cache(os.environ)
    digests, paths = FileDigests(directory), source.paths
    texts = [path / name for path in paths for name in TEXT_FILES if (path / name).is_file()]
    more = {"role": source.role, "multiplied": source.weights, "attends": source.attends, "network": source.network}
    return identity(
        {
            "format": FORMAT,
            "weights": digests.of(file for path in paths for file in sorted(path.glob("*.safetensors"))),
            "config": digests.of([path / "config.json" for path in paths]),
            "tokenizer": digests.of(texts),
            "dtype": str(memory.dtype),
            "shape": memory.claims.shape,
            "device": memory.device.type,
            "kvcellar": version("kvcellar"),
            "torch": version("torch"),
            "transformers": version("transformers"),
        }
        | {name: value for name, value in more.items() if value}
    )


def open_events(settings: Settings, *, watched: bool) -> KvEvents | None:
    """The publisher that the settings ask for, or that others in this process listen to (`watched`)."""
    if settings.kv_events is None and not watched:
        return None
    for endpoint in (settings.kv_events, settings.kv_events_replay):
        if endpoint is not None and endpoint.startswith("tcp://") and not endpoint.startswith(_LOOPBACK):
            log.warning("KV events at %s have the tokens of prompts, for every machine that can reach it", endpoint)
    return KvEvents(
        settings.kv_events,
        replay=settings.kv_events_replay,
        topic=settings.kv_events_topic,
        size=settings.kv_events_block,
    )
