"""codec: one snapshot as a file. Every byte that is read was verified; sizes are checked before anything is allocated.

    0   magic, 8 bytes; version, size of the header, number of chunks, 4 bytes each; size of all chunks, 8 bytes; all
        little-endian
    28  header: identity, key and parent (zeros for none), 32 bytes each, and the sealed description of the snapshot
        digest of all before it
        the chunks, sealed, one after the other
        digest of each sealed chunk
        digest of the header's digest and of these: the seal of the file

A digest is BLAKE2b of 16 bytes. With a cipher, description and chunks are sealed by AES-256-GCM; the key and the number
of the chunk are authenticated with them. Keys and sizes are not secret. Whether a file is whole is known without the
cipher.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from kvcellar.snapshot import KEY, Snapshot
from kvcellar.spans import Span
from kvcellar.tiers.files import Files

MAGIC = b"kvcellar"
VERSION = 1
DIGEST = 16
HEADER_LIMIT = 64 << 20  # bytes: 8 for each token, and what the record says of them
CHUNK_LIMIT = 1 << 30
FILE_LIMIT = 1 << 40
_START = struct.Struct("<8sIIIQ")
_NONE = bytes(KEY)


class Damaged(Exception):
    """The file is not what was written."""


class Foreign(Exception):
    """The file is whole, but of another version or sealed with another key."""


class Cipher(Protocol):
    """What seals content. `Plain` does not."""

    overhead: int  # bytes by which sealed content is longer

    def seal(self, content: bytes, place: bytes) -> bytes: ...

    def unseal(self, content: bytes, place: bytes) -> bytes:
        """Raises `Foreign` if it was sealed with another key, or for another place."""
        ...


class Plain:
    """No cipher."""

    overhead = 0

    def seal(self, content: bytes, place: bytes) -> bytes:
        return content

    def unseal(self, content: bytes, place: bytes) -> bytes:
        return content


def digest(*parts: bytes) -> bytes:
    found = blake2b(digest_size=DIGEST)
    for part in parts:
        found.update(part)
    return found.digest()


def sealed_meta(snapshot: Snapshot, cipher: Cipher) -> bytes:
    """All of a snapshot but its key and parent."""
    described = {
        "namespace": snapshot.namespace,
        "start": snapshot.span.start,
        "end": snapshot.span.end,
        "sizes": snapshot.sizes,
        "tokens": len(snapshot.tokens),
    }
    words = json.dumps(described, separators=(",", ":")).encode()
    content = struct.pack("<I", len(words)) + words + snapshot.tokens + snapshot.record
    return cipher.seal(content, snapshot.key)


def unsealed_meta(key: bytes, parent: bytes | None, content: bytes, cipher: Cipher) -> Snapshot:
    """Raises `Damaged` for content that no snapshot has, `Foreign` for what was sealed with another key."""
    content = cipher.unseal(content, key)
    try:
        (length,) = struct.unpack_from("<I", content)
        found = json.loads(content[4 : 4 + length])
        tokens = content[4 + length : 4 + length + found["tokens"]]
        record = content[4 + length + found["tokens"] :]
        span = Span(found["start"], found["end"])
        sizes = tuple(found["sizes"])
        namespace = found["namespace"]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    if (
        len(tokens) != 8 * len(span)
        or not len(span)
        or not isinstance(namespace, str)
        or not all(type(size) is int and 0 < size <= CHUNK_LIMIT for size in sizes)
    ):
        raise Damaged("its header contradicts itself")
    return Snapshot(key, parent, namespace, span, tokens, record, sizes)


def file_size(meta: bytes, sizes: Sequence[int], cipher: Cipher) -> int:
    """Bytes of the file."""
    return _size(len(meta), len(sizes), sum(sizes) + cipher.overhead * len(sizes))


def _size(meta: int, chunks: int, payload: int) -> int:
    return _START.size + 3 * KEY + meta + DIGEST + payload + DIGEST * (chunks + 1)


def write(
    files: Files, path: Path, identity: bytes, snapshot: Snapshot, meta: bytes, chunks: Iterable[bytes], cipher: Cipher
) -> bytes:
    """Write a new file and make its content durable; returns its seal. `meta` is `sealed_meta` of the snapshot.

    Raises `OSError`, and `ValueError` for chunks of other sizes than the snapshot says.
    """
    header = identity + snapshot.key + (snapshot.parent or _NONE) + meta
    payload = snapshot.size + cipher.overhead * len(snapshot.sizes)
    start = _START.pack(MAGIC, VERSION, len(header), len(snapshot.sizes), payload) + header
    file = files.create(path)
    try:
        digests = [digest(start)]
        files.write(file, start + digests[0])
        sizes = iter(snapshot.sizes)
        for number, chunk in enumerate(chunks):
            if len(chunk) != next(sizes, None):
                raise ValueError(f"chunk {number} of a snapshot has {len(chunk)} bytes, not what its record says")
            sealed = cipher.seal(chunk, _place(snapshot.key, number))
            digests.append(digest(sealed))
            files.write(file, sealed)
        if next(sizes, None) is not None:
            raise ValueError("a snapshot has fewer chunks than its record says")
        seal = digest(*digests)
        files.write(file, b"".join((*digests[1:], seal)))
        files.sync(file)
    finally:
        files.close(file)
    return seal


def _place(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(8, "little")


class Reader:
    """An open file, whose header and digests are verified. Close it, or use it in `with`."""

    def __init__(self, files: Files, path: Path) -> None:
        """Raises `OSError`, `Damaged`, and `Foreign` for another version."""
        self._files = files
        self._file = files.open(path)
        try:
            self._verify()
        except BaseException:
            self.close()
            raise

    def _verify(self) -> None:
        self.size = self._files.size(self._file)
        start = self._read(_START.size, 0)
        magic, version, length, chunks, payload = _START.unpack(start)
        if magic != MAGIC:
            raise Damaged("it does not begin like a snapshot")
        if version != VERSION:
            raise Foreign(f"it is of version {version}")
        if not 3 * KEY < length <= HEADER_LIMIT or self.size != _size(length - 3 * KEY, chunks, payload):
            raise Damaged(f"it has {self.size} bytes")
        header = self._read(length, _START.size)
        own = self._read(DIGEST, _START.size + length)
        if own != digest(start, header):
            raise Damaged("its header was changed")
        tail = self._read(DIGEST * (chunks + 1), self.size - DIGEST * (chunks + 1))
        self._digests = [tail[at : at + DIGEST] for at in range(0, len(tail), DIGEST)]
        self.seal = self._digests.pop()
        if self.seal != digest(own, *self._digests):
            raise Damaged("its digests were changed")
        self.identity, self.key, parent = (header[at : at + KEY] for at in (0, KEY, 2 * KEY))
        self.parent = None if parent == _NONE else parent
        self.meta = header[3 * KEY :]
        self._at = _START.size + length + DIGEST

    def _read(self, n: int, at: int) -> bytes:
        found = self._files.read(self._file, n, at)
        if len(found) != n:
            raise Damaged("it was cut off")
        return found

    def snapshot(self, cipher: Cipher) -> Snapshot:
        """Raises `Damaged`, and `Foreign` if it was sealed with another key."""
        found = unsealed_meta(self.key, self.parent, self.meta, cipher)
        if len(found.sizes) != len(self._digests) or self.size != file_size(self.meta, found.sizes, cipher):
            raise Damaged("its header contradicts itself")
        return found

    def chunks(self, snapshot: Snapshot, cipher: Cipher) -> Iterator[bytes]:
        """In order, each verified. Raises `OSError`, `Damaged` and `Foreign`."""
        at = self._at
        for number, (size, expected) in enumerate(zip(snapshot.sizes, self._digests, strict=True)):
            sealed = self._read(size + cipher.overhead, at)
            if digest(sealed) != expected:
                raise Damaged(f"its chunk {number} was changed")
            at += len(sealed)
            yield cipher.unseal(sealed, _place(self.key, number))

    def close(self) -> None:
        with suppress(OSError):  # Linux closes the file even then, and nothing was written
            self._files.close(self._file)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AesGcm:
    """AES-256-GCM by the package `cryptography`, with a random nonce of 12 bytes for each sealed content.

    NIST SP 800-38D allows 2^32 such nonces with one key.
    """

    overhead = 12 + 16

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes. Raises `ImportError` where `cryptography` is not installed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._invalid, self._aes = InvalidTag, AESGCM(secret)

    def seal(self, content: bytes, place: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._aes.encrypt(nonce, content, place)

    def unseal(self, content: bytes, place: bytes) -> bytes:
        try:
            return self._aes.decrypt(content[:12], content[12:], place)
        except (self._invalid, ValueError) as error:
            raise Foreign("it was sealed with another key") from error
