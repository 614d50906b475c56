"""Images without a processor: a file is taken for one if it begins as a PNG does."""

import hashlib
from collections.abc import Sequence

from kvcellar.errors import BadRequest
from kvcellar.images.image import ImageInput, ProcessedImage, is_row

PNG = b"\x89PNG "


class FakeImages:
    """Each image has 3 rows. `kept`: by digest; the test may remove some."""

    token = "<image>"

    def __init__(self, placeholder: int) -> None:
        self.placeholder = placeholder
        self.kept: dict[bytes, ProcessedImage] = {}

    def process(self, source: bytes) -> ProcessedImage:
        if not source.startswith(PNG):
            raise BadRequest("it is no image of a known format", "messages")
        digest = hashlib.sha256(source).digest()
        made = ProcessedImage(ImageInput(digest, 3, ()), "<image>" * 3, 8, 8)
        return self.kept.setdefault(digest, made)

    def inputs_of(self, prompt: Sequence[int]) -> tuple[ImageInput, ...]:
        first = {image.input.row_ids()[0]: image.input for image in self.kept.values()}
        rows = [token for token in prompt if is_row(token)]
        if any(rows[at] not in first for at in range(0, len(rows), 3)):
            raise BadRequest("prompt has rows of an image that is not kept any more; send it again", "prompt")
        return tuple(first[rows[at]] for at in range(0, len(rows), 3))
