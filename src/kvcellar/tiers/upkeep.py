"""upkeep: what an operator does with a store on disk: list, verify, collect, remove, export and import its entries.

    disk = opened(directory)         # also while servers use it
    entries(disk); verified(disk); collected(disk)
    for part in exported(disk): file.write(part)
    imported(file, tier)             # `tier(identity)` is the one that takes entries of an identity

An archive is a tar file. Its first member, `kvcellar.json`, has the format, the last one, `end`, nothing; the others
are files of entries as they are in the store (see `codec`), named by their keys, each after the one that it continues.
Nothing in an archive is trusted: sizes are checked before anything is read, and content before anything is stored.
"""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.codec import CHUNK_LIMIT, Cipher, Content, Damaged, Foreign, Plain, Reader
from kvcellar.tiers.disk import DiskTier
from kvcellar.tiers.rows import Row
from kvcellar.tiers.tier import Tier

FORMAT = 1
MANIFEST, MANIFEST_LIMIT, END = "kvcellar.json", 4096, "end"
NO_IDENTITY = bytes(32)
UNLIMITED = 1 << 60  # bytes: looking at a store evicts nothing
NAME = 16  # hexadecimal digits of a key or an identity that are shown


def opened(
    directory: Path,
    cipher: Cipher | None = None,
    *,
    identity: bytes = NO_IDENTITY,
    max_bytes: int = UNLIMITED,
    share_of_free: float = 1.0,
) -> DiskTier:
    """The store in a directory; what processes that have ended left there is deleted. Unlimited, it keeps all that it
    has. Raises `BadRequest` if there is none."""
    if not (directory / "index.sqlite").is_file():
        raise BadRequest(f"{directory} is no store: it has no index.sqlite", "store")
    return DiskTier(directory, identity=identity, max_bytes=max_bytes, share_of_free=share_of_free, cipher=cipher)


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry. `snapshot` is None if it was sealed with another key."""

    row: Row
    snapshot: Snapshot | None


def entries(disk: DiskTier) -> list[Stored]:
    """Each after the one that it continues, if that is there."""
    rows = {row.key: row for row in disk.rows()}
    after: dict[bytes | None, list[Row]] = {}
    for row in rows.values():
        after.setdefault(row.parent if row.parent in rows else None, []).append(row)
    order = after.pop(None, [])
    for row in order:  # which grows while it is read
        order += after.pop(row.key, [])
    return [Stored(row, disk.described(row)) for row in order]


def paths(stored: Iterable[Stored]) -> dict[bytes, bytes]:
    """The tokens from the first one to the end of each entry that can be read, by its key."""
    found: dict[bytes, bytes] = {}
    for one in stored:
        if one.snapshot is not None and (one.row.parent is None or one.row.parent in found):
            found[one.row.key] = (found[one.row.parent] if one.row.parent is not None else b"") + one.snapshot.tokens
    return found


def selected(stored: Sequence[Stored], *, namespace: str | None, entry: str | None, prefix: bytes) -> list[bytes]:
    """The keys of those of one namespace, or of all, whose text begins with the tokens of `prefix`. `entry`: the first
    hexadecimal digits of a key; only of that one and all that continue it."""
    if entry is not None:
        first = {one.row.key for one in stored if entry and one.row.key.hex().startswith(entry)}
        stored = [one for one in stored if one.row.key in _continuing(stored, first)]
    texts = paths(stored) if prefix else {}
    return [
        one.row.key
        for one in stored
        if (namespace is None or (one.snapshot is not None and one.snapshot.namespace == namespace))
        and (not prefix or texts.get(one.row.key, b"").startswith(prefix))
    ]


def _continuing(stored: Iterable[Stored], keys: Iterable[bytes]) -> set[bytes]:
    """These and all that continue them. `stored`: parents first."""
    found = set(keys)
    for one in stored:
        if one.row.parent in found:
            found.add(one.row.key)
    return found


@dataclass(slots=True)
class Verified:
    read: int = 0  # entries
    bytes: int = 0
    damaged: int = 0
    unreadable: int = 0  # sealed with another key, or gone


def verified(disk: DiskTier) -> Verified:
    """Read every entry; those that are damaged are removed."""
    found, before = Verified(), disk.failures["damaged"]
    for row in disk.rows():
        content = disk.content(row)
        found.read += content is not None
        found.unreadable += content is None
        found.bytes += len(content or b"")
    found.damaged = disk.failures["damaged"] - before
    found.unreadable -= found.damaged
    return found


def collected(disk: DiskTier) -> int:
    """Remove what continues an entry that is not there, and so is of no use; returns how many. Opening the store has
    deleted what processes left unfinished, and listing it what has expired."""
    stored = entries(disk)
    there = {one.row.key for one in stored}
    lost = [one.row.key for one in stored if one.row.parent is not None and one.row.parent not in there]
    gone = _continuing(stored, lost)
    disk.remove(gone)
    return len(gone)


# -- archives -----------------------------------------------------------------------------------------------------


def exported(disk: DiskTier, identity: bytes | None = None) -> Iterator[bytes]:
    """An archive, in parts: of the entries of one identity, or of all."""
    rows = [one.row for one in entries(disk) if identity is None or one.row.identity == identity]
    yield _member(MANIFEST, json.dumps({"format": FORMAT}).encode())
    for row in rows:
        content = disk.content(row)
        if content is not None:
            yield _member(row.key.hex(), content)
    yield _member(END, b"") + bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, content: bytes) -> bytes:
    head = tarfile.TarInfo(name)
    head.size, head.mode = len(content), 0o600
    padding = -len(content) % tarfile.BLOCKSIZE
    return head.tobuf(tarfile.USTAR_FORMAT) + content + bytes(padding)


class Readable(Protocol):
    def read(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class Imported:
    stored: int = 0  # entries
    refused: dict[str, int] = field(default_factory=dict[str, int])  # entries that were not stored, by reason

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def imported(source: Readable, tier: Callable[[bytes], Tier | None], cipher: Cipher | None = None) -> Imported:
    """Store the entries of an archive. `tier` returns the one that takes entries of an identity; None refuses them.
    Raises `KvcellarError` for what is no archive, or was cut off; what was stored before stays."""
    found = Imported()
    try:
        with tarfile.open(fileobj=_Stream(source), mode="r|") as archive:
            _check_manifest(archive)
            while (member := archive.next()) is None or member.name != END:
                if member is None:
                    raise EOFError("it was cut off")
                _import(_content(archive, member, CHUNK_LIMIT), tier, cipher or Plain(), found)
    except (tarfile.TarError, EOFError) as error:
        raise KvcellarError(f"it is not an archive of `kvcellar cache export`: {error}") from error
    return found


def _check_manifest(archive: tarfile.TarFile) -> None:
    first = archive.next()
    try:
        if first is None or first.name != MANIFEST:
            raise ValueError(f"it does not begin with {MANIFEST}")
        manifest: Any = json.loads(_content(archive, first, MANIFEST_LIMIT))
        if manifest != {"format": FORMAT}:
            raise ValueError("it has another format")
    except ValueError as error:
        raise KvcellarError(f"it is not an archive of `kvcellar cache export`: {error}") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes:
    file = archive.extractfile(member) if member.isreg() and member.size <= most else None
    if file is None:
        raise KvcellarError(f"{member.name[:100]!r} in the archive is no file of at most {most} bytes")
    return file.read()


def _import(content: bytes, tier: Callable[[bytes], Tier | None], cipher: Cipher, found: Imported) -> None:
    try:
        reader = Reader(Content(content))
        snapshot = reader.header.snapshot(cipher)
        chunks = list(reader.chunks(snapshot, cipher))
    except (Damaged, Foreign) as error:
        found.refuse(str(error))
        return
    target = tier(reader.header.identity)
    if target is None:
        found.refuse("it was computed by other weights, settings or versions than this server's")
    elif snapshot.parent is not None and not target.contains(snapshot.parent):
        found.refuse("it continues an entry that is not there")
    elif target.put(snapshot, chunks, reader.header.retention):
        found.stored += 1
    else:
        found.refuse("the store had no place for it")


class _Stream(io.RawIOBase):
    """A source as a file for `tarfile`, which only reads on."""

    def __init__(self, source: Readable) -> None:
        super().__init__()
        self._source = source

    def read(self, size: int = -1, /) -> bytes:
        return self._source.read(size)


# -- as JSON ------------------------------------------------------------------------------------------------------

SHOWN = 16  # tokens of an entry


def fields(one: Stored) -> dict[str, object]:
    """An entry as JSON. Of what was sealed with another key, neither namespace, span nor tokens are known."""
    row, snapshot = one.row, one.snapshot
    kept = row.retention
    known: dict[str, object] = {"namespace": None, "start": None, "end": None, "tokens": None}
    if snapshot is not None:
        tokens = list(memoryview(snapshot.tokens[: SHOWN * 8]).cast("q"))
        known = {"namespace": snapshot.namespace, "start": snapshot.span.start, "end": snapshot.span.end}
        known["tokens"] = tokens
    return {
        "tier": "disk",
        "name": row.key.hex()[:NAME],
        "parent": row.parent.hex()[:NAME] if row.parent is not None else "",
        "identity": row.identity.hex()[:NAME],
        "bytes": row.size,
        "uses": row.hits,
        "value": row.value,
        "pinned": kept.pinned,
        "expires": kept.expires,
        **known,
    }


def totals(stored: Iterable[Stored]) -> list[dict[str, object]]:
    """Entries, tokens and bytes of each identity and namespace, the largest first."""
    found: dict[tuple[bytes, str | None], Counter[str]] = {}
    for one in stored:
        namespace = one.snapshot.namespace if one.snapshot is not None else None
        into = found.setdefault((one.row.identity, namespace), Counter())
        into.update(entries=1, tokens=len(one.snapshot.span) if one.snapshot is not None else 0, bytes=one.row.size)
    ordered = sorted(found.items(), key=lambda item: -item[1]["bytes"])
    return [
        {"identity": identity.hex()[:NAME], "namespace": namespace, **counts}
        for (identity, namespace), counts in ordered
    ]
