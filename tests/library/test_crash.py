"""A process that is killed while it creates a model leaves the old model or the new one, and nothing else."""

import fcntl
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvcellar.errors import ModelNotFound
from kvcellar.files import Files
from kvcellar.library.library import Library
from kvcellar.library.manifest import Manifest
from tests.library.made import FakeTools, adapter, made, model, tree
from tests.small_process import in_small_process
from tests.tiers.faults import Counting, Killing, Recording, after_power_loss

NEW = "FROM ./m\nDRAFT ./d\nADAPTER ./p\nSYSTEM new"
TYPES = {"quantize": "int8", "draft_quantize": "int4"}
BATCHES = 6


@pytest.fixture
def here(tmp_path) -> Path:
    model(tmp_path / "m", 1)
    model(tmp_path / "d", 2, size=100)
    model(tmp_path / "old", 3)
    adapter(tmp_path / "p")
    return tmp_path


class Slow(FakeTools):
    """Takes its time, so that a kill at a random moment is in each part of a creation."""

    def quantize(self, source: Path, into: Path, kind: str, *, draft: bool):
        time.sleep(0.001)
        return super().quantize(source, into, kind, draft=draft)


def in_child(work: Callable[[], object]) -> int:
    """Fork a process that does `work` and ends; returns its id."""
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent sees the code alone
            os._exit(1)
        os._exit(0)
    return child


def create(root: Path, here: Path, **options) -> Manifest:
    return made(Library(root, options.pop("files", None)), "a", NEW, here, **TYPES, **options).model.manifest


def check_after_kill(root: Path, here: Path, old: Manifest | None, new: Manifest, before: dict[str, bytes]) -> None:
    """The name has its old model or its new one, whole; the next change removes the rest; a second run ends in the same
    manifest."""
    library = Library(root)
    found = library.find("a")
    assert (None if found is None else found.manifest) in (old, new)
    library.check()
    library.collect()
    if found is None or found.manifest == old:
        assert tree(library) == before
    assert not any(path.startswith("tmp/") for path in tree(library))
    assert create(root, here) == new
    library.check()


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new(here, batch, replaces):
    in_small_process(kill_before_operations, str(here), batch, replaces)


def kill_before_operations(folder: str, batch: int, replaces: bool) -> None:
    here = Path(folder)
    counted = Counting()
    new = create(here / "counted", here, files=counted)
    for number in range(batch, counted.done, BATCHES):
        root = here / str(number)
        old = made(Library(root), "a", "FROM ./old", here).model.manifest if replaces else None
        before = tree(Library(root)) if replaces else {}
        child = in_child(lambda root=root, number=number: create(root, here, files=Killing(number)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, number
        check_after_kill(root, here, old, new, before)
        shutil.rmtree(root)


@pytest.mark.parametrize("batch", range(5))
def test_a_kill_at_a_random_moment_leaves_the_old_or_the_new(here, batch):
    """Ten of the fifty kills; each is after a part of the time that a creation takes."""
    in_small_process(kill_at_moments, str(here), batch)


def kill_at_moments(folder: str, batch: int) -> None:
    here = Path(folder)
    rng, started = random.Random(batch), time.monotonic()
    new = create(here / "measured", here, tools=Slow())
    seconds = time.monotonic() - started
    for kill in range(10):
        root = here / str(kill)
        old = made(Library(root), "a", "FROM ./old", here).model.manifest if kill % 2 else None
        before = tree(Library(root)) if old else {}
        child = in_child(lambda root=root: create(root, here, tools=Slow()))
        time.sleep(rng.random() * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_after_kill(root, here, old, new, before)
        shutil.rmtree(root)


@pytest.mark.parametrize("batch", range(3))
def test_a_kill_while_models_are_removed_or_copied_leaves_each_whole_or_gone(here, batch):
    in_small_process(kill_while_removing, str(here), batch)


def kill_while_removing(folder: str, batch: int) -> None:
    here = Path(folder)

    def work(library: Library) -> None:
        library.copy("a", "b")
        library.remove("a")

    root = here / "counted"
    new = create(root, here)
    counted = Counting()
    work(Library(root, counted))
    for number in range(batch, counted.done, 3):
        root = here / str(number)
        create(root, here)
        os.waitpid(in_child(lambda root=root, number=number: work(Library(root, Killing(number)))), 0)
        library = Library(root)
        found = [library.find(name) for name in "ab"]
        assert any(found), "the model is under one name at least"
        assert all(one is None or one.manifest == new for one in found)
        library.check()
        work_again(library)
        assert tree(library) == {}


def work_again(library: Library) -> None:
    for name in library.names():
        library.remove(str(name))


class Ordered(Recording):
    """Records the life of each file by the name that it gets, and the order of what makes names durable."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[tuple[list, bytes]] = []
        self.order: list[str] = []

    def create(self, path: Path) -> int:
        if path.name in ("part", "manifest"):
            self.trace = []
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.order.append(f"{target.parent.name}/")
        if source.name in ("part", "manifest"):
            self.finished.append((self.trace, target.read_bytes()))
            self.trace = []

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.order.append(f"sync {path.name}")


def test_a_power_loss_leaves_nothing_under_a_name_but_its_content(here):
    """Whatever of the unsynced writes is lost: what has its final name is whole. Names of blobs are durable before that
    of the manifest."""
    files = Ordered()
    made(Library(here / "library", files), "a", NEW, here)
    assert len(files.finished) == 7, "two configs, weights of all three, one tokenizer, the manifest"
    for trace, whole in files.finished:
        assert {content for content, named in after_power_loss(trace) if named} == {whole}
    assert files.order == ["blobs/"] * 6 + ["sync blobs", "views/", "sync manifests", "a/", "sync a"]


# -- several at a time ------------------------------------------------------------------------------------------------


def test_creations_of_one_name_at_a_time_end_in_the_model_of_one(here):
    root = here / "library"
    texts = [f"FROM ./{name}\nSYSTEM {i}" for i in range(4) for name in ("m", "old")]
    children = [in_child(lambda text=text: made(Library(root), "a", text, here)) for text in texts]
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    library = Library(root)
    library.check()
    manifest = library.resolve("a").manifest
    assert f"FROM {manifest.source}\nSYSTEM {manifest.system}" in texts
    library.collect()
    assert {path.split("/")[1] for path in tree(library) if path.startswith("blobs/")} == {
        file.blob for file in manifest.files.values()
    }


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_what_is_being_created_is_not_removed_by_others(here, number):
    """Before some operation of a creation, another process removes the only other model with the same files."""
    root = here / "library"
    other = Library(root)
    made(other, "b", NEW, here, **TYPES)

    class Meanwhile(Counting):
        def at(self, count: int, name: str, arguments: tuple) -> None:
            if count == number and not self.locked():
                if other.find("b") is not None:
                    other.remove("b")
                other.collect()

        def locked(self) -> bool:
            import fcntl

            opened = os.open(root / "tmp", os.O_RDONLY)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(opened)
            return False

    found = create(root, here, files=Meanwhile())
    assert Library(root).resolve("a").manifest == found
    Library(root).check()


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_stay(here):
    library = Library(here / "library")
    made(library, "b", "FROM ./old", here)
    for name in ("1-dead", "2-empty"):
        (library.root / "tmp" / name).mkdir()
    (library.root / "tmp/1-dead/lock").write_bytes(b"")
    (library.root / "tmp/1-dead/part").write_bytes(b"x")
    (library.root / "tmp/stray").write_bytes(b"x")
    (library.root / "blobs/sha256-stray").write_bytes(b"x")
    (library.root / "views/stray").mkdir()
    with library.disk.staging() as staging:
        put = staging.put(here / "m/config.json", "config.json")
        library.collect()
        assert [path.name for path in (library.root / "tmp").iterdir()] == [staging.directory.name]
        assert (library.root / "blobs" / put.blob).is_file()
    library.collect()
    assert not any("stray" in path or path.startswith("tmp/") for path in tree(library))
    assert not (library.root / "blobs" / put.blob).exists()
    library.check()


def test_a_staging_that_ends_while_others_look_for_the_dead_is_no_error(here):
    class Late(Files):
        def names(self, directory: Path) -> Iterator[str]:
            yield from (*super().names(directory), *(["1-ended"] if directory.name == "tmp" else []))

    made(Library(here / "library", Late()), "a", "FROM ./m", here)
    Library(here / "library").check()


def test_a_blob_that_is_removed_while_one_of_its_size_is_looked_for_is_no_error(here, monkeypatch):
    class Gone:
        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            raise FileNotFoundError

    scan = os.scandir

    def scandir(path):
        return nullcontext([Gone()]) if Path(path).name == "blobs" else scan(path)

    library = Library(here / "library")
    with library.disk.staging() as staging, monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        put = staging.put(here / "m/config.json", "config.json")
    assert library.disk.damage(put) is None


def test_a_model_that_is_replaced_while_it_is_resolved_is_the_new_one(here):
    class Replacing(Files):
        times = 0

        def close(self, opened: int) -> None:
            super().close(opened)
            self.times += 1
            if self.times == 1:  # the manifest was read
                made(Library(here / "library"), "a", "FROM ./m", here)

    made(Library(here / "library"), "a", "FROM ./old", here)
    found = Library(here / "library", Replacing()).resolve("a")
    assert found == Library(here / "library").resolve("a")
    assert found.manifest.source == "./m"


def test_a_model_that_is_removed_after_its_name_was_read_is_not_found(here):
    class Removing(Library):
        def _existing(self, name):
            found = super()._existing(name)
            Library(self.root).remove(str(name))
            return found

    for read in (Removing.resolve, Removing.manifest, Removing.modified):
        made(Library(here / "library"), "a", "FROM ./m", here)
        with pytest.raises(ModelNotFound, match="there is no model 'a:latest' in the library"):
            read(Removing(here / "library"), "a")


@pytest.mark.parametrize("fails", ["fcntl.flock", "os.mkdir"])
def test_a_staging_that_cannot_begin_leaves_no_file_open(tmp_path, monkeypatch, fails) -> None:
    library = Library(tmp_path / "library")
    with library.disk.staging():
        pass
    before, calls = len(os.listdir("/proc/self/fd")), 0
    module, name = fails.split(".")
    target = {"os": os, "fcntl": fcntl}[module]
    act = getattr(target, name)

    def failing(*given: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is of the library's lock, or of the directory
            raise OSError("injected")
        return act(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing)
        with pytest.raises(OSError, match="injected"), library.disk.staging():
            pass
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((tmp_path / "library" / "tmp").iterdir()) == []
