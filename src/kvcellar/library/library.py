"""library: the models on disk, by name. Any number of processes may use it at a time.

A change is one rename: whatever ends a process, each name has its old model or its new one. Sizes of blobs are checked
whenever a model is resolved; digests when it is created, by `verify`, and when the view of a model has to be made
again.

The lowest version of kvcellar that a model requires (REQUIRES).
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused, first_few, shown
from kvcellar.files import Files
from kvcellar.library.disk import BLOBS, KEEP, MANIFESTS, VIEWS, Disk, Staging
from kvcellar.library.manifest import MOST_BYTES, Manifest, ManifestDamaged
from kvcellar.library.names import SUFFIX, ModelName
from kvcellar.version import __version__

_VERSION = re.compile(r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?")


def required(text: str) -> str:
    """The version as it is stored. Raises `BadRequest` unless it is like 1, 1.2 or 1.2.3."""
    if (found := _VERSION.fullmatch(text)) is None:
        raise BadRequest(f"REQUIRES {shown(text)} is not a version of kvcellar, like {__version__}", "requires")
    return ".".join(part or "0" for part in found.groups())


def check_version(requires: str | None, version: str = __version__) -> None:
    """Raise `ModelRefused` if this kvcellar is older."""
    if requires is not None and _numbers(version) < _numbers(required(requires)):
        raise ModelRefused(f"the model requires kvcellar {requires}; this is {version}. Upgrade kvcellar")


def _numbers(version: str) -> tuple[int, ...]:
    found = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return (*found, *[0] * (3 - len(found)))


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model that can be loaded: `directory` has its files; drafts and adapters have directories of their own."""

    name: str
    id: str
    base_id: str
    directory: Path
    draft: Path | None
    adapters: tuple[Path, ...]
    manifest: Manifest


class Library:
    """The models below a directory, which is created by the first one."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.disk = Disk(root, files or Files())

    @property
    def root(self) -> Path:
        return self.disk.root

    # -- reading ------------------------------------------------------------------------------------------------

    def names(self) -> tuple[ModelName, ...]:
        """Of all models, in order."""
        return tuple(sorted(self._names(self.root / MANIFESTS, ()), key=str))

    def find(self, text: str) -> LibraryModel | None:
        """The model of this name; None if there is none, or the text is no name. Raises `ModelRefused`."""
        try:
            name = ModelName.parse(text)
        except BadRequest:
            return None
        return None if self._stored(name) is None else self.resolve(text)

    def resolve(self, text: str) -> LibraryModel:
        """Raises `BadRequest` for what is no name, `ModelNotFound`, and `ModelRefused` if it is damaged or needs a
        later kvcellar."""
        name = self._existing(ModelName.parse(text))
        manifest = self._manifest(name)
        while True:
            try:
                return self._resolved(name, manifest)
            except ModelRefused:
                before, manifest = manifest.id, self._manifest(name)
                if manifest.id == before:  # else it was replaced meanwhile, and its files were removed
                    raise

    def _resolved(self, name: ModelName, manifest: Manifest) -> LibraryModel:
        check_version(manifest.requires)
        self._refuse_damaged(name, manifest, ((path, self.disk.damage(f)) for path, f in manifest.files.items()))
        if not self.disk.is_whole(manifest):
            self._refuse_damaged(name, manifest, self._compared(manifest))
            with self.disk.staging() as staging, self.disk.locked():
                self.disk.place_view(manifest, staging)
        return self._model(name, manifest)

    def _model(self, name: ModelName, manifest: Manifest) -> LibraryModel:
        view = self.disk.view(manifest)
        adapters = tuple(view / "adapters" / str(i) for i in range(len(manifest.adapters)))
        draft = None if manifest.draft is None else view / "draft"
        return LibraryModel(str(name), manifest.id, manifest.base_id, view, draft, adapters, manifest)

    def manifest(self, text: str) -> Manifest:
        """Of the model of this name; its files may be damaged. Raises as `resolve`."""
        return self._manifest(self._existing(ModelName.parse(text)))

    def modified(self, text: str) -> float:
        """When the model of this name was created, in seconds since 1970."""
        name = self._existing(ModelName.parse(text))
        try:
            return self._path(name).stat().st_mtime
        except FileNotFoundError as error:
            raise self._absent(name) from error

    def verify(self, text: str) -> tuple[str, ...]:
        """What of a model's files is damaged. Reads all of them."""
        return tuple(f"{path}: {why}" for path, why in self._compared(self.manifest(text)) if why is not None)

    def check(self) -> None:
        """Assert what is always true. Reads every file."""
        names = self.names()
        assert len({name.path.lower() for name in names}) == len(names), "two names differ in case only"
        for name in names:
            manifest = self._manifest(name)
            assert Manifest.from_bytes(manifest.to_bytes()) == manifest
            assert not self.verify(str(name)), f"{name} is damaged"

    # -- changing -----------------------------------------------------------------------------------------------

    def commit(self, name: ModelName, manifest: Manifest, staging: Staging) -> LibraryModel:
        """Make `name` this model, whose files have been put there by `staging`, in place of the one that it was. Raises
        `BadRequest` if there is a name that differs in case only, and `OSError`."""
        _refuse_unreadable(name, manifest)
        with self.disk.locked():
            self._refuse_other_case(name)
            missing = [why for file in manifest.files.values() if (why := self.disk.damage(file)) is not None]
            if missing:
                raise ModelRefused(f"{name} cannot be created: {missing[0]}. Something else removed it; try again")
            self.disk.files.sync_directory(self.root / BLOBS)
            if not self.disk.is_whole(manifest):  # a whole one may be in use
                self.disk.place_view(manifest, staging)
            self._write(name, manifest, staging)
        self._collect_now_or_later()
        return self._model(name, manifest)

    def copy(self, source: str, target: str) -> None:
        """Make `target` the same model, in place of the one that it was. Raises as `resolve` and `commit`."""
        name = ModelName.parse(target)
        with self.disk.staging() as staging, self.disk.locked():
            manifest = self.manifest(source)
            self._refuse_other_case(name)
            self._write(name, manifest, staging)
        self._collect_now_or_later()

    def remove(self, text: str) -> str:
        """Remove a model, and what only it has. What a process has loaded or opened stays readable for it. Returns its
        name as it was created. Raises `BadRequest`, `ModelNotFound`, `OSError`."""
        with self.disk.locked():
            name = self._existing(ModelName.parse(text))
            path = self._path(name)
            self.disk.files.unlink(path)
            self.disk.files.sync_directory(path.parent)
            for folder in path.relative_to(self.root / MANIFESTS).parents[:-1]:
                try:
                    os.rmdir(self.root / MANIFESTS / folder)
                except OSError:
                    break  # it has other models
        self._collect_now_or_later()
        return str(name)

    def collect(self) -> int:
        """Remove blobs and views that belong to no model and to nothing that is being created, and what killed
        processes left. Returns the bytes. While a manifest is damaged, no blob is removed: it may be that model's."""
        with self.disk.locked():
            needed = self.disk.remove_dead()
            self.disk.remove_uploads(time.time() - KEEP)
            views: set[str] = set()
            for name in self.names():
                try:
                    manifest = self._manifest(name)
                except (ModelNotFound, ModelRefused):
                    return 0
                needed |= {file.blob for file in manifest.files.values()}
                views.add(manifest.id)
            for one in set(self.disk.files.names(self.root / VIEWS)) - views:
                self._remove_view(one)
            return sum(self._remove_blob(one) for one in set(self.disk.files.names(self.root / BLOBS)) - needed)

    def _collect_now_or_later(self) -> None:
        """After a change that is complete: what cannot be removed now is removed after the next one."""
        with suppress(OSError):
            self.collect()

    # -- names --------------------------------------------------------------------------------------------------

    def _names(self, folder: Path, above: tuple[str, ...]) -> Iterator[ModelName]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and len(above) < 2:
                yield from self._names(Path(entry.path), (*above, entry.name))
            elif above and entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                try:
                    yield ModelName.parse(f"{'/'.join(above)}:{entry.name.removesuffix(SUFFIX)}")
                except BadRequest:
                    continue  # a file of something else

    def _path(self, name: ModelName) -> Path:
        return self.root / MANIFESTS / name.path

    def _stored(self, name: ModelName) -> ModelName | None:
        """The name as its model was created, which may differ in case."""
        if self._path(name).is_file():
            return name
        return next((one for one in self.names() if one.same(name)), None)

    def _existing(self, name: ModelName) -> ModelName:
        if (stored := self._stored(name)) is not None:
            return stored
        raise self._absent(name)

    def _absent(self, name: ModelName) -> ModelNotFound:
        names = [str(one) for one in self.names()]
        has = f"It has {first_few(names, 8)}" if names else "It has none"
        return ModelNotFound(f"there is no model {str(name)!r} in the library {self.root}. {has}")

    def _refuse_other_case(self, name: ModelName) -> None:
        stored = self._stored(name)
        if stored is not None and stored != name:
            raise BadRequest(
                f"the library has a model {str(stored)!r}, and names that differ in case only are one name. Use that "
                f"name, or remove that model first",
                "model",
            )

    # -- files --------------------------------------------------------------------------------------------------

    def _manifest(self, name: ModelName) -> Manifest:
        path = self._path(name)
        try:
            opened = self.disk.files.open(path)
            try:
                content = self.disk.files.read(opened, MOST_BYTES + 1, 0)
            finally:
                self.disk.files.close(opened)
            return Manifest.from_bytes(content)
        except FileNotFoundError as error:  # removed since its name was read
            raise self._absent(name) from error
        except ManifestDamaged as error:
            raise ModelRefused(
                f"the manifest of {name} is damaged: {error}. Create the model again, or remove it: kvcellar rm {name}"
            ) from error

    def _write(self, name: ModelName, manifest: Manifest, staging: Staging) -> None:
        written, path = staging.write("manifest", manifest.to_bytes()), self._path(name)
        for folder in reversed(path.relative_to(self.root / MANIFESTS).parents[:-1]):
            if not (made := self.root / MANIFESTS / folder).is_dir():
                made.mkdir(mode=0o700)
                self.disk.files.sync_directory(made.parent)
        self.disk.files.rename(written, path)
        self.disk.files.sync_directory(path.parent)

    def _compared(self, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
        return ((path, self.disk.wrong_content(file, path)) for path, file in manifest.files.items())

    def _refuse_damaged(self, name: ModelName, manifest: Manifest, found: Iterator[tuple[str, str | None]]) -> None:
        damaged = [f"{path}: {why}" for path, why in found if why is not None]
        if damaged:
            source = f" from {manifest.source}" if manifest.source else ""
            raise ModelRefused(
                f"{name} is damaged: {'; '.join(damaged[:3])}. Create it again{source}, or remove it: "
                f"kvcellar rm {name}"
            )

    def _remove_view(self, name: str) -> None:
        path = self.root / VIEWS / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            self.disk.files.unlink(path)

    def _remove_blob(self, name: str) -> int:
        path = self.root / BLOBS / name
        size = path.lstat().st_size
        self.disk.files.unlink(path)
        return size


def _refuse_unreadable(name: ModelName, manifest: Manifest) -> None:
    """Raise `ModelRefused` for a manifest that could not be read again."""
    try:
        Manifest.from_bytes(manifest.to_bytes())
    except (ManifestDamaged, ValueError) as error:
        raise ModelRefused(f"{name} cannot be created: its manifest could not be read: {error}") from error
