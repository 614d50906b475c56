"""A front end finds the images of a prompt by the ids of their rows, as long as they are kept."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.images.image import FIRST, ImageArray, ImageInput, ProcessedImage
from kvcellar.images.store import Images
from kvcellar.wire import packed
from kvcellar.worker import Worker

from .files import picture


class Counted(Images):
    """Images that take no process: a file is its number of rows and, behind a comma, what is shown."""

    def __init__(self, most_bytes: int = 10_000) -> None:
        super().__init__(Path(), model="m", placeholder=0, most_rows=100, most_bytes=most_bytes)
        self.prepared = 0

    def _prepared(self, file: bytes) -> ProcessedImage:
        self.prepared += 1
        rows, shown = file.strip().split(b",")
        array = ImageArray("pixel_values", "uint8", (1000,), memoryview(b"\0" * 1000))
        return ProcessedImage(ImageInput(shown.ljust(32), int(rows), (array,)), "<image>" * int(rows), 1, 1)


def test_a_file_that_is_sent_again_is_not_decoded():
    images = Counted()
    one = images.process(b"3,cat", "x")
    assert images.process(b"3,cat", "x") is one
    assert images.prepared == 1
    assert images.process(b" 3,cat", "x") == one  # another file of the same pixels
    assert images.prepared == 2
    images.check()


def test_images_are_found_in_order_and_as_often_as_they_occur():
    images = Counted()
    cat, dog = (images.process(file, "x").input for file in (b"3,cat", b"2,dog"))
    a, b, c = cat.row_ids()
    ids = [5, a, b, 6, c, *dog.row_ids(), 7, *cat.row_ids()]
    assert images.inputs_of(ids) == (cat, dog, cat)
    assert images.inputs_of([1, 2, 3]) == ()
    assert images.inputs_of([]) == ()


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((FIRST,), "at 0 of the prompt is of no image that is kept"),
        ((1, FIRST + 12345), "at 1 of the prompt is of no image that is kept"),
        (("cat1",), "not of its first row"),
        (("cat0", "cat1"), "ends 1 rows before the end of an image"),
        (("cat0", 9, "cat2"), "at 2 of the prompt is not the next row"),
        (("cat0", "dog0", "dog1"), "at 1 of the prompt is not the next row"),
        (("cat0", "cat1", "cat2", "cat2"), "not of its first row"),
        (("dog0", "dog1", FIRST), "at 2 of the prompt is of no image"),
    ],
)
def test_rows_that_are_forged_or_missing_are_refused(ids, reason):
    images = Counted()
    rows = {
        f"{name}{index}": row
        for name, file in (("cat", b"3,cat"), ("dog", b"2,dog"))
        for index, row in enumerate(images.process(file, "x").input.row_ids())
    }
    with pytest.raises(BadRequest, match=reason) as refused:
        images.inputs_of([rows.get(one, one) for one in ids])
    assert refused.value.param == "prompt"


def test_the_image_that_was_not_used_for_the_longest_time_goes_first():
    images = Counted(most_bytes=2500)
    cat, dog = (images.process(file, "x").input for file in (b"3,cat", b"2,dog"))
    images.inputs_of(cat.row_ids())
    images.process(b"2,emu", "x")
    images.check()
    assert images.inputs_of(cat.row_ids()) == (cat,)
    with pytest.raises(BadRequest, match="Send the image again"):
        images.inputs_of(dog.row_ids())
    images.process(b"2,dog", "x")
    assert images.inputs_of(dog.row_ids()) == (dog,)


def test_an_image_that_is_larger_than_all_that_is_kept_is_refused():
    with pytest.raises(BadRequest, match=r"x: the processor makes \d+ bytes of the image; 500 are kept"):
        Counted(most_bytes=500).process(b"2,dog", "x")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=30))
def test_what_is_kept_has_a_limit_after_any_requests(calls):
    images = Counted(most_bytes=4000)
    for spaces, shown in calls:
        one = images.process(b" " * spaces + f"{shown + 1},{shown}".encode(), "x")
        assert images.inputs_of(one.input.row_ids()) == (one.input,)
        images.check()
        assert images.kept_bytes <= 4000


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(1, 50), st.integers(1, 50))
def test_rows_of_different_images_differ(one, other, many, few):
    a, b = (set(ImageInput(digest, rows, ()).row_ids()) for digest, rows in ((one, many), (other, few)))
    assert len(a) == many
    assert min(a | b) >= FIRST
    assert one == other or not a & b


def test_programs_give_paths_pictures_and_arrays(tmp_path):
    class Files(Counted):
        def _prepared(self, file: bytes) -> ProcessedImage:
            return super()._prepared(b"2," + file[:8].hex().encode())

    images, image = Files(), picture()
    file = tmp_path / "a.png"
    image.save(file)
    given_png = [images.process(one, "x") for one in (file, file.read_bytes(), image, np.asarray(image))]
    assert {one.input.digest for one in given_png} == {given_png[0].input.digest}
    with pytest.raises(BadRequest, match=r"x: .*No such file"):
        images.process(tmp_path / "none.png", "x")
    with pytest.raises(BadRequest, match="a value of type list is not an image"):
        images.process([1, 2], "x")


@pytest.mark.parametrize(
    ("thumbnail", "kept"), [(b"\xff\xd8\xff" + b"\0" * 9, True), (b"\xff\xd8\xff" * 4096, False), (b"<svg", False)]
)
def test_only_small_thumbnails_are_taken_from_the_process(
    thumbnail: bytes, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ProcessedImage(ImageInput(bytes(32), 1, ()), "<image>", 1, 1, thumbnail=thumbnail)
    monkeypatch.setattr(Worker, "run", lambda *_: packed(made))
    images = Images(Path(), model="m", placeholder=0, most_rows=9)
    assert images.process(b"a file", "x").thumbnail == (thumbnail if kept else b"")
