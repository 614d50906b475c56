"""image: an image as prompts, messages and keys of memory have it. No torch.

In a prompt, an image is the tokens that its model's processor writes for it; in place of each placeholder among them
there is an id of its own, a *row id*, which says what image it is and which row of its features. So a key of memory
tells images apart as it tells texts, and prompts need nothing beside their ids.

Always true: row ids have 63 bits, the highest of which is set: they are above every vocabulary, and those of two images
differ, for the other 62 are of a hash of the image's digest.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import shake_128
from typing import Any

from msgspec import Struct

FIRST = 1 << 62  # of row ids: token ids are below
_BITS = FIRST - 1
THUMBNAIL_SIDE, THUMBNAIL_BYTES = 96, 8192  # most pixels of a side, and bytes


class ImageArray(Struct, frozen=True, array_like=True):
    """What a processor made of an image, for its model: an array by the name of the argument."""

    name: str
    dtype: str  # a name of NumPy: float32, int64, bool
    shape: tuple[int, ...]
    data: memoryview  # bytes in order of C; none where the image has a `place`

    def array(self) -> Any:
        """As an array of NumPy, which is not copied."""
        import numpy as np  # not at the top: imported only where there are images

        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class FilePlace(Struct, frozen=True, array_like=True):
    """Where the data of arrays is: in a file that is open in another process. `sizes` are bytes of each."""

    process: int  # its number
    file: int  # that of the file in it
    inode: int  # of the file: another one may have the same number since
    sizes: tuple[int, ...]


class ImageInput(Struct, frozen=True, array_like=True):
    """An image for an engine. `digest` tells it from all whose pixels, or what was made of them, differ."""

    digest: bytes  # 32
    rows: int  # placeholders: rows of its features
    arrays: tuple[ImageArray, ...]
    place: FilePlace | None = None  # in a message: see `shared`

    @property
    def bytes(self) -> int:
        return sum(len(one.data) for one in self.arrays)

    def row_ids(self) -> tuple[int, ...]:
        """In order of its rows."""
        data = memoryview(shake_128(self.digest).digest(8 * self.rows)).cast("q")
        return tuple(FIRST | one & _BITS for one in data)


class ProcessedImage(Struct, frozen=True, array_like=True):
    """An image for a front end: `text` stands for it in a prompt, with `input.rows` placeholders among its tokens."""

    input: ImageInput
    text: str
    width: int  # pixels, as it was decoded
    height: int
    token: str = ""  # what chat templates write for an image, in whose place `text` is
    thumbnail: bytes = b""  # a JPEG to show it to people (`decoding.thumbnail`)


def seen_from(places: Sequence[int], pos: int) -> range:
    """By number, the images that a token at `pos` sees by cross-attention, where each image is one token, at `places`:
    the last one up to there, and those that stand right in front of it."""
    end = bisect_right(places, pos)
    first = max(0, end - 1)
    while first > 0 and places[first - 1] == places[first] - 1:
        first -= 1
    return range(first, end)


def is_row(token: int) -> bool:
    return FIRST <= token < 2 * FIRST


def has_rows(ids: Sequence[int]) -> bool:
    """Whether any of the ids is of an image."""
    return len(ids) > 0 and max(ids) >= FIRST


def with_rows(ids: Iterable[int], placeholder: int, images: Sequence[ImageInput]) -> list[int]:
    """The ids with those of the rows of `images`, in order, in place of the placeholders. Raises `ValueError` if there
    are not as many placeholders as rows."""
    rows = [row for image in images for row in image.row_ids()]
    found, at = list(ids), 0
    for index, token in enumerate(found):
        if token == placeholder:
            if at == len(rows):
                raise ValueError(f"there are more placeholders than the {len(rows)} rows of the images")
            found[index] = rows[at]
            at += 1
    if at < len(rows):
        raise ValueError(f"there are {at} placeholders, and {len(rows)} rows of images")
    return found
