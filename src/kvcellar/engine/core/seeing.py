"""seeing: features of the images of requests, and what steps have of them.

An image is encoded once, in slices between steps, when a completion comes to its rows; what memory has of it needs no
features. They are kept by the digest of the image, for other places and requests, as many as `most` bytes.

By cross-attention, all tokens behind an image see it, up to the next one. Its features are kept as long as a completion
runs that sees it; one that resumes behind an image whose features are gone encodes it again.

Always true:
  * `bytes` are those of all features that are kept: less than `most`, beside one image, before each that is encoded
    ahead of need; beyond that there is one image for each running prompt that comes to it next, of one that is computed
    whole all, or by cross-attention those that the first running completion with images sees or comes to next;
  * features that a completion in decode sees are kept;
  * at most one image is being encoded, whose features are not kept; none while the engine rests;
  * the features of an image do not depend on the text around it: the self-test has shown that for this model.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Completion, Scheduled, Status
from kvcellar.engine.models.sliced import Sliced
from kvcellar.engine.models.vision import Features, ImageRows, StepImages, Vision
from kvcellar.images.image import ImageInput, is_row
from kvcellar.memory.plan import Ahead
from kvcellar.memory.spans import Span


class Seeing:
    def __init__(self, vision: Vision, *, device: torch.device, most: int, solo: bool = False) -> None:
        """`solo`: a forward has one sequence, and may need the positions of the tokens before its own."""
        self.vision, self._device, self.most, self._solo = vision, device, most, solo
        self._features: dict[bytes, Features] = {}  # the longest unused first
        self._positions: dict[PromptImages, tuple[Tensor, int]] = {}  # [axes,T] of prompts, and the next one behind
        self._begun: tuple[bytes, Sliced[Features]] | None = None  # of the image that is being encoded
        self.bytes = self.encoded = 0

    # -- features ---------------------------------------------------------------------------------------------------

    def end(self, completion: Completion, end: int) -> int:
        """The most tokens, up to `end`, that may be in memory after the next step: those behind it begin with an image
        that is not encoded."""
        images = completion.request.images
        for index in images.needed(completion.computed) if images is not None else ():
            assert images is not None
            if images.inputs[index].digest not in self._features:
                return min(end, max(completion.computed, images.begins(index)))
        return end

    def missing(self, running: Iterable[Completion]) -> tuple[Completion, int] | None:
        """The image that is needed first, and is not encoded, and whose prompt that is; one that was begun goes first.
        What a prompt does not come to next waits while as many features are kept as are allowed; where these are kept
        for completions that see them, so do all prompts but the first."""
        first: tuple[Completion, int] | None = None
        with_images = (one for one in running if one.request.images is not None)
        for number, completion in enumerate(with_images):
            images, full = completion.request.images, self.bytes >= self.most
            assert images is not None
            if full and images.crossed and number > 0:
                break
            if completion.status is Status.PREFILL:
                for index in (images.together if full else images.needed)(completion.computed):
                    digest = images.inputs[index].digest
                    if self._begun is not None and self._begun[0] == digest:
                        return completion, index
                    if first is None and digest not in self._features:
                        first = completion, index
        return first

    def encode(self, completion: Completion, index: int, running: Sequence[Completion], seconds: float) -> None:
        """Encode an image of a completion, for about so many seconds. What was begun of another one is lost. Raises
        what the network raises."""
        images = completion.request.images
        assert images is not None
        image = images.inputs[index]
        if self._begun is None or self._begun[0] != image.digest:
            self.abandon()
            self._begun = image.digest, self._encoding(completion.request.prompt, image, images.spans[index])
        try:
            made = self._begun[1].run(seconds)
        except BaseException:
            self.abandon()
            raise
        if made is not None:
            self._begun = None
            self._features[image.digest] = made
            self.bytes += made.bytes
            self.encoded += 1
            self.evict(running)

    def _encoding(self, prompt: Sequence[int], image: ImageInput, span: Span) -> Sliced[Features]:
        ids = self._ids(prompt[span.start : span.end])
        return self.vision.encoding(ids, {one.name: self._tensor(one.array()) for one in image.arrays})

    def abandon(self) -> None:
        """No prompt that runs needs the image that is being encoded, if there is one."""
        if self._begun is not None:
            self._begun[1].end()
            self._begun = None

    def evict(self, running: Sequence[Completion]) -> None:
        """Free features that are not needed, down to fewer than are allowed."""
        if self.bytes < self.most:
            return
        needed = {
            one.request.images.inputs[index].digest
            for one in running
            if one.request.images is not None
            for index in one.request.images.needed(one.computed)
        }
        for digest in [one for one in self._features if one not in needed]:
            if self.bytes < self.most:
                return
            self.bytes -= self._features.pop(digest).bytes

    def _ids(self, tokens: Iterable[int]) -> list[int]:
        """As the network gets them."""
        return [self.vision.placeholder if is_row(token) else token for token in tokens]

    def _tensor(self, array: Any) -> Tensor:
        made = torch.tensor(array, device=self._device)
        return made.to(self.vision.model.dtype) if made.is_floating_point() else made

    # -- steps ------------------------------------------------------------------------------------------------------

    def ahead(self, scheduled: Sequence[Scheduled]) -> tuple[Ahead, ...]:
        """The spans of a step whose tokens see each other both ways."""
        found: list[Ahead] = []
        for completion, tokens, _ in scheduled:
            if (images := completion.request.images) is not None and completion.seq is not None:
                new = Span(completion.computed, completion.computed + tokens)
                found += ((completion.seq, span) for span in images.ahead_in(new))
        return tuple(found)

    def step(self, scheduled: Sequence[Scheduled], ids: list[int]) -> tuple[list[int], StepImages | None]:
        """The ids [T] of a step as the network gets them, and what it has of images."""
        if all(one.completion.request.images is None for one in scheduled):
            return ids, None
        rows = self._rows(scheduled, ids) if self.vision.sees is None else self._seen(scheduled)
        given = StepImages(self._placed(scheduled, rows), rows, self._before(scheduled))
        return (self._ids(ids) if rows is not None else ids), given

    def _rows(self, scheduled: Sequence[Scheduled], ids: Sequence[int]) -> ImageRows | None:
        parts: list[tuple[int, Features, int]] = []
        for completion, start, end in _spread(scheduled):
            if (images := completion.request.images) is not None:
                for place in range(start, end):
                    if is_row(ids[place]):
                        index, row = images.rows[ids[place]]
                        parts.append((place, self._used(images.inputs[index]), row))
        return ImageRows.of(parts, self._device)

    def _seen(self, scheduled: Sequence[Scheduled]) -> ImageRows | None:
        """Rows that see the same images attend to them together, whichever completions they are of."""
        parts: dict[tuple[bytes, ...], tuple[list[int], list[Features]]] = {}
        for completion, start, end in _spread(scheduled):
            if (images := completion.request.images) is not None:
                for place in range(start, end):
                    seen = [images.inputs[index] for index in images.seen(completion.computed + place - start)]
                    if seen:
                        key = tuple(one.digest for one in seen)
                        if key not in parts:
                            parts[key] = [], [self._used(one) for one in seen]
                        parts[key][0].append(place)
        return ImageRows.seeing(list(parts.values()), self._device)

    def _used(self, image: ImageInput) -> Features:
        found = self._features[image.digest]
        self._features[image.digest] = self._features.pop(image.digest)  # the last to go
        return found

    def _placed(self, scheduled: Sequence[Scheduled], rows: ImageRows | None) -> Tensor | None:
        """The positions of all rows of a step: [axes,T] where some are of images, else [T]; None: those of the plan."""
        if not self.vision.axes:
            return None
        parts = [self._of_text(one, one.computed, end - start) for one, start, end in _spread(scheduled)]
        axes = max(one.shape[0] for one in parts)
        if rows is None:
            return torch.cat([one[0] for one in parts]).to(self._device)
        return torch.cat([one.expand(axes, -1) for one in parts], 1).to(self._device)

    def _before(self, scheduled: Sequence[Scheduled]) -> Tensor | None:
        """The positions [axes,past] of the tokens before those of a solo step; None: those of any text."""
        if not self.vision.axes or not self._solo:
            return None
        (completion,) = (one.completion for one in scheduled)
        return self._of_text(completion, 0, completion.computed).to(self._device)

    def _of_text(self, completion: Completion, start: int, count: int) -> Tensor:
        """The positions [axes or 1,count] of its tokens from `start` on. Behind the prompt all axes are the same."""
        images = completion.request.images
        if images is None:
            return torch.arange(start, start + count)[None]
        prompt, after = self._prompt(completion, images)
        of_prompt, behind = prompt[:, start : start + count], max(0, start - prompt.shape[1])
        drawn = torch.arange(after + behind, after + behind + count - of_prompt.shape[1])
        return torch.cat([of_prompt, drawn.expand(prompt.shape[0], -1)], 1)

    def _prompt(self, completion: Completion, images: PromptImages) -> tuple[Tensor, int]:
        if images not in self._positions:
            arrays: dict[str, list[Tensor]] = {}
            for one in chain.from_iterable(image.arrays for image in images.inputs):
                if one.dtype.startswith("int") and one.shape:  # grids
                    arrays.setdefault(one.name, []).append(torch.tensor(one.array()))
            given = {name: torch.cat(several) for name, several in arrays.items()}
            found = self.vision.positions(self._ids(completion.request.prompt), given)
            assert found is not None, "a network with axes has positions"
            self._positions[images] = found, int(found.max()) + 1
        return self._positions[images]

    def forget(self, images: PromptImages, running: Sequence[Completion]) -> None:
        """Its request is over."""
        self._positions.pop(images, None)
        self.evict(running)

    def check(self, running: Sequence[Completion]) -> None:
        """Assert what is always true."""
        for one in running:
            if (images := one.request.images) is not None and one.status is Status.DECODE:
                assert all(images.inputs[index].digest in self._features for index in images.seen(one.computed))
        assert self.bytes == sum(one.bytes for one in self._features.values())
        assert self._begun is None or self._begun[0] not in self._features


def _spread(scheduled: Sequence[Scheduled]) -> Iterator[tuple[Completion, int, int]]:
    """Each completion of a step, with the rows of its tokens and drafts."""
    row = 0
    for one in scheduled:
        yield one.completion, row, row + one.rows
        row += one.rows
