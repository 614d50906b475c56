"""prompt_images: the images of one request, and where they stand in its tokens. No torch.

Always true: `spans` are in order and do not overlap; each goes from the first row of an image to behind its last one,
and the tokens in it that are rows are those of this image, all of them and in order.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import blake2b

from kvcellar.errors import BadRequest
from kvcellar.images.image import ImageInput, is_row, seen_from
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.snapshot import StoredImage
from kvcellar.memory.spans import Span, around, deepest


class PromptImages:
    def __init__(
        self,
        prompt: Sequence[int],
        images: Sequence[ImageInput],
        *,
        ahead: bool,
        whole_prompt: bool = False,
        crossed: bool = False,
        namespace: str = "",
    ) -> None:
        """`namespace` is that of the request. `ahead`: the tokens of an image see each other both ways, `whole_prompt`:
        all tokens of the prompt do. `crossed`: images are one token each, and others see them by cross-attention.
        Raises `BadRequest` if the rows of the prompt are not those of the images."""
        self.inputs, self.crossed = tuple(images), crossed
        self.keys = tuple(StoredImage(namespace, one.digest, key_of(one.row_ids())) for one in images)  # of features
        self.digest = blake2b(key_of(prompt), digest_size=16).hexdigest() if whole_prompt else ""  # of what sees ahead
        self.rows = {row: (index, at) for index, one in enumerate(images) for at, row in enumerate(one.row_ids())}
        self._places = places = [at for at, token in enumerate(prompt) if is_row(token)]
        if [prompt[at] for at in places] != [row for one in images for row in one.row_ids()]:
            raise BadRequest("the rows of images in the prompt are not those of its images", "prompt")
        self.spans, first = list[Span](), 0
        for one in images:
            self.spans.append(Span(places[first], places[first + one.rows - 1] + 1))
            first += one.rows
        self._ends = [span.end for span in self.spans]
        self._ahead = [Span(0, len(prompt))] if whole_prompt else self.spans if ahead else []

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.inputs)

    @property
    def count(self) -> int:
        """Rows of all images."""
        return len(self._places)

    @property
    def end(self) -> int:
        """Behind the last image, and behind all that sees ahead."""
        return max(span.end for span in [*self.spans[-1:], *self._ahead[-1:]])

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

    def after(self, pos: int) -> range:
        """The images of which tokens at `pos` or behind it are."""
        return range(bisect_right(self._ends, pos), len(self.spans))

    def together(self, pos: int) -> range:
        """Of those that are needed, as many as the step has to have that comes to the first one."""
        needed = self.needed(pos)
        if self.digest:
            return needed
        return range(needed.start, min(needed.stop, max(needed.start + 1, self.seen(pos).stop)))

    def begins(self, index: int) -> int:
        """Where a step begins, at the latest, that has rows of this image."""
        return self.resumes(self.spans[index].start)

    def resumes(self, pos: int) -> int:
        """The last position up to `pos` where what is computed can go on."""
        return deepest(self._ahead, pos)

    def whole(self, start: int, end: int) -> int:
        """The last position up to `end` at which a step that begins at `start` may end. If it can end nowhere before,
        the first one behind it."""
        span = around(self._ahead, end)
        if span is None:
            return end
        return span.start if span.start > start else span.end

    def inside(self, pos: int) -> bool:
        """Whether `pos` is inside a span that sees ahead: nothing resumes there."""
        return around(self._ahead, pos) is not None

    def ahead_in(self, tokens: Span) -> list[Span]:
        """The spans of new tokens whose tokens see each other both ways."""
        return [span for span in self._ahead if tokens.start <= span.start and span.end <= tokens.end]
