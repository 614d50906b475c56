"""Trains the embedded demo model on the standard library of this interpreter, and exports it.

    python scripts/train_embedded.py                    the recipe of the shipped model, into its folder
    python scripts/train_embedded.py --arch lfm3        another architecture
    python scripts/train_embedded.py --export-only      export the last checkpoint, finished or not

A run that was stopped goes on from its last checkpoint when it is started with the same options.
"""

import argparse
import logging
import os
from pathlib import Path

import torch
from embedded_trainer.corpus import standard_library
from embedded_trainer.network import DEFAULT_LAYERS, Shape, count_parameters
from embedded_trainer.optimiser import Recipe
from embedded_trainer.prepare import prepare
from embedded_trainer.release import release
from embedded_trainer.training import Run

ROOT = Path(__file__).resolve().parent.parent
STEPS = 4000

log = logging.getLogger("train_embedded")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(DEFAULT_LAYERS), default="gemma3")
    parser.add_argument("--layers", help="a letter per layer: S sliding, F full, C short convolution")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 4096 tokens each (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop here, unfinished, if the steps take longer")
    parser.add_argument("--rate", type=float, default=Recipe(steps=1).rate, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder to learn from")
    parser.add_argument("--without-tests", action="store_true", help="leave out the library's own tests")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded", help="checkpoint and tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "kvcellar" / "models" / "embedded")
    parser.add_argument("--export-only", action="store_true", help="train no further; export what the checkpoint holds")
    parser.add_argument("--no-export", action="store_true", help="train only")
    return parser


def main() -> None:
    asked = options().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    shape = Shape(arch=asked.arch, layers=asked.layers or DEFAULT_LAYERS[asked.arch])
    recipe = Recipe(steps=asked.steps, rate=asked.rate, seed=asked.seed)
    prepared = prepare(asked.stdlib, asked.work, shape.vocabulary, with_tests=not asked.without_tests)
    log.info("%s %s, %d parameters", shape.arch, shape.layers, count_parameters(shape))
    for name, stream in prepared.streams.items():
        log.info("%s: %d tokens of %d bytes", name, len(stream), prepared.held_bytes(name))
    run = Run(shape, recipe, prepared.mixture(recipe.test_share), prepared.streams["held_library"], asked.work)
    if not asked.export_only:
        run.train(minutes=asked.minutes)
    if not asked.no_export:
        release(run, prepared, asked.stdlib, asked.out)


if __name__ == "__main__":
    main()
