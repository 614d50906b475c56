"""Sizes in files and objects that no store has written: nothing is allocated for them before they were compared with
what is known of the entry, or with a limit."""

import io
import json
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from kvcellar.files import Files
from kvcellar.memory.retention import DEFAULT
from kvcellar.memory.tiers import remote, upkeep
from kvcellar.memory.tiers.codec import (
    DIGEST,
    HEADER_LIMIT,
    MOST_CHUNKS,
    START,
    TEXT_LIMIT,
    AesGcm,
    Cipher,
    Plain,
    Replaced,
    digest,
    encoded,
    head_of,
    sealed_meta,
)
from kvcellar.memory.tiers.identity import FileDigests
from kvcellar.memory.tiers.objects import Found
from kvcellar.memory.tiers.remote import AHEAD, FIRST, RemoteTier
from kvcellar.memory.tiers.tier import fresh
from tests.tiers.in_memory import InMemory
from tests.tiers.made import IDENTITY, content, made, store

MOST = 64 << 20  # bytes of Python objects: texts of 1 MiB take up to 30 times as many
ONE = made(1)
SECRET = bytes(range(32))


@contextmanager
def allocating(most: int) -> Iterator[None]:
    """The block allocates no more than so many bytes at any time."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= most, f"{peak >> 20} MiB were allocated"


@dataclass(frozen=True)
class Forged:
    """A file that says of itself what it likes: header and seal are right, all between them is zeros."""

    head: bytes
    size: int
    chunks: int

    def write(self, path: Path) -> None:
        path.write_bytes(self.head)
        os.truncate(path, self.size)
        if self.chunks <= 1 << 20:
            with path.open("r+b") as file:
                file.seek(-DIGEST, os.SEEK_END)
                file.write(digest(self.head[-DIGEST:], bytes(DIGEST * self.chunks)))


def forged(meta: bytes, *, chunks: int, payload: int, key: bytes = ONE[0].key) -> Forged:
    head = head_of(IDENTITY, replace(ONE[0], key=key), DEFAULT, meta, Plain())[START:-DIGEST]
    start = struct.pack("<8sIIIQ", b"kvcellar", 3, len(head), chunks, payload) + head
    whole = start + digest(start)
    return Forged(whole, len(whole) + payload + DIGEST * (chunks + 1), chunks)


def described(text: bytes, *, tokens: int = 3, record: bytes = b"", cipher: Cipher | None = None) -> bytes:
    content = struct.pack("<I", len(text)) + text + bytes(8 * tokens) + record
    return (cipher or Plain()).mark + bytes((cipher or Plain()).seal(content, ONE[0].key))


def text(sizes: list[int], *, tokens: int = 3) -> bytes:
    return json.dumps({"namespace": "n", "start": 0, "end": tokens, "sizes": sizes, "tokens": 8 * tokens}).encode()


BOMBS = {
    "lists": b"[[]" + b",[]" * (4 << 20) + b"]",
    "numbers": b"[" + b"1," * (4 << 20) + b"1]",
    "nested": b'{"a":' * (1 << 20),
    "spaces": b" " * (16 << 20),
}
SAID = sealed_meta(ONE[0], Plain())
FORGED = {
    **{f"{n} chunks": partial(forged, SAID, chunks=n, payload=ONE[0].size) for n in (1 << 20, 1 << 22, 1 << 26)},
    **{f"2^{bits} bytes": partial(forged, SAID, chunks=2, payload=1 << bits) for bits in (30, 40, 60)},
    **{f"{bomb}": lambda bomb=bomb: forged(described(BOMBS[bomb]), chunks=2, payload=60) for bomb in BOMBS},
    **{
        f"{bomb} in its record": lambda bomb=bomb: forged(
            described(text([40, 20]), record=BOMBS[bomb]), chunks=2, payload=ONE[0].size
        )
        for bomb in BOMBS
    },
    "sizes": lambda: forged(described(text([1] * (1 << 20))), chunks=1 << 20, payload=1 << 20),
    "tokens": lambda: forged(described(text([40, 20], tokens=1 << 21), tokens=1 << 21), chunks=2, payload=60),
    "large chunks": lambda: forged(
        sealed_meta(replace(ONE[0], sizes=(1 << 27, 1 << 27)), Plain()), chunks=2, payload=1 << 28
    ),
}
kinds = pytest.mark.parametrize("kind", FORGED)


def file_of(directory: Path) -> Path:
    (path,) = (directory / "data").iterdir()
    return path


def written(one: Forged, directory: Path) -> None:
    try:
        one.write(file_of(directory))
    except OSError:
        pytest.skip("the file system has no files of that size")


@kinds
@pytest.mark.parametrize("rebuilt", [False, True], ids=["row", "no row"])
def test_a_forged_file_is_refused_before_anything_is_allocated_for_it(tmp_path, kind, rebuilt) -> None:
    with closing(store(tmp_path, max_bytes=1 << 62)) as disk:
        assert disk.put(*ONE)
    if rebuilt:
        (tmp_path / "index.sqlite").unlink()
    written(FORGED[kind](), tmp_path)
    with allocating(MOST), closing(store(tmp_path, max_bytes=1 << 62)) as disk:
        if not (rebuilt and kind == "large chunks"):  # then its caller has the memory: see `Space`
            assert content(disk, ONE[0].key) is None
            assert not disk.entries()


@kinds
@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
def test_a_forged_file_is_refused_where_its_row_agrees(tmp_path, kind, keyed) -> None:
    if keyed:
        pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    one, cipher = FORGED[kind](), AesGcm(SECRET) if keyed else Plain()
    with closing(store(tmp_path, cipher=cipher, max_bytes=1 << 62)) as disk:
        assert disk.put(*ONE)
        with disk._index.transaction() as do:
            do("UPDATE entries SET size=?, seal=?", (one.size, bytes(DIGEST)))
    written(one, tmp_path)
    with closing(store(tmp_path, cipher=cipher, max_bytes=1 << 62)) as disk, allocating(MOST):
        assert content(disk, ONE[0].key) is None
        upkeep.verified(disk)
        assert not disk.rows() or kind == "large chunks"


class CountedFiles(Files):
    read_bytes = 0

    def read(self, file: int, n: int, at: int) -> bytes:
        self.read_bytes += n
        return super().read(file, n, at)


def test_nothing_is_read_of_a_file_that_has_another_size_than_its_row_says(tmp_path) -> None:
    files = CountedFiles()
    with closing(store(tmp_path, files=files)) as disk:
        assert disk.put(*ONE)
        os.truncate(file_of(tmp_path), 1 << 20)
        assert content(disk, ONE[0].key) is None
        assert not files.read_bytes


class Endless(InMemory):
    """Objects that are forged: of each, so many zeros follow its head."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, int] = {}

    def read(self, names: Sequence[str], n: int) -> list[Found]:
        return [self._longer(one, found, n) for one, found in zip(names, super().read(names, n), strict=True)]

    def _longer(self, name: str, found: Found, n: int) -> Found:
        if found is None or name not in self.lengths:
            return found
        more = min(n, self.lengths[name])
        assert more <= MOST
        return found[0] + bytes(max(0, more - len(found[0]))), self.lengths[name]


@kinds
@pytest.mark.parametrize("known", ["stored", "listed", "new"])
def test_no_more_is_asked_of_a_remote_store_than_an_object_is_known_to_have(kind, known) -> None:
    one, objects, name = FORGED[kind](), Endless(), ONE[0].key.hex()
    writer = RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    assert writer.put(*ONE)
    reader = writer if known == "stored" else RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    if known == "listed":
        assert reader.entries()
    size = len(objects.content[name])
    objects.content[name], objects.lengths[name], objects.asked = one.head, one.size, 0

    def take(size: int) -> memoryview:
        if size > max(ONE[0].sizes):
            raise Replaced("it is larger than was known")
        return fresh(size)

    with allocating(MOST):
        assert reader.get(ONE[0].key, take) is None
        assert objects.asked <= (FIRST + START + HEADER_LIMIT + DIGEST if known == "new" else size + 1)
        reader.entries()
    assert reader.failures.total() > 0


def test_memory_is_taken_before_an_object_is_read() -> None:
    objects, sizes = InMemory(), (1 << 20, 1 << 20)
    large = replace(ONE[0], sizes=sizes)
    assert RemoteTier(objects, identity=IDENTITY, cap=1 << 30).put(large, [bytes(1 << 20)] * 2)
    reader, objects.asked = RemoteTier(objects, identity=IDENTITY, cap=1 << 30), 0
    reserved = iter([1 << 20])

    def take(size: int) -> memoryview:
        if next(reserved, 0) < size:
            raise Replaced("it is larger")
        return memoryview(bytearray(size))

    assert reader.get(large.key, take) is None
    assert objects.asked == FIRST
    assert reader.failures == {"replaced": 1}


def test_so_many_objects_are_listed_and_so_many_bytes_of_descriptions_kept(monkeypatch) -> None:
    objects = InMemory()
    writer = RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    for seed in range(20):
        assert writer.put(*made(seed))
    monkeypatch.setattr(remote, "MOST_LISTED", 7)
    assert len(RemoteTier(objects, identity=IDENTITY, cap=1 << 20).entries()) == 7
    assert len(writer.entries()) == 20, "what was not listed is there all the same"
    monkeypatch.setattr(remote, "MOST_LISTED", 100)
    monkeypatch.setattr(remote, "MOST_DESCRIBED", 200)
    assert len(RemoteTier(objects, identity=IDENTITY, cap=1 << 20).entries()) == AHEAD, "so many are read at once"


def test_without_a_cipher_a_process_reads_what_it_has_stored_or_nothing() -> None:
    objects, other = InMemory(), (ONE[0], [bytes(size) for size in ONE[0].sizes])
    writer = RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    assert writer.put(*ONE)
    head = head_of(IDENTITY, ONE[0], DEFAULT, sealed_meta(ONE[0], Plain()), Plain())
    objects.content[ONE[0].key.hex()] = b"".join(encoded(head, *other, Plain()))
    reader = RemoteTier(objects, identity=IDENTITY, cap=1 << 20)
    assert content(reader, ONE[0].key) == other, "what another process has stored cannot be verified without a key"
    assert content(writer, ONE[0].key) is None
    assert writer.failures == {"replaced": 1}
    assert objects.content, "others may use it"


@pytest.mark.parametrize(
    "large",
    [
        replace(ONE[0], sizes=(1,) * (MOST_CHUNKS + 1)),
        replace(ONE[0], record=bytes(TEXT_LIMIT + 1)),
        replace(ONE[0], namespace="n" * TEXT_LIMIT),
        made(2, tokens=1 << 19)[0],
    ],
    ids=["chunks", "record", "namespace", "tokens"],
)
def test_what_would_not_be_read_is_not_stored(tmp_path, large) -> None:
    objects = InMemory()
    tiers = (store(tmp_path, max_bytes=1 << 30), RemoteTier(objects, identity=IDENTITY, cap=1 << 30))
    for tier in tiers:
        assert not tier.put(large, [])
        assert tier.failures == {"too large": 1}
    assert not objects.content
    tiers[0].close()


class Counting(io.RawIOBase):
    """An archive with a member of `size` bytes, which begins with `head`; counts what is read of it."""

    def __init__(self, head: bytes, size: int) -> None:
        manifest, member, end = (tarfile.TarInfo(name) for name in (upkeep.MANIFEST, "a", upkeep.END))
        about = json.dumps({"format": upkeep.FORMAT}).encode()
        manifest.size, member.size = len(about), size
        block = tarfile.BLOCKSIZE
        first = manifest.tobuf() + about + bytes(-len(about) % block) + member.tobuf() + head
        self._first, self._last = first, end.tobuf()
        self._zeros = size - len(head) + -size % block
        self.read_at_once = 0

    def read(self, n: int = -1, /) -> bytes:
        self.read_at_once = max(self.read_at_once, n)
        if self._first:
            found, self._first = self._first[:n], self._first[n:]
        elif self._zeros:
            found = bytes(min(n, self._zeros))
            self._zeros -= len(found)
        else:
            found, self._last = self._last[:n], self._last[n:]
        return found


@kinds
def test_of_an_archive_nothing_is_kept_that_the_store_could_not_have(tmp_path, kind) -> None:
    one = FORGED[kind]()
    source = Counting(one.head, max(min(one.size, 1 << 29), len(one.head)))
    with closing(store(tmp_path)) as disk, allocating(MOST):
        found = upkeep.imported(source, lambda _: disk)
        assert (found.stored, sum(found.refused.values())) == (0, 1)
        assert source.read_at_once <= upkeep.PART


def test_an_entry_is_exported_in_parts(tmp_path) -> None:
    snapshot, chunks = made(1, size=8 << 20)
    with closing(store(tmp_path, max_bytes=1 << 30)) as disk:
        assert disk.put(snapshot, chunks)
        with allocating(14 << 20):  # a chunk at a time
            assert max(map(len, upkeep.exported(disk))) <= upkeep.PART


def test_remembered_digests_are_read_within_a_limit(tmp_path) -> None:
    (tmp_path / "digests.json").write_bytes(b" " * (32 << 20))
    with allocating(4 << 20):
        assert FileDigests(tmp_path)._known == {}
