"""prompt_images: the images of one request, and where they stand in its tokens. No torch.

Always true: `spans` are in order and do not overlap; each goes from the first row of an image to behind its last one,
and the tokens in it that are rows are those of this image, all of them and in order.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvcellar.errors import BadRequest
from kvcellar.images.image import ImageInput, is_row, seen_from
from kvcellar.memory.spans import Span


class PromptImages:
    def __init__(
        self, prompt: Sequence[int], images: Sequence[ImageInput], *, ahead: bool, crossed: bool = False
    ) -> None:
        """`ahead`: the tokens of an image see each other both ways. `crossed`: images are one token each, and others
        see them by cross-attention. Raises `BadRequest` if the rows of the prompt are not those of the images."""
        self.inputs, self.ahead, self.crossed = tuple(images), ahead, crossed
        self.rows = {row: (index, at) for index, one in enumerate(images) for at, row in enumerate(one.row_ids())}
        self._places = places = [at for at, token in enumerate(prompt) if is_row(token)]
        if [prompt[at] for at in places] != [row for one in images for row in one.row_ids()]:
            raise BadRequest("the rows of images in the prompt are not those of its images", "prompt")
        self.spans, first = list[Span](), 0
        for one in images:
            self.spans.append(Span(places[first], places[first + one.rows - 1] + 1))
            first += one.rows
        self._ends = [span.end for span in self.spans]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.inputs)

    @property
    def count(self) -> int:
        """Rows of all images."""
        return len(self._places)

    @property
    def end(self) -> int:
        """Behind the last image."""
        return self._ends[-1]

    def text_before(self, pos: int) -> int:
        """How many of the tokens before `pos` are of text."""
        return pos - bisect_left(self._places, pos)

    def named(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
        """Where the first row of each is, and a name: by its `places` in messages, if these are known."""
        names = [f"message {message + 1}, image {number + 1}" for message, number in places]
        if len(names) != len(self.spans):
            names = [f"image {number + 1} of the prompt" for number in range(len(self.spans))]
        return [(span.start, name) for span, name in zip(self.spans, names, strict=True)]

    def seen(self, pos: int) -> range:
        """The images that a token at `pos` sees by cross-attention (`seen_from`), if its network does that."""
        return seen_from(self._places, pos) if self.crossed else range(0)

    def needed(self, pos: int) -> range:
        """The images of which features are needed to compute what is at `pos` and behind it."""
        seen, after = self.seen(pos), self.after(pos)
        return range(seen.start if seen else after.start, after.stop)

    def next(self, pos: int) -> range:
        """Those of them that are needed first."""
        needed = self.needed(pos)
        return range(needed.start, min(needed.stop, max(needed.start + 1, self.seen(pos).stop)))

    def after(self, pos: int) -> range:
        """The images of which tokens at `pos` or behind it are."""
        return range(bisect_right(self._ends, pos), len(self.spans))

    def whole(self, start: int, end: int) -> int:
        """The last position up to `end` at which a step that begins at `start` may end. If it can end nowhere before,
        the first one behind it."""
        at = bisect_right(self._ends, end)
        if not self.ahead or at == len(self.spans) or not self.spans[at].start < end:
            return end
        return self.spans[at].start if self.spans[at].start > start else self.spans[at].end

    def inside(self, pos: int) -> bool:
        """Whether `pos` is inside a span that sees ahead: nothing resumes there."""
        at = bisect_right(self._ends, pos)
        return self.ahead and at < len(self.spans) and self.spans[at].start < pos

    def ahead_in(self, tokens: Span) -> list[Span]:
        """The spans of new tokens whose tokens see each other both ways."""
        return [span for span in self.spans if self.ahead and tokens.start <= span.start and span.end <= tokens.end]
