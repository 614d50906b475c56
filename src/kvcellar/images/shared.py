"""shared: arrays of images in memory that an engine in another process of this machine can read. No torch.

Such memory is a file without a name. A message to an engine says where the file is open in the sender, and the
engine opens it, too: so the arrays of an image are copied once, however many prompts have it.

Always true:
  * the memory is there as long as an array of it is, in any process: nothing is left when one is killed;
  * only images of `LEAST` bytes are there, so that their open files are few; others are in messages.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from itertools import accumulate

from msgspec.structs import replace

from kvcellar.errors import EngineFailed
from kvcellar.images.image import FilePlace, ImageInput

LEAST = 2 << 20  # bytes
_ALIGNED = 64  # bytes


class _Shared(mmap.mmap):
    """Memory that others find by `file`, which is open as long as this."""

    file: int

    def __del__(self) -> None:
        os.close(self.file)


def shareable(image: ImageInput) -> ImageInput:
    """The image with its arrays in memory that can be shared, if they are large enough and this system has such."""
    if image.bytes < LEAST or sys.platform != "linux":
        return image
    file, sizes = os.memfd_create("kvcellar-image"), [len(one.data) for one in image.arrays]
    try:
        os.truncate(file, _starts(sizes)[-1] + sizes[-1])
        for array, start in zip(image.arrays, _starts(sizes), strict=True):
            _write(file, array.data, start)
        memory = _Shared(file, 0, access=mmap.ACCESS_READ)
    except BaseException:
        os.close(file)
        raise
    memory.file = file
    return _with_arrays(image, memory, sizes)


def to_send(image: ImageInput) -> ImageInput:
    """The image as an engine on this machine gets it. The caller keeps the image until that has opened it."""
    memory = image.arrays[0].data.obj if image.arrays else None
    if not isinstance(memory, _Shared):
        return image
    arrays = tuple(replace(one, data=memoryview(b"")) for one in image.arrays)
    place = FilePlace(
        os.getpid(), memory.file, os.fstat(memory.file).st_ino, tuple(len(one.data) for one in image.arrays)
    )
    return replace(image, arrays=arrays, place=place)


def received(image: ImageInput) -> ImageInput:
    """The image with its arrays, as it was before `to_send`. The sender is trusted: a place may name any file that this
    process can open. Raises `EngineFailed` if the sender has gone."""
    if (place := image.place) is None:
        return image
    try:
        file = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise EngineFailed(f"the memory of an image cannot be opened: {error.strerror}") from error
    try:
        if os.fstat(file).st_ino != place.inode:
            raise EngineFailed("the memory of an image is gone")
        return replace(_with_arrays(image, mmap.mmap(file, 0, access=mmap.ACCESS_READ), place.sizes), place=None)
    finally:
        os.close(file)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes begin in a file, all of them aligned."""
    return [*accumulate((size + -size % _ALIGNED for size in sizes[:-1]), initial=0)]


def _with_arrays(image: ImageInput, memory: mmap.mmap, sizes: Sequence[int]) -> ImageInput:
    view = memoryview(memory)
    parts = [view[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]
    return replace(image, arrays=tuple(replace(one, data=part) for one, part in zip(image.arrays, parts, strict=True)))


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
