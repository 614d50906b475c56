"""labels: what stands for an image in the text of a rendered conversation, and the token ids of such a text.

Always true: a label is made of halves of surrogate pairs, which neither a client's text nor a template's has. It says
what image it is: texts of conversations with other images differ. It is not in what the tokenizer gets.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvcellar.errors import BadRequest
from kvcellar.images.image import ImageInput, ProcessedImage, with_rows
from kvcellar.text.tokens import TextTokenizer

LENGTH = 24  # characters of 11 bits, for a digest of 32 bytes
_LABEL = re.compile(f"[\ud800-\udfff]{{{LENGTH}}}")


def label(image: ImageInput) -> str:
    number = int.from_bytes(image.digest, "big")
    return "".join(chr(0xD800 + (number >> 11 * n & 0x7FF)) for n in range(LENGTH))


@dataclass(frozen=True, slots=True)
class Labelled:
    """The images that a text has labels of. `placeholder` is the token for each row of them, `token` what templates
    write for one, `places` message and number in it of each."""

    images: Sequence[ProcessedImage] = ()
    placeholder: int = -1
    token: str = ""
    places: Sequence[tuple[int, int]] = ()

    def among(self, text: str) -> list[ProcessedImage]:
        """The images of a text, in order."""
        return [image for image, _ in self._found(text)]

    def written(self, text: str, marks: Sequence[int] = ()) -> tuple[str, Sequence[int]]:
        """The text with what each image is written as in place of its label, and the positions of its marks in it."""
        if not self.images:
            return text, marks
        found = self._found(text)
        starts = [start for _, start in found]
        grown = [*accumulate((len(image.text) - LENGTH for image, _ in found), initial=0)]
        texts = iter([image.text for image, _ in found])
        moved = [mark + grown[bisect_left(starts, mark)] for mark in marks]
        return _LABEL.sub(lambda _: next(texts), text), moved

    def encode(
        self, tokenizer: TextTokenizer, text: str, marks: Sequence[int], *, limit: int | None = None
    ) -> list[int]:
        """The token ids of a text, as `TextTokenizer.encode_marked`, with row ids for its images."""
        ids = tokenizer.encode_marked(*self.written(text, marks), limit=limit)
        if not self.images:
            return ids
        try:
            return with_rows(ids, self.placeholder, [image.input for image in self.among(text)])
        except ValueError as error:
            raise BadRequest(f"the images are not in what the chat template writes: {error}", "messages") from error

    def _found(self, text: str) -> list[tuple[ProcessedImage, int]]:
        """The images of a text, and where their labels begin."""
        if not self.images:
            return []
        by_label = {label(image.input): image for image in self.images}
        return [(by_label[found[0]], found.start()) for found in _LABEL.finditer(text)]


NO_IMAGES = Labelled()
