"""codec: one snapshot as a file or object. Every byte that is read was verified; sizes are checked before anything is
allocated.

    0   magic, 8 bytes; version, size of the header, number of chunks, 4 bytes each; size of all chunks, 8 bytes; all
        little-endian
    28  header: identity, key and parent (zeros for none), 32 bytes each; the retention, as JSON with its length before
        it; a byte for the cipher; and the sealed description of the snapshot
        digest of all before it
        the chunks, sealed, one after the other
        digest of each sealed chunk
        digest of the header's digest and of these: the seal of the file

A digest is BLAKE2b of 16 bytes. With a cipher, description and chunks are sealed by AES-256-GCM; the key and the number
of the chunk are authenticated with them. Keys, sizes and retention are not secret. Whether a file is whole is known
without the cipher.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvcellar.files import Files
from kvcellar.images.image import is_row
from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import KEY, Snapshot
from kvcellar.memory.spans import Span
from kvcellar.memory.tiers.tier import Chunk, Take, checked, fresh

MAGIC = b"kvcellar"
VERSION = 3
DIGEST = 16
HEADER_LIMIT = 4 << 20  # bytes
META_LIMIT = HEADER_LIMIT - (1 << 17)  # bytes of a sealed description: 8 for each token, and the texts
TEXT_LIMIT = 1 << 20  # bytes of the description, and of the record: reading JSON takes up to a hundred times as many
CHUNK_LIMIT = 1 << 28
MOST_CHUNKS = 1 << 17
MOST_TOKEN = 1 << 32  # ids of tokenizers are below
_START = struct.Struct("<8sIIIQ")
START = _START.size
_NONE = bytes(KEY)
_MOST = 2**63 - 1  # of a number of a retention: what an index stores


class Damaged(Exception):
    """The file is not what was written."""


class Foreign(Exception):
    """The file is whole, but of another version or sealed with another key."""


class TooLarge(Exception):
    """It is over a limit of its format, which the message has."""


class Replaced(Exception):
    """It is another snapshot of the same tokens than the one that was known: another process has stored it."""


class Plain:
    """No cipher."""

    overhead = 0  # bytes by which sealed content is longer
    mark = b"p"  # one byte before a sealed description: what another kind of cipher has sealed is known

    def seal(self, content: Chunk, place: bytes) -> Chunk:
        return content

    def unseal(self, content: Chunk, place: bytes) -> Chunk:
        return content


class AesGcm:
    """AES-256-GCM by the package `cryptography`, with a random nonce of 12 bytes for each sealed content.

    NIST SP 800-38D allows 2^32 such nonces with one key.
    """

    overhead = 12 + 16
    mark = b"g"

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes. Raises `ImportError` where `cryptography` is not installed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._invalid, self._aes = InvalidTag, AESGCM(secret)

    def seal(self, content: Chunk, place: bytes) -> Chunk:
        nonce = os.urandom(12)
        return nonce + self._aes.encrypt(nonce, content, place)

    def unseal(self, content: Chunk, place: bytes) -> Chunk:
        """Raises `Foreign` if it was sealed with another key, or for another place."""
        try:
            return self._aes.decrypt(content[:12], content[12:], place)
        except (self._invalid, ValueError) as error:
            raise Foreign("it was sealed with another key") from error


Cipher = Plain | AesGcm  # what seals content


def digest(*parts: Chunk) -> bytes:
    found = blake2b(digest_size=DIGEST)
    for part in parts:
        found.update(part)
    return found.digest()


@dataclass(frozen=True, slots=True)
class _Description:
    """The texts of a sealed description; `tokens` are the bytes of the tokens that follow."""

    namespace: str
    start: int
    end: int
    sizes: tuple[int, ...]
    tokens: int


def sealed_meta(snapshot: Snapshot, cipher: Cipher) -> bytes:
    """All of a snapshot but its key and parent. Raises `TooLarge` for what `read_header` would refuse."""
    span = snapshot.span
    described = _Description(snapshot.namespace, span.start, span.end, snapshot.sizes, len(snapshot.tokens))
    words = msgspec.json.encode(described)
    longest, largest = max(len(words), len(snapshot.record)), max(snapshot.sizes, default=0)
    if longest > TEXT_LIMIT or largest > CHUNK_LIMIT or len(snapshot.sizes) > MOST_CHUNKS:
        raise TooLarge(
            f"it has {len(snapshot.sizes)} chunks of up to {largest} bytes, and a text of {longest}; at most"
            f" {MOST_CHUNKS}, {CHUNK_LIMIT} and {TEXT_LIMIT} are stored"
        )
    content = struct.pack("<I", len(words)) + words + snapshot.tokens + snapshot.record
    meta = cipher.mark + bytes(cipher.seal(content, snapshot.key))
    if len(meta) > META_LIMIT:
        raise TooLarge(f"its description has {len(meta)} bytes; at most {META_LIMIT} are stored")
    return meta


def unsealed_meta(key: bytes, parent: bytes | None, content: bytes, cipher: Cipher) -> Snapshot:
    """Raises `Damaged` for content that no snapshot has, `Foreign` for what was sealed with another key."""
    if content[:1] != cipher.mark:
        raise Foreign("it was sealed with another cipher, or with none")
    if len(content) > META_LIMIT:
        raise Damaged(f"its description has {len(content)} bytes")
    content = bytes(cipher.unseal(content[1:], key))
    try:
        (length,) = struct.unpack_from("<I", content)
        if length > TEXT_LIMIT:
            raise ValueError(f"its text has {length} bytes")
        found = msgspec.json.decode(content[4 : 4 + length], type=_Description)
        at = 4 + length
        tokens, record = content[at : at + found.tokens], content[at + found.tokens :]
        span, sizes = Span(found.start, found.end), found.sizes
    except (ValueError, RecursionError, struct.error) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    if (
        len(tokens) != 8 * len(span)
        or not len(span)
        or len(record) > TEXT_LIMIT
        or len(sizes) > MOST_CHUNKS
        or not all(0 < size <= CHUNK_LIMIT for size in sizes)
        or not are_ids(memoryview(tokens).cast("q"))
    ):
        raise Damaged("its header contradicts itself")
    return Snapshot(key, parent, found.namespace, span, tokens, record, sizes)


def are_ids(tokens: Sequence[int]) -> bool:
    """Whether these can be ids of tokens, and of rows of images."""
    return min(tokens) >= 0 and (max(tokens) < MOST_TOKEN or all(one < MOST_TOKEN or is_row(one) for one in tokens))


def file_size(head: bytes, snapshot: Snapshot, cipher: Cipher) -> int:
    """Bytes of the file that begins with `head`."""
    return len(head) + _payload(snapshot, cipher) + DIGEST * (len(snapshot.sizes) + 1)


def _payload(snapshot: Snapshot, cipher: Cipher) -> int:
    return snapshot.size + cipher.overhead * len(snapshot.sizes)


def head_of(identity: bytes, snapshot: Snapshot, retention: Retention, meta: bytes, cipher: Cipher) -> bytes:
    """All that comes before the chunks. `meta` is `sealed_meta` of the snapshot."""
    words = msgspec.json.encode(retention)
    kept = struct.pack("<H", len(words)) + words
    header = b"".join((identity, snapshot.key, snapshot.parent or _NONE, kept, meta))
    start = _START.pack(MAGIC, VERSION, len(header), len(snapshot.sizes), _payload(snapshot, cipher)) + header
    return start + digest(start)


def encoded(head: bytes, snapshot: Snapshot, chunks: Iterable[Chunk], cipher: Cipher) -> Iterator[Chunk]:
    """The file in parts; the last one ends with the seal. Raises `ValueError` for chunks of other sizes than the
    snapshot's."""
    yield head
    digests = [head[-DIGEST:]]
    for number, chunk in enumerate(checked(snapshot, chunks)):
        sealed = cipher.seal(chunk, _place(snapshot.key, number))
        digests.append(digest(sealed))
        yield sealed
    yield b"".join((*digests[1:], digest(*digests)))


def _place(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(8, "little")


def write(files: Files, path: Path, parts: Iterable[Chunk]) -> bytes:
    """Write a new file of `encoded` parts and make its content durable; returns its seal. Raises `OSError`."""
    part: Chunk = b""
    file = files.create(path)
    try:
        for part in parts:
            files.write(file, part)
        files.sync(file)
    finally:
        files.close(file)
    return bytes(part[-DIGEST:])


class Content:
    """Bytes in memory as what a `Reader` reads: all, or the first ones of `size`."""

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self._content, self.size = content, len(content) if size is None else size

    def read(self, n: int, at: int) -> bytes:
        """`n` bytes from `at` on, fewer at the end."""
        return self._content[at : at + n]

    def read_into(self, memory: memoryview, at: int) -> int:
        """As many bytes from `at` on as `memory` has, fewer at the end; returns how many."""
        found = memoryview(self._content)[at : at + len(memory)]
        memory[: len(found)] = found
        return len(found)


class OpenFile(AbstractContextManager["OpenFile"]):
    """A file, with the methods of `Content`, which raise `OSError`. Close it, or use it in `with`."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files, self._file = files, files.open(path)
        try:
            self.size = files.size(self._file)
        except BaseException:
            self.close()
            raise

    def read(self, n: int, at: int) -> bytes:
        return self._files.read(self._file, n, at)

    def read_into(self, memory: memoryview, at: int) -> int:
        return self._files.read_into(self._file, memory, at)

    def close(self) -> None:
        with suppress(OSError):  # Linux closes the file even then, and nothing was written
            self._files.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.close()


Source = Content | OpenFile


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a file without its chunks. `size` is that of the header and its digest, `end` of the file."""

    identity: bytes
    key: bytes
    parent: bytes | None
    retention: Retention
    meta: bytes
    chunks: int
    digest: bytes
    size: int
    end: int

    def snapshot(self, cipher: Cipher) -> Snapshot:
        """Raises `Damaged`, and `Foreign` if it was sealed with another key."""
        found = unsealed_meta(self.key, self.parent, self.meta, cipher)
        whole = self.size + _payload(found, cipher) + DIGEST * (len(found.sizes) + 1)
        if len(found.sizes) != self.chunks or self.end != whole:
            raise Damaged("its header contradicts itself")
        return found


def head_sizes(head: bytes) -> tuple[int, int]:
    """Bytes of all before the chunks, and of all, as a file says that begins with `head`. Raises `Damaged`."""
    if len(head) < START:
        raise Damaged("it was cut off")
    _, _, length, chunks, payload = _START.unpack_from(head)
    size = START + length + DIGEST
    return min(size, START + HEADER_LIMIT + DIGEST), size + payload + DIGEST * (chunks + 1)


def read_header(source: Source) -> Header:
    """The verified header of a file. Raises `OSError`, `Damaged`, and `Foreign` for another version."""
    start = _read(source, START, 0)
    magic, version, length, chunks, _ = _START.unpack(start)
    if magic != MAGIC:
        raise Damaged("it does not begin like a snapshot")
    if version != VERSION:
        raise Foreign(f"it is of version {version}")
    end = head_sizes(start)[1]
    if not 3 * KEY < length <= HEADER_LIMIT or chunks > MOST_CHUNKS or source.size != end:
        raise Damaged(f"it has {source.size} bytes")
    header, own = _read(source, length, START), _read(source, DIGEST, START + length)
    if own != digest(start, header):
        raise Damaged("its header was changed")
    identity, key, parent = (header[at : at + KEY] for at in (0, KEY, 2 * KEY))
    retention, meta = _retention(header[3 * KEY :])
    size = START + length + DIGEST
    return Header(identity, key, None if parent == _NONE else parent, retention, meta, chunks, own, size, end)


def _retention(content: bytes) -> tuple[Retention, bytes]:
    """The retention at the beginning, and what follows it."""
    try:
        (length,) = struct.unpack_from("<H", content)
        kept = msgspec.json.decode(content[2 : 2 + length], type=Retention)
        if kept.expires is not None and not -_MOST <= kept.expires <= _MOST:
            raise ValueError("a number is out of bounds")
        return kept, content[2 + length :]
    except (ValueError, RecursionError, struct.error) as error:
        raise Damaged(f"its retention cannot be read: {error}") from error


def _read(source: Source, n: int, at: int) -> bytes:
    found = source.read(n, at)
    if len(found) != n:
        raise Damaged("it was cut off")
    return found


class Reader:
    """Reads a file whose header and digests are verified."""

    def __init__(self, source: Source) -> None:
        """Raises `OSError`, `Damaged`, and `Foreign` for another version."""
        self._source, self.header = source, read_header(source)
        tail = DIGEST * (self.header.chunks + 1)
        found = _read(source, tail, self.header.end - tail)
        self._digests, self.seal = found[:-DIGEST], found[-DIGEST:]
        if self.seal != digest(self.header.digest, self._digests):
            raise Damaged("its digests were changed")

    def chunks(self, snapshot: Snapshot, cipher: Cipher, take: Take = fresh) -> Iterator[memoryview]:
        """In order, each verified, in memory of `take`; `snapshot` is that of the header. Raises `OSError`, `Damaged`
        and `Foreign`."""
        at = self.header.size
        for number, size in enumerate(snapshot.sizes):
            chunk = take(size)
            sealed = fresh(size + cipher.overhead) if cipher.overhead else chunk
            if self._source.read_into(sealed, at) != len(sealed):
                raise Damaged("it was cut off")
            if digest(sealed) != self._digests[number * DIGEST : (number + 1) * DIGEST]:
                raise Damaged(f"its chunk {number} was changed")
            if sealed is not chunk:
                chunk[:] = cipher.unseal(sealed, _place(snapshot.key, number))
            at += len(sealed)
            yield chunk
