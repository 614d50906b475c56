"""Trains the MTP head of an exported model, whose weights stay as they are."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .head import MtpHead, head_shapes, initial_head
from .network import Shape, Weights
from .optimiser import Recipe
from .prepare import Prepared
from .training import LOOK_WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe(Recipe):
    """How a head learns. The defaults are the shipped head's."""

    chain: int = 3  # chained steps
    falling: float = 0.7  # weight of a step's loss, as a share of the one before

    def mean(self, losses: list[Tensor]) -> Tensor:
        """Weighted, over the steps of a chain."""
        weights = [self.falling**step for step in range(self.chain)]
        return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)


class NoModel(Exception):
    """A folder without a model that this trainer exported."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The model of a folder, as it was exported."""

    folder: Path
    shape: Shape
    weights: Weights  # bfloat16
    digest: str  # SHA-256 of its weights file
    manifest: dict[str, Any]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"


def exported(folder: Path) -> Exported:
    """Reads the model in `folder`; raises `NoModel` if there is none."""
    file, record = folder / "model.safetensors", folder / "manifest.json"
    if not (file.is_file() and record.is_file()):
        raise NoModel(f"{folder} has no model to train a head for; run --stage model first, or name another --out")
    manifest = json.loads(record.read_text())
    shape = Shape(**manifest["run"]["shape"])
    return Exported(folder, shape, load_file(file), hashlib.sha256(file.read_bytes()).hexdigest(), manifest)


class HeadTask:
    """Mean nats between the model's distribution and the head's, over the steps of a chain."""

    def __init__(self, model: Exported, recipe: HeadRecipe, prepared: Prepared) -> None:
        self.model, self.shape, self.recipe = model, model.shape, recipe
        self.mixture, self.text = prepared.mixture(recipe.test_share), prepared.streams["held_library"]
        self.made_of = {
            "model": {"sha256": model.digest},
            "recipe": asdict(recipe),
            "corpus": {"stamp": prepared.stamp},
        }
        self.heads: dict[int, MtpHead] = {}

    def initial(self) -> Weights:
        return initial_head(self.shape, self.model.weights, self.recipe.seed)

    def head(self, length: int) -> MtpHead:
        if length not in self.heads:
            self.heads[length] = MtpHead(self.shape, length, self.recipe.chain, torch.bfloat16)
        return self.heads[length]

    def loss(self, weights: Weights, step: int) -> Tensor:
        length = self.recipe.window_at(step)
        ids = self.recipe.batch(self.mixture, step, length)
        return self.recipe.mean(self.head(length).losses(weights, self.model.weights, ids))

    def held_out(self, weights: Weights) -> float:
        """Over windows spread evenly on the held-out library."""
        length, count = self.recipe.window, len(self.text) // self.recipe.window
        most = min(LOOK_WINDOWS, count)
        rows = [self.text[i * count // most * length :][:length].long() for i in range(most)]
        head = self.head(length)
        parts = [rows[at : at + 4] for at in range(0, most, 4)]
        total = sum(
            float(self.recipe.mean(head.losses(weights, self.model.weights, torch.stack(part)))) * len(part)
            for part in parts
        )
        return total / most


def count_head_parameters(shape: Shape) -> int:
    return sum(torch.Size(size).numel() for size in head_shapes(shape).values())
