"""decoding: pixels of an image file. For a process with limits (`preparing`): codecs are compiled code that reads what
a client wrote.

Always true of what is returned: an RGB image of 8 bits a channel, upright, of a file that has its end. (Data that end
properly, but too soon for the size that the header declares, are filled up by codecs, here as in browsers.)

Transparent pixels are put on white, as `convert_to_rgb` of transformers does: processors would do so themselves, and so
the pixels that a model gets are those of transformers. Profiles of colour are not applied, which no processor does.
"""

import io
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError

from kvcellar.errors import BadRequest
from kvcellar.images.image import THUMBNAIL_BYTES, THUMBNAIL_SIDE

MOST_BYTES = 32 << 20  # of a file
MOST_PIXELS = 50_000_000
MOST_SIDE = 16_384  # pixels
MOST_ASPECT = 100  # of the longer side to the shorter one
NAMES = "PNG, JPEG, WebP, GIF and BMP"
_FORMATS = (  # where their first bytes are, and Pillow's names
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (8, b"WEBP", "WEBP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
)
_REFUSED = (  # what is recognised to be refused by name
    (0, b"%PDF", "PDF"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"8BPS", "PSD"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"\0\0\0\x0cjP", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL", "JPEG XL"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphe", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftyp", "MP4"),
    (0, b"\x1aE\xdf\xa3", "WebM"),
    (8, b"WAVE", "WAV"),
    (0, b"ID3", "MP3"),
    (0, b"\xff\xfb", "MP3"),
    (0, b"OggS", "Ogg"),
    (0, b"fLaC", "FLAC"),
    (0, b"%!PS", "PostScript"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
_ORIENTATION = 0x0112  # of EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FAULTS = (  # what readers raise for files that are damaged
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SyntaxError,
    TypeError, ValueError, Image.DecompressionBombError, struct.error, zlib.error,
)  # fmt: skip


def opened_image(data: bytes) -> Image.Image:
    """An image whose header has been read, and its size checked; its first frame is read by `pixels`. Raises
    `BadRequest` if it is of another format, too large, or damaged."""
    if len(data) > MOST_BYTES:
        raise BadRequest(f"the image has {len(data)} bytes; {MOST_BYTES} are allowed. Send a smaller one")
    name = _format_of(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=[name])
    except UnidentifiedImageError:
        raise BadRequest(f"the image begins as {name}, but is damaged: its header cannot be read") from None
    except FAULTS as error:
        raise _damaged(name, error) from None
    _check_size(*image.size)
    return image


def pixels(image: Image.Image) -> Image.Image:
    """What an opened image shows, as RGB. Raises `BadRequest` if it ends too early, or is damaged otherwise."""
    name = str(image.format)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            return _rgb(_upright(image))
    except FAULTS as error:
        raise _damaged(name, error) from None


def thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of what `pixels` has returned, which is made small itself. b"": it would have too many bytes."""
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), reducing_gap=2.0)
    for quality in (80, 40):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        if file.tell() <= THUMBNAIL_BYTES:
            return file.getvalue()
    return b""


def _format_of(data: bytes) -> str:
    """Pillow's name of the format that the file begins as."""
    for at, magic, name in _FORMATS:
        if data[at : at + len(magic)] == magic and (name != "WEBP" or data.startswith(b"RIFF")):
            return name
    if not data:
        raise BadRequest("the image is empty")
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    found = next((name for at, magic, name in _REFUSED if data[at : at + len(magic)] == magic), None)
    if found is None and start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        found = "SVG"
    if found is None and start.startswith((b"<!doctype html", b"<html")):
        found = "HTML"
    what = f"is {found}" if found else f"begins with {data[:8].hex(' ')}, which is no known format"
    raise BadRequest(f"the image {what}; {NAMES} are read")


def _check_size(width: int, height: int) -> None:
    size, advice = f"the image has {width} x {height} pixels", "Send a smaller one"
    if min(width, height) < 1:
        raise BadRequest(f"{size}; there must be at least one")
    if max(width, height) > MOST_SIDE:
        raise BadRequest(f"{size}; a side may have {MOST_SIDE}. {advice}")
    if width * height > MOST_PIXELS:
        raise BadRequest(f"{size}, {width * height} in all; {MOST_PIXELS} are allowed. {advice}")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise BadRequest(
            f"{size}; the longer side may be {MOST_ASPECT} times as long as the shorter one. Cut it into parts"
        )


def _damaged(name: str, error: Exception) -> BadRequest:
    return BadRequest(f"the image ({name}) is damaged or incomplete: {' '.join(str(error).split())[:200]}")


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF data say. Data that cannot be read say nothing, as in browsers."""
    try:
        how = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except FAULTS:
        how = None
    return image if how is None else image.transpose(how)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would show those above 255 as white
        grey = np.asarray(image)
        low = image.info.get("transparency")
        seen = Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")
        return seen if not isinstance(low, int) else _on_white(seen, Image.fromarray(_visible(grey, low)))
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        seen = image.convert("RGBA")
        return _on_white(seen.convert("RGB"), seen.getchannel("A"))
    return image.convert("RGB")


def _visible(
    grey: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", hidden: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.where(grey == hidden, 0, 255).astype(np.uint8)


def _on_white(image: Image.Image, alpha: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    image.putalpha(alpha)
    return Image.alpha_composite(white, image).convert("RGB")
