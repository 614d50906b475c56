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

import os
import secrets
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvcellar.files import Files, lock_within
from kvcellar.memory.tiers.codec import (
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
from kvcellar.places import make_private

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


class Archive:
    """Documents in memory: they end with the process. All methods may be called from any thread. They raise
    `OSError`."""

    _cipher: Cipher = Plain()
    _secret = b""

    def __init__(self, cap: int = MEMORY_BYTES, share: float = 1.0) -> None:
        """`share` of the `cap` on bytes: what one owner may have."""
        self._cap, self._share = cap, share
        self._contents, self._lock = dict[str, bytes](), Lock()

    def get(self, owner: str, name: str) -> Document | None:
        """Raises `Damaged` and `Foreign`."""
        file = file_of(owner, name, self._secret)
        with self._opened(file) as source:
            if source is None:
                return None
            found = document_of(source)
        parts = ((found.head, "head"), (found.body, "body"))
        head, body = (bytes(self._cipher.unseal(part, _place(file, what))) for part, what in parts)
        return Document(head, body, found.seal)

    def put(self, owner: str, name: str, head: bytes, body: bytes, *, after: bytes | None = None) -> bytes:
        """Store a document, and return its seal. `after`: the seal of the document that it replaces, empty if there is
        to be none; None: whatever is there. Raises `Full`, `TooLarge` and `Changed`; then nothing has changed."""
        file = file_of(owner, name, self._secret)
        parts = ((head, "head"), (body, "body"))
        head, body = (bytes(self._cipher.seal(part, _place(file, what))) for part, what in parts)
        content = encoded(head, body)
        with self._locked(writes=True):
            with self._opened(file) as found:
                seal = b"" if found is None else found.read(DIGEST, max(0, found.size - DIGEST))
            if after not in (None, seal):
                raise Changed
            self._check_size(file, len(content))
            self._write(file, content)
        return content[-DIGEST:]

    def _check_size(self, file: str, size: int) -> None:
        """Raise `Full` if a new or replaced `file` does not fit beside the others, and beside the one that it replaces,
        which is deleted only afterwards."""
        sizes = self._sizes()
        cap, used = self._most(sum(sizes.values())), sum(sizes.values())
        own = [bytes for name, bytes in sizes.items() if name != file and name.startswith(file.partition("-")[0])]
        if len(own) >= MOST:
            raise Full(f"there are {len(own)} already; at most {MOST} are allowed")
        if sum(own) + size > (limit := int(self._share * cap)):
            raise Full(f"it has {size} bytes beside {sum(own)} of others; {limit} bytes are allowed")
        if used + size > cap:  # how much other owners have is not for this one to know
            raise Full(f"it has {size} bytes, and there is no space left for documents")

    def heads(self, owner: str) -> Iterator[bytes | Exception]:
        """The heads of all documents of an owner in any order, or the error of one that cannot be read."""
        for file in self._sizes():
            if file.startswith(_hex(owner, self._secret)):
                try:
                    with self._opened(file) as found:
                        if found is not None:
                            yield bytes(self._cipher.unseal(head_of(found)[0], _place(file, "head")))
                except (OSError, Damaged, Foreign) as error:
                    yield error

    def delete(self, owner: str, name: str) -> bool:
        """Also where it cannot be read. False if there is none."""
        try:
            with self._locked():
                self._unlink(file_of(owner, name, self._secret))
        except FileNotFoundError:
            return False
        return True

    # -- where they are -----------------------------------------------------------------------------------------

    def _locked(self, *, writes: bool = False) -> AbstractContextManager[object]:
        """One thread of one process at a time. Raises `TimeoutError`."""
        return self._lock

    @contextmanager
    def _opened(self, file: str) -> Generator[Source | None]:
        found = self._contents.get(file)
        yield None if found is None else Content(found)

    def _sizes(self) -> Mapping[str, int]:
        return {file: len(content) for file, content in [*self._contents.items()]}

    def _most(self, used: int) -> int:
        """The most bytes of all documents, which take `used` of them."""
        return self._cap

    def _write(self, file: str, content: bytes) -> None:
        self._contents[file] = content

    def _unlink(self, file: str) -> None:
        """Raises `FileNotFoundError`."""
        if self._contents.pop(file, None) is None:
            raise FileNotFoundError(file)


class DiskArchive(Archive):
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
        super().__init__(cap, share)
        self._directory, self._files = directory, files or Files()
        self._cipher, self._secret = cipher or Plain(), secret

    @contextmanager
    def _locked(self, *, writes: bool = False) -> Generator[None]:
        """With `writes`, the directory is there, without what processes that have ended were writing."""
        if writes:
            make_private(self._directory)
        opened = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_within(WAIT, opened, f"another process has been writing for {WAIT:g} s")
            if writes:
                for name in list(self._files.names(self._directory)):
                    if name.endswith(PART):
                        self._files.unlink(self._directory / name)
            yield
        finally:
            os.close(opened)

    @contextmanager
    def _opened(self, file: str) -> Generator[Source | None]:
        try:
            opened = OpenFile(self._files, self._directory / file)
        except FileNotFoundError:
            yield None
            return
        with opened:
            yield opened

    def _sizes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):
            for name in self._files.names(self._directory):
                if not name.endswith(PART):
                    with suppress(OSError):
                        found[name] = (self._directory / name).lstat().st_size
        return found

    def _most(self, used: int) -> int:
        return min(self._cap, used + int(SHARE_OF_FREE * self._files.free(self._directory)))

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

    def _unlink(self, file: str) -> None:
        self._files.unlink(self._directory / file)
        self._files.sync_directory(self._directory)
