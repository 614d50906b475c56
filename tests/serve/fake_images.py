"""Images without a processor: a file is taken for one if it begins as a PNG does."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvcellar.errors import BadRequest
from kvcellar.images.fetching import Fetcher
from kvcellar.images.image import ImageInput, ProcessedImage, is_row
from kvcellar.images.sources import file_of

PNG = b"\x89PNG "


class FakeImages:
    """Each image has 3 rows. `kept`: by digest; the test may remove some."""

    def __init__(self) -> None:
        self.kept: dict[bytes, ProcessedImage] = {}

    def process(self, source: Any, where: str) -> ProcessedImage:
        try:
            file = file_of(source, Fetcher(()))
            if not file.startswith(PNG):
                raise BadRequest("it is no image of a known format")
        except BadRequest as error:
            raise BadRequest(f"{where}: {error.message}", where) from None
        digest = hashlib.sha256(file).digest()
        made = ProcessedImage(ImageInput(digest, 3, ()), "<image>" * 3, 8, 8, "<image>")
        return self.kept.setdefault(digest, made)

    def rest(self) -> None:
        """There is no process."""

    def inputs_of(self, prompt: Sequence[int]) -> tuple[ImageInput, ...]:
        first = {image.input.row_ids()[0]: image.input for image in self.kept.values()}
        rows = [token for token in prompt if is_row(token)]
        if any(rows[at] not in first for at in range(0, len(rows), 3)):
            raise BadRequest("prompt has rows of an image that is not kept any more; send it again", "prompt")
        return tuple(first[rows[at]] for at in range(0, len(rows), 3))
