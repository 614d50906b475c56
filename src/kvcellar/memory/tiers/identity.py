"""identity: what decides the bytes of stored memory, as one digest. Memory of another identity is never read.

Digesting weights reads them all, so digests are remembered by what `stat` says of a file: device, inode, size, and the
times of its last change in nanoseconds. A file that was changed in the last two seconds is not remembered: on some file
systems a second change in that time would leave the times as they are.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Annotated

import msgspec

from kvcellar.places import make_private

SETTLED = 2.0  # seconds after a change from which on the times of a file are relied on
REMEMBERED = 256  # files, at most
REMEMBERED_BYTES = 1 << 20  # of the file that they are remembered in
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def identity(parts: Mapping[str, str]) -> bytes:
    """One digest, 32 bytes, of named parts: of weights, adapter, tokenizer, config, storage, shape, versions ..."""
    digest = blake2b(digest_size=32, person=b"kvcellar-ident")
    digest.update(json.dumps(dict(parts), sort_keys=True).encode())
    return digest.digest()


class FileDigests:
    """Digests of files, remembered in a directory of the user's cache, or, where that is None, only here."""

    def __init__(self, directory: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._path = directory / "digests.json" if directory is not None else None
        self._clock = clock
        self._known = self._read()
        self.computed = 0  # files that were read

    def of(self, files: Iterable[Path]) -> str:
        """One digest of the content of files, in order, whatever their names. Raises `OSError`."""
        digest = blake2b(digest_size=32)
        for path in files:
            digest.update(bytes.fromhex(self._of_one(path)))
        self._write()
        return digest.hexdigest()

    def _of_one(self, path: Path) -> str:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            mark = _mark(about)
            if (known := self._known.get(mark)) is not None:
                return known
            self.computed += 1
            found = file_digest(file, lambda: blake2b(digest_size=32)).hexdigest()
            after = os.fstat(file.fileno())
        if _mark(after) == mark and max(about.st_mtime, about.st_ctime) + SETTLED < self._clock():
            self._known[mark] = found
        return found

    def _read(self) -> dict[str, str]:
        """What is remembered; nothing where it cannot be read: it costs reading the files."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                content = file.read(REMEMBERED_BYTES + 1)
            return msgspec.json.decode(content, type=dict[str, _Digest]) if len(content) <= REMEMBERED_BYTES else {}
        except (OSError, ValueError, RecursionError):
            return {}

    def _write(self) -> None:
        if self._path is None or not self.computed:
            return
        kept = dict(list(self._known.items())[-REMEMBERED:])
        part = self._path.with_name(f"digests.{os.getpid()}")
        with suppress(OSError):
            make_private(self._path.parent)
            part.write_text(json.dumps(kept))
            os.replace(part, self._path)


def _mark(about: os.stat_result) -> str:
    return f"{about.st_dev} {about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"
