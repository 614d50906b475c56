"""chat_images: the images in the messages of a chat, taken out and prepared for the model; and those of a prompt.

In a message, an image is a part of the content: `{"type": "image", "image": SOURCE}`, or OpenAI's
`{"type": "image_url", "image_url": {"url": SOURCE}}`. SOURCE is what `Images.process` takes. From Python, it may be in
the list by itself, as a text may.

Always true:
  * a submitted prompt has rows only of images that a chat of its namespace, or of none, has had here: row ids do not
    tell what others have sent;
  * at most `SEEN` images of namespaces are known, those that were used last.
"""

import base64
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.images.fetching import Fetcher
from kvcellar.images.image import ImageInput, ProcessedImage, has_rows
from kvcellar.images.sources import file_of
from kvcellar.images.store import Images
from kvcellar.text.labels import NO_IMAGES, Labelled

Message = Mapping[str, Any]
KINDS = ("image", "image_url")
SEEN = 2**16
MOST_IMAGES = 128  # of one request: each takes a process some 50 ms to decode
MOST_SENT = 128 << 20  # bytes of the images of one prompt: a message to an engine has at most twice as many


class ChatImages:
    """Of one model. Safe to use from several threads."""

    def __init__(self, images: Images | None, *, placeholder: int = -1, why_not: str = "") -> None:
        """`placeholder`: the token for each row of an image. `why_not`: why there are none, as a sentence."""
        self._images, self.placeholder, self.why_not = images, placeholder, why_not
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # namespaces and digests
        self._lock = threading.Lock()

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self._images is not None

    def process(self, source: Any, where: str) -> ProcessedImage:
        """As `Images.process`."""
        if self._images is None:
            raise BadRequest(f"{where}: {self.why_not}", where)
        return self._images.process(source, where)

    def taken(self, messages: Sequence[Message], namespace: str) -> tuple[Sequence[Message], Labelled]:
        """The messages with what templates read of images, and the images. Raises `BadRequest` with the place."""
        if not isinstance(messages, list | tuple):
            return messages, NO_IMAGES  # to be refused
        if (count := sum(map(_count, messages))) > MOST_IMAGES:
            raise BadRequest(
                f"the messages have {count} images; {MOST_IMAGES} are allowed. Leave out the first ones", "messages"
            )
        found, taken, places = list[ProcessedImage](), list[Message](), list[tuple[int, int]]()
        for at, message in enumerate(messages):
            taken.append(self._taken(message, f"messages[{at}]", found))
            _check_sent(image.input for image in found)
            places += [(at, number) for number in range(len(found) - len(places))]
        if not found:
            return taken, NO_IMAGES
        with self._lock:
            for image in found:
                self._use(namespace, image.input)
        return taken, Labelled(found, self.placeholder, found[0].token, places)

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
        found.append(self.process(source_of(part), f"{where}.{part['type']}"))
        return {"type": "image", "image": found[-1].input.digest.hex()}

    def inputs(self, prompt: Sequence[int], namespace: str) -> tuple[ImageInput, ...]:
        """The images of a prompt that has some. Raises `BadRequest`."""
        if self._images is None:
            raise BadRequest(f"prompt has rows of images: {self.why_not}", "prompt")
        found = self._images.inputs_of(prompt)
        with self._lock:
            if any(not {(namespace, one.digest), ("", one.digest)} & self._seen.keys() for one in found):
                raise BadRequest("prompt has rows of images that are not known; send the images in messages", "prompt")
        _check_sent(found)
        return found

    def begun_in(self, ids: Sequence[int]) -> list[tuple[int, ProcessedImage]]:
        """The images that are kept here of those whose first row is among tokens, and where that is."""
        return [] if self._images is None or not has_rows(ids) else self._images.begun_in(ids)

    def rest(self) -> None:
        """End the process that prepares images. The next image starts another."""
        if self._images is not None:
            self._images.rest()

    def check(self) -> None:
        with self._lock:
            assert len(self._seen) <= SEEN


def as_part(given: Any) -> Any:
    """An element of a content as a part."""
    if isinstance(given, Mapping):
        return given
    return {"type": "text", "text": given} if isinstance(given, str) else {"type": "image", "image": given}


def _count(message: Any) -> int:
    """The images of a message."""
    parts: Any = message.get("content") if isinstance(message, Mapping) else None
    return sum(_is_image(as_part(part)) for part in parts) if isinstance(parts, list | tuple) else 0


def _is_image(part: Any) -> bool:
    return part.get("type") in KINDS


def source_of(part: Mapping[str, Any]) -> Any:
    """The source of the image that a part is."""
    found: Any = part.get(part["type"])
    return cast("Mapping[str, Any]", found).get("url") if isinstance(found, Mapping) else found


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
            file = base64.b64encode(file_of(source, Fetcher(()))).decode()
            yield {"type": "image", "image": f"data:image/*;base64,{file}"}


def _check_sent(images: Iterable[ImageInput]) -> None:
    if (size := sum(one.bytes for one in images)) > MOST_SENT:
        raise BadRequest(
            f"the images of a prompt have {size} bytes as the model gets them; {MOST_SENT} are allowed. Send fewer, or "
            f"smaller ones",
            "messages",
        )
