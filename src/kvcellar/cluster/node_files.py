"""node_files: secrets of a cluster, which each of its processes reads from files of its machine: what Ray is told, its
dashboard shows. No Ray.

Always true, of `KeyFiles`: a file has changed, or the keys were read after its last change.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcellar.engine.load.settings import key_in
from kvcellar.errors import BadRequest
from kvcellar.serve.http.key_ring import KeyRing, Keys
from kvcellar.serve.http.keys import read_keys, text_of

KEY_FILE, REMOTE_FILE = "store_key_file", "store_remote_file"  # in place of settings of an engine
MOST_BYTES = 4096  # of such a file
LOOK_SECONDS = 5.0  # between two looks at files of keys
_PASSWORD = re.compile(r"://[^/]*:[^/]*@|[?&](password|\w*secret\w*|\w*key)=", re.IGNORECASE)


def settings_here(told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an engine, with those that are in files. Raises `BadRequest`."""
    found = dict(told)
    if (file := found.pop(KEY_FILE, None)) is not None:
        found["store_key"] = key_in(text_of(Path(file), MOST_BYTES, KEY_FILE), str(file))
    if (file := found.pop(REMOTE_FILE, None)) is not None:
        found["store_remote"] = text_of(Path(file), MOST_BYTES, REMOTE_FILE).strip()
    return found


def check_told(told: Mapping[str, Any]) -> None:
    """Raises `BadRequest` where what Ray is told of an engine has a secret."""
    if told.get("store_key") is not None:
        raise BadRequest(f"Ray's dashboard would show it: give {KEY_FILE}, a file on each machine", "store_key")
    if _PASSWORD.search(str(told.get("store_remote") or "")):
        why = f"it has a password, which Ray's dashboard would show: put it into a file, {REMOTE_FILE}"
        raise BadRequest(why, "store_remote")


class KeyFiles:
    """The keys of a gateway: those in files, and those that all gateways were given, as digests."""

    def __init__(self, files: Sequence[str | None], given: Keys) -> None:
        """`files`: of API keys, admin keys and metrics keys."""
        api, admin, metrics = (None if one is None else Path(one) for one in files)
        self._files, self._given = (api, admin, metrics), given
        self._seen = self._stamps()

    def read(self) -> Keys:
        """Raises `BadRequest`."""
        self._seen = self._stamps()
        return self._given | read_keys(*self._files, {})

    @property
    def changed(self) -> bool:
        """Since they were read."""
        return self._stamps() != self._seen

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [None if one is None else _stamp(one) for one in self._files]


async def follow(files: KeyFiles, ring: KeyRing) -> None:
    """Read keys again whenever a file has changed, until this is cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if files.changed:
            with suppress(BadRequest):  # the ring logs it
                await asyncio.to_thread(ring.reload)


def _stamp(file: Path) -> tuple[int, ...]:
    """Another one where the file has other content, or is another file; empty: it is not there."""
    try:
        about = file.stat()
    except OSError:
        return ()
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size
