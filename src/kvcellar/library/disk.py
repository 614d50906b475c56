"""disk: the directories of the library, and how files get into them.

    blobs/sha256-HEX         contents, read-only, named by their digest
    manifests/NAME/TAG.json  the models; NAME may be owner/name
    views/ID/                a model as a directory of symbolic links to blobs, made from its manifest
    uploads/sha256-HEX       files that models are created from later (see `uploads.py`)
    tmp/                     what is being created: a directory for each running `Staging`, with a file that it has
                             locked

Always true:
  * a blob is renamed to its name when its content is complete and on the disk, and a manifest when all its blobs are;
  * what a running staging has written or reuses has its digest in `needs/` there, and is not removed;
  * `needs/`, names of blobs, manifests and views change only under the lock of the library.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvcellar.errors import ModelRefused
from kvcellar.files import Files, lock_within
from kvcellar.library.manifest import File, Manifest, Part
from kvcellar.places import make_private
from kvcellar.progress import report

FOLDERS = BLOBS, MANIFESTS, VIEWS, UPLOADS, TEMPORARY = "blobs", "manifests", "views", "uploads", "tmp"
WAIT = 60.0  # seconds that a process waits for the lock of the library
_CHUNK = 8 << 20
KEEP = 24 * 3600  # seconds that an upload stays
READ_ONLY = 0o400


class Disk:
    """The library below `root`. Reading creates nothing."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root, self.files = root, files

    def blob(self, file: File) -> Path:
        return self.root / BLOBS / file.blob

    def view(self, manifest: Manifest) -> Path:
        return self.root / VIEWS / manifest.id

    @contextmanager
    def locked(self) -> Generator[None]:
        """Make the directories; one thread of one process at a time is in the block. Raises `OSError`, `NoPlace`."""
        for folder in (self.root, *(self.root / name for name in FOLDERS)):
            make_private(folder, "KVCELLAR_MODELS")
        opened = os.open(self.root / TEMPORARY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_within(WAIT, opened, f"another process has had the library {self.root} locked for {WAIT:g} s")
            yield
        finally:
            os.close(opened)

    @contextmanager
    def staging(self) -> Generator["Staging"]:
        """A directory for what is being created, which is removed at the end."""
        directory = self.root / TEMPORARY / f"{os.getpid()}-{secrets.token_hex(8)}"
        with ExitStack() as opened, ExitStack() as made:  # it is removed while it is locked
            with self.locked():
                self.remove_dead()
                os.mkdir(directory, 0o700)
                made.callback(shutil.rmtree, directory, ignore_errors=True)  # what stays, as that of a killed process
                opened.callback(self._close, owned := self.files.create(directory / "lock"))
                fcntl.flock(owned, fcntl.LOCK_EX)
                os.mkdir(directory / "needs", 0o700)
            yield Staging(self, directory)

    def _close(self, file: int) -> None:
        with suppress(OSError):
            self.files.close(file)

    def remove_dead(self) -> set[str]:
        """Remove the directories of stagings that no longer run; needs the lock. Returns the blobs that the others
        need."""
        needed: set[str] = set()
        for name in list(self.files.names(self.root / TEMPORARY)):
            directory = self.root / TEMPORARY / name
            if self._runs(directory):
                with suppress(FileNotFoundError):  # it ends now
                    needed |= set(self.files.names(directory / "needs"))
            elif directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)
            else:
                with suppress(FileNotFoundError):  # its staging has removed it
                    self.files.unlink(directory)
        return needed

    def remove_uploads(self, before: float) -> None:
        """Remove those that were neither sent nor used since; needs the lock."""
        for name in list(self.files.names(self.root / UPLOADS)):
            about = os.lstat(self.root / UPLOADS / name)
            if max(about.st_atime, about.st_mtime) < before:
                self.files.unlink(self.root / UPLOADS / name)

    def _runs(self, directory: Path) -> bool:
        try:
            file = self.files.open(directory / "lock")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # not known, so it may
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            self.files.close(file)
        return False

    # -- contents -----------------------------------------------------------------------------------------------

    def damage(self, file: File) -> str | None:
        """What is wrong with a blob by its size alone; None if nothing is."""
        try:
            about = os.lstat(self.blob(file))
        except OSError as error:
            return f"{file.blob} is not readable ({error.strerror})"
        if not stat.S_ISREG(about.st_mode):
            return f"{file.blob} is not a regular file"
        return None if about.st_size == file.size else f"{file.blob} has {about.st_size} bytes, not {file.size}"

    def wrong_content(self, file: File, name: str) -> str | None:
        """What is wrong with a blob; None if nothing is. Reads all of it."""
        if (found := self.damage(file)) is not None:
            return found
        try:
            opened = self.files.open(self.blob(file))
            try:
                digest = self.digest(opened, f"verifying {name}")
            finally:
                self.files.close(opened)
        except OSError as error:
            return f"{file.blob} is not readable ({error.strerror})"
        return None if digest == file.digest else f"{file.blob} has other content: {digest}"

    def digest(self, opened: int, stage: str, copy: int | None = None) -> str:
        """Of an open file, as long as it is now, which is also written to `copy`."""
        size, done, found = self.files.size(opened), 0, hashlib.sha256()
        while chunk := self.files.read(opened, min(_CHUNK, size - done), done):
            found.update(chunk)
            if copy is not None:
                self.files.write(copy, chunk)
            done += len(chunk)
            report(stage, done >> 20, size >> 20)  # MiB
        return f"sha256:{found.hexdigest()}"

    # -- views --------------------------------------------------------------------------------------------------

    def is_whole(self, manifest: Manifest) -> bool:
        """Whether the view has exactly the links of this manifest."""
        view, links = self.view(manifest), _links(manifest)
        try:
            found = {str(path.relative_to(view)) for path in view.rglob("*") if path.is_symlink() or not path.is_dir()}
            return found == set(links) and all(os.readlink(view / path) == links[path] for path in links)
        except OSError:
            return False

    def place_view(self, manifest: Manifest, staging: "Staging") -> None:
        """Make the view, in place of what has its name; needs the lock."""
        built = staging.directory / "view"
        for path, target in _links(manifest).items():
            (built / path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(target, built / path)
        with suppress(FileNotFoundError):
            self.files.rename(self.view(manifest), staging.directory / "old view")
        self.files.rename(built, self.view(manifest))


class Staging:
    """Files that are being added to the library: what they are copied from does not change."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk, self.directory = disk, directory

    @property
    def root(self) -> Path:
        """Of the library."""
        return self._disk.root

    def folder(self, name: str) -> Path:
        """Path of a directory for files that are made, which does not exist yet."""
        return self.directory / name

    def put(self, source: Path, name: str) -> File:
        """Copy a file into the library, unless its content is there. Raises `OSError`, for a link as well, and
        `ModelRefused` if it is no regular file or changes meanwhile."""
        opened = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            before = os.fstat(opened)
            if not stat.S_ISREG(before.st_mode):
                raise ModelRefused(f"{source} is not a regular file")
            found = self._reused(opened, name) or self._linked(opened, source, name) or self._copied(opened, name)
            after = os.fstat(opened)
        finally:
            os.close(opened)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or found.size != after.st_size:
            raise ModelRefused(f"{source} changed while it was read. Create the model when nothing writes to it")
        return found

    def move(self, made: Path, name: str) -> File:
        """Take a file that was made in this staging into the library."""
        opened = os.open(made, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            file = File(name, self._disk.digest(opened, f"reading {name}"), self._disk.files.size(opened))
            os.fchmod(opened, READ_ONLY)
            self._disk.files.sync(opened)
        finally:
            self._disk.files.close(opened)
        self._publish(made, file)
        return file

    def reuse(self, file: File) -> None:
        """Keep a blob of another model. Raises `ModelRefused` if it is damaged."""
        self._need(file.blob)
        if (damage := self._disk.damage(file)) is not None:
            raise ModelRefused(f"{file.path} is damaged: {damage}. Create its model again from the source")

    def linked(self, name: str, part: Part) -> Path:
        """A directory of links to the blobs of a part of another model, which are kept. Raises as `reuse`."""
        folder = self.folder(name)
        folder.mkdir()
        for file in part.files:
            self.reuse(file)
            (folder / file.path).parent.mkdir(exist_ok=True)
            os.symlink(self._disk.blob(file).absolute(), folder / file.path)
        return folder

    def write(self, name: str, content: bytes) -> Path:
        """A file of the staging itself, on the disk."""
        path = self.directory / name
        opened = self._disk.files.create(path)
        try:
            self._disk.files.write(opened, content)
            self._disk.files.sync(opened)
        finally:
            self._disk.files.close(opened)
        return path

    def _need(self, blob: str) -> None:
        with self._disk.locked(), suppress(FileExistsError):
            self._disk.files.close(self._disk.files.create(self.directory / "needs" / blob))

    def _reused(self, opened: int, name: str) -> File | None:
        """The same content among the blobs, if that is not damaged."""
        size = self._disk.files.size(opened)
        blobs = self._disk.root / BLOBS
        with os.scandir(blobs) as entries:
            if not any(_has_size(entry, size) for entry in entries):
                return None
        file = File(name, self._disk.digest(opened, f"reading {name}"), size)
        self._need(file.blob)
        return None if self._disk.wrong_content(file, name) is not None else file

    def _linked(self, opened: int, source: Path, name: str) -> File | None:
        """An upload, which is private and not written any more, as a blob. None for other files, and where the file
        system has no hard links."""
        disk, place = self._disk, Path(os.path.realpath(source))
        if place.parent != Path(os.path.realpath(disk.root / UPLOADS)):
            return None
        file, part = (
            File(name, disk.digest(opened, f"reading {name}"), disk.files.size(opened)),
            self.directory / "part",
        )
        try:
            os.link(place, part)
        except OSError:
            return None
        self._publish(part, file)
        return file

    def _copied(self, opened: int, name: str) -> File:
        files, path = self._disk.files, self.directory / "part"
        part = files.create(path)
        try:
            digest = self._disk.digest(opened, f"storing {name}", part)
            os.fchmod(part, READ_ONLY)
            files.sync(part)
            file = File(name, digest, files.size(part))
        except BaseException:
            with suppress(OSError):
                files.unlink(path)
            raise
        finally:
            files.close(part)
        self._publish(path, file)
        return file

    def _publish(self, path: Path, file: File) -> None:
        """Give it its name, in place of an equal or a damaged one."""
        self._need(file.blob)
        self._disk.files.rename(path, self._disk.blob(file))


def _has_size(entry: os.DirEntry[str], size: int) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_size == size
    except FileNotFoundError:  # removed since its name was read
        return False


def _links(manifest: Manifest) -> Mapping[str, str]:
    """The target of each link of a view, relative to the directory of the link."""
    return {path: "../" * (path.count("/") + 2) + f"{BLOBS}/{file.blob}" for path, file in manifest.files.items()}
