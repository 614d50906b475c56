"""seeing: features of the images of requests, and what steps have of them.

An image is encoded once, in slices between steps, when a completion comes to its rows; what memory has of it needs no
features. They are kept by the digest of the image, for other places and requests of a namespace, as many as `most`
bytes, and written to the tiers, from which they are read where these have them.

By cross-attention, all tokens behind an image see it, up to the next one. Its features are kept as long as a completion
runs that sees it; one that resumes behind an image whose features are gone encodes it again.

Always true:
  * `bytes` are those of all features that are kept: less than `most`, beside one image, before each that is encoded or
    read ahead of need, one at a time; beyond that there is one image for each running prompt that comes to it
    next, of one that is computed whole all, or by cross-attention those that the first running completion with images
    sees or comes to next;
  * features that a completion in decode sees are kept;
  * at most one image is being encoded, whose features are neither kept nor read; none while the engine rests;
  * the features of an image do not depend on the text around it: the self-test has shown that for this model.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Completion, Request, Scheduled, Status
from kvcellar.engine.models.features import Features, from_bytes, to_bytes
from kvcellar.engine.models.sliced import Sliced
from kvcellar.engine.models.vision import ImageRows, StepImages, Vision
from kvcellar.images.image import ImageInput, is_row
from kvcellar.memory.plan import Ahead
from kvcellar.memory.prefix.node import TOKEN
from kvcellar.memory.snapshot import StoredImage
from kvcellar.memory.spans import Span
from kvcellar.memory.stored_features import Reading, StoredFeatures
from kvcellar.memory.tiers.admission import Rate
from kvcellar.memory.tiers.tier import Loaded

log = logging.getLogger("kvcellar.engine")


class Seeing:
    def __init__(self, vision: Vision, *, device: torch.device, most: int, solo: bool = False) -> None:
        """`solo`: a forward has one sequence, and may need the positions of the tokens before its own."""
        self.vision, self._device, self.most, self._solo = vision, device, most, solo
        self._stored: StoredFeatures | None = None  # None: there are no tiers
        self._features: dict[StoredImage, Features] = {}  # the longest unused first
        self._readings: dict[StoredImage, Reading] = {}
        self._read: set[StoredImage] = set()  # of running prompts: not looked for in tiers again
        self._unwritten: set[StoredImage] = set()  # were encoded, and not given to tiers
        self._positions: dict[PromptImages, tuple[Tensor, int]] = {}  # [axes,T] of prompts, and the next one behind
        self._begun: tuple[StoredImage, Sliced[Features]] | None = None  # of the image that is being encoded
        self._spent, self._tower = 0.0, Rate()  # seconds for that; of rows through the tower
        self.bytes = self.encoded = self.restored = 0

    def use_tiers(self, stored: StoredFeatures) -> None:
        """Write features there, and read them. To be called before the first step."""
        self._stored = stored

    # -- features ---------------------------------------------------------------------------------------------------

    def end(self, completion: Completion, end: int) -> int:
        """The most tokens, up to `end`, that may be in memory after the next step: those behind it begin with an image
        that is not encoded."""
        images = completion.request.images
        for index in images.needed(completion.computed) if images is not None else ():
            assert images is not None
            if images.keys[index] not in self._features:
                return min(end, max(completion.computed, images.begins(index)))
        return end

    def missing(self, running: Iterable[Completion]) -> tuple[Completion, int] | None:
        """The image that is needed first, and neither encoded nor read, and whose prompt that is; one that was begun
        goes first."""
        lacking = [one for one in self._lacking(running) if _key(*one) not in self._readings]
        begun = self._begun[0] if self._begun is not None else None
        return next((one for one in lacking if _key(*one) == begun), lacking[0] if lacking else None)

    def _lacking(self, running: Iterable[Completion]) -> Iterator[tuple[Completion, int]]:
        """The images that prompts need and that have no features, in order. What a prompt does not come to next waits
        while as many are kept as are allowed; where these are kept for completions that see them, so do all prompts but
        the first."""
        with_images = (one for one in running if one.request.images is not None)
        for number, completion in enumerate(with_images):
            images = completion.request.images
            assert images is not None
            if images.crossed and number > 0 and self.bytes >= self.most:
                return
            if completion.status is Status.PREFILL:
                next_ones = images.together(completion.computed)
                for index in images.needed(completion.computed):
                    if index not in next_ones and self._full:
                        break
                    if images.keys[index] not in self._features:
                        yield completion, index

    @property
    def _full(self) -> bool:
        """Whether nothing is encoded or read ahead of need. What is being read may have any size."""
        return bool(self._readings) or self.bytes >= self.most

    def read(self, running: Sequence[Completion]) -> None:
        """Begin to read what tiers have of the images that running prompts need, and keep of what has arrived one, so
        that streams wait for no more."""
        if (stored := self._stored) is None:
            return
        needed = self._needed(running)
        for image in [one for one in self._readings if one not in needed]:
            stored.end(self._readings.pop(image))
        self._read &= needed
        for image in [_key(*one) for one in self._lacking(running)]:
            if image not in self._read and (self._begun is None or self._begun[0] != image):
                self._read.add(image)
                self._readings[image] = stored.begin(image)
        for image, reading in list(self._readings.items()):
            if not stored.advance(reading, self._tower.seconds(len(image.tokens) // TOKEN)):
                del self._readings[image]
                if self._taken(reading):
                    break
        self.evict(running)

    def _taken(self, reading: Reading) -> bool:
        """Keep what a reading has found, which is over. False if that is nothing."""
        stored, loaded = self._stored, reading.loaded
        assert stored is not None
        try:
            if loaded is None:
                return False
            if (made := self._made(reading.image, loaded)) is not None:
                self._keep(reading.image, made)
                self.restored += 1
                return True
            log.warning("stored features of an image are not used: they are of another kind")
            stored.refuse(reading)
        except (RuntimeError, MemoryError) as error:  # too little memory, as a rule: the tower may find more
            log.warning("stored features of an image are not used: %s: %s", type(error).__name__, error)
        finally:
            stored.end(reading)
        return False

    def _made(self, image: StoredImage, loaded: Loaded) -> Features | None:
        """Features of what was read; None if it is not what this network makes of such an image."""
        snapshot, like = loaded.snapshot, self.vision.like
        assert like is not None, "a network that takes images was tested"
        if snapshot.tokens == image.tokens:
            return from_bytes(snapshot.record, loaded.chunks, len(snapshot.span), like, self._device)
        return None

    def _keep(self, image: StoredImage, made: Features) -> None:
        self._features[image] = made
        self.bytes += made.bytes

    def _drop(self, image: StoredImage) -> None:
        self.bytes -= self._features.pop(image).bytes
        self._unwritten.discard(image)

    def store(self, request: Request, images: Iterable[StoredImage]) -> None:
        """If a request allows it, write features of its images that were encoded, and keep those that are stored at
        least as long as it says."""
        if (stored := self._stored) is None or not request.retention.stored:
            return
        like = self.vision.like
        assert like is not None, "a network that takes images was tested"
        for image in images:
            if stored.renew(image, request.retention) or image not in self._unwritten:
                continue
            try:
                if stored.keep(image, request.retention, *to_bytes(self._features[image], like)):
                    self._unwritten.remove(image)
            except (RuntimeError, MemoryError) as error:  # of bytes for a copy
                log.warning("features of an image are not stored: %s: %s", type(error).__name__, error)
                self._unwritten.remove(image)

    def encode(self, completion: Completion, index: int, running: Sequence[Completion], seconds: float) -> None:
        """Encode an image of a completion, for about so many seconds. What was begun of another one is lost. Raises
        what the network raises."""
        images = completion.request.images
        assert images is not None
        image, key = images.inputs[index], images.keys[index]
        if self._begun is None or self._begun[0] != key:
            self.abandon()
            self._begun = key, self._encoding(completion.request.prompt, image, images.spans[index])
        began = time.perf_counter()
        try:
            made = self._begun[1].run(seconds)
        except BaseException:
            self.abandon()
            raise
        self._spent += time.perf_counter() - began
        if made is not None:
            self._tower.record(image.rows, self._spent)
            self._begun, self._spent = None, 0.0
            self._keep(key, made)
            self.encoded += 1
            self._unwritten.add(key)
            self.store(completion.request, [key])
            self.evict(running)

    def _encoding(self, prompt: Sequence[int], image: ImageInput, span: Span) -> Sliced[Features]:
        ids = self._ids(prompt[span.start : span.end])
        return self.vision.encoding(ids, {one.name: self._tensor(one.array()) for one in image.arrays})

    def abandon(self) -> None:
        """No prompt that runs needs the image that is being encoded, if there is one."""
        if self._begun is not None:
            self._begun[1].end()
            self._begun, self._spent = None, 0.0

    def rest(self) -> None:
        """No prompt runs."""
        self.abandon()
        self.read(())

    @property
    def reads(self) -> bool:
        """Whether there is nothing to do but to read features, at the end of which the engine is woken."""
        return bool(self._readings) and self._begun is None

    def evict(self, running: Sequence[Completion]) -> None:
        """Free features that are not needed, down to fewer than are allowed."""
        if self.bytes < self.most:
            return
        needed = self._needed(running)
        for image in [one for one in self._features if one not in needed]:
            if self.bytes < self.most:
                return
            self._drop(image)

    def _needed(self, running: Iterable[Completion]) -> set[StoredImage]:
        return {
            one.request.images.keys[index]
            for one in running
            if one.request.images is not None
            for index in one.request.images.needed(one.computed)
        }

    def drop(self, which: Callable[[StoredImage], bool], running: Sequence[Completion]) -> None:
        """Free the features of these images, but for those that running completions need."""
        needed = self._needed(running)
        for image in [one for one in self._features if which(one) and one not in needed]:
            self._drop(image)

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
                        parts.append((place, self._used(images.keys[index]), row))
        return ImageRows.of(parts, self._device)

    def _seen(self, scheduled: Sequence[Scheduled]) -> ImageRows | None:
        """Rows that see the same images attend to them together, whichever completions they are of."""
        parts: dict[tuple[StoredImage, ...], tuple[list[int], list[Features]]] = {}
        for completion, start, end in _spread(scheduled):
            if (images := completion.request.images) is not None:
                for place in range(start, end):
                    seen = tuple(images.keys[index] for index in images.seen(completion.computed + place - start))
                    if seen:
                        if seen not in parts:
                            parts[seen] = [], [self._used(one) for one in seen]
                        parts[seen][0].append(place)
        return ImageRows.seeing(list(parts.values()), self._device)

    def _used(self, image: StoredImage) -> Features:
        found = self._features[image]
        self._features[image] = self._features.pop(image)  # the last to go
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

    def forget(self, request: Request, running: Sequence[Completion]) -> None:
        """It is over."""
        if request.images is not None:
            self.store(request, request.images.keys)
            self._positions.pop(request.images, None)
            self.evict(running)

    def check(self, running: Sequence[Completion]) -> None:
        """Assert what is always true."""
        for one in running:
            if (images := one.request.images) is not None and one.status is Status.DECODE:
                assert all(images.keys[index] in self._features for index in images.seen(one.computed))
        assert self.bytes == sum(one.bytes for one in self._features.values())
        assert self._begun is None or self._begun[0] not in {*self._features, *self._readings}
        assert self._readings.keys() <= self._read and not self._readings.keys() & self._features.keys()
        assert self._unwritten <= self._features.keys()
        assert self._stored is None or self._stored.readings == {*self._readings.values()}


def _key(completion: Completion, index: int) -> StoredImage:
    assert completion.request.images is not None
    return completion.request.images.keys[index]


def _spread(scheduled: Sequence[Scheduled]) -> Iterator[tuple[Completion, int, int]]:
    """Each completion of a step, with the rows of its tokens and drafts."""
    row = 0
    for one in scheduled:
        yield one.completion, row, row + one.rows
        row += one.rows
