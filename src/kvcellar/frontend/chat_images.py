"""chat_images: the images in the messages of a chat, taken out and prepared for the model; and those of a prompt.

In a message, an image is a part of the content: `{"type": "image", "image": SOURCE}`, or OpenAI's
`{"type": "image_url", "image_url": {"url": SOURCE}}`. SOURCE is a `data:` URL. From Python it may also be bytes of a
file, a path, an image of PIL or an array of NumPy, which may stand in the list by itself, as a text may.

Always true:
  * a submitted prompt has rows only of images that a chat of its namespace, or of none, has had here: row ids do not
    tell what others have sent;
  * at most `SEEN` images of namespaces are known, those that were used last.
"""

import base64
import binascii
import io
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from kvcellar.errors import BadRequest, shown
from kvcellar.images.image import ImageInput, ProcessedImage, has_rows
from kvcellar.text.labels import NO_IMAGES, Labelled

Message = Mapping[str, Any]
_DATA = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*?;base64,", re.IGNORECASE)
_URL = re.compile(r"https?:", re.IGNORECASE)
KINDS = ("image", "image_url")
SEEN = 2**16


class Images(Protocol):
    """Prepares images for one model, and has those that it has prepared."""

    @property
    def token(self) -> str:
        """What chat templates write for an image."""
        ...

    @property
    def placeholder(self) -> int: ...

    def process(self, source: bytes) -> ProcessedImage:
        """Raises `BadRequest`."""
        ...

    def inputs_of(self, prompt: Sequence[int]) -> tuple[ImageInput, ...]:
        """The images whose rows a prompt has, in order. Raises `BadRequest` for those that are not kept."""
        ...


class ChatImages:
    """Of one model. Safe to use from several threads."""

    def __init__(self, images: Images | None, why_not: str) -> None:
        """`why_not`: why there are none, as a sentence."""
        self._images, self._why_not = images, why_not
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # namespaces and digests
        self._lock = threading.Lock()

    @property
    def token(self) -> str | None:
        """What chat templates write for an image; None if the model takes none."""
        return None if self._images is None else self._images.token

    @property
    def placeholder(self) -> int | None:
        return None if self._images is None else self._images.placeholder

    def taken(self, messages: Sequence[Message], namespace: str) -> tuple[Sequence[Message], Labelled]:
        """The messages with what templates read of images, and the images. Raises `BadRequest` with the place."""
        if not isinstance(messages, list | tuple):
            return messages, NO_IMAGES  # to be refused
        found = list[ProcessedImage]()
        taken = [self._taken(message, f"messages[{at}]", found) for at, message in enumerate(messages)]
        if not found or self._images is None:
            return taken, NO_IMAGES
        with self._lock:
            for image in found:
                self._use(namespace, image.input)
        return taken, Labelled(found, self._images.placeholder)

    def _use(self, namespace: str, image: ImageInput) -> None:
        self._seen[namespace, image.digest] = None
        self._seen.move_to_end((namespace, image.digest))
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)

    def _taken(self, message: Message, where: str, found: list[ProcessedImage]) -> Message:
        parts: Any = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(parts, list | tuple):
            return message
        content = [self._part(as_part(part), f"{where}.content[{at}]", found) for at, part in enumerate(parts)]
        return {**message, "content": content}

    def _part(self, part: Any, where: str, found: list[ProcessedImage]) -> Any:
        if not _is_image(part):
            return part
        where = f"{where}.{part['type']}"
        if self._images is None:
            raise BadRequest(f"{where}: {self._why_not}", where)
        try:
            found.append(self._images.process(bytes_of(source_of(part))))
        except BadRequest as error:
            error.message, error.param = f"{where}: {error.message}", where
            raise
        return {"type": "image", "image": found[-1].input.digest.hex()}

    def inputs(self, prompt: Sequence[int], namespace: str) -> tuple[ImageInput, ...]:
        """The images of a prompt. Raises `BadRequest`."""
        if not has_rows(prompt):
            return ()
        if self._images is None:
            raise BadRequest(f"prompt has rows of images: {self._why_not}", "prompt")
        found = self._images.inputs_of(prompt)
        with self._lock:
            if any(not {(namespace, one.digest), ("", one.digest)} & self._seen.keys() for one in found):
                raise BadRequest("prompt has rows of images that are not known; send the images in messages", "prompt")
        return found

    def check(self) -> None:
        with self._lock:
            assert len(self._seen) <= SEEN


def as_part(given: Any) -> Any:
    """An element of a content as a part."""
    if isinstance(given, Mapping):
        return given
    return {"type": "text", "text": given} if isinstance(given, str) else {"type": "image", "image": given}


def _is_image(part: Any) -> bool:
    return part.get("type") in KINDS


def source_of(part: Mapping[str, Any]) -> Any:
    """The source of the image that a part is."""
    found: Any = part.get(part["type"])
    return cast("Mapping[str, Any]", found).get("url") if isinstance(found, Mapping) else found


def bytes_of(source: Any) -> bytes:
    """The bytes of a file that has the image. Raises `BadRequest`."""
    if isinstance(source, str):
        return _decoded(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        try:
            return source.read_bytes()
        except OSError as error:
            raise BadRequest(f"the image {source} cannot be read: {error.strerror}", "messages") from error
    return _as_png(source)


def _decoded(source: str) -> bytes:
    if _URL.match(source):
        raise BadRequest("images are not fetched; send the data itself, as a data: URL in base64", "messages")
    begins = _DATA.match(source)
    if begins is None:
        raise BadRequest(f"an image is a data: URL in base64, not {shown(source[:40])}", "messages")
    return from_base64(source[begins.end() :])


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the image is not valid base64: {error}", "messages") from error


def _as_png(source: Any) -> bytes:
    """The pixels of an image of PIL, or of an array, without loss."""
    image: Any = source
    if "PIL.Image" not in sys.modules and "numpy" not in sys.modules:
        raise _no_image(source)
    from PIL import Image  # not at the top: imported only where there are images

    if not isinstance(source, Image.Image):
        import numpy as np

        if not isinstance(source, np.ndarray) or source.dtype != np.uint8:
            raise _no_image(source)
        try:
            image = Image.fromarray(source)
        except (TypeError, ValueError) as error:
            raise _no_image(source) from error
    file = io.BytesIO()
    (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def _no_image(source: Any) -> BadRequest:
    what = "a path, bytes of a file, an image of PIL, an array of bytes, or a data: URL"
    return BadRequest(f"an image is {what}, not {shown(source)}", "messages")


def portable(content: Any) -> Any:
    """A content whose images are `data:` URLs, so that it can be kept as JSON. Raises `BadRequest`."""
    if not isinstance(content, list | tuple):
        return content
    return list(_portable_parts(cast("Sequence[Any]", content)))


def _portable_parts(content: Sequence[Any]) -> Iterator[Any]:
    for part in map(as_part, content):
        source = source_of(part) if _is_image(part) else ""
        if isinstance(source, str):
            yield part
        else:
            yield {"type": "image", "image": f"data:;base64,{base64.b64encode(bytes_of(source)).decode()}"}
