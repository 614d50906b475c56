"""Where a prompt has images, and where a step may end, against a plain model."""

import hashlib
import random

import pytest

from kvcellar.engine.core.intake import ImageRules
from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.messages import Submission
from kvcellar.errors import BadRequest
from kvcellar.images.image import FIRST, ImageInput, has_rows, is_row, with_rows
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams

PLACEHOLDER = 7


def image(number: int, rows: int) -> ImageInput:
    return ImageInput(hashlib.sha256(bytes([number])).digest(), rows, ())


def a_prompt(draw: random.Random) -> tuple[list[int], list[ImageInput], list[Span]]:
    """With texts between images, and in them."""
    prompt, images, spans = [draw.randrange(8, 99) for _ in range(draw.randrange(3))], list[ImageInput](), list[Span]()
    for _ in range(draw.randrange(1, 4)):
        images.append(image(draw.randrange(3), draw.randrange(1, 6)))
        start, left = len(prompt), images[-1].rows
        while left:
            prompt.append(PLACEHOLDER)
            left -= 1
            if left and draw.random() < 0.3:
                prompt.append(9)
        spans.append(Span(start, len(prompt)))
        prompt += [draw.randrange(8, 99) for _ in range(draw.randrange(4))]
    return with_rows(prompt, PLACEHOLDER, images), images, spans


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("ahead", ["nothing", "images", "prompt"])
def test_spans_and_ends_of_steps_are_those_of_a_plain_search(seed: int, ahead: str) -> None:
    prompt, images, spans = a_prompt(random.Random(seed))
    found = PromptImages(prompt, images, ahead=ahead == "images", whole_prompt=ahead == "prompt")
    assert found.spans == spans
    together = {"nothing": [], "images": spans, "prompt": [Span(0, len(prompt))]}[ahead]
    for pos in range(len(prompt) + 1):
        cut = any(span.start < pos < span.end for span in together)
        assert found.inside(pos) == cut
        assert list(found.after(pos)) == [at for at, span in enumerate(spans) if span.end > pos]
    for start in [pos for pos in range(len(prompt)) if not found.inside(pos)]:
        for end in range(start + 1, len(prompt) + 1):
            allowed = [pos for pos in range(start + 1, len(prompt) + 1) if not found.inside(pos)]
            before = [pos for pos in allowed if pos <= end]
            assert found.whole(start, end) == (before[-1] if before else allowed[0])
            new = Span(start, found.whole(start, end))
            inside = [span for span in together if new.start <= span.start and span.end <= new.end]
            assert found.ahead_in(new) == inside
    for at, span in enumerate(spans):
        assert found.begins(at) == (0 if ahead == "prompt" else span.start)
        assert list(found.together(span.start)) == list(range(at, len(spans) if ahead == "prompt" else at + 1))
    assert found.end == (len(prompt) if ahead == "prompt" else spans[-1].end)


def test_rows_that_are_missing_in_another_order_or_of_another_image_are_refused() -> None:
    one, other = image(1, 3), image(2, 3)
    prompt = with_rows([8, *3 * [PLACEHOLDER], 9], PLACEHOLDER, [one])
    for wrong in (prompt[:3] + prompt[4:], [8, *prompt[1:4][::-1], 9], prompt + prompt, [8, 9]):
        with pytest.raises(BadRequest, match="rows of images"):
            PromptImages(wrong, [one], ahead=False)
    with pytest.raises(BadRequest, match="rows of images"):
        PromptImages(prompt, [other], ahead=False)


def test_rows_of_an_image_are_above_all_tokens_and_no_two_images_have_one_in_common() -> None:
    rows = [row for number in range(50) for row in image(number, 40).row_ids()]
    assert len(set(rows)) == len(rows)
    assert all(is_row(row) and FIRST <= row < 2 * FIRST for row in rows)
    assert has_rows([1, rows[0]])
    assert not has_rows([1, 2])
    assert not has_rows([])


def test_placeholders_and_rows_must_be_as_many() -> None:
    for count in (2, 4):
        with pytest.raises(ValueError, match="rows"):
            with_rows(count * [PLACEHOLDER], PLACEHOLDER, [image(1, 3)])


def test_where_an_image_is_in_front_of_a_text_there_is_one_and_a_text() -> None:
    one, other = image(1, 3), image(2, 2)
    rows, more = list(one.row_ids()), list(other.row_ids())

    def taken(prompt: list[int], *images: ImageInput) -> PromptImages | None:
        submission = Submission(number=1, prompt=key_of(prompt), params=SamplingParams(), seed=1, images=images)
        return ImageRules(in_front=True).of(submission)

    assert taken([9, 9]) is None
    assert taken([*rows, 9], one) is not None
    for prompt, images in (([9, *rows, 9], [one]), (rows, [one]), ([*rows, *more, 9], [one, other])):
        with pytest.raises(BadRequest, match="one image, in front of a text"):
            taken(prompt, *images)
