"""policy: which of the things that are kept in case they are wanted again goes first. Plain facts in, an order out.

What is kept, counted and freed is decided elsewhere, by who asks: memory offers candidates, and the engine trims them
between steps. No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that could go. `key` is its owner's name for it.

    `saves` are the tokens that would have to be computed again without it, counted once for each sequence that shares
    it: those since the checkpoint before it. `stands_for` counts itself and the checkpoints behind it that went: what
    wanted those resumes here. `age` is how often a checkpoint was made or resumed from since this one was. `number` is
    the order in which they were made.
    """

    key: int
    saves: int
    stands_for: int
    age: int
    number: int

    @property
    def loss(self) -> float:
        """What is lost with it, the less the longer it was not used. So checkpoints lie the more densely the nearer
        they are to what was read last."""
        return self.saves * self.stands_for / (1 + self.age)


class Trimmed(Protocol):
    """What offers candidates: the state rows of a memory."""

    @property
    def kept(self) -> int:
        """How many could go."""
        ...

    @property
    def free(self) -> int | None: ...

    def candidates(self) -> Iterable[Candidate]: ...

    def evict(self, key: int, /) -> None: ...


def first_to_go(candidates: Iterable[Candidate]) -> Candidate:
    """The one of least loss; of equal ones the oldest. Raises `ValueError` if there is none."""
    return min(candidates, key=lambda one: (one.loss, one.number))


def trim(rows: Trimmed, *, most: int, spare: int) -> None:
    """Evict what is kept only to go back to, until no more than `most` are, or `spare` others are free."""
    while rows.kept > most and (rows.free or 0) < spare:
        rows.evict(first_to_go(rows.candidates()).key)


def value(clock: float, *, hits: int, saves: int, costs: int, priority: int = 0) -> float:
    """What keeping a thing is worth, on the scale of `clock`, the value of the last one that went: the lowest goes
    next.

    `hits` is how often it was used, `saves` the tokens that would have to be computed again without it, `costs` what
    it takes, in any unit; each level of `priority` counts twice as much as the one below. It is
    GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): a thing that is not used keeps its value while the clock
    rises, and a thing that is used gets a new one, so that only what changes is ranked anew.
    """
    return clock + hits * saves * 2.0**priority / costs
