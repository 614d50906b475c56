"""kept: files in the user's cache directory that spare the next start work: programs, what loads have found, and what
steps take.

A file is a line with its format, a SHA-256, and MessagePack compressed by zlib: a few kilobytes.

Always true:
  * a file is named by the digest of everything that its content depends on (`facts`), which the SHA-256 covers: one
    that was damaged or renamed is not used, nor what is no regular file of its own, such as a link or a pipe;
  * a file has its name only when all of its bytes are there; of processes that write the same file, the last one wins;
  * a directory has at most `MOST_FILES` files: those written last, and for an hour what killed writers have left;
  * no failure to read or write a file is an error: it only costs the work.
"""

import hashlib
import logging
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kvcellar.errors import KvcellarError
from kvcellar.places import NoPlace, cache, make_private

log = logging.getLogger("kvcellar.engine.models")

MOST_STORED, MOST_BYTES = 4 * 2**20, 64 * 2**20  # of a file, and of what is in it
SUFFIX = ".kept"
MOST_FILES = 128
UNFINISHED, ABANDONED = ".new", 3600.0  # files that are being written; seconds after which their writer was killed

Content = TypeVar("Content")


class Damaged(KvcellarError):
    """A file that is not what was written. The message names what is wrong."""


class Kept(Generic[Content]):
    """Files of one kind in one directory."""

    def __init__(
        self, directory: Path, kind: bytes, encode: Callable[[Content], bytes], decode: Callable[[bytes], Content]
    ) -> None:
        """`kind` is the first line of each file, `decode` raises `Damaged`."""
        self._directory, self._kind, self._encode, self._decode = directory, kind, encode, decode

    def read(self, digest: str) -> Content | None:
        """What was kept under that digest; None if there is nothing that is intact."""
        path = self._path(digest)
        try:
            return self._decode(self._opened(_bytes(path), digest))
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            log.warning("%s is not used: %s; it is made again", path, error)
            return None

    def write(self, digest: str, content: Content) -> None:
        """Keep it, unless it is too large to be read. What fails is logged: it is made again then."""
        if len(written := self._sealed(self._encode(content), digest)) > MOST_STORED:
            log.info("%s is not kept: it takes %s bytes", self._path(digest), len(written))
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, suffix=UNFINISHED, delete=False) as file:
                try:
                    file.write(written)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self._path(digest))
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._trim()
        except OSError as error:
            log.warning("nothing can be kept in %s: %s", self._directory, error.strerror)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}{SUFFIX}"

    def _trim(self) -> None:
        files = sorted(self._directory.glob(f"*{SUFFIX}"), key=_age)
        since = (time.time() - ABANDONED) * 1e9
        abandoned = [one for one in self._directory.glob(f"*{UNFINISHED}") if -_age(one) < since]
        for path in (*files[MOST_FILES:], *abandoned):
            with suppress(OSError):  # what is no file of ours
                path.unlink()

    def _sealed(self, content: bytes, digest: str) -> bytes:
        packed = zlib.compress(content, 9)
        return self._kind + _seal(digest, packed) + packed

    def _opened(self, content: bytes, digest: str) -> bytes:
        """Raises `Damaged`."""
        start = len(self._kind) + hashlib.sha256().digest_size
        packed = content[start:]
        if len(content) > MOST_STORED or content[: len(self._kind)] != self._kind:
            raise Damaged("it is no file of this format")
        if _seal(digest, packed) != content[len(self._kind) : start]:
            raise Damaged("its content or its name was changed")
        unpacker = zlib.decompressobj()
        try:
            stored = unpacker.decompress(packed, MOST_BYTES)
        except zlib.error as error:
            raise Damaged(f"it cannot be read: {error}") from error
        if not unpacker.eof:
            raise Damaged("it is too large")
        return stored


def place_of(name: str, environment: Mapping[str, str]) -> Path | None:
    """The directory of that name in the user's cache; None, with a log record, if there is no place for it that only
    the user can write to."""
    try:
        directory = cache(environment) / name
        make_private(directory)
    except (NoPlace, OSError) as error:
        log.info("%s are not kept: %s", name, error)
        return None
    return directory


def _seal(digest: str, packed: bytes) -> bytes:
    return hashlib.sha256(digest.encode() + packed).digest()


def _bytes(path: Path) -> bytes:
    """Content of a regular file, of one that is too large its first bytes. Raises `OSError`."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is not a regular file")
        with os.fdopen(opened, "rb", closefd=False) as file:
            return file.read(MOST_STORED + 1)
    finally:
        os.close(opened)


def _age(path: Path) -> int:
    """Less for files that were written later."""
    try:
        return -path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has deleted it meanwhile
        return 0
