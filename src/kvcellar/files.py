"""files: the operations on files that a store does. Tests replace them, to let each fail or to record their order."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Files:
    """The file system. All raise `OSError`. A file that is written is for its owner alone."""

    def create(self, path: Path) -> int:
        """A new file, open for writing. Raises `FileExistsError`; follows no link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """An existing regular file, open for reading; follows no link, and waits for no pipe."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def write(self, file: int, content: bytes | bytearray | memoryview) -> None:
        """All of it, at the end."""
        left = memoryview(content).cast("B")
        while left:
            left = left[self.write_some(file, left) :]

    def write_some(self, file: int, content: memoryview) -> int:
        """A part of it; returns how much."""
        return os.write(file, content)

    def read(self, file: int, n: int, at: int) -> bytes:
        """`n` bytes from `at` on, fewer at the end of the file."""
        found = os.pread(file, n, at)
        while len(found) < n and (more := os.pread(file, n - len(found), at + len(found))):  # 2 GiB in one call at most
            found += more
        return found

    def read_into(self, file: int, memory: memoryview, at: int) -> int:
        """As many bytes from `at` on as `memory` has, fewer at the end of the file; returns how many."""
        done = 0
        while done < len(memory) and (more := self.read_some(file, memory[done:], at + done)):
            done += more
        return done

    def read_some(self, file: int, memory: memoryview, at: int) -> int:
        """A part of it; returns how much."""
        return os.preadv(file, [memory], at)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def sync(self, file: int) -> None:
        """Make its content durable. After an error the content is lost, whatever a second call returns."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path, used: int) -> None:
        """Set its times, in nanoseconds since 1970; follows no link."""
        os.utime(path, ns=(used, used), follow_symlinks=False)

    def sync_directory(self, path: Path) -> None:
        """Make the names in it durable."""
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def names(self, directory: Path) -> Iterator[str]:
        """The names in a directory."""
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry.name

    def free(self, directory: Path) -> int:
        """Bytes that this user may still write to the file system of a directory."""
        about = os.statvfs(directory)
        return about.f_bavail * about.f_frsize


def lock_within(seconds: float, opened: int, late: str) -> None:
    """Lock an open file or directory for this process alone, until it is closed. Raises `TimeoutError` with the message
    `late` if another process has it locked all that time."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(late) from None
            time.sleep(0.01)
