"""The command line of the trainer, as scripts/train_embedded.py runs it."""

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from .corpus import standard_library
from .head_evaluation import measure_head
from .head_release import exported_head, release_head
from .head_training import HeadRecipe, HeadTask, NoModel, count_head_parameters, exported
from .network import DEFAULT_LAYERS, Shape, count_parameters
from .optimiser import Recipe
from .prepare import prepare
from .release import release
from .training import ModelTask, OtherRun, Run
from .vision.release import measure, release_vision
from .vision.task import VisionRecipe, VisionTask

ROOT = Path(__file__).resolve().parents[2]
STEPS, HEAD_STEPS, VISION_STEPS = 4000, 1500, 2400
STAGES = ("all", "model", "head", "vision")

log = logging.getLogger(__name__)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage", choices=STAGES, default="all", help="the model, its MTP head, both (all), or the model that sees"
    )
    parser.add_argument("--arch", choices=sorted(DEFAULT_LAYERS), default="lfm3")
    parser.add_argument("--layers", help="a letter per layer: S sliding, F full, C short convolution")
    parser.add_argument("--steps", type=positive, default=STEPS, help="of 4096 tokens each (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop a stage here, unfinished, if its steps take longer")
    parser.add_argument("--rate", type=float, default=Recipe(steps=1).rate, help="highest learning rate of the model")
    parser.add_argument("--head-steps", type=positive, default=HEAD_STEPS, help="of the head (default %(default)s)")
    parser.add_argument("--head-rate", type=float, default=HeadRecipe(steps=1).rate, help="that of the head")
    parser.add_argument("--vision-steps", type=positive, default=VISION_STEPS, help="of the model that sees")
    parser.add_argument("--vision-rate", type=float, default=VisionRecipe(steps=1).rate, help="that of the same")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder to learn from")
    parser.add_argument("--licence", type=Path, help="that library's licence (default: LICENSE.txt in its folder)")
    parser.add_argument("--without-tests", action="store_true", help="leave out the library's own tests")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded", help="checkpoints and tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "kvcellar" / "engine" / "models" / "embedded")
    parser.add_argument("--export-only", action="store_true", help="train no further; export what the checkpoint holds")
    parser.add_argument("--measure", action="store_true", help="print what a stage measures of what is in --out")
    parser.add_argument("--no-export", action="store_true", help="train one stage only, and leave --out as it is")
    return parser


def main(description: str | None) -> None:
    parser = options(description)
    given = parser.parse_args()
    if given.no_export and given.stage == "all":
        parser.error("the head is trained for an exported model; with --no-export, name one --stage")
    if given.measure and given.stage not in ("head", "vision"):
        parser.error("--measure goes with --stage head or vision; the model's numbers are in CARD.md")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        if given.stage in ("all", "model"):
            model_stage(given)
        if given.stage in ("all", "head"):
            head_stage(given)
        if given.stage == "vision":
            vision_stage(given)
    except (ValueError, NoModel, OtherRun) as wrong:
        parser.error(str(wrong))


def model_stage(given: argparse.Namespace) -> None:
    licence = given.licence or given.stdlib / "LICENSE.txt"
    if not licence.is_file():
        raise ValueError(f"{licence} is missing, and must ship with the weights; name it with --licence")
    shape = Shape(arch=given.arch, layers=given.layers or DEFAULT_LAYERS[given.arch])
    prepared = prepare(given.stdlib, given.work, shape.vocabulary, with_tests=not given.without_tests)
    recipe = Recipe(steps=given.steps, rate=given.rate, seed=given.seed)
    if not len(prepared.streams["tests"]):
        recipe = replace(recipe, test_share=0.0)
    log.info("%s %s, %d parameters", shape.arch, shape.layers, count_parameters(shape))
    for name, stream in prepared.streams.items():
        log.info("%s: %d tokens of %d bytes", name, len(stream), prepared.held_bytes(name))
    task = ModelTask(shape, recipe, prepared)
    run = Run(task, given.work)
    if not given.export_only:
        run.train(minutes=given.minutes)
    if not given.no_export:
        release(run, task, prepared, given.stdlib, licence, given.out)


def head_stage(given: argparse.Namespace) -> None:
    model = exported(given.out)
    prepared = prepare(
        given.stdlib,
        given.work / "head",
        model.shape.vocabulary,
        with_tests=not given.without_tests,
        tokenizer=model.tokenizer,
    )
    if given.measure:
        for row in measure_head(model, exported_head(model), prepared.streams["held_library"]):
            print(row)
        return
    recipe = HeadRecipe(steps=given.head_steps, rate=given.head_rate, seed=given.seed)
    if not len(prepared.streams["tests"]):
        recipe = replace(recipe, test_share=0.0)
    log.info("MTP head for %s, %d parameters", given.out, count_head_parameters(model.shape))
    task = HeadTask(model, recipe, prepared)
    run = Run(task, given.work / "head")
    if not given.export_only:
        run.train(minutes=given.minutes)
    if not given.no_export:
        release_head(run, task, prepared)


def vision_stage(given: argparse.Namespace) -> None:
    """The model that sees is in the folder `vision` of the other one."""
    out = given.out / "vision"
    if given.measure:
        print(measure(out))
        return
    task = VisionTask(VisionRecipe(steps=given.vision_steps, rate=given.vision_rate, seed=given.seed))
    run = Run(task, given.work / "vision", torch.float32)
    if not given.export_only:
        run.train(minutes=given.minutes)
    if not given.no_export:
        release_vision(run, task, out)
