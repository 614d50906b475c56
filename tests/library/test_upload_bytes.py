"""The bytes of uploads are counted once, from their arrival until a model has them or they are removed."""

import errno
import hashlib
import os
from bisect import bisect_left
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.library.disk import TEMPORARY, UPLOADS
from kvcellar.library.library import Library
from kvcellar.library.uploads import Upload, Uploads, UploadsFull

MOST = 1000


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(Library(tmp_path / "models").disk, MOST)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def on_disk(uploads: Uploads) -> int:
    """Bytes of files, whole or not."""
    root = uploads.disk.root
    return sum(
        path.stat().st_size for folder in (UPLOADS, TEMPORARY) for path in (root / folder).rglob("*") if path.is_file()
    )


def left(uploads: Uploads) -> int:
    """Bytes that may still be received."""

    def fits(size: int) -> bool:
        try:
            uploads.take(size)
        except UploadsFull:
            return False
        uploads.give(size)
        return True

    return bisect_left(range(MOST + 1), True, key=lambda size: not fits(size)) - 1


CALLS = st.tuples(st.sampled_from(["begin", "write", "finish", "close"]), st.integers(0, 5))


@settings(max_examples=15, deadline=None)
@given(st.lists(CALLS, max_size=30), st.integers(1, 3))
def test_what_is_free_is_what_is_not_on_the_disk(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int]], contents: int
) -> None:
    """With any number of uploads at the same time, also of one content. A refused part was not written."""
    uploads = Uploads(Library(tmp_path_factory.mktemp("models")).disk, MOST)
    whole = [bytes([number]) * (100 * number + 250) for number in range(contents)]
    opened: list[tuple[Upload, bytes]] = []
    for what, number in calls:
        content = whole[number % contents]
        if what == "begin" and len(opened) < 5:
            try:
                opened.append((uploads.begin(digest_of(content), 0), content))
            except UploadsFull:
                pass
        elif opened:
            upload, content = opened[number % len(opened)]
            try:
                if what == "write":
                    upload.write(content)
                elif what == "finish":
                    upload.finish()
            except (UploadsFull, BadRequest):
                pass
            if what != "write":  # an upload ends with either
                upload.close()
                opened.remove((upload, content))
        assert left(uploads) == MOST - on_disk(uploads)
    for upload, _ in opened:
        upload.close()
    assert left(uploads) == MOST - on_disk(uploads)


def test_uploads_that_are_open_at_once_stay_below_the_cap(uploads: Uploads) -> None:
    contents = [bytes([number]) * 900 for number in range(5)]
    opened = [uploads.begin(digest_of(content), 900) for content in contents]
    for number, (upload, content) in enumerate(zip(opened, contents, strict=True)):
        if number:
            with pytest.raises(UploadsFull, match="900 are taken"):
                upload.write(content)
        else:
            upload.write(content)
            upload.finish()
        upload.close()
    assert on_disk(uploads) == 900


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ["close", "sync", "sync_directory", "rename"])
def test_bytes_are_counted_once_whatever_fails(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, name: str, finished: bool
) -> None:
    def broken(*args: Any) -> None:
        if name == "close":
            os.close(*args)
        raise OSError(errno.EIO, "Input/output error")

    content = bytes(600)
    monkeypatch.setattr(uploads.disk.files, name, broken)
    upload = uploads.begin(digest_of(content), 600)
    upload.write(content)
    failed = nullcontext() if name != "close" and not finished else pytest.raises(OSError, match="Input/output error")
    with failed:
        try:
            if finished:
                upload.finish()
        finally:
            upload.close()
    monkeypatch.undo()
    upload.close()
    assert left(uploads) == MOST - on_disk(uploads)
    assert on_disk(uploads) == (600 if finished and name in ("close", "sync_directory") else 0)
