"""File systems that fail, kill or forget: for each operation of a store what it can do to it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from kvcellar.files import Files

COUNTED = (
    "create",
    "open",
    "write_some",
    "read",
    "read_some",
    "sync",
    "close",
    "rename",
    "unlink",
    "sync_directory",
    "names",
)


class Counting(Files):
    """Calls `at(number, operation, arguments)` before each operation, from 0 on."""

    def __init__(self) -> None:
        self.done = 0

    def at(self, number: int, name: str, arguments: tuple) -> None:
        """What happens before an operation."""

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name not in COUNTED:
            return found

        def counted(*arguments):
            number, self.done = self.done, self.done + 1
            self.at(number, name, arguments)
            return found(*arguments)

        return counted


class Failing(Counting):
    """One operation raises; a write has written half before that."""

    def __init__(self, number: int, error: int) -> None:
        super().__init__()
        self._number, self._error = number, error
        self.failed: str | None = None

    def at(self, number: int, name: str, arguments: tuple) -> None:
        if number == self._number:
            self.failed = name
            if name == "write_some":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if name == "close":
                os.close(arguments[0])  # as Linux does: the descriptor is gone even then
            raise OSError(self._error, os.strerror(self._error))


class Short(Files):
    """Every write writes one byte at most, every read two."""

    def write_some(self, file: int, content: memoryview) -> int:
        return os.write(file, content[:1])

    def read(self, file: int, n: int, at: int) -> bytes:
        found = b""
        while len(found) < n and (more := os.pread(file, min(2, n - len(found)), at + len(found))):
            found += more
        return found

    def read_some(self, file: int, memory: memoryview, at: int) -> int:
        return os.preadv(file, [memory[:2]], at)


class Killing(Counting):
    """The process is killed before an operation; a write has written half before that."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def at(self, number: int, name: str, arguments: tuple) -> None:
        if number == self._number:
            if name == "write_some":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)


class Recording(Files):
    """What was done to one file and its names, for `after_power_loss`."""

    def __init__(self) -> None:
        self.trace: list[tuple[str, object]] = []

    def write_some(self, file: int, content: memoryview) -> int:
        self.trace.append(("write", bytes(content)))
        return super().write_some(file, content)

    def sync(self, file: int) -> None:
        super().sync(file)
        self.trace.append(("sync", None))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.trace.append(("rename", target))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.trace.append(("sync_directory", path))


def after_power_loss(trace: list[tuple[str, object]]) -> Iterator[tuple[bytes, bool]]:
    """What may be left of a file after the operations of `trace`: its content, and whether it has its final name.

    A write that was not synced may be lost, whole, or torn in the middle; a rename that was not synced may be lost.
    """
    synced = max((i for i, (name, _) in enumerate(trace) if name == "sync"), default=-1)
    named = any(name == "rename" for name, _ in trace)
    durable = any(name == "sync_directory" for name, _ in trace)
    contents: set[bytes] = {b""}
    for i, (name, what) in enumerate(trace):
        if name == "write":
            assert isinstance(what, bytes)
            whole = {content + what for content in contents}
            torn = {content + what[: len(what) // 2] for content in contents}
            hole = {content + bytes(len(what)) for content in contents}
            contents = whole if i < synced else contents | whole | torn | hole
    for content in contents:
        if not durable:
            yield content, False
        if named:
            yield content, True
