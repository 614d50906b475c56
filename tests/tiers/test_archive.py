"""Documents by owner and name: replaced as a whole or not at all, verified when they are read, within their caps."""

import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.files import Files
from kvcellar.memory.tiers import archive as module
from kvcellar.memory.tiers.archive import (
    PART,
    Archive,
    Changed,
    DiskArchive,
    Document,
    Full,
    Sizes,
    TooLarge,
    file_of,
)
from kvcellar.memory.tiers.codec import AesGcm, Damaged, Foreign
from kvcellar.places import NoPlace
from tests.tiers.places import Make

CAP = 4096


@pytest.fixture
def archive(make: Make) -> Archive:
    return make(CAP, share=0.5)


def seals(archive: Archive, *names: str, owner: str = "a") -> list[bytes]:
    return [archive.put(owner, name, b"head", name.encode()) for name in names]


def test_what_was_put_is_returned_until_it_is_deleted(archive: Archive) -> None:
    assert archive.get("a", "x") is None
    assert not archive.delete("a", "x")
    assert list(archive.heads("a")) == []
    seal = archive.put("a", "x", b"head", b"body")
    found = archive.get("a", "x")
    assert found is not None
    assert (found.head, found.body, found.seal) == (b"head", b"body", seal)
    assert list(archive.heads("a")) == [b"head"]
    assert archive.get("b", "x") is None
    assert list(archive.heads("b")) == []
    assert not archive.delete("b", "x")
    assert archive.delete("a", "x")
    assert archive.get("a", "x") is None


def test_a_document_is_replaced_only_after_the_one_that_was_named(archive: Archive) -> None:
    first = archive.put("a", "x", b"head", b"one", after=b"")
    with pytest.raises(Changed):
        archive.put("a", "x", b"head", b"two", after=b"")
    second = archive.put("a", "x", b"head", b"two", after=first)
    with pytest.raises(Changed):
        archive.put("a", "x", b"head", b"three", after=first)
    assert archive.get("a", "x").body == b"two"
    archive.put("a", "x", b"head", b"three")
    archive.delete("a", "x")
    with pytest.raises(Changed):
        archive.put("a", "x", b"head", b"four", after=second)
    assert archive.get("a", "x") is None


def test_an_owner_has_half_of_the_bytes_and_all_owners_the_cap(archive: Archive) -> None:
    big = bytes(CAP // 2 - 200)
    archive.put("a", "x", b"", big)
    with pytest.raises(Full, match="2048 bytes are allowed"):
        archive.put("a", "y", b"", bytes(200))
    archive.put("a", "x", b"", big)  # in place of itself
    archive.put("b", "x", b"", big)
    with pytest.raises(Full, match=r"^it has \d+ bytes, and there is no space left for documents$"):
        archive.put("c", "x", b"", bytes(400))  # the message has no sizes of other owners
    assert archive.get("c", "x") is None
    archive.delete("b", "x")
    archive.put("c", "x", b"", bytes(400))


def test_an_owner_has_so_many_documents(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    seals(archive, "x", "y", "z")
    with pytest.raises(Full, match="at most 3"):
        seals(archive, "another")
    seals(archive, "z")
    seals(archive, "x", owner="b")


def test_a_document_over_the_limit_of_one_is_refused(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT", 100)
    with pytest.raises(TooLarge, match="at most 100 are allowed"):
        archive.put("a", "x", b"", bytes(101))


# -- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "documents"


@pytest.fixture
def disk(folder: Path) -> DiskArchive:
    return DiskArchive(folder, CAP)


def test_another_process_finds_what_was_put_and_only_its_user_can_read_it(disk: DiskArchive, folder: Path) -> None:
    disk.put("a", "x", b"head", b"body")
    assert DiskArchive(folder, CAP).get("a", "x").body == b"body"
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(NoPlace):
        disk.put("a", "y", b"head", b"body")


def test_nothing_is_written_before_something_is_stored(disk: DiskArchive, folder: Path) -> None:
    assert (disk.get("a", "x"), list(disk.heads("a")), disk.delete("a", "x")) == (None, [], False)
    assert not folder.exists()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_was_changed_anywhere_is_damaged_and_others_are_not(
    data: Any, disk: DiskArchive, folder: Path
) -> None:
    seals(disk, "x", "y")
    path = folder / file_of("a", "x")
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["bit", "cut", "longer", "other"])):
        case "bit":
            at = data.draw(st.integers(0, 8 * len(content) - 1))
            content[at // 8] ^= 1 << at % 8
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "longer":
            content += b"\0"
        case _:
            content[:] = data.draw(st.binary(max_size=200))
    path.write_bytes(content)
    with pytest.raises((Damaged, Foreign)):
        disk.get("a", "x")
    assert disk.get("a", "y").body == b"y"
    assert sum(head == b"head" for head in disk.heads("a")) >= 1
    assert disk.delete("a", "x")


def test_the_size_in_a_file_is_checked_before_it_is_allocated(disk: DiskArchive, folder: Path) -> None:
    seals(disk, "x")
    path = folder / file_of("a", "x")
    content = path.read_bytes()
    path.write_bytes(content[:16] + struct.pack("<Q", 1 << 62) + content[24:])
    with pytest.raises(Damaged, match="bytes"):
        disk.get("a", "x")


def test_what_is_no_file_is_not_followed(disk: DiskArchive, folder: Path) -> None:
    seals(disk, "y")
    (folder / file_of("a", "x")).symlink_to(folder / file_of("a", "y"))
    with pytest.raises(OSError, match="symbolic links"):
        disk.get("a", "x")
    assert disk.delete("a", "x")
    os.mkfifo(folder / file_of("a", "x"))
    with pytest.raises((Damaged, OSError)):
        disk.get("a", "x")


class Failing(Files):
    """Fails the operation of a name, so many of them after the first."""

    def __init__(self) -> None:
        self.operation = ""

    def __getattribute__(self, name: str) -> Any:
        if name != "operation" and name == object.__getattribute__(self, "operation"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("operation", ["create", "write", "write_some", "sync", "close", "rename"])
def test_a_document_that_cannot_be_written_leaves_the_one_before_and_no_file(folder: Path, operation: str) -> None:
    files = Failing()
    disk = DiskArchive(folder, CAP, files=files)
    seals(disk, "x")
    files.operation = operation
    with pytest.raises(OSError, match="No space left"):
        disk.put("a", "x", b"head", b"another")
    files.operation = ""
    assert disk.get("a", "x").body == b"x"
    assert len(list(folder.iterdir())) == 1


def test_what_a_killed_process_was_writing_is_deleted_and_never_read(disk: DiskArchive, folder: Path) -> None:
    seals(disk, "x")
    left = folder / f"{file_of('a', 'x')}-0000{PART}"
    left.write_bytes(bytes(CAP))
    assert list(disk.heads("a")) == [b"head"]
    seals(DiskArchive(folder, CAP), "y")
    assert not left.exists()


def test_a_new_directory_is_durable_before_its_first_document(folder: Path) -> None:
    synced = list[Path]()

    class Recording(Files):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    disk = DiskArchive(folder, CAP, files=Recording())
    seals(disk, "x", "y")
    assert synced == [folder.parent, folder, folder]


class Listing(Files):
    """Counts how often a directory is listed."""

    def __init__(self) -> None:
        self.listed = 0.0

    def names(self, directory: Path) -> Iterator[str]:
        self.listed += 0.5  # once for files that are being written, and for sizes
        return super().names(directory)


def test_two_that_write_in_turn_list_the_directory_once_each(folder: Path) -> None:
    files = Listing(), Listing()
    both = [DiskArchive(folder, 50 * CAP, files=one) for one in files]
    for number in range(40):
        one = both[number % 2]
        one.put("ab"[number % 3 == 0], f"x{number % 7}", b"head", bytes(number))
        with suppress(Full, Changed):
            one.put("a", "new", b"", bytes(60 * CAP if number % 4 else 1), after=b"")
        one.delete("a", f"x{number % 5}")
        one.delete("a", "none")
    assert [one.listed for one in files] == [1, 1]
    assert [vars(one._counted()) for one in both] == [
        vars(Sizes((f.name, f.stat().st_size) for f in folder.iterdir()))
    ] * 2


def test_after_more_changes_than_are_followed_or_a_change_that_failed_files_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLLOWED", followed := 64)
    files = Listing()
    one, other = DiskArchive(folder, 50 * CAP, files=files), DiskArchive(folder, 50 * CAP)
    seals(one, "x")
    seals(other, *(f"y{number}" for number in range(followed)))
    seals(one, "x")
    assert files.listed == 1
    seals(other, *(f"y{number}" for number in range(followed + 1)))
    seals(one, "x")
    assert files.listed == 2
    failing = Failing()
    third = DiskArchive(folder, 50 * CAP, files=failing)
    seals(third, "x")
    failing.operation = "create"
    with pytest.raises(OSError, match="space"):
        seals(third, "z")
    seals(one, "x")
    assert files.listed == 3
    one.check()


def test_of_many_that_replace_the_same_document_one_succeeds(folder: Path) -> None:
    first = DiskArchive(folder, CAP).put("a", "x", b"", b"first")
    done, changed = [], []

    def replace(number: int) -> None:
        try:
            done.append(DiskArchive(folder, CAP).put("a", "x", b"", str(number).encode(), after=first))
        except Changed:
            changed.append(number)

    threads = [threading.Thread(target=replace, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(changed)) == (1, 7)
    assert DiskArchive(folder, CAP).get("a", "x").seal == done[0]


def test_a_process_that_writes_for_ever_blocks_no_other(disk: DiskArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    seals(disk, "x")
    monkeypatch.setattr(module, "WAIT", 0.0)
    with disk._locked(), pytest.raises(TimeoutError, match="another process"):
        seals(disk, "y")


def test_the_cap_is_no_more_than_a_share_of_what_is_free(folder: Path) -> None:
    class Small(Files):
        def free(self, directory: Path) -> int:
            return 1000

    with pytest.raises(Full, match="100 bytes are allowed"):
        DiskArchive(folder, CAP, files=Small()).put("a", "x", b"", bytes(200))


def test_a_document_is_replaced_only_where_both_fit_at_the_same_time(folder: Path) -> None:
    disk = DiskArchive(folder, CAP)
    disk.put("a", "x", b"", bytes(CAP // 2 + 100))
    with pytest.raises(Full, match="no space left for documents"):
        disk.put("a", "x", b"", bytes(CAP // 2))
    disk.put("a", "x", b"", bytes(CAP // 2 - 400))


def test_with_a_key_text_and_names_are_hidden_and_another_key_reads_nothing(folder: Path) -> None:
    pytest.importorskip("cryptography", reason="AES-GCM needs the package cryptography")
    own = DiskArchive(folder, CAP, cipher=AesGcm(bytes(32)), secret=b"own")
    seal = own.put("a", "x", b"a head", b"a body")
    assert own.get("a", "x") == Document(b"a head", b"a body", seal)
    assert list(own.heads("a")) == [b"a head"]
    own.put("a", "x", b"a head", b"another body", after=seal)
    (file,) = folder.iterdir()
    assert file.name != file_of("a", "x")
    assert b"body" not in file.read_bytes()
    assert b"head" not in file.read_bytes()
    assert DiskArchive(folder, CAP).get("a", "x") is None
    other = DiskArchive(folder, CAP, cipher=AesGcm(bytes(31) + b"1"), secret=b"own")
    with pytest.raises(Foreign, match="another key"):
        other.get("a", "x")
    assert all(isinstance(head, Foreign) for head in other.heads("a"))
    file.rename(folder / file_of("a", "y", b"own"))
    with pytest.raises(Foreign):
        own.get("a", "y")
