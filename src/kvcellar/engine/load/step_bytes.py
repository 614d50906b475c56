"""step_bytes: the bytes that measured steps took, kept in the user's cache directory for the next start.

Measuring runs eight forwards, and the same model takes the same bytes each time.

Always true: a value that is returned was measured by this process, or read from a file that was written for the same
facts.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.facts import Unsettled, digest, network, served, surroundings
from kvcellar.engine.recording.kept import Damaged, Kept, place_of

log = logging.getLogger("kvcellar.measures")

FORMAT = b"kvcellar steps 2\n"
LARGEST = 1 << 50  # bytes that any step could take

Sizes = dict[str, Annotated[int, Meta(ge=0, le=LARGEST)]]  # by what identifies a step


class SizesFiles(Kept[Sizes]):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, FORMAT, msgspec.msgpack.encode, _sizes)


def _sizes(stored: bytes) -> Sizes:
    try:
        return msgspec.msgpack.decode(stored, type=Sizes)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Damaged(str(error)) from error


class Measures:
    """The bytes of steps."""

    def __init__(
        self, known: Mapping[str, int] | None = None, files: SizesFiles | None = None, inputs: str = ""
    ) -> None:
        """`known`: what was measured before. `files` keep what this process measures; `inputs` is the digest of
        everything that it depends on, except the `step` of `of`."""
        self._files, self._inputs, self._fresh = files, inputs, False
        self.known = {**(known or {}), **self._read()}

    def of(self, step: str, measure: Callable[[], int]) -> int:
        """The bytes of `step`, a name that identifies it: as kept, else as `measure` returns them."""
        if step not in self.known:
            self.known[step] = measure()
            self._fresh = True
        return self.known[step]

    def keep(self) -> None:
        """Write the file, if anything was measured that is not in it."""
        if self._files is not None and self._fresh:
            self._files.write(self._inputs, {**self._read(), **self.known})
        self._fresh = False

    def _read(self) -> Sizes:
        return (None if self._files is None else self._files.read(self._inputs)) or {}


def measures_of(
    guest: Guest, path: Path | None, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> Measures:
    """The measures of the model of `path`, which was loaded since `began` (nanoseconds of the clock). `limits` are the
    settings that limit the size of steps. `path` is None for a network given as an object: its code may do anything, so
    it is measured at each start, and so is a device with its own memory, where that is quick.
    """
    if path is None or guest.device.type != "cpu":
        return Measures()
    try:
        inputs = facts_of(guest, path, began=began, limits=limits, environment=environment)
    except (Unsettled, OSError) as error:
        log.info("what steps take is not kept: %s", error)
        return Measures()
    directory = place_of("steps", environment)
    return Measures(files=None if directory is None else SizesFiles(directory), inputs=digest(inputs))


def facts_of(
    guest: Guest, path: Path, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, object]:
    """What the bytes of this guest's steps depend on. The values of weights are among it, since the bytes of a mixture
    of experts depend on its router. Raises `Unsettled` and `OSError`."""
    found = surroundings(path, began=began, environment=environment)
    return {**found, **network(guest), **served(guest), "limits": dict(limits)}
