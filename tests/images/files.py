"""Image files, made by Pillow and by hand."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """Pixels of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def written(image: Image.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes = b"", *more: bytes, kind: int = 2, depth: int = 8) -> bytes:
    """A PNG that declares a size, with these rows before compression."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    """The header of a BMP, without pixels."""
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def gif(width: int, height: int) -> bytes:
    """A GIF whose frame has no pixels."""
    size = struct.pack("<HH", width, height)
    return b"GIF89a" + size + b"\0\0\0," + b"\0" * 4 + size + b"\0\x02\0;"
