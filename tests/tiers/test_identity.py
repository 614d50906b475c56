"""Digests of weights: the content decides, and a file is read again only when it may have changed."""

import os
import time

import pytest

from kvcellar.memory.tiers.identity import FileDigests, identity


def later() -> float:
    """A clock by which files of now were not changed in the last seconds."""
    return time.time() + 1000


def test_each_part_decides_and_their_order_does_not() -> None:
    parts = {"weights": "a", "dtype": "b"}
    assert identity(parts) == identity({"dtype": "b", "weights": "a"})
    assert len({identity(parts), identity({**parts, "dtype": "c"}), identity({**parts, "more": ""}), identity({})}) == 4
    assert identity({"a": "b"}) != identity({"a b": ""})


def test_content_decides_and_order_and_names_do_not_hide_it(tmp_path) -> None:
    one, two, three = (tmp_path / name for name in "abc")
    one.write_bytes(b"x")
    two.write_bytes(b"yz")
    three.write_bytes(b"x")
    digests = FileDigests(None)
    assert digests.of([one]) == digests.of([three])
    assert digests.of([one, two]) != digests.of([two, one])
    assert digests.of([one, two]) != digests.of([one])


def test_a_file_is_read_once_over_many_starts(tmp_path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    for start in range(3):
        digests = FileDigests(tmp_path / "cache", clock=later)
        digests.of([tmp_path / "w"])
        assert digests.computed == (start == 0)


@pytest.mark.parametrize("change", ["content", "replaced", "times"])
def test_a_file_that_may_have_changed_is_read_again(tmp_path, change) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"weights")
    first = FileDigests(tmp_path / "cache", clock=later).of([path])
    about = path.stat()
    if change == "replaced":
        path.unlink()
    if change != "times":
        path.write_bytes(b"WEIGHTS")
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # as a copy that keeps times does
    else:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    digests = FileDigests(tmp_path / "cache", clock=later)
    assert (digests.of([path]) == first) == (change == "times")
    assert digests.computed == 1


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    for _ in range(2):
        digests = FileDigests(tmp_path / "cache", clock=time.time)
        digests.of([tmp_path / "w"])
        assert digests.computed == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": "zz"}', b"\xff"])
def test_what_is_remembered_may_be_damaged(tmp_path, content) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "digests.json").write_bytes(content)
    (tmp_path / "w").write_bytes(b"weights")
    digests = FileDigests(tmp_path / "cache", clock=later)
    assert digests.of([tmp_path / "w"]) == FileDigests(None).of([tmp_path / "w"])


def test_a_place_that_cannot_be_written_costs_reading_again_only(tmp_path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    (tmp_path / "file").write_bytes(b"")
    assert FileDigests(tmp_path / "file" / "cache").of([tmp_path / "w"]) == FileDigests(None).of([tmp_path / "w"])
