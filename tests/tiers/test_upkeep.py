"""What an operator does with a store: entries are listed, verified, removed, and moved by archives."""

import io
import json
import tarfile
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.memory.snapshot import Snapshot, looking_ahead
from kvcellar.memory.tiers.codec import MAGIC, AesGcm
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.tier import Tier
from kvcellar.memory.tiers.upkeep import (
    check_named,
    collected,
    entries,
    exported,
    imported,
    opened,
    paths,
    selected,
    verified,
)
from tests.tiers.made import IDENTITY, content, made, store

OTHER = bytes(reversed(IDENTITY))


def three(disk: DiskTier) -> list[tuple[Snapshot, list[bytes]]]:
    """A chain of two, and one that stands alone."""
    first = made(1)
    found = [first, made(2, first[0]), made(3)]
    for one in found:
        assert disk.put(*one)
    return found


def archive(disk: DiskTier) -> bytes:
    return b"".join(exported(disk))


def only(disk: Tier):
    return lambda identity: disk if identity == IDENTITY else None


def test_entries_of_all_identities_are_listed_parents_first_with_their_texts(tmp_path) -> None:
    disk = store(tmp_path)
    first, second, third = (snapshot for snapshot, _ in three(disk))
    store(tmp_path, identity=OTHER).put(*made(4))
    listed = entries(opened(tmp_path))
    keys = [one.row.key for one in listed]
    assert sorted(keys) == sorted([first.key, second.key, third.key, made(4)[0].key])
    assert keys.index(first.key) < keys.index(second.key)
    assert {one.row.identity for one in listed} == {IDENTITY, OTHER}
    assert paths(listed)[second.key] == first.tokens + second.tokens


def test_entries_are_selected_by_namespace_by_key_and_by_the_beginning_of_their_text(tmp_path) -> None:
    disk = store(tmp_path)
    first, second, third = (snapshot for snapshot, _ in three(disk))

    def keys(namespace: str | None = None, entry: str | None = None, prefix: bytes = b"") -> set[bytes]:
        return set(selected(entries(disk), namespace=namespace, entry=entry, prefix=prefix))

    assert keys() == keys("n") == {first.key, second.key, third.key}
    assert keys("another") == keys(entry="") == keys(entry="zz") == keys(prefix=bytes(8) * 99) == set()
    assert keys(entry=first.key.hex()) == {first.key, second.key}, "what continues it, too"
    assert keys(entry=second.key.hex()[:12]) == {second.key}
    assert keys(prefix=first.tokens[:8]) >= {first.key, second.key}
    assert keys(prefix=first.tokens + second.tokens[:8]) == {second.key}


@pytest.mark.parametrize("ahead", [1, 2])
def test_entries_that_look_ahead_are_selected_by_the_tokens_that_they_depend_on(tmp_path, ahead: int) -> None:
    disk, text = store(tmp_path), [5, 6, 7, 8, 9]
    stored, chunks = made(1, tokens=len(text) - ahead)
    entry = replace(stored, tokens=looking_ahead(text, ahead).tobytes())
    assert disk.put(entry, chunks)

    def found(tokens: list[int]) -> list[bytes]:
        prefix = array("q", tokens).tobytes()
        return selected(entries(disk), namespace=None, entry=None, prefix=prefix)

    for length in range(ahead + 1, len(text) + 1):
        assert found(text[:length]) == [entry.key]
        assert found([*text[: length - 1], 4]) == []
    assert found([*text, 1]) == []


def test_what_another_key_has_sealed_is_listed_without_its_text(tmp_path) -> None:
    disk = store(tmp_path, cipher=AesGcm(bytes(32)))
    three(disk)
    listed = entries(opened(tmp_path))
    assert [one.snapshot for one in listed] == [None] * 3
    assert paths(listed) == {}
    assert verified(opened(tmp_path)).unreadable == 3
    assert verified(opened(tmp_path, AesGcm(bytes(32)))).read == 3


def test_a_directory_that_is_no_store_is_left_as_it_is(tmp_path) -> None:
    with pytest.raises(BadRequest, match="is no store"):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())


def test_verifying_removes_what_is_damaged_and_collecting_what_continued_it(tmp_path) -> None:
    disk = store(tmp_path)
    first, second, third = (snapshot for snapshot, _ in three(disk))
    row = next(row for row in disk.rows() if row.key == first.key)
    file = tmp_path / "data" / row.name
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    found = verified(disk)
    assert (found.read, found.damaged, found.unreadable) == (2, 1, 0)
    assert collected(disk) == 1
    assert [row.key for row in disk.rows()] == [third.key]
    assert collected(disk) == 0
    assert not disk.contains(second.key)


@given(st.booleans())
def test_an_archive_brings_back_what_it_was_made_of(sealed) -> None:
    import tempfile

    cipher = AesGcm(bytes(32)) if sealed else None
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        disk, other = store(Path(one), cipher=cipher), store(Path(two))
        whole = three(disk)
        found = imported(io.BytesIO(archive(disk)), only(other), cipher)
        assert (found.stored, found.refused) == (3, {})
        assert [content(other, snapshot.key) for snapshot, _ in whole] == whole
        assert imported(io.BytesIO(archive(disk)), only(other), cipher).stored == 3, "again"


def test_entries_of_another_identity_are_refused_with_the_reason(tmp_path) -> None:
    disk = store(tmp_path / "one", identity=OTHER)
    assert disk.put(*made(1))
    other = store(tmp_path / "two")
    found = imported(io.BytesIO(archive(disk)), only(other))
    assert found.stored == 0
    assert "other weights" in next(iter(found.refused))
    assert other.rows() == []


def test_an_entry_whose_parent_is_missing_is_refused(tmp_path) -> None:
    disk, other = store(tmp_path / "one"), store(tmp_path / "two")
    first, _, third = (snapshot for snapshot, _ in three(disk))
    disk.remove([first.key])
    found = imported(io.BytesIO(archive(disk)), only(other))
    assert (found.stored, found.refused) == (1, {"it continues an entry that is not there": 1})
    assert [row.key for row in other.rows()] == [third.key]


def test_no_changed_byte_of_an_archive_is_stored(tmp_path) -> None:
    disk = store(tmp_path / "one")
    assert disk.put(*made(1))
    whole = archive(disk)
    start = whole.index(b"kvcellar", tarfile.BLOCKSIZE + 1)  # of the entry
    size = disk.rows()[0].size
    for at in range(start, start + size, 7):
        other = store(tmp_path / "two")
        changed = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        found = imported(io.BytesIO(changed), only(other))
        assert (found.stored, sum(found.refused.values()), other.rows()) == (0, 1, []), at
        other.close()


def tar(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as writing:
        for name, data in members:
            head = tarfile.TarInfo(name)
            head.size, head.type = len(data), kind
            writing.addfile(head, io.BytesIO(data))
    return made.getvalue()


MANIFEST = ("kvcellar.json", json.dumps({"format": 1}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a tar file" * 100,
        tar(("other.json", b"{}")),
        tar(("kvcellar.json", b"{")),
        tar(("kvcellar.json", b"[]")),
        tar(("kvcellar.json", b'{"format": 2}')),
        tar(("kvcellar.json", b" " * 5000)),
        tar(MANIFEST, kind=tarfile.SYMTYPE),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path, data) -> None:
    disk = store(tmp_path)
    with pytest.raises(KvcellarError, match="archive"):
        imported(io.BytesIO(data), only(disk))
    assert disk.rows() == []


def extended(size: int, kind: bytes) -> bytes:
    head = tarfile.TarInfo("x")
    head.size, head.type = size, kind
    return head.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.SYMTYPE])
@pytest.mark.parametrize("size", [512, 1 << 40])
def test_members_that_are_no_plain_files_are_refused_before_they_are_read(tmp_path, kind, size) -> None:
    first = tar(MANIFEST)[:1024]
    source = io.BytesIO(first + extended(size, kind) + bytes(10_000))
    with pytest.raises(KvcellarError, match="a member is no plain file"):
        imported(source, only(store(tmp_path)))
    assert source.tell() == len(first) + 512


@pytest.mark.parametrize("size", [-1, 1 << 40])
def test_sizes_of_members_are_checked_before_they_are_read(tmp_path, size) -> None:
    first = tar(MANIFEST)[:1024]
    source = io.BytesIO(first + extended(size, tarfile.REGTYPE) + bytes(10_000))
    with pytest.raises(KvcellarError, match="a member is no plain file"):
        imported(source, only(store(tmp_path)))
    assert source.tell() == len(first) + 512


def test_what_cannot_be_used_is_refused(tmp_path) -> None:
    def check(snapshot: Snapshot) -> None:
        raise BadRequest("a record that cannot be read")

    disk, other = store(tmp_path / "one"), store(tmp_path / "two")
    three(disk)
    found = imported(io.BytesIO(archive(disk)), only(other), check=check)
    assert (found.stored, sum(found.refused.values()), len(found.refused), other.rows()) == (0, 3, 1, [])


def test_reasons_do_not_depend_on_what_an_archive_has(tmp_path) -> None:
    disk = store(tmp_path)
    content = [(f"{n}", MAGIC + n.to_bytes(4, "little") + bytes(16 + n)) for n in range(30)]
    found = imported(io.BytesIO(tar(MANIFEST, *content, ("end", b""))), only(disk))
    assert (found.stored, sum(found.refused.values())) == (0, 30)
    assert set(found.refused) == {"it is damaged", "it is of another version, or sealed with another key"}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ((None, None, None), "name what to remove"),
        ((None, None, ""), "the prefix is empty"),
        (("n", None, []), "the prefix is empty"),
        ((None, "", None), "12 to 64"),
        ((None, "0" * 11, None), "12 to 64"),
        ((None, "g" * 12, None), "12 to 64"),
        ((None, None, [1 << 64]), "token ids are from 0"),
        ((None, None, [-1]), "token ids are from 0"),
    ],
)
def test_what_would_remove_too_much_is_refused(named, message) -> None:
    with pytest.raises(BadRequest, match=message):
        check_named(*named)
    check_named("", "0" * 12, [0, 7])


@pytest.mark.parametrize("cut", [1600, 2300, 2800])
def test_an_archive_that_is_cut_off_keeps_what_came_before(tmp_path, cut) -> None:
    disk, other = store(tmp_path / "one"), store(tmp_path / "two")
    three(disk)
    with pytest.raises(KvcellarError, match="archive"):
        imported(io.BytesIO(archive(disk)[:-cut]), only(other))
    assert 1 <= len(other.rows()) <= 3
    assert verified(other).damaged == 0
