"""A simulated machine for the depth controller: costs of rows and acceptance are given, time is counted."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcellar.engine.speculate.depth import DepthController, Limit, Outcome

Cost = Callable[[int], float]  # seconds of a step by its rows


@dataclass
class Machine:
    """`accept[k]` is the probability of draft k, given those before it. Noise is lognormal, with pauses."""

    cost: Cost
    accept: Sequence[float]
    noise: float = 0.0
    pauses: float = 0.0  # share of steps that take 20 times as long
    draft: float = 0.0  # seconds of one draft
    offered: float = 1.0  # share of rounds for which the drafter has drafts
    seed: int = 0
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def seconds(self, depths: Sequence[int], *, noisy: bool = True) -> float:
        exact = self.cost(len(depths) + sum(depths)) + self.draft * max(depths, default=0)
        if not noisy:
            return exact
        pause = 20.0 if self.dice.random() < self.pauses else 1.0
        return exact * pause * self.dice.lognormvariate(0, self.noise)

    def accepted(self, depth: int) -> int:
        count = 0
        while count < depth and self.dice.random() < self.accept[min(count, len(self.accept) - 1)]:
            count += 1
        return count

    def tokens(self, depth: int) -> float:
        """Expected tokens of a round."""
        total, chance = 1.0, 1.0
        for pos in range(depth):
            chance *= self.accept[min(pos, len(self.accept) - 1)]
            total += chance
        return total

    def best(self, sequences: int, most: int) -> float:
        """The most tokens per second that one depth for all gives."""
        return max(
            sequences * self.tokens(depth) / self.seconds([depth] * sequences, noisy=False) for depth in range(most + 1)
        )

    def plain(self, sequences: int) -> float:
        return sequences / self.seconds([0] * sequences, noisy=False)


@dataclass
class Run:
    seconds: float = 0.0  # without noise
    tokens: float = 0.0
    depths: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def play(
    controller: DepthController, machine: Machine, rounds: int, *, sequences: int = 1, most: int = 8, first: int = 0
) -> Run:
    """Tokens are counted as expected ones and seconds without noise, so that few rounds tell much."""
    run = Run()
    limits = [Limit((first + i, 0), most) for i in range(sequences)]
    for _ in range(rounds):
        depths = controller.choose(limits)
        assert all(0 <= depth <= most for depth in depths)
        depths = [depth if machine.dice.random() < machine.offered else 0 for depth in depths]
        accepted = [machine.accepted(depth) for depth in depths]
        outcomes = [
            Outcome(limit.key, depth, min(got + 1, depth), got)
            for limit, depth, got in zip(limits, depths, accepted, strict=True)
        ]
        controller.observe(outcomes, machine.seconds(depths))
        controller.check()
        run.seconds += machine.seconds(depths, noisy=False)
        run.tokens += sum(machine.tokens(depth) for depth in depths)
        run.depths.append(sum(depths) / sequences)
    return run
