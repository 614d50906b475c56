"""Where `image_bytes` are full, prompts that attend to images by cross-attention have theirs in order of arrival: the
first one always goes on, so each becomes the first."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.core.request import Completion
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.models.features import Features
from kvcellar.images.image import ImageInput
from kvcellar.memory.cells.layouts import Causal
from tests.engine.world import Ask, World

PARTS, MOST = 3, 100  # of an image; bytes


@dataclass
class Encoding:
    """Takes so many slices."""

    size: int
    left: int = PARTS

    def run(self, seconds: float) -> Features | None:
        self.left -= 1
        return None if self.left else Features(torch.zeros(self.size, dtype=torch.uint8), {}, None, ahead=False)

    def end(self) -> None:
        self.left = 0


class Full:
    """A world whose images have so many bytes, by where they are in a prompt."""

    def __init__(self, sizes: dict[int, int], *, cells: int = 4000, sequences: int = 8) -> None:
        self.world = World({"full": Causal()}, {"full": cells}, max_sequences=sequences, step_tokens=32)
        vision: Any = object()
        self.seeing = Seeing(vision, device=torch.device("cpu"), most=MOST)
        sized = {Ask(0, at + 1, 1, images=((at, 1),)).pictured(range(at + 1)): size for at, size in sizes.items()}
        digests = {images.inputs[0].digest: size for (_, images), size in sized.items() if images is not None}

        def encoding(prompt: Any, image: ImageInput, span: Any) -> Any:
            return Encoding(digests[image.digest])

        self.seeing._encoding = encoding  # type: ignore[method-assign]
        self.world.manager.seeing = self.seeing
        self.over: dict[int, int] = {}
        self.waits: tuple[int, int, int] = 0, 0, 0  # the first completion, how far it is computed, and turns since then

    def play(self, asks: list[Ask]) -> None:
        self.world.play(asks, self._look)
        self._look()
        assert self.seeing.bytes < MOST or not self.seeing._features

    def _look(self) -> None:
        self.over |= {number: self.world.turns for number, one in self.world.heard.items() if one.over} | self.over
        scheduler = self.world.scheduler
        if first := min([*scheduler.running, *scheduler.waiting], key=lambda one: one.key, default=None):
            same = self.waits[:2] == (id(first), len(first.tokens) + first.computed)
            self.waits = id(first), len(first.tokens) + first.computed, self.waits[2] + 1 if same else 0
            assert self.waits[2] <= self._bound(first), "the first one waits"

    def _bound(self, first: Completion) -> int:
        """Turns: to encode what it sees, after what was begun, and to be admitted."""
        images = first.request.images
        return PARTS * (1 + (len(images.together(first.computed)) if images is not None else 0)) + 3


def crossed(draw: Random, sizes: dict[int, int]) -> Ask:
    """Some images one right behind another, or with text between."""
    places, at = list[int](), draw.randrange(4)
    for _ in range(draw.randrange(5)):
        places.append(at)
        sizes.setdefault(at, draw.choice([1, 10, MOST // 2, MOST, 3 * MOST]))
        at += draw.choice([1, 1, 4, 40])
    return Ask(
        at=draw.randrange(40),
        prompt=at + draw.randint(1, 9),
        max_tokens=draw.choice([1, 9, 40]),
        n=draw.choice([1, 1, 3]),
        cancel=draw.choice([None, None, draw.randrange(80)]),
        family=draw.choice([None, 0, 1]),
        owner=draw.choice(["", "other"]),
        images=tuple((place, 1) for place in places),
        crossed=True,
    )


@given(st.integers(0, 1 << 30), st.booleans())
def test_the_first_one_always_goes_on_so_that_all_come_to_an_end(seed: int, scarce: bool) -> None:
    draw, sizes = Random(seed), dict[int, int]()
    asks = [crossed(draw, sizes) for _ in range(draw.randint(2, 9))]
    longest = max(one.prompt + one.max_tokens for one in asks)
    full = Full(sizes, cells=longest + (20 if scarce else 2000), sequences=draw.randint(1, 6))
    full.play(asks)
    for number, ask in enumerate(asks):
        reasons = full.world.heard[number].reasons
        assert ask.cancel is not None or reasons == dict.fromkeys(range(ask.n), "length")


@pytest.mark.parametrize("others", [0, 30])
def test_a_small_prompt_waits_for_those_before_it_and_for_none_behind_it(others: int) -> None:
    """The first one is large and answers for long, the second one larger: it has no room beside the first. The third
    one is small, and so are those that arrive after it, one in every other turn."""
    full = Full({0: MOST, 1: 2 * MOST, 2: 2 * MOST, 3: 1, 4: 1})
    large = [
        Ask(at=0, prompt=3, max_tokens=60, images=((0, 1),), crossed=True),
        Ask(at=1, prompt=4, max_tokens=20, images=((1, 1), (2, 1)), crossed=True),
    ]
    small = [Ask(at=2 + 2 * at, prompt=6, max_tokens=5, images=((3, 1),), crossed=True) for at in range(1 + others)]
    full.play([*large, *small])
    assert sorted(full.over, key=lambda number: full.over[number])[:3] == [0, 1, 2]
    assert full.over[2] <= full.over[1] + PARTS + 8


def test_texts_pass_prompts_that_wait_for_bytes() -> None:
    full = Full({0: MOST, 1: 1})
    first = Ask(at=0, prompt=3, max_tokens=60, images=((0, 1),), crossed=True)
    full.play([first, Ask(at=1, prompt=4, max_tokens=5, images=((1, 1),), crossed=True), Ask(2, 9, 5)])
    assert full.over[2] < 20 < full.over[0] < full.over[1]


@pytest.mark.parametrize("parts", [3, 60])
def test_a_prompt_that_waits_for_its_image_holds_up_none_that_is_ready(parts: int) -> None:
    """Behind it is one whose tokens all see each other, as many as a step has, beside a stream."""
    full = Full({0: 1})
    full.seeing._encoding = lambda *_: Encoding(1, parts)  # type: ignore[method-assign,assignment]
    waits = Ask(10, 20, 1, images=((0, 8),), whole=True)
    full.play([Ask(0, 3, 150), waits, Ask(11, 32, 1, whole=True)])
    assert full.over[2] <= 15
    assert full.over[1] >= 10 + parts
