"""The training loop of the model and of its head: steps, evaluates on held-out text at intervals, saves checkpoints.

Always true:
  * a step's windows, rate and length follow from the recipe and its number alone, so a run that was killed and resumed
    equals one that was not;
  * a checkpoint is replaced atomically.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .network import Network, Shape, Weights, initial_weights
from .optimiser import Optimiser, Recipe
from .prepare import Prepared

log = logging.getLogger(__name__)

REPORT_EVERY = 50  # steps
LOOK_EVERY = 500  # steps
CHECKPOINT_SECONDS = 180.0
LOOK_WINDOWS = 40


class OtherRun(Exception):
    """The checkpoint in the working folder belongs to a run with other options."""


@dataclass(frozen=True, slots=True)
class Look:
    """One line of the run's record: what was known after `step` steps."""

    step: int
    tokens: int
    seconds: float
    train_nats: float  # running mean
    held_out_nats: float  # of a fixed sample of windows


@dataclass(slots=True)
class Progress:
    """The progress of a run, which continues after interruptions."""

    step: int = 0
    seconds: float = 0.0  # at work, wall time, without pauses between runs
    tokens: int = 0
    running: float = 0.0  # mean training loss, decaying over about 100 steps
    looks: list[Look] = field(default_factory=list)


class Task(Protocol):
    """What a run trains: the weights it begins with, their loss at each step, their loss on held-out text.

    `made_of` is what a checkpoint must agree on to be resumed: name of a part -> its fields.
    """

    made_of: dict[str, dict[str, Any]]

    @property
    def recipe(self) -> Recipe: ...

    def initial(self) -> Weights:
        """Float32."""
        ...

    def loss(self, weights: Weights, step: int) -> Tensor: ...

    def held_out(self, weights: Weights) -> float: ...


class ModelTask:
    """The model itself: mean nats per token of windows of the trained pools."""

    def __init__(self, shape: Shape, recipe: Recipe, prepared: Prepared) -> None:
        self.shape, self.recipe = shape, recipe
        self.mixture, self.text = prepared.mixture(recipe.test_share), prepared.streams["held_library"]
        self.made_of = {"shape": shape.as_json(), "recipe": asdict(recipe), "corpus": {"stamp": prepared.stamp}}
        self.networks: dict[int, Network] = {}

    def initial(self) -> Weights:
        return initial_weights(self.shape, self.recipe.seed)

    def network(self, length: int) -> Network:
        if length not in self.networks:
            self.networks[length] = Network(self.shape, length, torch.bfloat16)
        return self.networks[length]

    def loss(self, weights: Weights, step: int) -> Tensor:
        length = self.recipe.window_at(step)
        return self.network(length).loss(weights, self.recipe.batch(self.mixture, step, length + 1))

    def held_out(self, weights: Weights) -> float:
        return held_out_nats(self.network(self.recipe.window), weights, self.text, most=LOOK_WINDOWS)


class Run:
    """A training run and its working folder."""

    def __init__(self, task: Task, work: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.task, self.recipe, self.work = task, task.recipe, work
        self.progress = Progress()
        self.optimiser = Optimiser(task.initial(), task.recipe, dtype)
        if (work / "checkpoint.safetensors").exists():
            self._load()
        self.working = self.optimiser.working()

    def train(self, *, until: int | None = None, minutes: float | None = None) -> None:
        """To step `until` (the recipe's last, if not given), or until `minutes` of work have passed."""
        last = self.recipe.steps if until is None else min(until, self.recipe.steps)
        saved = time.monotonic()
        while self.progress.step < last and (minutes is None or self.progress.seconds < 60 * minutes):
            with self._clock():
                self._step()
            if self.progress.step % LOOK_EVERY == 0 or self.progress.step == last:
                self._look()
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def _step(self) -> None:
        recipe, progress = self.recipe, self.progress
        loss = self.task.loss(self.working, progress.step)
        loss.backward()
        norm = self.optimiser.step(self.working)
        value = float(loss.detach())
        progress.step += 1
        progress.tokens += recipe.step_tokens
        progress.running += (value - progress.running) / min(progress.step, 100)
        if progress.step % REPORT_EVERY == 0:
            speed = progress.tokens / max(progress.seconds, 1e-9)
            log.info(
                "step %d of %d: loss %.3f, gradient %.2f, %.0f tokens/s",
                progress.step, recipe.steps, progress.running, norm, speed,
            )  # fmt: skip

    def _look(self) -> None:
        with torch.no_grad():
            nats = self.task.held_out(self.working)
        progress = self.progress
        look = Look(
            step=progress.step,
            tokens=progress.tokens,
            seconds=round(progress.seconds, 1),
            train_nats=round(progress.running, 4),
            held_out_nats=round(nats, 4),
        )
        progress.looks.append(look)
        log.info("step %d: held out %.4f nats per token after %.1f min", look.step, nats, progress.seconds / 60)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.progress.seconds += time.monotonic() - start

    def save(self) -> None:
        """One file, tensors and record together, moved into place when complete."""
        self.work.mkdir(parents=True, exist_ok=True)
        record = {**self.task.made_of, "progress": asdict(self.progress)}
        part = self.work / "checkpoint.part"
        save_file(self.optimiser.tensors(), part, metadata={"run": json.dumps(record)})
        part.replace(self.work / "checkpoint.safetensors")

    def _load(self) -> None:
        record, tensors = read_checkpoint(self.work)
        for part, wanted in self.task.made_of.items():
            differing = {k: (record[part].get(k), v) for k, v in wanted.items() if record[part].get(k) != v}
            if differing:
                raise OtherRun(
                    f"the checkpoint in {self.work} was made with another {part} (there, here): {differing}. "
                    f"Give the same options to continue, or another --work to begin anew."
                )
        progress = dict(record["progress"])
        progress["looks"] = [Look(**look) for look in progress["looks"]]
        self.progress = Progress(**progress)
        self.optimiser.restore(tensors, self.progress.step)
        log.info("going on from step %d", self.progress.step)


def read_checkpoint(work: Path) -> tuple[dict[str, Any], Weights]:
    """The record and the tensors of the checkpoint in `work`."""
    with safe_open(work / "checkpoint.safetensors", framework="pt") as file:
        metadata = file.metadata()
        return json.loads(metadata["run"]), {name: file.get_tensor(name) for name in file.keys()}


@torch.no_grad()
def held_out_nats(network: Network, weights: Weights, stream: Tensor, *, most: int | None = None) -> float:
    """Mean nats per token over windows of the network's length that tile `stream`, or over `most` of them, evenly."""
    length = network.length
    count = (len(stream) - 1) // length
    chosen = range(count) if most is None or most >= count else [i * count // most for i in range(most)]
    rows = [stream[i * length : (i + 1) * length + 1].long() for i in chosen]
    if not rows:
        raise ValueError(f"held-out text of {len(stream)} tokens is shorter than one window of {length}")
    total = 0.0
    for at in range(0, len(rows), 4):
        few = rows[at : at + 4]
        total += float(network.loss(weights, torch.stack(few))) * len(few)
    return total / len(rows)
