"""Hostile images are refused by name, and the process that decodes them does the next one."""

import base64
import zlib

import pytest

from kvcellar.errors import BadRequest
from kvcellar.images.store import Images

from .files import bmp, chunk, gif, picture, png, written
from .made import write_processor, write_tokenizer

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
GOOD = written(picture(), "PNG")
WHERE = "messages[2].content[1]"


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose header declares another size."""
    data = bytearray(written(picture(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


BOMB = zlib.compress(b"\0" * (200 << 20), 9)
HOSTILE = {
    "empty": (b"", "empty"),
    "one byte": (b"\x89", "no known format"),
    "text": (b"hello, world", "no known format"),
    "only a magic": (b"\x89PNG\r\n\x1a\n", "PNG"),
    "only a magic of JPEG": (b"\xff\xd8\xff", "JPEG"),
    "only a magic of WebP": (b"RIFF\0\0\0\0WEBP", "WEBP"),
    "a sound": (b"RIFF\x24\0\0\0WAVEfmt ", "is WAV"),
    "another sound": (b"ID3\4\0", "is MP3"),
    "a third sound": (b"OggS\0\2", "is Ogg"),
    "SVG": (SVG, "is SVG"),
    "SVG after XML": (b"<?xml version='1.0'?>" + SVG, "is SVG"),
    "HTML": (b"\n<!DOCTYPE html><script>", "is HTML"),
    "PDF": (b"%PDF-1.7\n", "is PDF"),
    "TIFF": (b"II*\0\x08\0\0\0", "is TIFF"),
    "TIFF, big": (b"MM\0*\0\0\0\x08", "is TIFF"),
    "HEIC": (b"\0\0\0\x18ftypheic", "is HEIC"),
    "AVIF": (b"\0\0\0\x1cftypavif", "is AVIF"),
    "MP4": (b"\0\0\0\x18ftypisom", "is MP4"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0", "is PostScript"),
    "ICO": (b"\0\0\1\0\1\0", "is ICO"),
    "ZIP": (b"PK\3\4" + GOOD, "is ZIP"),
    "gzip": (b"\x1f\x8b\x08" + GOOD, "is gzip"),
    "PSD": (b"8BPS\0\1", "is PSD"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n", "is JPEG 2000"),
    "10 000 x 1": (png(10_000, 1, b"\0" * 30_001), "10000 x 1 pixels; the longer side"),
    "1 x 10 000": (bmp(1, 10_000), "1 x 10000 pixels; the longer side"),
    "a bomb of pixels": (png(16_000, 16_000, b"\0"), "16000 x 16000 pixels, 256000000 in all; 50000000"),
    "a long side": (png(2**31 - 1, 2**31 - 1, b"\0"), "a side may have 16384"),
    "no width": (png(0, 5), "PNG"),
    "a BMP of gigabytes": (bmp(30_000, 30_000), "a side may have 16384"),
    "a BMP of negative width": (bmp(-5, 5), "4294967291 x 5 pixels; a side may have 16384"),
    "a GIF of 65535 x 65535": (gif(65_535, 65_535), "a side may have 16384"),
    "a GIF without a frame": (b"GIF89a" + b"\x0a\0" * 2 + b"\0\0\0;", "GIF"),
    "a GIF without pixels": (gif(10, 10), "GIF"),
    "a JPEG that declares more": (jpeg_of(65_000, 65_000), "a side may have 16384"),
    "a bomb of text": (png(4, 4, b"\0" * 52, chunk(b"zTXt", b"a\0\0" + BOMB)), "PNG"),
    "a bomb of words": (png(4, 4, b"\0" * 52, chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB)), "PNG"),
    "a wrong sum": (GOOD[:60] + bytes([GOOD[60] ^ 255]) + GOOD[61:], "PNG"),
    "cut": (GOOD[: len(GOOD) // 2], "damaged or incomplete"),
    "too many bytes": (GOOD + b"\0" * (32 << 20), "bytes; 33554432 are allowed"),
    "SVG by URL": (url(SVG, "image/svg+xml"), "is SVG"),
    "another type": (url(GOOD, "text/html"), "one of images"),
    "no type": (url(GOOD, ""), "one of images"),
    "not base64": ("data:image/png;base64,@@@@", "not valid base64"),
    "base64 of URLs": ("data:image/png;base64,_-_-", "not valid base64"),
    "base64 in lines": (url(GOOD)[:60] + "\n" + url(GOOD)[60:], "not valid base64"),
    "half a base64": (url(GOOD)[:-3], "not valid base64|damaged"),
    "percent": ("data:image/png,%89PNG", "not a data: URL of base64"),
    "no comma": ("data:image/png;base64", "not a data: URL of base64"),
    "a file": ("file:///etc/passwd", "may be a data: URL"),
    "a path": ("/etc/passwd", "may be a data: URL"),
    "ftp": ("ftp://example.com/a.png", "may be a data: URL"),
    "a host": ("http://example.com/a.png", "not fetched from 'example.com'"),
    "a number": (7, "not an image"),
    "null": (None, "not an image"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    ids = write_tokenizer(folder)
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 200_704}}
    write_processor(folder, "qwen3_vl", {"processor_class": "Qwen3VLProcessor"}, image)
    images = Images(folder, model="m", placeholder=ids["<image>"], most_rows=256)
    yield images
    images.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_by_name(images, name):
    source, reason = HOSTILE[name]
    with pytest.raises(BadRequest, match=reason) as refused:
        images.process(source, WHERE)
    assert refused.value.param == WHERE
    assert str(refused.value).startswith(f"{WHERE}: ")
    assert len(str(refused.value)) < 600
    images.check()


def test_a_good_one_is_taken_after_all_of_them(images):
    assert images.process(url(GOOD), WHERE) is images.process(GOOD, WHERE)
    assert images.process(GOOD + b"PK\3\4" + b"\0" * 50, WHERE).input == images.process(GOOD, WHERE).input


def test_an_image_of_too_many_tokens_is_refused_before_its_pixels_are_read(tmp_path):
    """Those of this one are not there."""
    ids = write_tokenizer(tmp_path)
    write_processor(
        tmp_path, "qwen3_vl", {"processor_class": "Qwen3VLProcessor"}, {"image_processor_type": "Qwen2VLImageProcessor"}
    )
    images = Images(tmp_path, model="m", placeholder=ids["<image>"], most_rows=256)
    try:
        with pytest.raises(BadRequest, match=r"4000 x 4000 pixels has \d+ tokens for this model; 256 are allowed"):
            images.process(png(4000, 4000, b""), WHERE)
    finally:
        images.close()


def test_a_job_that_takes_too_long_names_the_image_and_the_limit(images, monkeypatch):
    monkeypatch.setattr("kvcellar.images.store.SECONDS", 0.05)
    big = png(7000, 7000, b"\0" * (7000 * 21_001))
    with pytest.raises(BadRequest, match=rf"{WHERE[:8]}.*more than 0.05 seconds"):
        images.process(big, WHERE)
    monkeypatch.undo()
    assert images.process(written(picture(seed=5), "PNG"), WHERE).input.rows > 0
