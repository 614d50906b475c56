"""sources: the file of an image, of what requests and programs have: a URL, base64, a path, pixels. No torch."""

import base64
import binascii
import io
import re
from pathlib import Path
from typing import Any

from kvcellar.errors import BadRequest, shown
from kvcellar.images.fetching import Fetcher

MOST_FILE = 32 << 20  # bytes
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<base64>;base64)?,", re.IGNORECASE)
_MOST_HEAD = 128  # characters before the data


def file_of(source: Any, fetcher: Fetcher) -> bytes:
    """Raises `BadRequest`."""
    match source:
        case bytes():
            file = source
        case str() if source[:5].lower() == "data:":
            file = _of_data_url(source)
        case str():
            file = fetcher.fetch(source, MOST_FILE)
        case Path():
            file = _read(source)
        case _:
            file = _of_pixels(source)
    if len(file) > MOST_FILE:
        raise BadRequest(f"the image has {len(file)} bytes; {MOST_FILE} are allowed. Send a smaller one")
    return file


def of_base64(text: str) -> bytes:
    """What APIs send that name the type elsewhere. Raises `BadRequest`."""
    if len(text) > 4 * MOST_FILE // 3 + 4:
        raise BadRequest(f"the image has about {3 * len(text) // 4} bytes; {MOST_FILE} are allowed. Send a smaller one")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the image is not valid base64: {error}") from None


def _of_data_url(url: str) -> bytes:
    head = _DATA.match(url[:_MOST_HEAD])
    if head is None or not head["base64"]:
        raise BadRequest(f"{shown(url[:40])} is not a data: URL of base64, as data:image/png;base64,...")
    if not head["type"].lower().startswith("image/"):
        raise BadRequest(f"the data: URL has the type {shown(head['type'])}; it must be one of images, as image/png")
    return of_base64(url[head.end() :])


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_FILE + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None


def _of_pixels(source: Any) -> bytes:
    """A PNG of an image of Pillow, or of an array [height, width] or [height, width, channels] of bytes."""
    from PIL import Image  # not at the top: requests have files

    try:
        image = source if isinstance(source, Image.Image) else Image.fromarray(source)
        image = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
        written = io.BytesIO()
        image.save(written, "PNG", compress_level=1)
    except (TypeError, ValueError, AttributeError, OSError):
        kind = type(source).__name__
        raise BadRequest(
            f"a value of type {kind} is not an image: it may be bytes, a data: URL, a path, an image of Pillow, or an "
            f"array of bytes [height, width, 3]"
        ) from None
    return written.getvalue()
