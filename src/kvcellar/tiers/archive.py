"""archive: documents by owner and name, such as named conversations, in a directory or in memory.

    conversations/<digest of owner>-<digest of name>    a file for each document
    conversations/*.part                                files that are being written

A file is a start (magic, version, and the sizes of both parts), the head, a digest of these, the body, and a digest of
the first digest and the body: the seal. Heads are small, so that documents can be listed without reading bodies. With a
cipher, head and body are sealed, and names depend on a secret.

Always true:
  * a document is replaced as a whole, or not at all; a file is durable before it has its name;
  * what is returned was verified, and its size was checked before it was read;
  * all files together have at most `cap` bytes; one owner has at most a share of them, and at most `MOST` files.
"""

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from kvcellar.places import make_private
from kvcellar.tiers.codec import (
    DIGEST,
    Cipher,
    Content,
    Damaged,
    Foreign,
    OpenFile,
    Plain,
    Source,
    TooLarge,
    digest,
    write,
)
from kvcellar.tiers.files import Files

MOST = 1024  # documents of one owner
HEAD_LIMIT = 64 << 10
BODY_LIMIT = 8 << 20  # bytes of one document
MEMORY_BYTES = 64 << 20
SHARE_OF_FREE = 0.1
WAIT = 10.0  # seconds that a process waits for another one that writes
PART = ".part"
_MAGIC, _VERSION = b"kvc-docs", 1
_START = struct.Struct("<8sIIQ")


class Full(Exception):
    """The document does not fit. The message has the limit that it exceeds."""


class Changed(Exception):
    """There is another document under that name, or none any more."""


@dataclass(frozen=True, slots=True)
class Document:
    """`seal` identifies the content."""

    head: bytes
    body: bytes
    seal: bytes


class Archive(Protocol):
    """All methods may be called from any thread. They raise `OSError`."""

    def get(self, owner: str, name: str) -> Document | None:
        """Raises `Damaged` and `Foreign`."""
        ...

    def put(self, owner: str, name: str, head: bytes, body: bytes, *, after: bytes | None = None) -> bytes:
        """Store a document, and return its seal. `after`: the seal of the document that it replaces, empty if there is
        to be none; None: whatever is there. Raises `Full`, `TooLarge` and `Changed`; then nothing has changed."""
        ...

    def heads(self, owner: str) -> Iterator[bytes | Exception]:
        """The heads of all documents of an owner in any order, or the error of one that cannot be read."""
        ...

    def delete(self, owner: str, name: str) -> bool:
        """Also where it cannot be read. False if there is none."""
        ...


def file_of(owner: str, name: str, secret: bytes = b"") -> str:
    """The name of the file of a document, that of its owner first."""
    return f"{_hex(owner, secret)}-{_hex(name, secret)}"


def _hex(text: str, secret: bytes = b"") -> str:
    return digest(secret, text.encode()).hex()


def _place(file: str, part: str) -> bytes:
    """What a sealed part is authenticated for."""
    return f"{file}.{part}".encode()


def encoded(head: bytes, body: bytes) -> bytes:
    """Raises `TooLarge` for parts that are over their limits."""
    if len(head) > HEAD_LIMIT or len(body) > BODY_LIMIT:
        raise TooLarge(f"it has {len(head) + len(body)} bytes; at most {BODY_LIMIT} are allowed")
    start = _START.pack(_MAGIC, _VERSION, len(head), len(body)) + head
    first = digest(start)
    return b"".join((start, first, body, digest(first, body)))


def head_of(source: Source) -> tuple[bytes, bytes, int]:
    """The verified head, its digest, and the size of the body. Raises `OSError`, `Damaged` and `Foreign`."""
    start = source.read(_START.size, 0)
    if len(start) != _START.size or not start.startswith(_MAGIC):
        raise Damaged("it does not begin like a document")
    _, version, head, body = _START.unpack(start)
    if version != _VERSION:
        raise Foreign(f"it is of version {version}")
    if head > HEAD_LIMIT or body > BODY_LIMIT or source.size != _START.size + head + body + 2 * DIGEST:
        raise Damaged(f"it has {source.size} bytes")
    found = source.read(head + DIGEST, _START.size)
    if found[head:] != digest(start, found[:head]):
        raise Damaged("its head was changed")
    return found[:head], found[head:], body


def document_of(source: Source) -> Document:
    """All of it, verified. Raises `OSError`, `Damaged` and `Foreign`."""
    head, first, size = head_of(source)
    found = source.read(size + DIGEST, _START.size + len(head) + DIGEST)
    if found[size:] != digest(first, found[:size]):
        raise Damaged("its body was changed")
    return Document(head, found[:size], found[size:])


def check_size(sizes: Mapping[str, int], file: str, size: int, cap: int, share: float, *, replaced: int = 0) -> None:
    """Raise `Full` if a new or replaced `file` does not fit beside the others, and beside the bytes of the one that it
    replaces where these are freed only afterwards."""
    others = {name: bytes for name, bytes in sizes.items() if name != file}
    own = [bytes for name, bytes in others.items() if name.startswith(file.partition("-")[0])]
    if len(own) >= MOST:
        raise Full(f"there are {len(own)} already; at most {MOST} are allowed")
    if sum(own) + size > (limit := int(share * cap)):
        raise Full(f"it has {size} bytes beside {sum(own)} of others; {limit} bytes are allowed")
    if sum(others.values()) + replaced + size > cap:  # how much other owners have is not for this one to know
        raise Full(f"it has {size} bytes, and there is no space left for documents")


def check_seal(found: Source | None, after: bytes | None) -> None:
    """Raise `Changed` unless the document that is there has the seal `after`; see `Archive.put`."""
    if after is None:
        return
    seal = b"" if found is None else found.read(DIGEST, max(0, found.size - DIGEST))
    if seal != after:
        raise Changed


class MemoryArchive:
    """Documents that end with the process."""

    def __init__(self, cap: int = MEMORY_BYTES, share: float = 1.0) -> None:
        """`share` of `cap`: what one owner may have."""
        self._cap, self._share = cap, share
        self._files, self._lock = dict[str, bytes](), Lock()

    def get(self, owner: str, name: str) -> Document | None:
        found = self._files.get(file_of(owner, name))
        return None if found is None else document_of(Content(found))

    def put(self, owner: str, name: str, head: bytes, body: bytes, *, after: bytes | None = None) -> bytes:
        file, content = file_of(owner, name), encoded(head, body)
        with self._lock:
            found = self._files.get(file)
            check_seal(None if found is None else Content(found), after)
            check_size(
                {name: len(one) for name, one in self._files.items()}, file, len(content), self._cap, self._share
            )
            self._files[file] = content
        return content[-DIGEST:]

    def heads(self, owner: str) -> Iterator[bytes | Exception]:
        with self._lock:
            found = [one for file, one in self._files.items() if file.startswith(_hex(owner))]
        yield from (head_of(Content(one))[0] for one in found)

    def delete(self, owner: str, name: str) -> bool:
        with self._lock:
            return self._files.pop(file_of(owner, name), None) is not None


class DiskArchive:
    """Documents in a directory that several processes may use. The directory is made when something is stored."""

    def __init__(
        self,
        directory: Path,
        cap: int,
        *,
        share: float = 1.0,
        cipher: Cipher | None = None,
        secret: bytes = b"",
        files: Files | None = None,
    ) -> None:
        """`cap`: most bytes, and no more than a tenth of what is free on the disk and of the files themselves, of which
        one owner may have a `share`."""
        self._directory, self._cap, self._share = directory, cap, share
        self._cipher, self._secret, self._files = cipher or Plain(), secret, files or Files()

    def get(self, owner: str, name: str) -> Document | None:
        file = file_of(owner, name, self._secret)
        with self._opened(file) as source:
            if source is None:
                return None
            found = document_of(source)
        parts = ((found.head, "head"), (found.body, "body"))
        head, body = (bytes(self._cipher.unseal(part, _place(file, what))) for part, what in parts)
        return Document(head, body, found.seal)

    @contextmanager
    def _opened(self, file: str) -> Generator[OpenFile | None]:
        try:
            opened = OpenFile(self._files, self._directory / file)
        except FileNotFoundError:
            yield None
            return
        with opened:
            yield opened

    def put(self, owner: str, name: str, head: bytes, body: bytes, *, after: bytes | None = None) -> bytes:
        file = file_of(owner, name, self._secret)
        parts = ((head, "head"), (body, "body"))
        head, body = (bytes(self._cipher.seal(part, _place(file, what))) for part, what in parts)
        content = encoded(head, body)
        make_private(self._directory)
        with self._locked():
            with self._opened(file) as found:
                check_seal(found, after)
            self._clean()
            sizes = self._sizes()
            used = sum(sizes.values())
            cap = min(self._cap, used + int(SHARE_OF_FREE * self._files.free(self._directory)))
            check_size(sizes, file, len(content), cap, self._share, replaced=sizes.get(file, 0))
            self._write(file, content)
        return content[-DIGEST:]

    def _write(self, file: str, content: bytes) -> None:
        part = self._directory / f"{file}-{secrets.token_hex(4)}{PART}"
        try:
            write(self._files, part, (content,))
            self._files.rename(part, self._directory / file)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(part)
            raise
        self._files.sync_directory(self._directory)

    def heads(self, owner: str) -> Iterator[bytes | Exception]:
        for file in self._names():
            if file.startswith(_hex(owner, self._secret)):
                try:
                    with self._opened(file) as found:
                        if found is not None:
                            yield bytes(self._cipher.unseal(head_of(found)[0], _place(file, "head")))
                except (OSError, Damaged, Foreign) as error:
                    yield error

    def delete(self, owner: str, name: str) -> bool:
        if not self._directory.is_dir():
            return False
        with self._locked():
            try:
                self._files.unlink(self._directory / file_of(owner, name, self._secret))
            except FileNotFoundError:
                return False
            self._files.sync_directory(self._directory)
            return True

    # -- inside -------------------------------------------------------------------------------------------------

    def _names(self) -> Iterable[str]:
        """Of the documents."""
        try:
            return [name for name in self._files.names(self._directory) if not name.endswith(PART)]
        except FileNotFoundError:
            return ()

    def _sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self._names():
            with suppress(OSError):
                found[name] = (self._directory / name).lstat().st_size
        return found

    def _clean(self) -> None:
        """Delete what a process that has ended was writing. Only under the lock."""
        for name in list(self._files.names(self._directory)):
            if name.endswith(PART):
                self._files.unlink(self._directory / name)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """One thread of one process at a time. Raises `TimeoutError`."""
        opened, until = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + WAIT
        try:
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"another process has been writing for {WAIT:g} s") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(opened)
