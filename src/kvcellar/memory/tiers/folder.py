"""folder: the files of a store on disk, and the processes that have it open.

A process that has the store open holds a lock on a file of its own in `processes/` until it has removed that file. The
files are created, and their locks tested, only by a process that holds the lock of the directory: so none is seen
before it is locked.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.files import Files, lock_within
from kvcellar.places import make_private

WAIT = 60.0  # seconds that a process waits for another one that opens the store
FOLDERS = DATA, TEMPORARY, QUARANTINE, PROCESSES = "data", "temporary", "damaged", "processes"


class Folder:
    """The directory of a store, as one of the processes that use it sees it."""

    def __init__(self, files: Files, directory: Path, process: str) -> None:
        self._files, self._directory, self._process = files, directory, process
        self.index = directory / "index.sqlite"
        self._own: int | None = None

    def path(self, folder: str, name: str) -> Path:
        return self._directory / folder / name

    # -- processes ----------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Generator[None]:
        """Make the directories; one process at a time opens the store. Raises `OSError`, also where another one takes
        too long, and `NoPlace`."""
        for folder in (self._directory, *(self._directory / name for name in FOLDERS)):
            make_private(folder)
        opened = os.open(self._directory / PROCESSES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_within(WAIT, opened, f"another process has been opening it for {WAIT:g} s")
            yield
        finally:
            os.close(opened)

    def enter(self) -> None:
        """Make the file that this process has locked for as long as it has the store open."""
        self._own = self._files.create(self.path(PROCESSES, self._process))
        fcntl.flock(self._own, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Remove the file, and then its lock."""
        self.unlink(PROCESSES, self._process)
        if self._own is not None:
            with suppress(OSError):
                self._files.close(self._own)
            self._own = None

    def alive(self) -> set[str]:
        """The processes that have the store open. One that cannot be tested counts as alive."""
        return {name for name in self.names(PROCESSES) if name == self._process or self._is_locked(name)}

    def shared(self) -> bool:
        """Whether other processes may have the store open: those that have ended without leaving it count, too."""
        return len(self.names(PROCESSES)) > 1

    def _is_locked(self, process: str) -> bool:
        try:
            file = self._files.open(self.path(PROCESSES, process))
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            self._files.close(file)
        return False

    def leave_dead(self, alive: set[str]) -> None:
        """Remove the files of all other processes."""
        for process in set(self.names(PROCESSES)) - alive:
            self.unlink(PROCESSES, process)

    # -- files --------------------------------------------------------------------------------------------------

    def names(self, folder: str) -> list[str]:
        return list(self._files.names(self._directory / folder))

    def move(self, name: str, source: str, target: str) -> None:
        self._files.rename(self.path(source, name), self.path(target, name))

    def sync(self, folder: str) -> None:
        self._files.sync_directory(self._directory / folder)

    def unlink(self, folder: str, name: str) -> bool:
        """Whether there is no such file now."""
        try:
            self._files.unlink(self.path(folder, name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def erase(self, name: str) -> bool:
        """Unlink a file wherever it is; whether there is none of its name now."""
        return all(self.unlink(folder, name) for folder in (DATA, TEMPORARY, QUARANTINE))

    def clear(self, folder: str) -> None:
        for name in self.names(folder):
            self.unlink(folder, name)

    def remove_index(self) -> None:
        for path in (self.index.with_name(self.index.name + "-journal"), self.index):
            with suppress(FileNotFoundError):
                self._files.unlink(path)

    # -- bytes --------------------------------------------------------------------------------------------------

    def bytes(self) -> int:
        """Of all files, now."""
        total = 0
        for folder in ("", *FOLDERS):
            for entry in os.scandir(self._directory / folder):
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
        return total

    def free(self) -> int:
        """Bytes that this user may still write to the disk."""
        return self._files.free(self._directory)
