"""Files of images give the pixels that they show, whole and upright, or are refused by name."""

import io

import numpy as np
import pytest
from PIL import Image

from kvcellar.errors import BadRequest
from kvcellar.images import decoding
from kvcellar.images.decoding import MOST_BYTES, THUMBNAIL_BYTES, opened_image, pixels, thumbnail

from .files import picture, png, written


def shown(data: bytes) -> np.ndarray:
    image = pixels(opened_image(data))
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True}), ("PNG", {"optimize": True, "compress_level": 0})],
)
def test_formats_without_loss_give_the_same_pixels(kind, how):
    assert np.array_equal(shown(written(picture(), kind, **how)), np.asarray(picture()))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_formats_with_loss_are_read(kind):
    grey = Image.new("RGB", (40, 30), (90, 120, 200))
    assert np.abs(shown(written(grey, kind)).astype(int) - np.asarray(grey)).max() < 8


@pytest.mark.parametrize("turn", range(1, 9))
def test_pixels_are_upright(turn):
    image, exif = picture(), Image.Exif()
    exif[0x0112] = turn
    turned = {
        1: image, 2: image.transpose(0), 3: image.transpose(3), 4: image.transpose(1), 5: image.transpose(5),
        6: image.transpose(4), 7: image.transpose(6), 8: image.transpose(2),
    }[turn]  # fmt: skip
    assert np.array_equal(shown(written(image, "PNG", exif=exif)), np.asarray(turned))


def test_an_exif_that_cannot_be_read_says_nothing():
    data = written(picture(), "WEBP", lossless=True, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(shown(data), np.asarray(picture()))


def test_transparent_pixels_are_on_white():
    clear = picture().convert("RGBA")
    clear.putalpha(0)
    assert (shown(written(clear, "PNG")) == 255).all()
    assert (shown(written(clear, "WEBP", lossless=True, exact=True)) == 255).all()
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert (shown(written(half, "PNG")) == 127).all()
    assert (shown(written(Image.new("LA", (4, 4), (0, 0)), "PNG")) == 255).all()


def test_palettes_and_their_transparent_colour():
    image = Image.new("P", (4, 2))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 0, 1, 1] * 2)
    assert shown(written(image, "PNG"))[0, [0, 2]].tolist() == [[255, 0, 0], [0, 255, 0]]
    for kind in ("PNG", "GIF"):
        assert shown(written(image, kind, transparency=0))[0, [0, 2]].tolist() == [[255, 255, 255], [0, 255, 0]]


def test_grey_of_sixteen_bits_keeps_its_upper_eight():
    rows = b"\0\x12\x34\x80\0\xff\xff"
    assert shown(png(3, 1, rows, kind=0, depth=16))[0, :, 0].tolist() == [0x12, 0x80, 0xFF]


def test_one_bit_and_cmyk_are_read():
    assert (shown(written(Image.new("1", (8, 8), 1), "PNG")) == 255).all()
    assert (
        np.abs(shown(written(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).astype(int) - [255, 0, 0]).max() < 8
    )


def test_only_the_first_frame_is_read():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        how = {"lossless": True} if kind == "WEBP" else {}
        data = written(frames[0], kind, save_all=True, append_images=frames[1:], **how)
        assert shown(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_what_ends_too_early_is_refused(kind, share):
    data = written(picture(200, 160), kind)
    with pytest.raises(BadRequest, match=r"damaged or incomplete|cannot be read"):
        shown(data[: int(len(data) * share)])


def test_a_file_of_too_many_bytes_is_refused_unread():
    with pytest.raises(BadRequest, match=rf"{MOST_BYTES + 1} bytes; {MOST_BYTES} are allowed"):
        opened_image(b"\0" * (MOST_BYTES + 1))


@pytest.mark.parametrize(
    ("size", "shown"), [((48, 32), (48, 32)), ((4000, 1000), (96, 24)), ((10, 900), (1, 96)), ((96, 96), (96, 96))]
)
def test_a_thumbnail_is_small(size: tuple[int, int], shown: tuple[int, int]) -> None:
    found = thumbnail(picture(*size))
    assert 0 < len(found) <= THUMBNAIL_BYTES
    assert Image.open(io.BytesIO(found)).size == shown


def test_a_thumbnail_of_too_many_bytes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "THUMBNAIL_BYTES", 99)
    assert thumbnail(picture()) == b""
