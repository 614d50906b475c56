"""Which image is encoded next, and which features stay."""

import hashlib
import time
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Scheduled, Status
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.models.crossing import Crossed
from kvcellar.engine.models.features import Features, Mask
from kvcellar.engine.models.sliced import Sliced
from kvcellar.images.image import ImageInput, with_rows

PLACEHOLDER, ROWS, WIDTH = 7, 4, 3
EACH = ROWS * WIDTH * 4  # bytes of features


class FakeVision:
    placeholder = PLACEHOLDER

    def encoding(self, ids: Any, inputs: Any) -> Sliced[Features]:
        assert list(ids) == ROWS * [PLACEHOLDER]
        made = Features(torch.zeros(ROWS, WIDTH), {}, None, ahead=False)
        return Sliced(lambda: made, lambda _: nullcontext(), time.perf_counter)


def image(number: int) -> ImageInput:
    return ImageInput(hashlib.sha256(bytes([number])).digest(), ROWS, ())


def prompt_of(*numbers: int, whole: bool = False) -> Any:
    """A completion whose prompt has a token before each image."""
    images = [image(number) for number in numbers]
    ids = with_rows([one for _ in images for one in (9, *ROWS * [PLACEHOLDER])], PLACEHOLDER, images)
    request = SimpleNamespace(prompt=ids, images=PromptImages(ids, images, ahead=False, whole_prompt=whole))
    return SimpleNamespace(request=request, computed=0, status=Status.PREFILL)


def seeing_of(most: int) -> Seeing:
    vision: Any = FakeVision()
    return Seeing(vision, device=torch.device("cpu"), most=most)


@pytest.mark.parametrize(("most", "ahead"), [(1, 1), (EACH, 1), (2 * EACH, 2), (9 * EACH, 3)])
def test_images_that_are_not_next_are_encoded_while_features_are_fewer_than_are_kept(most: int, ahead: int) -> None:
    seeing, one = seeing_of(most), prompt_of(1, 2, 3)
    while (found := seeing.missing([one])) is not None:
        seeing.encode(*found, [one], inf)
        seeing.check([one])
    assert seeing.encoded == ahead
    assert seeing.end(one, 15) == (1 + ROWS) * ahead + (ahead < 3)


def test_what_a_prompt_comes_to_next_is_always_encoded_and_what_it_has_passed_goes_first() -> None:
    seeing, one = seeing_of(1), prompt_of(1, 2, 3)
    for index in range(3):
        assert seeing.missing([one]) == (one, index)
        seeing.encode(one, index, [one], inf)
        assert seeing.bytes == EACH
        one.computed += 1 + ROWS
    assert seeing.missing([one]) is None


def test_a_prompt_that_is_computed_whole_begins_when_all_of_its_images_are_encoded() -> None:
    seeing, one = seeing_of(1), prompt_of(1, 2, 3, whole=True)
    for index in range(3):
        assert seeing.missing([one]) == (one, index)
        assert seeing.end(one, 15) == 0
        seeing.encode(one, index, [one], inf)
    assert seeing.missing([one]) is None
    assert seeing.end(one, 15) == 15


STATES = 5  # of an image that is seen by cross-attention
HELD = 2 * STATES * WIDTH * 4  # bytes of its keys and values


class CrossedVision(FakeVision):
    sees = "image_attention_mask"
    axes = False

    def __init__(self) -> None:
        self.module = nn.Identity()

    def encoding(self, ids: Any, inputs: Any) -> Sliced[Features]:
        assert list(ids) == [PLACEHOLDER]
        kv = torch.zeros(1, STATES, WIDTH), torch.zeros(1, STATES, WIDTH)
        mask = Mask("sees", torch.Size([1, 1]), torch.Size([1]), torch.float32)
        made = Features(torch.empty(0), {}, mask, ahead=False, crossed=Crossed({self.module: kv}, {}))
        return Sliced(lambda: made, lambda _: nullcontext(), time.perf_counter)


def crossed_of(*parts: int) -> Any:
    """A completion whose prompt has these images, one token each, and for numbers below 0 so many tokens of text."""
    images = [ImageInput(image(number).digest, 1, ()) for number in parts if number > 0]
    ids = with_rows(
        [one for part in parts for one in ([PLACEHOLDER] if part > 0 else -part * [9])], PLACEHOLDER, images
    )
    request = SimpleNamespace(prompt=ids, images=PromptImages(ids, images, ahead=False, crossed=True))
    return SimpleNamespace(request=request, computed=0, status=Status.PREFILL)


def crossing_of(most: int) -> Seeing:
    vision: Any = CrossedVision()
    return Seeing(vision, device=torch.device("cpu"), most=most)


def encode_all(seeing: Seeing, running: list[Any]) -> None:
    while (found := seeing.missing(running)) is not None:
        seeing.encode(*found, running, inf)


def test_features_that_a_completion_in_decode_sees_stay_until_its_request_is_over() -> None:
    seeing, one, other = crossing_of(1), crossed_of(-2, 1, -3), crossed_of(2, -3)
    encode_all(seeing, [one])
    one.computed, one.status = 6, Status.DECODE
    seeing.check([one])
    assert seeing.missing([one, other]) is None  # too many are kept: it waits
    assert seeing.end(other, 4) == 0
    seeing.forget(one.request, [other])
    assert seeing.bytes == 0
    encode_all(seeing, [other])
    assert (seeing.bytes, seeing.end(other, 4)) == (HELD, 4)


def test_what_is_behind_the_last_token_that_sees_it_makes_room_for_another_prompt() -> None:
    seeing, one, other = crossing_of(2 * HELD), crossed_of(1, -2, 2, -2), crossed_of(3, -2)
    encode_all(seeing, [one])
    one.computed, one.status = 5, Status.DECODE  # it sees the second one only
    assert seeing.missing([one, other]) is None
    seeing.evict([one, other])
    assert seeing.bytes == HELD
    assert seeing.missing([one, other]) == (other, 0)


def test_what_resumes_behind_an_image_needs_its_features() -> None:
    seeing, one = crossing_of(9 * HELD), crossed_of(-1, 1, -2, 2, 3, -4)
    one.computed = 8  # from memory
    assert seeing.end(one, 10) == 8
    encode_all(seeing, [one])
    assert (seeing.encoded, seeing.end(one, 10)) == (2, 10)  # it sees the last two: they stand side by side


def test_the_first_prompt_gets_all_that_it_sees_where_nothing_more_may_be_kept() -> None:
    seeing, one = crossing_of(1), crossed_of(1, 2, -2)
    one.computed = 3
    encode_all(seeing, [one])
    assert (seeing.encoded, seeing.bytes) == (2, 2 * HELD)


def test_rows_of_a_step_that_see_the_same_images_attend_together() -> None:
    seeing, one, other = crossing_of(9 * HELD), crossed_of(-1, 1, -2, 2, -1), crossed_of(1, -2)
    encode_all(seeing, [one, other])
    other.computed = 2
    step = [Scheduled(one, 6, 0), Scheduled(other, 1, 0)]
    ids, images = seeing.step(step, [*one.request.prompt, 9])
    assert ids == [9, PLACEHOLDER, 9, 9, PLACEHOLDER, 9, 9]
    assert images is not None
    assert images.rows is not None
    assert [rows.tolist() for rows, _ in images.rows.seen] == [[1, 2, 3, 6], [4, 5]]
    assert images.rows.mask is not None
    assert images.rows.mask.of(images.rows.rows, 7).flatten().tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_an_image_that_is_kept_is_not_encoded_for_another_prompt() -> None:
    seeing, one, other = seeing_of(9 * EACH), prompt_of(1), prompt_of(2, 1)
    seeing.encode(one, 0, [one], inf)
    assert seeing.missing([one, other]) == (other, 0)
    seeing.encode(other, 0, [one, other], inf)
    assert seeing.missing([one, other]) is None
