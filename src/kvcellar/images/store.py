"""store: the images that a front end has prepared, and knows again by the ids of their rows. No torch.

Always true:
  * an image is kept under its digest, and found by each source (a hash of its file) and by the id of its first row;
  * what is kept has at most `most_bytes`: those go first that were not used for the longest time.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvcellar.errors import BadRequest, Overloaded
from kvcellar.images.fetching import Fetcher
from kvcellar.images.image import THUMBNAIL_BYTES, ImageInput, ProcessedImage, has_rows, is_row
from kvcellar.images.shared import shareable
from kvcellar.images.sources import file_of
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker

SECONDS = 10.0  # of CPU time for an image; one of 50 megapixels needs two
MEMORY = 2**31  # bytes
STACK = 2**23  # bytes
BESIDE = 4  # images that are prepared at the same time
PATIENCE = 60.0  # seconds that one waits for its turn
_JPEG = b"\xff\xd8\xff"
_SOURCE = 128  # bytes that a source is counted as


class Setup(Struct, frozen=True, array_like=True):
    """What the process is for: the model in `folder`, which digests name `model`."""

    folder: Path
    model: str
    placeholder: int
    most_rows: int


@dataclass(slots=True)
class _Kept:
    image: ProcessedImage
    sources: list[bytes] = field(default_factory=list[bytes])

    @property
    def bytes(self) -> int:
        image = self.image
        return image.input.bytes + len(image.text) + len(image.thumbnail) + _SOURCE * len(self.sources)


class Images:
    """Of one engine. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        placeholder: int,
        most_rows: int,
        most_bytes: int = 256 << 20,
        hosts: Sequence[str] = (),
    ) -> None:
        """`folder` has the files of the model's processor, and `model` says in digests which model that is. An image
        may have `most_rows` tokens. Images are fetched from `hosts`, and from nowhere else."""
        setup = Setup(folder, model, placeholder, most_rows)
        self._worker = Worker("kvcellar.images.preparing", lambda: setup)
        self._fetcher, self._most = Fetcher(hosts), most_bytes
        self._beside = threading.BoundedSemaphore(BESIDE)
        self._lock = threading.Lock()  # of what follows
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # by digest, the last used one at the end
        self._sources: dict[bytes, bytes] = {}  # digests by hashes of files
        self._firsts: dict[int, bytes] = {}  # digests by ids of first rows
        self._bytes = 0

    def process(self, source: Any, where: str) -> ProcessedImage:
        """What is made of an image: the bytes of a file, or a `data:` URL, or the URL of an image on a host that is
        allowed; from Python also a path, an image of Pillow or an array (see `sources`). The first one waits for
        seconds until the process is there. Raises `BadRequest` that names `where`, and `Overloaded`."""
        try:
            file = file_of(source, self._fetcher)
            key = sha256(file).digest()
            if (found := self._found(key)) is not None:
                return found
            image = self._prepared(file)
            self._keep(key, image)
            return image
        except BadRequest as error:
            raise BadRequest(f"{where}: {error.message}", where, hint=error.hint) from None

    def inputs_of(self, ids: Sequence[int]) -> tuple[ImageInput, ...]:
        """The images whose rows are in a prompt, in order; one that is there twice, twice. Raises `BadRequest` if one
        is not kept, or if rows of one are missing."""
        if not has_rows(ids):
            return ()
        found: list[ImageInput] = []
        left: list[int] = []  # rows of the last one that are to come, in reverse
        for place, token in enumerate(ids):
            if is_row(token):
                if not left:
                    found.append(self._begun(token, place))
                    left = list(reversed(found[-1].row_ids()))
                if left.pop() != token:
                    raise BadRequest(f"the token at {place} of the prompt is not the next row of its image", "prompt")
        if left:
            raise BadRequest(f"the prompt ends {len(left)} rows before the end of an image", "prompt")
        return tuple(found)

    def begun_in(self, ids: Sequence[int]) -> list[tuple[int, ProcessedImage]]:
        """The images that are kept of those whose first row is among tokens, and where that is."""
        rows = [(at, token) for at, token in enumerate(ids) if is_row(token)]
        with self._lock:
            return [(at, self._kept[self._firsts[row]].image) for at, row in rows if row in self._firsts]

    @property
    def kept_bytes(self) -> int:
        return self._bytes

    def rest(self) -> None:
        """End the process. The next image starts another."""
        self._worker.rest()

    def close(self) -> None:
        self._worker.close()

    def check(self) -> None:
        with self._lock:
            assert self._bytes == sum(one.bytes for one in self._kept.values()) <= self._most
            assert self._sources == {key: digest for digest, one in self._kept.items() for key in one.sources}
            assert self._firsts == {one.image.input.row_ids()[0]: digest for digest, one in self._kept.items()}

    def _prepared(self, file: bytes) -> ProcessedImage:
        if not self._beside.acquire(timeout=PATIENCE):
            raise Overloaded(f"{BESIDE} images are being decoded, and more are waiting; try again later")
        try:
            made: ProcessedImage = decode(self._worker.run(file, SECONDS), ProcessedImage)
            if len(made.thumbnail) > THUMBNAIL_BYTES or not made.thumbnail.startswith(_JPEG):
                made = replace(made, thumbnail=b"")  # a file that has taken over its fork may say anything
            return replace(made, input=shareable(replace(made.input, place=None)))
        except JobEnded as ended:
            why = f"more than {SECONDS:g} seconds" if ended.late else f"more than {MEMORY >> 30} GiB of memory"
            raise BadRequest(f"decoding the image takes {why}, or ends the process that does it") from None
        finally:
            self._beside.release()

    def _found(self, key: bytes) -> ProcessedImage | None:
        with self._lock:
            if (digest := self._sources.get(key)) is None:
                return None
            self._kept.move_to_end(digest)
            return self._kept[digest].image

    def _begun(self, row: int, place: int) -> ImageInput:
        """The image whose first row this is."""
        with self._lock:
            if (digest := self._firsts.get(row)) is None:
                raise BadRequest(
                    f"the token at {place} of the prompt is of no image that is kept, or not of its first row. Send "
                    f"the image again",
                    "prompt",
                )
            self._kept.move_to_end(digest)
            return self._kept[digest].image.input

    def _keep(self, key: bytes, image: ProcessedImage) -> None:
        digest = image.input.digest
        if (size := _Kept(image, [key]).bytes) > self._most:
            raise BadRequest(
                f"the processor makes {size} bytes of the image; {self._most} are kept of all. Send a smaller one"
            )
        with self._lock:
            kept = self._kept.setdefault(digest, _Kept(image))
            self._bytes += kept.bytes if not kept.sources else 0
            if key not in self._sources:
                kept.sources.append(key)
                self._sources[key] = digest
                self._bytes += _SOURCE
            self._firsts[image.input.row_ids()[0]] = digest
            self._kept.move_to_end(digest)
            while self._bytes > self._most:
                self._drop(*self._kept.popitem(last=False))

    def _drop(self, digest: bytes, kept: _Kept) -> None:
        self._bytes -= kept.bytes
        del self._firsts[kept.image.input.row_ids()[0]]
        for key in kept.sources:
            del self._sources[key]
