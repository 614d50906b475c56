"""What a run learns: conversations about pictures, and, at the tower alone, what stands in each patch of a picture.

The second is dropped when the model is exported. Without it the tower learns nothing for long: a wrong word says little
about which pixels were misread.

Always true: a step's pictures and conversations follow from the seed and its number alone.
"""

from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear

from ..network import Weights
from ..optimiser import Recipe
from .network import (
    ASSISTANT,
    BEGIN,
    END,
    IMAGE,
    PATCH,
    ROWS,
    SIDE,
    SYSTEM,
    USER,
    hf_config,
    initial_model,
    trained_tokenizer,
)
from .scenes import BACKGROUNDS, COLOURS, DIGITS, SHAPES, Scene, draw, random_scene
from .talk import OTHER, Turn, on_one_of, random_turn, without_picture

PARTS = {"kind": 1 + len(SHAPES) + len(DIGITS), "colour": len(COLOURS) + len(BACKGROUNDS), "middle": 2}  # classes
_PREFIX = "patches."  # of the weights that are dropped
UNUSED = "post_layernorm"  # of the tower: what is in front of it goes to the projector
IGNORED = -100
HELD_OUT = 1 << 40  # seeds from here on are of no step


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionRecipe(Recipe):
    """How the model that sees learns."""

    rate: float = 1e-2
    conversations: int = 24  # in a step
    turns: int = 4  # about a picture
    patches: float = 0.5  # weight of the loss at the tower


@dataclass(frozen=True, slots=True)
class Batch:
    """Of a step. ids, labels [B,T]; of its N pictures in order pixels [N,3,SIDE,SIDE], patches [N,ROWS,len(PARTS)]."""

    ids: Tensor
    labels: Tensor
    pixels: Tensor | None
    patches: Tensor | None


class VisionTask:
    def __init__(self, recipe: VisionRecipe) -> None:
        self.recipe = recipe
        self.made_of: dict[str, dict[str, Any]] = {"shape": hf_config().to_diff_dict(), "recipe": asdict(recipe)}
        self.tokenizer = trained_tokenizer()
        self._model = initial_model(recipe.seed)

    def initial(self) -> Weights:
        every = self._model.named_parameters()
        weights = {name: weight.detach().clone() for name, weight in every if UNUSED not in name}
        width = self._model.config.vision_config.hidden_size
        generator = torch.Generator().manual_seed(self.recipe.seed)
        for part, classes in PARTS.items():
            weights[f"{_PREFIX}{part}"] = torch.randn(classes, width, generator=generator) / width**0.5
        return weights

    def loss(self, weights: Weights, step: int) -> Tensor:
        return self._loss(weights, self.batch((self.recipe.seed << 32) + step))

    def held_out(self, weights: Weights) -> float:
        """Of the words alone, over unseen pictures."""
        batches = [self.batch(HELD_OUT + number) for number in range(4)]
        return sum(float(self._words(weights, one)[0]) for one in batches) / len(batches)

    def batch(self, seed: int) -> Batch:
        random = Random(seed)
        rows = [self._conversation(random) for _ in range(self.recipe.conversations)]
        longest = max(len(ids) for ids, _, _ in rows)
        ids, labels = (torch.full((len(rows), longest), fill) for fill in (0, IGNORED))
        for row, (tokens, wanted, _) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.tensor(wanted)
        scenes = [scene for _, _, scenes in rows for scene in scenes]
        if not scenes:
            return Batch(ids, labels, None, None)
        pixels = torch.stack([pixels_of(draw(scene, random)) for scene in scenes])
        return Batch(ids, labels, pixels, torch.stack([patches_of(scene) for scene in scenes]))

    def _loss(self, weights: Weights, batch: Batch) -> Tensor:
        loss, features = self._words(weights, batch)
        if batch.patches is None or features is None:
            return loss
        for number, part in enumerate(PARTS):
            logits = linear(features, weights[f"{_PREFIX}{part}"])
            loss = loss + self.recipe.patches * cross_entropy(
                logits.flatten(0, 1), batch.patches[..., number].flatten()
            )
        return loss

    def _words(self, weights: Weights, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss of the answers, and the tower's features [N,ROWS,D]."""
        seen = list[Tensor]()
        projector = self._model.model.multi_modal_projector
        handle = projector.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            inputs = {"input_ids": batch.ids} | ({"pixel_values": batch.pixels} if batch.pixels is not None else {})
            logits = functional_call(self._model, network_of(weights), kwargs=inputs).logits
        finally:
            handle.remove()
        words = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
        return words, seen[0].unflatten(0, (-1,)) if seen else None

    def _conversation(self, random: Random) -> tuple[list[int], list[int], list[Scene]]:
        """Tokens; those of answers again, others IGNORED; and its pictures."""
        tokens, wanted = [BEGIN], [IGNORED]

        def add(ids: list[int], *, learned: bool = False) -> None:
            tokens.extend(ids)
            wanted.extend(ids if learned else [IGNORED] * len(ids))

        def turn(turn: Turn, pictures: int = 0) -> None:
            shown, question = [IMAGE] * (ROWS * pictures), self._ids(turn.question)
            add([USER, *(shown + question if random.random() < 0.7 else question + shown), END, ASSISTANT])
            add([*self._ids(turn.answer), END], learned=True)

        if random.random() < 0.1:
            add([SYSTEM, *self._ids(random.choice(OTHER)), END])
        scenes = list[Scene]()
        if random.random() < 0.05:
            turn(without_picture(random))
            if random.random() < 0.5:
                return tokens, wanted, scenes
        first = random_scene(random)
        scenes.append(first)
        if random.random() < 0.85:
            turn(random_turn(first, random), 1)
            for _ in range(random.randint(1, 2 * self.recipe.turns - 3)):
                turn(random_turn(first, random))
            if random.random() < 0.85:
                return tokens, wanted, scenes
            scenes.append(random_scene(random))
            turn(random_turn(scenes[1], random), 1)
        else:
            scenes.append(random_scene(random))
            number = random.randrange(2)
            turn(on_one_of(number, scenes[number], random), 2)
        for _ in range(self.recipe.turns - 1):
            number = random.randrange(3)
            turn(on_one_of(number, scenes[number], random) if number < 2 else random_turn(scenes[1], random))
        return tokens, wanted, scenes

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def network_of(weights: Weights) -> Weights:
    """Those that are exported."""
    return {name: weight for name, weight in weights.items() if not name.startswith(_PREFIX)}


def pixels_of(image: Image.Image) -> Tensor:
    """As the exported image processor makes them. [3,SIDE,SIDE]"""
    small = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)


def patches_of(scene: Scene) -> Tensor:
    """Classes of each patch: the kind and colour of the thing at its middle, and whether that one's middle is in it.
    [ROWS,len(PARTS)]"""
    across = SIDE // PATCH
    found = torch.zeros(across, across, len(PARTS), dtype=torch.long)
    found[..., 1] = len(COLOURS) + [*BACKGROUNDS].index(scene.background)
    middles = (torch.arange(across) + 0.5) / across
    for thing in scene.things:
        group = scene.groups[thing.group]
        inside = ((middles - thing.y).abs() < thing.side / 2)[:, None] & ((middles - thing.x).abs() < thing.side / 2)
        row, column = int(thing.y * across), int(thing.x * across)
        inside[row, column] = True
        kind, colour = 1 + (*SHAPES, *DIGITS).index(group.kind), [*COLOURS].index(group.colour)
        found[..., :2][inside] = torch.tensor([kind, colour])
        found[row, column, 2] = 1
    return found.flatten(0, 1)
