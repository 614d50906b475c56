"""Which image is encoded next, and which features stay."""

import hashlib
import time
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Status
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.models.sliced import Sliced
from kvcellar.engine.models.vision import Features
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
        seeing.check()
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


def test_an_image_that_is_kept_is_not_encoded_for_another_prompt() -> None:
    seeing, one, other = seeing_of(9 * EACH), prompt_of(1), prompt_of(2, 1)
    seeing.encode(one, 0, [one], inf)
    assert seeing.missing([one, other]) == (other, 0)
    seeing.encode(other, 0, [one, other], inf)
    assert seeing.missing([one, other]) is None
