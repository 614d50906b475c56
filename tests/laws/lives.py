"""Random lives of a memory: every operation there is, in any order, with any numbers, and now and then a fault in it.

The same seed gives the same operations. A failure reports the seed and the operation.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import get_args

import torch

from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Arrangement
from kvcellar.memory.spans import Span
from tests.laws.breaking import ERRORS, Fault
from tests.laws.dumb import Member
from tests.laws.player import End, Player
from tests.laws.watch import Wishes, highest

SEQS, LIMITS = 7, {6: 9}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPERATIONS = {  # and how often, compared with the others
    "some_tokens": 8, "one_prompt": 2, "one_token_each": 2, "only_ask": 1, "reserve": 1, "fork": 3, "fork_to_many": 1,
    "remove_the_end": 2, "remove_from_the_middle": 5, "drop": 1, "clear": 0.2, "ask": 1, "write_input": 3,
    "share_input": 3, "read_inputs": 1, "claim": 3, "assemble": 3, "split": 1, "join": 1.5, "drop_claim": 1,
    "drop_checkpoint": 1, "forget": 1, "ask_claim": 0.5, "copy_claim": 2, "damaged_copy": 0.3,
    "compact": 2, "compact_all": 0.5, "leave_room": 1,
}  # fmt: skip
OF_INPUTS = {"write_input", "share_input", "read_inputs"}


class Life:
    """For a memory of `members`, in a type, an arrangement and numbers of cells that depend on the seed."""

    def __init__(self, members: Sequence[Member], seed: int, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
        self.seed, self.draw = seed, Random(seed)
        self.player = Player(
            members,
            [self.draw.randint(24, 90) for _ in members],
            dtype=dtypes[seed % len(dtypes)],
            wishes=Wishes(self.draw.choice(get_args(Arrangement))),
            limits=LIMITS,
            spare=self.draw.choice([None, self.draw.randint(0, 50_000)]),
        )
        self.inputs = any(m.kind.of_input for m in members)

    def play(self, steps: int) -> Counter[str]:
        """What was done. All is given back at the end."""
        names = [name for name in OPERATIONS if self.inputs or name not in OF_INPUTS]
        for number in range(steps):
            name = "one_prompt" if not number else self.draw.choices(names, [OPERATIONS[name] for name in names])[0]
            error, late = self.draw.choice(ERRORS), self.draw.random() < 0.5
            at = self.draw.choice([self.draw.randint(0, 8), self.draw.randint(0, 80)])
            self.player.fault = Fault(at, error, late=late) if self.draw.random() < 0.3 else None
            try:
                getattr(self, name)()
                self.player.check()
            except BaseException as error:
                error.add_note(f"in life {self.seed}, in its operation {number}: {name}, with {self.player.fault}")
                raise
        self.player.clear()
        self.player.memory.check()
        assert self.player.memory.free() == self.player.memory.storage.capacity()
        return self.player.done

    def _seq(self) -> int:
        return self.draw.randrange(SEQS)

    def _known(self) -> int:
        return self.draw.choice(sorted(self.player.dumb.lines) or [self._begun()])

    def _begun(self) -> int:
        """A sequence that is there and has nothing, where there was none."""
        self.player.step(self.player.batch({0: 1}), {0: 0})
        return 0

    # -- steps ----------------------------------------------------------------------------------------------------

    def _feeds(self) -> dict[int, int]:
        most = self.draw.choice([3, 3, 12])
        return {self._seq(): self.draw.randint(1, most) for _ in range(self.draw.randint(1, 4))}

    def _end(self) -> End:
        accepted = {self._seq(): self.draw.randint(0, 5) for _ in range(3)}
        return self.draw.choice(["commit", "commit", "commit", "abandon", accepted, accepted])

    def _ask(self, seq: int) -> Feed:
        """Query-only rows, near the end of a sequence."""
        start = max(0, self.player.dumb.length(seq) + self.draw.randint(-4, 2))
        return Feed(seq, Span(start, start + self.draw.randint(1, 3)), stores=False)

    def some_tokens(self) -> None:
        feeds, draw = self._feeds(), self.draw
        borders = {
            seq: {draw.randint(0, n) for _ in range(4)} for seq, n in feeds.items() if n > 1 and draw.random() < 0.3
        }
        asks = {seq: self._ask(seq) for seq in (self._seq(), self._seq()) if draw.random() < 0.3}
        claimed = [seq for seq in feeds if draw.random() < 0.3]
        self.player.step(self.player.batch(feeds, borders, list(asks.values()), claimed), self._end())

    def one_prompt(self) -> None:
        seq = self._seq()
        claimed = [seq] if self.draw.random() < 0.5 else []
        self.player.step(self.player.batch({seq: self.draw.randint(6, 24)}, claimed=claimed))

    def one_token_each(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            if self.player.dumb.lines:
                self.player.step(self.player.batch(dict.fromkeys(self.player.dumb.lines, 1)), self._end())

    def only_ask(self) -> None:
        self.player.step(Batch((self._ask(self._known()),)), self.draw.choice(["commit", "abandon"]))

    def reserve(self) -> None:
        starts = {self._seq(): self.draw.randint(0, 40) for _ in range(3)}
        self.player.reserve(Batch(tuple(Feed(s, Span(at, at + self.draw.randint(1, 6))) for s, at in starts.items())))

    # -- sequences ------------------------------------------------------------------------------------------------

    def _pos(self, seq: int) -> int:
        return self.draw.randint(0, self.player.dumb.length(seq) + 1)

    def fork(self) -> None:
        src = self._known()
        self.player.fork(src, self._seq(), self._pos(src))

    def fork_to_many(self) -> None:
        src = self._known()
        upto = self._pos(src)
        for less, dst in enumerate(range(SEQS)):
            self.player.fork(src, dst, max(0, upto - less // 2))

    def remove_the_end(self) -> None:
        seq = self._known()
        length, back = self.player.dumb.length(seq), self.draw.choice([2, 5, 30])
        start = max(0, length - self.draw.randint(-1, back))
        self.player.remove(seq, Span(start, max(start, length) + self.draw.randint(0, 2)))

    def remove_from_the_middle(self) -> None:
        longest = max((self._known() for _ in range(3)), key=self.player.dumb.length)
        seq, number = longest, self.draw.choice([4, 4, 3, 1, 0])
        start = self.draw.randrange(max(1, self.player.dumb.length(seq) - number))
        ahead = self.player.dumb.lines[seq].ahead
        if ahead and self.draw.random() < 0.3:
            start = self.draw.choice(ahead).start + 1
        elif self.draw.random() < 0.5:
            start -= start % 4
        self.player.remove(seq, Span(start, start + number))

    def drop(self) -> None:
        self.player.drop(self._known())

    def clear(self) -> None:
        self.player.begin(self.player.batch(self._feeds()))
        self.player.clear()

    def ask(self) -> None:
        seq = self._known()
        self.player.ask(seq, [self._pos(seq) for _ in range(3)])

    # -- claims ---------------------------------------------------------------------------------------------------

    def _claim(self) -> int:
        """One that is there, made if there is none."""
        if not self.player.dumb.claims:
            self.player.step(self.player.batch({0: 1}))
            length = self.player.dumb.length(0)
            self.player.claim(0, Span(0, length), [length] if self.draw.random() < 0.8 else [])
        return self.draw.choice(sorted(self.player.dumb.claims) or [0])

    def claim(self) -> None:
        seq, draw = self._known(), self.draw
        length = self.player.dumb.length(seq)
        start = draw.choice([0, draw.randint(0, length), *(c.span.end for c in self.player.dumb.claims.values())])
        end = draw.choice([length, length, draw.randint(0, length + 1)])
        checkpoints = {draw.choice([end, end, length, self._pos(seq)]) for _ in range(draw.randint(0, 3))}
        self.player.claim(seq, Span(min(start, end), end), sorted(checkpoints))

    def _path(self) -> tuple[list[int], int]:
        """Claims, and how many of their tokens to assemble."""
        claims, draw, path, end = self.player.dumb.claims, self.draw, [], 0
        while fitting := [number for number, claim in claims.items() if claim.span.start == end]:
            path.append(draw.choice(fitting))
            end = claims[path[-1]].span.end
            if draw.random() < 0.4:
                break
        if path and draw.random() < 0.1:
            path.insert(draw.randrange(len(path)), draw.choice(sorted(claims)))
        tails = [pos + 1 for of in claims[path[-1]].held.values() for pos in of] if path else []
        places = [*claims[path[-1]].checkpoints, end, *tails[-3:]] if path else [1]
        return path, draw.choice([*places, draw.randint(0, 30)])

    def assemble(self) -> None:
        self._claim()
        tries = [self._path() for _ in range(6)]
        path, pos = next((one for one in tries if self.player.dumb.assembled(*one)), tries[0])
        without = [seq for seq in range(SEQS) if seq not in self.player.dumb.lines]
        self.player.assemble(self.draw.choice(without or [self._seq()]), path, pos)

    def split(self) -> None:
        number = self._claim()
        if number in self.player.dumb.claims:
            span = self.player.dumb.claims[number].span
            self.player.split(number, self.draw.randint(span.start, span.end))

    def _neighbours(self) -> list[tuple[int, int]]:
        claims = self.player.dumb.claims
        return [(a, b) for a in claims for b in claims if claims[a].span.end == claims[b].span.start]

    def join(self) -> None:
        if not self._neighbours():
            self.split()
        claims = sorted(self.player.dumb.claims)
        if len(claims) > 1:
            self.player.join(*self.draw.choice(self._neighbours() or [tuple(self.draw.sample(claims, 2))]))

    def drop_claim(self) -> None:
        number = self._claim()
        if number in self.player.dumb.claims:
            self.player.drop_claim(number)

    def drop_checkpoint(self) -> None:
        number = self._claim()
        claims = {n: c for n, c in self.player.dumb.claims.items() if c.checkpoints or n == number}
        if claims:
            number, claim = self.draw.choice(sorted(claims.items()))
            self.player.drop_checkpoint(number, self.draw.choice([*claim.checkpoints, claim.span.end]))

    def forget(self) -> None:
        number = self._claim()
        if number in self.player.dumb.claims:
            self.player.forget(number, self.draw.choice([1, 3, 40]))

    def copy_claim(self) -> None:
        number = self._claim()
        if number in self.player.dumb.claims:
            self.player.copy_claim(number)

    def damaged_copy(self) -> None:
        for number in self.player.dumb.claims:
            self.player.damaged_copy(number, self.draw)
            return

    def ask_claim(self) -> None:
        for number in self.player.dumb.claims:
            self.player.ask_claim(number)

    # -- inputs ---------------------------------------------------------------------------------------------------

    def write_input(self) -> None:
        self.player.write_input(self._seq(), self.draw.randint(1, 9), self.draw.choice(["cat", "dog", None]))

    def share_input(self) -> None:
        there = [line.digest for line in self.player.dumb.lines.values() if line.digest is not None]
        without = [seq for seq in range(SEQS) if not self.player.dumb.input_of(seq)]
        self.player.share_input(self.draw.choice([*without, self._seq()]), self.draw.choice([*there, "cow"]))

    def read_inputs(self) -> None:
        lengths = {seq: len(self.player.dumb.input_of(seq)) for seq in self.player.dumb.lines}
        if longest := max(lengths.values(), default=0):
            self.player.read_inputs([seq for seq, n in lengths.items() if n == longest])

    # -- storage --------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        self.player.compact(self.draw.randint(1, 30))

    def compact_all(self) -> None:
        budget = self.draw.randint(3, 30)
        for _ in range(1000):
            if not self.player.compact(budget):
                break
        else:
            raise AssertionError("compaction never ends")
        for store in self.player.memory.storage.stores:
            assert highest(store.cells) == store.cells.used or not store.cells.free, "a hole is left"

    def leave_room(self) -> None:
        self.player.leave_room(self.draw.choice([self.draw.randint(0, 20_000), 1 << 40]))
