"""The command line of the trainer, as scripts/train_embedded.py runs it."""

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from .corpus import standard_library
from .network import DEFAULT_LAYERS, Shape, count_parameters
from .optimiser import Recipe
from .prepare import prepare
from .release import release
from .training import OtherRun, Run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4000

log = logging.getLogger(__name__)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(DEFAULT_LAYERS), default="lfm3")
    parser.add_argument("--layers", help="a letter per layer: S sliding, F full, C short convolution")
    parser.add_argument("--steps", type=positive, default=STEPS, help="of 4096 tokens each (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop here, unfinished, if the steps take longer")
    parser.add_argument("--rate", type=float, default=Recipe(steps=1).rate, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder to learn from")
    parser.add_argument("--licence", type=Path, help="that library's licence (default: LICENSE.txt in its folder)")
    parser.add_argument("--without-tests", action="store_true", help="leave out the library's own tests")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded", help="checkpoint and tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "kvcellar" / "models" / "embedded")
    parser.add_argument("--export-only", action="store_true", help="train no further; export what the checkpoint holds")
    parser.add_argument("--no-export", action="store_true", help="train only")
    return parser


def main(description: str | None) -> None:
    parser = options(description)
    given = parser.parse_args()
    licence = given.licence or given.stdlib / "LICENSE.txt"
    if not licence.is_file():
        parser.error(f"{licence} is missing, and must ship with the weights; name it with --licence")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        shape = Shape(arch=given.arch, layers=given.layers or DEFAULT_LAYERS[given.arch])
    except ValueError as wrong:
        parser.error(str(wrong))
    prepared = prepare(given.stdlib, given.work, shape.vocabulary, with_tests=not given.without_tests)
    recipe = Recipe(steps=given.steps, rate=given.rate, seed=given.seed)
    if not len(prepared.streams["tests"]):
        recipe = replace(recipe, test_share=0.0)
    log.info("%s %s, %d parameters", shape.arch, shape.layers, count_parameters(shape))
    for name, stream in prepared.streams.items():
        log.info("%s: %d tokens of %d bytes", name, len(stream), prepared.held_bytes(name))
    try:
        run = Run(shape, recipe, prepared, given.work)
    except OtherRun as wrong:
        parser.error(str(wrong))
    if not given.export_only:
        run.train(minutes=given.minutes)
    if not given.no_export:
        release(run, prepared, given.stdlib, licence, given.out)
