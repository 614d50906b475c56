"""download: one file of a hub, continued where an earlier download of it was interrupted.

Always true:
  * a file has its final name only after all of its bytes were hashed, and the digest was the expected one;
  * the bytes of an interrupted download are next to it, as `NAME.incomplete`, and are hashed again before more are
    appended. A process that writes there holds the lock of the repository (`library/hub.py`).
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.utils import get_session, hf_raise_for_status

from kvcellar.errors import KvcellarError

_BLOCK = 1 << 20  # bytes that are read and hashed at once
_ATTEMPTS = 5  # connections in a row that bring no byte
_PAUSE = 1.0  # seconds before the next connection
_PASSING = (httpx2.NetworkError, httpx2.TimeoutException, httpx2.RemoteProtocolError)

Count = Callable[[int], None]  # bytes that are there now, or, below 0, that were dropped; what it raises ends the work


class WrongDigest(KvcellarError):
    """The bytes of a file are not those that the hub lists."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the hub lists it. `sha256` is None where it lists no such digest."""

    path: str
    size: int
    sha256: str | None


class _Partial:
    """The bytes of a file that are there, and their digest."""

    def __init__(self, file: BinaryIO, count: Count) -> None:
        self._file, self._count = file, count
        self._digest = hashlib.sha256()
        self.size = 0
        while block := file.read(_BLOCK):
            self._add(block)

    def append(self, block: bytes) -> None:
        self._file.write(block)
        self._add(block)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        dropped, self.size, self._digest = self.size, 0, hashlib.sha256()
        self._count(-dropped)

    def check(self) -> None:
        """Raises what `count` raises."""
        self._count(0)

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def _add(self, block: bytes) -> None:
        self._digest.update(block)
        self.size += len(block)
        self._count(len(block))


def download(url: str, headers: dict[str, str], listed: Listed, target: Path, count: Count) -> None:
    """Write a file to `target`, which is not there yet. Connections that break are repeated; the bytes so far are kept.

    Raises `WrongDigest`, with nothing kept; what httpx2 and huggingface_hub raise; `OSError`; what `count` raises.
    """
    incomplete = partial_of(target)
    with open(incomplete, "a+b") as file:
        file.seek(0)
        partial = _Partial(file, count)
        if partial.size > listed.size:
            partial.restart()
        _complete(url, headers, partial, listed.size)
        file.flush()
        os.fsync(file.fileno())
    if (partial.size, partial.sha256()) != (listed.size, listed.sha256):
        incomplete.unlink()
        raise WrongDigest(f"{listed.path}: {partial.size} bytes with sha256 {partial.sha256()}")
    incomplete.replace(target)


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.incomplete")


def sha256_of(file: Path, count: Count) -> str:
    """The digest of a file that is there."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
            count(len(block))
    return digest.hexdigest()


def _complete(url: str, headers: dict[str, str], partial: _Partial, size: int) -> None:
    """Append bytes until there are `size`, or until the server ends with more or fewer."""
    failed = 0
    while partial.size < size:
        partial.check()
        before = partial.size
        try:
            _append(url, headers, partial, size)
            if partial.size == before:
                return
        except _PASSING:
            failed = failed + 1 if partial.size == before else 0
            if failed == _ATTEMPTS:
                raise
            time.sleep(_PAUSE)


def _append(url: str, headers: dict[str, str], partial: _Partial, size: int) -> None:
    """One connection."""
    asked = {**headers, "Accept-Encoding": "identity"}
    if partial.size:
        asked["Range"] = f"bytes={partial.size}-"
    with get_session().stream("GET", url, headers=asked, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        if partial.size and response.status_code != int(httpx2.codes.PARTIAL_CONTENT):
            partial.restart()
        for block in response.iter_raw():
            partial.append(block)
            if partial.size > size:
                return
