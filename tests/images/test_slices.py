"""Images are encoded in slices between the steps of streams: what a slice is, and when there is none any more."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Request, Status
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.messages import Submission
from kvcellar.engine.models.features import Features
from kvcellar.engine.models.sliced import Sliced
from kvcellar.engine.models.vision import vision_of
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.images.image import ImageInput, with_rows
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.prefix.node import key_of
from kvcellar.sampling_params import SamplingParams
from tests.engine.world import Ask, Heard, World
from tests.zoo_test_support.images import drawn, image_input, inputs_of, network_of, processor_of

PLACEHOLDER, ROWS, PARTS = 7, 4, 12
PART = 0.0009  # seconds of a part, a little less than a step with one row


def slices() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "kvcellar-slices"]


# -- a call in slices ---------------------------------------------------------------------------------------------


class Parts:
    """Work of some parts, each of which takes `PART` seconds of a clock that nothing else moves."""

    def __init__(self, parts: int, error: Exception | None = None) -> None:
        self.now, self.parts, self.done, self.inside, self.closed = 0.0, parts, 0, 0, False
        self._error = error
        self._pause: Callable[[], None] = lambda: None
        self.sliced = Sliced(self._work, self._around, lambda: self.now)

    @contextmanager
    def _around(self, pause: Callable[[], None]) -> Iterator[None]:
        self._pause = pause
        self.inside += 1
        yield
        self.inside -= 1

    def _work(self) -> int:
        try:
            for _ in range(self.parts):
                assert self.inside == 1
                self.now += PART
                self.done += 1
                self._pause()
            if self._error is not None:
                raise self._error
            return self.done
        finally:
            self.closed = True


@pytest.mark.parametrize(("seconds", "each"), [(0.0, 1), (1.9 * PART, 1), (3.1 * PART, 3), (inf, 8)])
def test_a_slice_has_the_parts_that_fit_and_one_at_least(seconds: float, each: int) -> None:
    work, ends = Parts(8), list[int]()
    while (result := work.sliced.run(seconds)) is None:
        ends.append(work.done)
    assert result == 8
    assert ends == [*range(each, 9, each)][: len(ends)]
    assert len(ends) == (0 if seconds == inf else 8 // each)
    assert not slices()


def test_what_work_raises_is_raised_and_ends_it() -> None:
    work = Parts(2, KeyError("weights"))
    assert work.sliced.run(0.0) is None
    assert work.sliced.run(0.0) is None
    with pytest.raises(KeyError, match="weights"):
        work.sliced.run(0.0)
    assert not slices()


@pytest.mark.parametrize("slices_before", [0, 1, 3])
def test_work_is_ended_where_it_stopped(slices_before: int) -> None:
    work = Parts(3)
    for _ in range(slices_before):
        assert work.sliced.run(0.0) is None
    work.sliced.end()
    work.sliced.end()
    assert (work.done, work.closed) == (slices_before, slices_before > 0)
    assert not slices()


# -- a network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3"])
def test_features_are_those_of_one_forward_and_between_slices_the_network_is_as_it_was(model_type: str) -> None:
    model = network_of(model_type, torch.float32)
    image = image_input(model, processor_of(model.config), drawn(1))
    vision, ids, inputs = vision_of(model), [PLACEHOLDER], inputs_of([image])
    assert vision is not None
    ids, text = [vision.placeholder] * image.rows, [5, 6, 8, 31]
    whole, logits = vision.encoding(ids, inputs).run(inf), vision.logits(text, {})
    assert whole is not None
    encoding, count = vision.encoding(ids, inputs), 0
    while (made := encoding.run(0.0)) is None:
        count += 1
        assert not any(_hooked(model))
        assert torch.equal(vision.logits(text, {}), logits)  # the decoder runs: the slices do not stop it
        assert torch.is_inference_mode_enabled() is False
    assert count >= 2, "a slice for each layer of the tower"
    assert torch.equal(made.rows, whole.rows)
    assert [*made.layers] == [*whole.layers]
    for name, several in made.layers.items():
        assert all(map(torch.equal, several, whole.layers[name]))
    assert (made.mask, made.ahead) == (whole.mask, whole.ahead)


def test_a_network_is_as_it_was_after_it_was_stopped_in_the_middle() -> None:
    model = network_of("llava", torch.float32)
    image = image_input(model, processor_of(model.config), drawn(1))
    vision, inputs = vision_of(model), inputs_of([image])
    assert vision is not None
    ids = [vision.placeholder] * image.rows
    stopped = vision.encoding(ids, inputs)
    assert stopped.run(0.0) is None
    stopped.end()
    assert not slices()
    assert not any(_hooked(model))
    assert torch.equal(vision.encode(ids, inputs).rows, vision.encode(ids, inputs).rows)


def _hooked(model: nn.Module) -> list[nn.Module]:
    """Modules with hooks, but for those of transformers."""
    ours = "kvcellar."
    return [
        one
        for one in model.modules()
        if any(
            hook.__module__.startswith(ours)
            for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())
        )
    ]


# -- an engine ----------------------------------------------------------------------------------------------------


class Tower:
    """Makes features in `PARTS` parts of `PART` seconds of the world's clock."""

    placeholder, axes = PLACEHOLDER, False

    def __init__(self, world: World, error: Exception | None = None) -> None:
        self._world, self._error = world, error
        self.begun = self.slices = 0
        self.steps = list[int]()  # of the engine before each part

    def encoding(self, ids: Any, inputs: Any) -> Sliced[Features]:
        pauses = list[Callable[[], None]]()
        self.begun += 1

        @contextmanager
        def around(pause: Callable[[], None]) -> Iterator[None]:
            pauses[:] = [pause]
            self.slices += 1
            yield

        def work() -> Features:
            for _ in range(PARTS):
                self.steps.append(self._world.loop.steps)
                self._world.now += PART
                pauses[0]()
            if self._error is not None:
                raise self._error
            return Features(torch.zeros(ROWS, 3), {}, None, ahead=False)

        return Sliced(work, around, self._world.clock)


class Images:
    """An engine with a tower, beside whose streams images are encoded."""

    def __init__(self, *, streams: int, error: Exception | None = None, gap: float | None = 0.1) -> None:
        self.world = World({"causal": Causal()}, {"causal": 4000}, gap=gap, step_tokens=64)
        self.tower: Any = Tower(self.world, error)
        self.seeing = Seeing(self.tower, device=torch.device("cpu"), most=1 << 20)
        self.world.manager.seeing = self.seeing
        for number in range(streams):
            self.world.submit(number, Ask(0, 4, 500))
        self.turns(6)

    def submit(self, *numbers: int) -> tuple[Request, Heard]:
        """A prompt with these images, for some tokens."""
        images = [ImageInput(hashlib.sha256(bytes([number])).digest(), ROWS, ()) for number in numbers]
        prompt = with_rows([one for _ in images for one in (900, *ROWS * [PLACEHOLDER])] + [901], PLACEHOLDER, images)
        params, heard = SamplingParams(max_tokens=3, temperature=0.0), Heard()
        number = self.world.loop.number()
        made = Submission(number=number, prompt=key_of(prompt), params=params, seed=0, images=tuple(images))
        request = Request(made, heard, images=PromptImages(prompt, images, ahead=False))
        self.world.loop.submit(request, [self.world._completion(request, list(prompt), 0)])
        return request, heard

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.world.turn()

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.world.turn()
        raise AssertionError("it does not come to an end")


def test_a_stream_has_a_step_between_two_slices() -> None:
    images = Images(streams=1)
    _, heard = images.submit(1)
    images.until(lambda: heard.over)
    parts = [images.tower.steps.count(step) for step in sorted(set(images.tower.steps))]
    assert sum(parts) == PARTS
    assert max(parts) * PART <= 0.002, "a stream waits for two steps' time at most"
    assert [*sorted(set(images.tower.steps))] == [*range(min(images.tower.steps), max(images.tower.steps) + 1)]
    assert images.seeing.encoded == 1
    assert not slices()


@pytest.mark.parametrize(("gap", "count"), [(0.1, 1), (0.01, 2)])
def test_without_streams_a_slice_is_as_long_as_a_stream_might_wait(gap: float, count: int) -> None:
    images = Images(streams=0, gap=gap)
    _, heard = images.submit(1)
    images.until(lambda: heard.over)
    assert (images.seeing.encoded, images.tower.slices) == (1, count)


def test_two_images_of_two_requests_are_encoded_one_after_the_other() -> None:
    images = Images(streams=1)
    heard = [images.submit(number)[1] for number in (1, 2)]
    images.until(lambda: all(one.over for one in heard))
    assert (images.seeing.encoded, images.tower.begun) == (2, 2)
    assert [one.tokens(0) for one in heard] == [3, 3]


def test_an_image_that_two_requests_need_goes_on_where_one_of_them_is_cancelled() -> None:
    images = Images(streams=1)
    (first, _), (_, heard) = images.submit(1), images.submit(1)
    images.until(lambda: len(images.tower.steps) >= 3)
    images.world.loop.cancel(first.number)
    images.until(lambda: heard.over)
    assert (images.seeing.encoded, images.tower.begun) == (1, 1)


@pytest.mark.parametrize("streams", [0, 1])
def test_a_request_that_is_cancelled_ends_its_image(streams: int) -> None:
    images = Images(streams=streams, gap=0.01 if streams == 0 else 0.1)
    images.world.scheduler.between = lambda: 0.0  # type: ignore[method-assign]
    request, heard = images.submit(1)
    images.until(lambda: len(images.tower.steps) >= 3)
    assert slices()
    images.world.loop.cancel(request.number)
    images.turns(2)
    assert heard.over
    assert (images.seeing.encoded, images.seeing.bytes) == (0, 0)
    assert not slices()
    _, again = images.submit(1)
    images.until(lambda: again.over)
    assert (images.seeing.encoded, images.tower.begun) == (1, 2)


def test_an_image_that_no_prompt_needs_is_not_left_half_encoded_while_the_engine_rests() -> None:
    images = Images(streams=0)
    images.world.scheduler.between = lambda: 0.0  # type: ignore[method-assign]
    request, _ = images.submit(1)
    images.until(lambda: len(images.tower.steps) >= 3)
    images.world.loop._cancel(request)  # as a step does for one whose client is gone
    assert slices()
    images.turns(1)
    assert not slices()


def test_an_engine_that_is_closed_in_the_middle_ends_the_slices() -> None:
    images = Images(streams=1)
    _, heard = images.submit(1)
    images.until(lambda: len(images.tower.steps) >= 3)
    assert slices()
    images.world.loop.post(images.world.inbox.close)
    images.world.loop.turn()
    assert not slices()
    assert heard.error is not None


def test_what_a_running_prompt_has_passed_is_freed_where_no_more_may_be_kept() -> None:
    images = Images(streams=0)
    images.seeing.most = 1
    request, heard = images.submit(1)
    images.until(lambda: any(one.status is Status.DECODE for one in request.completions))
    images.turns(1)
    assert not heard.over
    assert images.seeing.bytes == 0


def test_an_image_that_its_network_cannot_show_ends_its_request_and_leaves_memory_as_it_was() -> None:
    images = Images(streams=1, error=ModelRefused("the image is in two pieces"))
    _, heard = images.submit(1)
    prefixes = images.world.manager.cache.prefixes
    images.until(lambda: heard.over)
    assert isinstance(heard.error, BadRequest)
    assert heard.error.message == "the image is in two pieces"
    assert images.world.manager.cache.prefixes is prefixes
    stream = images.world.requests[0].completions[0]
    before = len(stream.tokens)
    images.turns(3)
    assert len(stream.tokens) == before + 3


def test_an_error_of_a_tower_ends_its_request_only() -> None:
    images = Images(streams=1, error=KeyError("weights"))
    _, heard = images.submit(1)
    images.until(lambda: heard.over)
    assert "encoding an image failed with KeyError" in str(heard.error)
    assert not slices()
    stream = images.world.requests[0].completions[0]
    before = len(stream.tokens)
    images.turns(3)
    assert stream.status is Status.DECODE
    assert len(stream.tokens) == before + 3
