"""The shipped model that sees: it is that of its record, and says what unseen pictures show, at every door it has."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from safetensors import safe_open

from kvcellar import Engine
from kvcellar.engine.models import embedded
from kvcellar.library.names import SEEING
from scripts.embedded_trainer.vision.network import ROWS, initial_model
from scripts.embedded_trainer.vision.release import render, right, unseen
from tests.cli.command import kvcellar

FOLDER = embedded.path(SEEING)
GREEDY: Any = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(SEEING, cache_bytes=32 << 20, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((FOLDER / "manifest.json").read_text())


def squares(colour: str = "red", count: int = 3) -> Image.Image:
    """Not drawn by the trainer."""
    image = Image.new("RGB", (300, 200), "white")
    pen = ImageDraw.Draw(image)
    for number in range(count):
        pen.rectangle(
            (20 + 95 * number, 40 + 40 * (number % 2), 85 + 95 * number, 105 + 40 * (number % 2)), fill=colour
        )
    return image


def test_the_card_is_that_of_the_record_of_a_finished_run(record: dict[str, Any]) -> None:
    assert (FOLDER / "CARD.md").read_text() == render(record)
    assert record["run"]["steps_done"] == record["run"]["recipe"]["steps"]


def test_it_is_small_and_has_the_weights_of_its_network(record: dict[str, Any]) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3 << 20
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        found = sum(file.get_tensor(name).numel() for name in file.keys())
    assert found == sum(weight.numel() for weight in initial_model(0).parameters())
    assert record["run"]["parameters"] <= found


def test_most_answers_on_unseen_pictures_are_right(engine: Engine) -> None:
    asked = unseen(12, seed=1)
    good = Counter(one.kind for one, is_right in zip(asked, right(engine, asked), strict=True) if is_right)
    assert good["describe"] >= 9
    assert good.total() >= 0.75 * len(asked)


def test_three_red_squares(engine: Engine) -> None:
    first = engine.chat([{"role": "user", "content": [squares(), "What is this?"]}], **GREEDY)
    assert first.text == "three red squares"
    again = engine.chat([{"role": "user", "content": [squares(), "How many?"]}], **GREEDY)
    assert again.text == "three"
    assert again.usage.cached_tokens > ROWS
    other = engine.chat([{"role": "user", "content": [squares("blue", 2), "What is this?"]}], **GREEDY)
    assert other.text == "two blue squares"


def test_a_conversation_goes_on_about_a_picture_and_then_another(engine: Engine) -> None:
    session = engine.session()
    assert session.send([squares(), "What is this?"], **GREEDY).text == "three red squares"
    second = session.send("What colour is it?", **GREEDY)
    assert second.text == "red"
    assert second.usage.cached_tokens > ROWS
    assert session.send([squares("green", 1), "and now?"], **GREEDY).text == "a green square"


def test_without_a_picture_it_says_so(engine: Engine) -> None:
    assert engine.chat([{"role": "user", "content": "What is this?"}], **GREEDY).text == "there is no picture"


def test_it_answers_on_the_command_line() -> None:
    found = kvcellar("run", SEEING, "--image", str(Path(__file__).parents[2] / "docs" / "squares.png"), "What is this?")
    assert (found.code, found.out.strip()) == (0, "three red squares"), found.err
