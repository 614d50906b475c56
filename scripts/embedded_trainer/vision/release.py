"""Exports the model that sees, measures it on unseen pictures, and writes its record and card."""

import json
import logging
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import PIL
import torch
from PIL import Image

from kvcellar import Engine

from ..card import paragraph, table
from ..export import write_json
from ..release import machine
from ..training import Run
from .network import ROWS, write_files
from .scenes import Scene, draw, random_scene
from .talk import KINDS, Turn, on_one_of, turn_of, without_picture
from .task import HELD_OUT, VisionTask, network_of

log = logging.getLogger(__name__)

PICTURES = 500  # of a measurement
_OF_TEXT = ("step_tokens", "window", "long_window", "long_share", "test_share")  # of a recipe, and of no effect here
_GREEDY: Any = {"max_tokens": 24, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Asked:
    """Unseen pictures, a question on them, and its answer."""

    kind: str
    pictures: tuple[Image.Image, ...]
    question: str
    answer: str
    scene: Scene | None  # the only picture's

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*self.pictures, self.question]}]


def unseen(count: int, seed: int = HELD_OUT) -> list[Asked]:
    """For each of `count` pictures a description and one more question; for a fifth of them one more on one of two
    pictures, and one without a picture."""
    random = Random(f"unseen {seed}")
    found = list[Asked]()
    for place in range(count):
        scenes = [random_scene(random), random_scene(random)]
        pictures = [draw(scene, random) for scene in scenes]
        kinds = ("describe", [kind for kind in KINDS if kind != "describe"][place % (len(KINDS) - 1)])
        found += [_asked(turn_of(kind, scenes[0], random), pictures[:1], scenes[0]) for kind in kinds]
        if place % 5 == 0:
            number = random.randrange(2)
            found.append(_asked(on_one_of(number, scenes[number], random), pictures, None))
            found.append(_asked(without_picture(random), [], None))
    return found


def _asked(turn: Turn, pictures: list[Image.Image], scene: Scene | None) -> Asked:
    return Asked(turn.kind, tuple(pictures), turn.question, turn.answer, scene)


def right(engine: Engine, asked: list[Asked]) -> list[bool]:
    """Whether each answer is the right one, to the letter."""
    return [engine.chat(one.messages, **_GREEDY).text == one.answer for one in asked]


def release_vision(run: Run, task: VisionTask, out: Path) -> None:
    """Write the run as it stands into `out`, with its record and card."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_files(folder, run.optimiser.masters)
        with Engine(folder, threads=1) as engine:
            record = {"run": _described(run, task), "found": _measured(engine)}
        write_json(folder / "manifest.json", record)
        (folder / "CARD.md").write_text(render(record))
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir()):
            shutil.copyfile(file, out / file.name)
    log.info("exported to %s: %s", out, json.dumps(record["found"]))


def _described(run: Run, task: VisionTask) -> dict[str, Any]:
    progress = run.progress
    return {
        "parameters": sum(weight.numel() for weight in network_of(run.optimiser.masters).values()),
        "recipe": {name: given for name, given in asdict(task.recipe).items() if name not in _OF_TEXT},
        "steps_done": progress.step,
        "seconds": round(progress.seconds),
        "machine": machine(),
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "looks": [{name: given for name, given in asdict(look).items() if name != "tokens"} for look in progress.looks],
    }


def _measured(engine: Engine) -> dict[str, Any]:
    asked = unseen(PICTURES)
    answers = right(engine, asked)
    every, good = Counter(one.kind for one in asked), Counter[str]()
    things, good_things = Counter[str](), Counter[str]()
    for one, is_right in zip(asked, answers, strict=True):
        good[one.kind] += is_right
        if one.kind == "describe" and one.scene is not None:
            name = f"{one.scene.count} in {len(one.scene.groups)}"
            things[name] += 1
            good_things[name] += is_right
    return {
        "kinds": {kind: [good[kind], count] for kind, count in every.items()},
        "things": {name: [good_things[name], things[name]] for name in sorted(things)},
    }


def render(record: dict[str, Any]) -> str:
    """The card of the model of this record."""
    run, found = record["run"], record["found"]
    recipe = run["recipe"]
    what = f"""
    A demo model that sees: pictures of up to five shapes (circle, square, triangle, star) or digits, in up to two
    groups of one colour and kind each. It says what is there ("three red squares and a blue 7"), how many, of which
    colour and shape, and knows no other pictures and no other questions. It is here so that tests, examples and a first
    try have an image, a tower and rows in memory. It has {run["parameters"] / 1e6:.2f} million parameters: a SigLIP
    tower, which makes {ROWS} rows of a picture of any size, a projector and a Llama (`llava` in the names of
    transformers)."""
    provisional = ["**Provisional:** taken from a run that was not finished."]
    how = f"""
    {run["steps_done"]} of {recipe["steps"]} steps of {recipe["conversations"]} conversations about one or two pictures,
    drawn and written anew for each step by `scripts/embedded_trainer/vision`; no other data. Muon for matrices and
    AdamW for the rest, rate {recipe["rate"]}; beside the answers' loss, one of what stands in each patch, at the tower,
    with weight {recipe["patches"]}; seed {recipe["seed"]}. `python scripts/train_embedded.py --stage vision` repeats
    it; another processor will not give the same bits. It took {run["seconds"] / 60:.0f} minutes on {run["machine"]},
    with torch {run["torch"]} and Pillow {run["pillow"]}."""
    measured = f"""
    {PICTURES} unseen pictures are described, and each has one more question; an answer is right if it is the expected
    one to the letter.
    `python scripts/train_embedded.py --stage vision --measure` prints it."""
    kinds = [[kind, f"{good} of {count}"] for kind, (good, count) in found["kinds"].items()]
    things = [[name, f"{good} of {count}"] for name, (good, count) in found["things"].items()]
    looks = [
        [str(look["step"]), f"{look['seconds'] / 60:.0f}", f"{look['train_nats']:.3f}", f"{look['held_out_nats']:.3f}"]
        for look in run["looks"]
    ]
    blocks = [
        "# The embedded model that sees",
        paragraph(what),
        *(provisional if run["steps_done"] < recipe["steps"] else []),
        "## Recipe",
        paragraph(how),
        "## Answers",
        paragraph(measured),
        table(["question", "right"], kinds),
        "Descriptions, by the number of things and groups:",
        table(["things in groups", "right"], things),
        "## Licence",
        "Apache-2.0, as kvcellar: it was trained on drawn pictures and written sentences alone.",
        "## While training",
        "Nats per token of answers; held out is without what is learned at the tower.",
        table(["steps", "minutes", "trained on", "held out"], looks),
    ]
    return "\n\n".join(blocks) + "\n"


def measure(folder: Path) -> str:
    """The tables of the card, measured again of the model in `folder`."""
    with Engine(folder, threads=1) as engine:
        found = _measured(engine)
    rows = [[name, f"{good} of {count}"] for part in found.values() for name, (good, count) in part.items()]
    return table(["", "right"], rows)
