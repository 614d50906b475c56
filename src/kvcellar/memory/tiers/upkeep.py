"""upkeep: what an operator does with a store on disk: list, verify, collect, remove, export and import its entries.

    disk = opened(directory)         # also while servers use it
    entries(disk); verified(disk); collected(disk)
    for part in exported(disk): file.write(part)
    imported(file, tier)             # `tier(identity)` is the one that takes entries of an identity

An archive is a tar file. Its first member, `kvcellar.json`, has the format, the last one, `end`, nothing; the others
are files of entries as they are in the store (see `codec`), named by their keys, each after the one that it continues.
Sizes are checked before anything is read, and content before anything is stored. Without a cipher, the digests only
detect damage: nothing shows that the K/V of an archive were computed from its tokens, so import only what is trusted.
"""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.memory.snapshot import MOST_AHEAD, Snapshot, adapter_of, image_of, looking_ahead, requested
from kvcellar.memory.tiers.codec import (
    MOST_TOKEN,
    START,
    Cipher,
    Content,
    Damaged,
    Foreign,
    Plain,
    Reader,
    Source,
    are_ids,
    head_sizes,
    read_header,
)
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.index import Row, parents_first
from kvcellar.memory.tiers.tier import Tier

FORMAT = 1
MANIFEST, MANIFEST_LIMIT, END = "kvcellar.json", 4096, "end"
PART = 1 << 20  # bytes of an archive that are read at once
MEMBER_LIMIT = 1 << 30  # bytes of an entry
NO_PLACE = "the store had no place for it"
NO_IDENTITY = bytes(32)
UNLIMITED = 1 << 60  # bytes: looking at a store evicts nothing
NAME = 16  # hexadecimal digits of a key or an identity that are shown
ENTRY = re.compile("[0-9a-f]{12,64}")  # the name of an entry in memory has 12


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
    return [Stored(row, disk.described(row)) for row in parents_first(disk.rows())]


def paths(stored: Iterable[Stored]) -> dict[bytes, bytes]:
    """The tokens from the first one to the end of each entry that can be read, by its key."""
    found: dict[bytes, bytes] = {}
    for one in stored:
        if one.snapshot is not None and (one.row.parent is None or one.row.parent in found):
            found[one.row.key] = (found[one.row.parent] if one.row.parent is not None else b"") + one.snapshot.tokens
    return found


def check_named(namespace: str | None, entry: str | None, prefix: str | Sequence[int] | None) -> None:
    """Raises `BadRequest` unless this names what to remove: an empty prefix or a short name would match too much."""
    if namespace is entry is prefix is None:
        raise BadRequest("name what to remove: a namespace, an entry or a prefix", "namespace")
    if entry is not None and ENTRY.fullmatch(entry) is None:
        raise BadRequest("an entry is named by 12 to 64 hexadecimal digits, as `tree` lists them", "entry")
    if prefix is not None and not len(prefix):
        raise BadRequest("the prefix is empty: name its text or tokens, or a namespace", "prefix")
    if prefix is not None and not isinstance(prefix, str) and not are_ids(prefix):
        raise BadRequest(f"token ids are from 0 to {MOST_TOKEN - 1}", "prefix")


def selected(stored: Sequence[Stored], *, namespace: str | None, entry: str | None, prefix: bytes) -> list[bytes]:
    """The keys of those of one namespace, or of all, whose text begins with the tokens of `prefix`. `entry`: the first
    hexadecimal digits of a key; only of that one and all that continue it."""
    if entry is not None:
        first = {one.row.key for one in stored if entry and one.row.key.hex().startswith(entry)}
        stored = [one for one in stored if one.row.key in _continuing(stored, first)]
    texts = paths(stored) if prefix else {}
    prefixes = beginnings_of(prefix)
    return [
        one.row.key
        for one in stored
        if (namespace is None or (one.snapshot is not None and requested(one.snapshot.namespace) == namespace))
        and (not prefix or texts.get(one.row.key, b"").startswith(prefixes))
    ]


def beginnings_of(prefix: bytes) -> tuple[bytes, ...]:
    """How entries begin whose text begins with the tokens of `prefix`: those of the model, and those of heads that look
    ahead, as far as they depend on tokens of the prefix only."""
    tokens = memoryview(prefix).cast("q").tolist()
    return (prefix, *(looking_ahead(tokens, n).tobytes() for n in range(1, min(MOST_AHEAD, len(tokens) - 1) + 1)))


def beginnings(stored: Sequence[Stored], entry: str) -> list[tuple[str, bytes]]:
    """The namespace and the first tokens, up to and including the first one of its own, of each entry of this name."""
    texts = paths(stored)
    return [
        (requested(one.snapshot.namespace), texts[one.row.key][: 8 * (one.snapshot.span.start + 1)])
        for one in stored
        if one.snapshot is not None and one.row.key in texts and one.row.key.hex().startswith(entry)
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
        with disk.verified(row) as file:
            found.read += file is not None
            found.unreadable += file is None
            found.bytes += file.size if file is not None else 0
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
    yield from _member(MANIFEST, Content(json.dumps({"format": FORMAT}).encode()))
    for row in rows:
        with disk.verified(row) as file:
            if file is not None and file.size <= MEMBER_LIMIT:
                yield from _member(row.key.hex(), file)
    yield from _member(END, Content(b""))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, content: Source) -> Iterator[bytes]:
    """Raises `KvcellarError` where it becomes shorter while it is read."""
    head = tarfile.TarInfo(name)
    head.size, head.mode = content.size, 0o600
    yield head.tobuf(tarfile.USTAR_FORMAT)
    for at in range(0, head.size, PART):
        part = content.read(min(PART, head.size - at), at)
        if len(part) < min(PART, head.size - at):
            raise KvcellarError(f"{name} was changed while it was exported")
        yield part
    if padding := -head.size % tarfile.BLOCKSIZE:
        yield bytes(padding)


class Readable(Protocol):
    def read(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class Imported:
    stored: int = 0  # entries
    refused: dict[str, int] = field(default_factory=dict[str, int])  # entries that were not stored, by reason

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def imported(
    source: Readable,
    tier: Callable[[bytes], Tier | None],
    cipher: Cipher | None = None,
    check: Callable[[Snapshot], object] = lambda _: None,
) -> Imported:
    """Store the entries of an archive. `tier` returns the one that takes entries of an identity; None refuses them.
    `check` raises `BadRequest` for a snapshot that cannot be used, which is refused. Raises `KvcellarError` for what is
    no archive, or was cut off; what was stored before stays."""
    found = Imported()
    try:
        name, size = _next(source, MANIFEST_LIMIT)
        manifest = _Member(source, size)
        _check_manifest(name, manifest.read(size))
        manifest.skip()
        while (following := _next(source, MEMBER_LIMIT))[0] != END:
            member = _Member(source, following[1])
            refused = _import(member, tier, cipher or Plain(), check)
            member.skip()
            found.stored += refused is None
            if refused is not None:
                found.refuse(refused)
    except (tarfile.TarError, EOFError) as error:
        raise KvcellarError(f"it is not an archive of `kvcellar cache export`: {error}") from error
    return found


def _check_manifest(name: str, content: bytes) -> None:
    try:
        known = name == MANIFEST and json.loads(content) == {"format": FORMAT}
    except (ValueError, RecursionError):
        known = False
    if not known:
        raise tarfile.ReadError(f"it does not begin with a {MANIFEST} of this format")


def _next(source: Readable, most: int) -> tuple[str, int]:
    """The name and the size of the next member. Extended headers, links and other kinds, which `tarfile` would read
    into memory whatever their size, are refused."""
    head = tarfile.TarInfo.frombuf(b"".join(_exactly(source, tarfile.BLOCKSIZE)), "utf-8", "surrogateescape")
    if head.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not 0 <= head.size <= most:
        raise tarfile.ReadError(f"a member is no plain file of at most {most} bytes")
    return head.name, head.size


class _Member:
    """The content of a member, which is read in order."""

    def __init__(self, source: Readable, size: int) -> None:
        self._source, self.size, self._left = source, size, size

    def read(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end."""
        n = min(n, self._left)
        self._left -= n
        return b"".join(_exactly(self._source, n))

    def skip(self) -> None:
        """All that is left, and what fills the last block."""
        for _ in _exactly(self._source, self._left + -self.size % tarfile.BLOCKSIZE):
            pass
        self._left = 0


def _exactly(source: Readable, n: int) -> Iterator[bytes]:
    """The next `n` bytes, in parts."""
    while n:
        if not (part := source.read(min(n, PART))):
            raise EOFError("it was cut off")
        yield part
        n -= len(part)


def _import(
    member: _Member, tier: Callable[[bytes], Tier | None], cipher: Cipher, check: Callable[[Snapshot], object]
) -> str | None:
    """Store a member; returns why it was refused, a fixed text: an archive must not decide how many reasons there are.
    Chunks are read only of what is described like an entry that the tier can have."""
    try:
        head = member.read(START)
        head += member.read(head_sizes(head)[0] - START)
        header = read_header(Content(head, member.size))
        snapshot, target = header.snapshot(cipher), tier(header.identity)
        if target is None:
            return "it was computed by other weights, settings or versions than this server's"
        if not _usable(snapshot, check):
            return "its record or its tokens are not those of a snapshot"
        if snapshot.parent is not None and not target.contains(snapshot.parent):
            return "it continues an entry that is not there"
        if header.end > target.cap:
            return NO_PLACE
        reader = Reader(Content(head + member.read(member.size)))
        chunks = list(reader.chunks(snapshot, cipher))
    except Damaged:
        return "it is damaged"
    except Foreign:
        return "it is of another version, or sealed with another key"
    return None if target.put(snapshot, chunks, header.retention) else NO_PLACE


def _usable(snapshot: Snapshot, check: Callable[[Snapshot], object]) -> bool:
    try:
        check(snapshot)
    except BadRequest:
        return False
    return True


# -- as JSON ------------------------------------------------------------------------------------------------------

SHOWN = 16  # tokens of an entry


def fields(one: Stored) -> dict[str, object]:
    """An entry as JSON. Of what was sealed with another key, neither namespace, span nor tokens are known."""
    row, snapshot = one.row, one.snapshot
    kept = row.retention
    known: dict[str, object] = {"namespace": None, "start": None, "end": None, "tokens": None}
    known |= {"adapter": None, "image": None}
    if snapshot is not None:
        tokens = list(memoryview(snapshot.tokens[: SHOWN * 8]).cast("q"))
        known = {"namespace": requested(snapshot.namespace), "start": snapshot.span.start, "end": snapshot.span.end}
        known |= {"tokens": tokens, "adapter": adapter_of(snapshot.namespace), "image": image_of(snapshot.namespace)}
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
        namespace = requested(one.snapshot.namespace) if one.snapshot is not None else None
        into = found.setdefault((one.row.identity, namespace), Counter())
        into.update(entries=1, tokens=len(one.snapshot.span) if one.snapshot is not None else 0, bytes=one.row.size)
    ordered = sorted(found.items(), key=lambda item: -item[1]["bytes"])
    return [
        {"identity": identity.hex()[:NAME], "namespace": namespace, **counts}
        for (identity, namespace), counts in ordered
    ]
