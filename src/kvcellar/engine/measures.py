"""measures: the bytes that tried steps took, kept in the user's cache directory for the next start.

Measuring runs eight forwards, and the same model takes the same bytes each time. So they are kept, in one small file
under a digest of everything that they depend on (`engine/depends.py`). They are used only if the file is exactly what
was written: else, whatever is wrong with it, they are measured again.

Always true:
  * a value that is returned was measured by this process, or read from a file with the right digest of its content,
    made for the same inputs;
  * a file has its name only when it is whole; processes that write the same one at the same time replace each other's;
  * no failure to read or write one is an error: it only costs the time to measure.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcellar.places import NoPlace, cache, make_private

log = logging.getLogger("kvcellar.measures")

FORMAT = 1
MOST_BYTES = 1 << 16  # of a file
MOST_FILES = 64  # the newest are kept
LARGEST = 1 << 50  # bytes that any step could take


def digest(value: object) -> str:
    """Of a value that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class Measures:
    """What was measured of steps with given inputs. `directory` is None where nothing is kept."""

    def __init__(self, directory: Path | None, inputs: str) -> None:
        """`inputs` is the digest of everything that a measurement depends on, but for what `of` is given."""
        self._inputs = inputs
        self._path = None if directory is None else directory / f"measures-{inputs[:32]}.json"
        self._known = {} if self._path is None else _read(self._path, inputs)
        self._fresh = False

    def of(self, step: str, measure: Callable[[], int]) -> int:
        """The bytes of `step`, a name that says all of it: as kept, else as `measure` returns them."""
        if step not in self._known:
            self._known[step] = measure()
            self._fresh = True
        return self._known[step]

    def keep(self) -> None:
        """Write the file, if something was measured that is not in it."""
        if self._path is None or not self._fresh:
            return
        kept = {**_read(self._path, self._inputs), **self._known}
        try:
            _write(self._path, sealed({"format": FORMAT, "inputs": self._inputs, "bytes": kept}))
            _prune(self._path.parent)
        except OSError as error:
            log.info("what steps take is not kept in %s: %s", self._path, error.strerror)
        self._fresh = False


def directory_for(environment: Mapping[str, str]) -> Path | None:
    """Where measures are kept: the user's own cache. None where there is none, or others could write into it."""
    try:
        directory = cache(environment)
        make_private(directory)
    except (NoPlace, OSError) as error:
        log.info("what steps take is measured at each start: %s", error)
        return None
    return directory


def sealed(content: dict[str, Any]) -> str:
    """As a file holds it."""
    return json.dumps({**content, "check": digest(content)}, sort_keys=True)


def _read(path: Path, inputs: str) -> dict[str, int]:
    """What the file holds; nothing unless it is whole and for these inputs."""
    try:
        content = json.loads(_bytes(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.info("%s is not used: %s", path, error)
        return {}
    if isinstance(content, dict) and _is_whole(content, inputs):
        return dict(content["bytes"])
    log.info("%s is not used: it is not what was written for these inputs", path)
    return {}


def _bytes(path: Path) -> bytes:
    """Of a regular file that is not too large. Raises `OSError`."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is not a regular file")
        return file.read(MOST_BYTES)  # of a larger one this is not JSON


def _is_whole(content: dict[str, Any], inputs: str) -> bool:
    check, kept = content.pop("check", None), content.get("bytes")
    return (
        content.keys() == {"format", "inputs", "bytes"}
        and type(content["format"]) is int
        and content["format"] == FORMAT
        and content["inputs"] == inputs
        and isinstance(kept, dict)
        and all(type(size) is int and 0 <= size <= LARGEST for size in kept.values())
        and check == digest(content)
    )


def _write(path: Path, text: str) -> None:
    """All of it, or nothing. A power cut may leave an empty file, which is not used."""
    opened, made = tempfile.mkstemp(prefix="measures-", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(opened, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def _prune(directory: Path) -> None:
    """Delete all but the newest: each new version of anything makes another file."""
    files = sorted(directory.glob("measures-*"), key=_written, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


def _written(file: Path) -> int:
    try:
        return file.lstat().st_mtime_ns
    except OSError:  # deleted meanwhile, by another process
        return 0
