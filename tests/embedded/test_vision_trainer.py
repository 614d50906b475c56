"""The trainer of the model that sees: pictures show what is said of them, and a resumed run is an uninterrupted one."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from kvcellar.images.processing import Processor
from scripts.embedded_trainer.training import Run, read_checkpoint
from scripts.embedded_trainer.vision.network import IMAGE, ROWS, SIDE, VOCABULARY, trained_tokenizer, write_files
from scripts.embedded_trainer.vision.scenes import COLOURS, MOST, SHAPES, Group, Scene, Thing, draw, random_scene
from scripts.embedded_trainer.vision.talk import KINDS, describe, turn_of
from scripts.embedded_trainer.vision.task import IGNORED, VisionRecipe, VisionTask, patches_of, pixels_of

SCENES = [random_scene(Random(seed)) for seed in range(200)]


def scene(*groups: Group) -> Scene:
    things = [number for number, group in enumerate(groups) for _ in range(group.count)]
    middles = [(at + 0.5) / len(things) for at in range(len(things))]
    return Scene("white", groups, tuple(Thing(group, x, 0.5, 0.15) for group, x in zip(things, middles, strict=True)))


def test_things_of_a_scene_do_not_touch_and_differ_from_the_background() -> None:
    for one in SCENES:
        assert len(one.things) == one.count <= MOST
        assert all(group.colour != one.background for group in one.groups)
        for at, thing in enumerate(one.things):
            for other in one.things[:at]:
                assert max(abs(thing.x - other.x), abs(thing.y - other.y)) > (thing.side + other.side) / 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", ["red", "blue", "yellow"])
def test_a_picture_has_the_colour_of_a_thing_where_it_is(shape: str, colour: str) -> None:
    drawn = draw(scene(Group(2, colour, shape)), Random(1))
    for x in (0.25, 0.75):
        found = drawn.getpixel((round(x * drawn.width), round(0.5 * drawn.height)))
        assert isinstance(found, tuple)
        assert max(abs(a - b) for a, b in zip(found, COLOURS[colour], strict=True)) <= 14


def test_answers_are_those_of_the_scene() -> None:
    both = scene(Group(3, "red", "square"), Group(1, "orange", "7"))
    assert describe(both) == "three red squares and an orange 7"
    assert describe(Scene("black", (), ())) == "an empty picture"
    answers = {kind: turn_of(kind, both, Random(3)).answer for kind in ("count", "colour", "shape", "background")}
    assert answers == {
        "count": "four",
        "colour": "red and orange",
        "shape": "three squares and a 7",
        "background": "white",
    }
    asked = [turn_of("yes or no", both, Random(seed)) for seed in range(60)]
    said = {turn.answer: turn.question.lower() for turn in asked}
    assert set(said) == {"yes", "no"}
    assert "red square" in said["yes"] or "orange 7" in said["yes"]
    counted = [turn_of("count of one kind", both, Random(seed)) for seed in range(60)]
    assert {turn.answer for turn in counted if "square" in turn.question.lower()} == {"three"}


def test_the_tokenizer_keeps_what_is_said_in_few_tokens() -> None:
    tokenizer = trained_tokenizer()
    assert tokenizer.get_vocab_size() <= VOCABULARY
    for one in SCENES:
        for turn in (turn_of(kind, one, Random(5)) for kind in KINDS):
            for text in (turn.question, turn.answer):
                assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("three red squares and an orange 7").ids) <= 8


def test_patches_say_what_stands_where() -> None:
    found = patches_of(scene(Group(1, "red", "square"), Group(1, "blue", "star"))).unflatten(0, (6, 6))
    assert found[3, 1].tolist() == [1 + SHAPES.index("square"), [*COLOURS].index("red"), 1]
    assert found[3, 4].tolist() == [1 + SHAPES.index("star"), [*COLOURS].index("blue"), 1]
    assert int(found[..., 2].sum()) == 2


def test_a_batch_learns_answers_alone_and_has_rows_for_each_picture() -> None:
    task = VisionTask(VisionRecipe(steps=1, conversations=12))
    batch = task.batch(7)
    assert batch.pixels is not None
    assert int((batch.ids == IMAGE).sum()) == ROWS * len(batch.pixels)
    learned = batch.labels != IGNORED
    assert (batch.ids[learned] == batch.labels[learned]).all()
    assert not (batch.ids[learned] == IMAGE).any()
    texts = task.tokenizer.decode_batch([row[row != IGNORED].tolist() for row in batch.labels])
    assert all(texts)


def test_pixels_are_those_of_the_exported_processor(tmp_path: Path) -> None:
    write_files(tmp_path, {})
    processor = Processor(tmp_path, "model", IMAGE, 1000)
    for seed in (1, 2):
        picture = draw(SCENES[seed], Random(seed))
        made = processor.process(picture)
        assert made.input.rows == ROWS
        (array,) = (one.array() for one in made.input.arrays if one.name == "pixel_values")
        assert array.reshape(3, SIDE, SIDE) == pytest.approx(np.asarray(pixels_of(picture)), abs=1e-5)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    recipe = VisionRecipe(steps=2, conversations=2, warm_up=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Run(VisionTask(recipe), whole, torch.float32).train()
    Run(VisionTask(recipe), parts, torch.float32).train(until=1)
    Run(VisionTask(recipe), parts, torch.float32).train()
    (_, wanted), (_, found) = read_checkpoint(whole), read_checkpoint(parts)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_run_learns(tmp_path: Path) -> None:
    task = VisionTask(VisionRecipe(steps=6, conversations=3, warm_up=2, rate=5e-3))
    run = Run(task, tmp_path, torch.float32)
    before = float(task.loss(run.working, 0).detach())
    run.train()
    assert float(task.loss(run.working, 0).detach()) < 0.9 * before
