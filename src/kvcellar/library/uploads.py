"""uploads: files that clients have sent to be parts of models, by digest, until models are created from them.

    uploads/sha256-HEX      whole and read-only; the blob of a model that is created from it is a second link to it

Always true:
  * a file has its name when all of its content is on the disk and has this digest;
  * what is being received is in the directory of a staging: that is removed at the end, or by the next change of the
    library if the process was killed;
  * files that no model has take at most `most_bytes`, those included that this process is receiving;
  * what was neither sent nor used for `KEEP` seconds is removed by the next upload or change of the library.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvcellar.errors import BadRequest, KvcellarError, shown
from kvcellar.library.disk import BLOBS, KEEP, READ_ONLY, UPLOADS, Disk
from kvcellar.library.manifest import DIGEST, blob_name, is_file_name

MOST_FILES = 1024  # of a model
GGUF = ".gguf"


class UploadsFull(KvcellarError):
    """There are no bytes for more."""


class Uploads:
    """Of one library. Thread-safe."""

    def __init__(self, disk: Disk, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.disk, self._most, self._clock = disk, most_bytes, clock
        self._lock = threading.Lock()
        self._stored, self._receiving = 0, 0  # bytes

    def has(self, digest: str) -> bool:
        """Whether a model can be created from the file of this digest. Raises `BadRequest` for what is none."""
        return self._path(checked_digest(digest)) is not None

    def begin(self, digest: str, size: int) -> "Upload":
        """Receive a file; `size`: bytes that are announced, 0 if none are. Close what is returned. Raises `BadRequest`,
        `UploadsFull`, `OSError`."""
        checked_digest(digest)
        with self.disk.locked():
            self.disk.remove_uploads(self._clock() - KEEP)
        with self._lock:
            self._stored = sum(self._unused(name) for name in list(self.disk.files.names(self.disk.root / UPLOADS)))
        self.take(size)
        self.give(size)
        return Upload(self, digest)

    def _unused(self, name: str) -> int:
        """Bytes of a file that no model has."""
        try:
            about = os.lstat(self.disk.root / UPLOADS / name)
        except FileNotFoundError:  # removed since its name was read
            return 0
        return about.st_size if about.st_nlink == 1 else 0

    def take(self, size: int) -> None:
        """Bytes for what is received. Raises `UploadsFull`."""
        with self._lock:
            taken = self._stored + self._receiving
            if taken + size > self._most:
                raise UploadsFull(
                    f"files that were uploaded, and that no model has, may take {self._most} bytes on this server; "
                    f"{taken} are taken, and {size} more are needed. They are removed after {KEEP // 3600} hours"
                )
            self._receiving += size

    def give(self, size: int) -> None:
        """Bytes that are not received any more."""
        with self._lock:
            self._receiving -= size

    def keep(self, part: Path, name: str, size: int) -> None:
        """Rename what was received; its bytes are stored from then on. Needs the lock of the disk."""
        with self._lock:
            replaced = self._unused(name)
            self.disk.files.rename(part, self.disk.root / UPLOADS / name)
            self._receiving -= size
            self._stored += size - replaced

    def _path(self, digest: str) -> Path | None:
        name = blob_name(digest)
        places = (self.disk.root / folder / name for folder in (UPLOADS, BLOBS))
        return next((path for path in places if path.is_file() and not path.is_symlink()), None)

    @contextmanager
    def placed(self, files: Mapping[str, str] | None, adapters: Mapping[str, str] | None) -> Generator[dict[str, Path]]:
        """The files that FROM ("model") and ADAPTER ("adapter") are made of, in directories which are removed at the
        end. Their names and digests are valid. Raises `BadRequest` for what was not uploaded."""
        given = {"files": ("model", files), "adapters": ("adapter", adapters)}
        with self.disk.staging() as staging:
            found: dict[str, Path] = {}
            for param, (command, part) in given.items():
                if part:
                    folder = staging.folder(param)
                    folder.mkdir()
                    for name, digest in part.items():
                        self._place(folder / name, digest, param)
                    gguf = [name for name in files or () if name.lower().endswith(GGUF)]
                    found[command] = folder / gguf[0] if gguf and part is files else folder
            yield found

    def _place(self, link: Path, digest: str, param: str) -> None:
        name, now = blob_name(digest), int(self._clock() * 1e9)
        kept = self.disk.root / UPLOADS / name
        with self.disk.locked():
            with suppress(OSError):  # it is there, or in no model, or the file system has no links
                os.link(self.disk.root / BLOBS / name, kept)
            if (path := self._path(digest)) is None:
                where = f"send it to /api/blobs/{digest} first"
                raise BadRequest(f"the file {link.name} was not uploaded; {where}", param)
            os.utime(path, ns=(now, os.stat(path).st_mtime_ns))
        os.symlink(path.absolute(), link)


class Upload:
    """One file that is being received. Its methods may be called from any thread, one after another."""

    def __init__(self, uploads: Uploads, digest: str) -> None:
        self._uploads, self._files, self._digest = uploads, uploads.disk.files, digest
        self._lock, self._hash = threading.Lock(), hashlib.sha256()
        self._size = 0  # bytes that are counted as being received
        self._stack = ExitStack()
        self._part = self._stack.enter_context(uploads.disk.staging()).directory / "part"
        try:
            self._opened = self._files.create(self._part)
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self._files.close, self._opened)
        self._closed = False

    def write(self, data: bytes) -> None:
        """Raises `UploadsFull` and `OSError`."""
        with self._lock:
            if self._closed:
                return
            self._uploads.take(len(data))
            self._size += len(data)
            self._files.write(self._opened, data)
            self._hash.update(data)

    def finish(self) -> None:
        """Give the file its name. Raises `BadRequest` if it has another digest."""
        with self._lock:
            if (found := f"sha256:{self._hash.hexdigest()}") != self._digest:
                raise BadRequest(f"the content that arrived has the digest {found}; upload the file again", "digest")
            os.fchmod(self._opened, READ_ONLY)
            self._files.sync(self._opened)
            with self._uploads.disk.locked():
                self._uploads.keep(self._part, blob_name(self._digest), self._size)
                self._size = 0
                self._files.sync_directory(self._uploads.disk.root / UPLOADS)

    def close(self) -> None:
        """Remove what has no name. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._stack.close()
                finally:
                    self._uploads.give(self._size)


def checked_digest(text: str) -> str:
    """Raises `BadRequest` for what is no digest."""
    if not DIGEST.fullmatch(text):
        raise BadRequest(f"a digest is sha256: and 64 digits of 0-9 and a-f, not {shown(text)}", "digest")
    return text


def check_names(files: Mapping[str, str], param: str) -> None:
    """Raise `BadRequest` for names that are none of files of one directory, and for what is no digest."""
    if len(files) > MOST_FILES:
        raise BadRequest(f"a model has at most {MOST_FILES} files, not {len(files)}", param)
    for name, digest in files.items():
        if not is_file_name(name):
            raise BadRequest(
                f"the name of a file has up to 200 letters, digits, - _ and ., and begins with a letter or a digit; "
                f"there are no directories: {shown(name)}",
                param,
            )
        checked_digest(digest)
    if any(name.lower().endswith(GGUF) for name in files) and len(files) > 1:
        raise BadRequest("a model in a GGUF file has no other files", param)
