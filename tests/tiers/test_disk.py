"""The disk store: what was stored comes back bit for bit, or not at all."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.memory.retention import Retention
from kvcellar.memory.tiers.codec import AesGcm
from kvcellar.memory.tiers.disk import StoreUnusable
from kvcellar.memory.tiers.index import LEAVES
from kvcellar.memory.tiers.upkeep import verified
from tests.tiers.made import chains, content, made, store

EMPTY = 100_000  # bytes that are enough for an index of few entries, and its journal
LARGE, LARGER = 100_000, 152_000  # bytes of a chunk, and of an entry of two chunks at most


@pytest.fixture
def tmp_path(tmp_path) -> Iterator[Path]:
    """In memory where that is possible: a test makes hundreds of transactions durable."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


def only_file(directory: Path) -> Path:
    (path,) = (directory / "data").iterdir()
    return path


def test_what_was_stored_comes_back_after_a_restart_parents_first(tmp_path) -> None:
    first = made(1)
    second = made(2, first[0])
    third = made(3, second[0])
    opened = store(tmp_path)
    for snapshot, chunks in (third, first, second):
        assert opened.put(snapshot, chunks)
    opened.close()
    again = store(tmp_path)
    assert [stored.snapshot for stored in chains(again.entries())] == [first[0], second[0], third[0]]
    for one in (first, second, third):
        assert content(again, one[0].key) == one
    assert not again.failures


def test_a_key_is_stored_once(tmp_path) -> None:
    opened = store(tmp_path)
    assert opened.put(*made(1))
    size = opened.size()
    assert opened.put(*made(1))
    assert opened.size() == size
    assert only_file(tmp_path)


def test_what_continues_nothing_that_is_there_is_no_entry(tmp_path) -> None:
    opened, first = store(tmp_path), made(1)
    second = made(2, first[0])
    opened.put(*first)
    opened.put(*second)
    opened.remove([first[0].key])
    assert chains(opened.entries()) == []
    opened.put(*first)
    assert [stored.snapshot for stored in chains(opened.entries())] == [first[0], second[0]]


def test_other_identities_are_neither_listed_nor_read(tmp_path) -> None:
    opened, other = store(tmp_path), store(tmp_path, identity=bytes(32))
    opened.put(*made(1))
    assert other.entries() == []
    assert content(other, made(1)[0].key) is None
    assert [one.snapshot for one in opened.entries()] == [made(1)[0]]


def test_a_file_that_is_cut_off_anywhere_is_a_miss(tmp_path) -> None:
    one = made(1)
    opened = store(tmp_path)
    opened.put(*one)
    whole = only_file(tmp_path).read_bytes()
    for length in range(len(whole)):
        opened.put(*one)
        only_file(tmp_path).write_bytes(whole[:length])
        assert content(opened, one[0].key) is None, f"{length} of {len(whole)} bytes were read"
        assert not list((tmp_path / "data").iterdir())
    assert opened.failures["damaged"] == len(whole)


@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_anywhere_is_a_miss(tmp_path, bit) -> None:
    one = made(1)
    opened = store(tmp_path)
    opened.put(*one)
    whole = only_file(tmp_path).read_bytes()
    for at in range(len(whole)):
        opened.put(*one)
        path = only_file(tmp_path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert content(opened, one[0].key) is None, f"byte {at} was changed and read"
        path.unlink(missing_ok=True)
        opened.remove([one[0].key])


def test_bytes_behind_the_end_are_a_miss(tmp_path) -> None:
    opened, one = store(tmp_path), made(1)
    opened.put(*one)
    with only_file(tmp_path).open("ab") as file:
        file.write(b"\0")
    assert content(opened, one[0].key) is None


def test_another_entry_under_its_name_is_a_miss(tmp_path) -> None:
    opened = store(tmp_path)
    opened.put(*made(1))
    path = only_file(tmp_path)
    opened.put(*made(2))
    (other,) = {*(tmp_path / "data").iterdir()} - {path}
    os.replace(other, path)
    assert content(opened, made(1)[0].key) is None
    assert content(opened, made(2)[0].key) is None


@pytest.mark.parametrize("plant", ["link", "pipe", "folder", "gone"])
def test_what_is_no_file_is_a_miss(tmp_path, plant) -> None:
    opened, one = store(tmp_path), made(1)
    opened.put(*one)
    path = only_file(tmp_path)
    if plant == "link":
        os.rename(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
    if plant == "pipe":
        os.mkfifo(path)
    if plant == "folder":
        path.mkdir()
    assert content(opened, one[0].key) is None
    opened.close()
    assert content(store(tmp_path), one[0].key) is None


def test_the_least_worthy_leaf_goes_first_and_the_cap_holds(tmp_path) -> None:
    first = made(1, size=LARGE)
    second, third, fourth = made(2, first[0], size=LARGE), made(3, size=LARGE), made(4, size=LARGE)
    opened = store(tmp_path, max_bytes=EMPTY + 3 * LARGER)
    opened.put(*first)
    opened.put(*second)
    opened.put(*third)
    opened.used([third[0].key])
    opened.put(*fourth)  # the first one is continued by the second, and the third was used
    assert {one.snapshot.key for one in opened.entries()} == {one[0].key for one in (first, third, fourth)}
    assert opened.size() <= opened.cap
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_what_is_pinned_stays_and_what_does_not_fit_is_not_stored(tmp_path) -> None:
    one, other = made(1, size=LARGE), made(2, size=LARGE)
    opened = store(tmp_path, max_bytes=EMPTY + LARGER)
    opened.put(*one, Retention(pinned=True))
    assert not opened.put(*other)
    assert opened.failures["too large"] == 1
    assert not opened.down, "a store that is full was taken for one that fails"
    opened.remove([one[0].key])
    assert opened.put(*other)
    assert [one.snapshot for one in opened.entries()] == [other[0]]


def test_entries_expire_by_the_clock(tmp_path) -> None:
    now = [1000.0]
    opened = store(tmp_path, clock=lambda: now[0])
    opened.put(*made(1), Retention(expires=2000.0))
    opened.put(*made(2))
    now[0] = 1999.0
    assert len(opened.entries()) == 2
    now[0] = 2000.0
    assert [one.snapshot for one in opened.entries()] == [made(2)[0]]
    assert only_file(tmp_path)


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "gone"])
def test_an_index_that_is_damaged_is_made_again_from_the_files(tmp_path, damage) -> None:
    opened = store(tmp_path)
    first = made(1)
    second = made(2, first[0])
    opened.put(*first)
    opened.put(*second)
    opened.close()
    path = tmp_path / "index.sqlite"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"garbage": b"x" * len(whole), "cut": whole[: len(whole) // 2], "empty": b""}[damage])
    again = store(tmp_path)
    assert [one.snapshot for one in chains(again.entries())] == [first[0], second[0]]
    assert content(again, second[0].key) == second


def test_a_snapshot_is_secret_and_another_cipher_reads_nothing(tmp_path) -> None:
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    cipher = AesGcm(bytes(32))
    opened, one = store(tmp_path, cipher=cipher), made(1, size=64)
    opened.put(*one)
    assert content(opened, one[0].key) == one
    stored = only_file(tmp_path).read_bytes() + (tmp_path / "index.sqlite").read_bytes()
    for secret in (one[0].tokens, one[0].record, *one[1]):
        assert secret not in stored
    other = store(tmp_path, cipher=AesGcm(bytes([1]) * 32))
    assert other.entries() == []
    assert content(other, one[0].key) is None
    assert content(opened, one[0].key) == one, "what another key has stored was taken for damaged"


def test_a_directory_that_others_can_write_to_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreUnusable, match="others can write"):
        store(tmp_path)


def test_files_are_for_their_owner_alone(tmp_path) -> None:
    opened = store(tmp_path)
    opened.put(*made(1))
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path.name}"


def test_verify_finds_what_is_damaged_and_leaves_the_rest(tmp_path) -> None:
    opened = store(tmp_path)
    opened.put(*made(1))
    path = only_file(tmp_path)
    opened.put(*made(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:])
    assert verified(opened).damaged == 1
    assert [one.snapshot for one in opened.entries()] == [made(2)[0]]


def test_an_index_that_cannot_be_written_costs_the_entry_only(tmp_path, monkeypatch) -> None:
    opened = store(tmp_path)
    opened.put(*made(1))
    with opened._index.transaction() as do:
        (pages,) = do("PRAGMA page_count").fetchone()
        do(f"PRAGMA max_page_count={pages}")
    monkeypatch.setattr(opened._index, "_limit", lambda *_: None)
    large = made(2, tokens=2000)
    assert not opened.put(*large)
    assert content(opened, large[0].key) is None
    assert content(opened, made(1)[0].key) == made(1)
    assert not list((tmp_path / "temporary").iterdir())
    assert only_file(tmp_path)


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("SELECT 1 FROM entries WHERE expires<=1.0 LIMIT 1", "USING COVERING INDEX by_expiry"),
        ("SELECT 1 FROM entries WHERE name='a'", "USING COVERING INDEX by_name"),
        (LEAVES.format(""), "USING INDEX leaves"),
        (LEAVES.format("AND owner='a'"), "USING INDEX leaves_of"),
    ],
)
def test_queries_read_an_index_in_its_order_and_not_all_entries(tmp_path, query, index) -> None:
    opened = store(tmp_path)
    with opened._index.transaction() as do:
        plan = [row[3] for row in do(f"EXPLAIN QUERY PLAN {query}")]
    assert index in plan[0]
    assert not any("TEMP B-TREE" in step for step in plan)


def test_more_entries_go_than_are_looked_at_together(tmp_path) -> None:
    opened = store(tmp_path)
    for seed in range(100):
        opened.put(*made(seed, size=2000))
    size = opened.size()
    opened.close()
    opened = store(tmp_path, max_bytes=size + EMPTY // 2)
    large = made(200, size=size // 2)
    assert opened.put(*large)
    assert opened.size() <= opened.cap
    assert large[0] in [one.snapshot for one in opened.entries()]
