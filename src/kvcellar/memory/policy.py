"""policy: which of the things that are kept in case they are wanted again goes first. Plain facts in, an order out.

What is kept, counted and freed is decided elsewhere, by who asks: memory offers candidates, and the engine trims them
between steps. No torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


def first_to_go(candidates: Iterable[Candidate]) -> Candidate:
    """The one of least loss; of equal ones the oldest. Raises `ValueError` if there is none."""
    return min(candidates, key=lambda one: (one.loss, one.number))


def value(clock: float, *, hits: float, saves: int, costs: int, priority: int = 0) -> float:
    """What keeping a thing is worth, on the scale of `clock`, the value of the last one that went: the lowest goes
    next.

    `hits` is how often it was used, `saves` the tokens that would have to be computed again without it, `costs` what
    it takes, in any unit; each level of `priority` counts twice as much as the one below. It is
    GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): a thing that is not used keeps its value while the clock
    rises, and a thing that is used gets a new one, so that only what changes is ranked anew.
    """
    return clock + hits * saves * 2.0**priority / costs


NEAREST, NEAR, EVERY = 8, 32, 256  # tokens between checkpoints: fewer save no more than a step takes
SMALL_ROW = 1 << 20  # bytes of a row of recurrent state, which takes no time that could be measured


def distance(row: int) -> int:
    """Tokens between spare checkpoints of recurrent state while memory is free, by the bytes of a row, so that they
    take at most 3 % of the time of a prompt (measured on CPUs, docs/log.md). It is computed and not timed, so that the
    same model leaves the same checkpoints each time."""
    return NEAREST if row < SMALL_ROW else NEAR


TAIL = 4  # tokens that cells save which only let prompts resume where none has before, in the value of a checkpoint
USUAL, FAINT, ALIKE, EVEN = 0.05, 8.0, 16.0, 4.0


def worth_by_age(
    returned: Sequence[Sequence[float]], reached: Sequence[Sequence[float]], widths: Sequence[float]
) -> list[list[float]]:
    """What keeping a thing is worth, by its class and the time since its last use: the lowest goes next.

    `reached[c][a]` things of class c were not used again before age a, which lasts `widths[a]`; `returned[c][a]` of
    them were during it. The worth is Gittins' index: the most uses that can be expected in each unit of the time for
    which the thing is kept, if it is kept as long as that is best. So of things that come back in turn the one goes
    that has just been used, and of things that come back at random, or not at all, the one that was used last of all.

    While little was seen of a class, its chance at each age is taken to be that of all classes, times the ratio of the
    class's uses to those that all classes would have had at these ages (as if `ALIKE` things of each had behaved so,
    with `EVEN` uses more that are like all); and every age to bring back a twentieth (as if `FAINT` things had), which
    is the order of last use.
    """
    ages = range(len(widths))
    of_all = [
        (sum(one[age] for one in returned) + FAINT * USUAL) / (sum(one[age] for one in reached) + FAINT) for age in ages
    ]
    found: list[list[float]] = []
    for came, were in zip(returned, reached, strict=True):
        usual = sum(many * chance for many, chance in zip(were, of_all, strict=True))
        ratio = (sum(came) + EVEN) / (usual + EVEN)
        chance = [(came[age] + ALIKE * min(1.0, ratio * of_all[age])) / (were[age] + ALIKE) for age in ages]
        found.append([_index(chance[age:], widths[age:]) for age in ages])
    return found


def _index(chance: Sequence[float], widths: Sequence[float]) -> float:
    best, left, uses, time = 0.0, 1.0, 0.0, 0.0
    for comes, width in zip(chance, widths, strict=True):
        time += left * width * (1 - comes / 2)
        uses += left * comes
        left *= 1 - comes
        best = max(best, uses / time)
    return best
