"""harness: a memory for one check, the texts that are in it, and the logits that came out.

Other text was read into the memory before and dropped, so that reading a cell or row that was not written gives wrong
logits. A harness keeps the logits of some rows of every feed, with the text up to them; a `ColdReference` computes what
they must be.

Always true: `texts` are the tokens that each sequence has in memory, if the memory is right.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.models.guest import Guest
from kvcellar.models.input_limits import random_tokens
from kvcellar.models.seam import ATTENTION
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.policy import trim
from kvcellar.spans import Span

SHORT = 96  # tokens of a text that need not be long: more than the blocks in which most recurrent layers compute
SEQUENCES = 6
LOOKED_AT = 16  # rows of a feed whose logits are kept, at most

Piece = tuple[int, Sequence[int]]  # a sequence and the tokens that it reads next


class CheckFailed(Exception):
    """Something other than logits is wrong; the message says what."""


class ColdReference:
    """The model's own eager forward over a whole text, without a cache."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._text: tuple[int, ...] = ()
        self._logits = torch.empty(0, device=guest.device)

    def logits(self, text: tuple[int, ...]) -> Tensor:
        """[L,V] in float32. Costs nothing for a prefix of the last text."""
        if self._text[: len(text)] != text:
            with _own_attention(self._guest), torch.inference_mode():
                ids = torch.tensor([text], device=self._guest.device)
                self._logits = self._guest.model(input_ids=ids, use_cache=False).logits[0].float()
            self._text = text
        return self._logits[: len(text)]


@contextmanager
def _own_attention(guest: Guest) -> Iterator[None]:
    if guest.mode == "solo":  # it always uses its own
        yield
        return
    guest.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        guest.model.set_attn_implementation(ATTENTION)


class Setup:
    """What all checks of one guest share: the reference, the lengths of texts, and memories that were used before."""

    def __init__(self, guest: Guest, tokens: int) -> None:
        self.guest, self.reference = guest, ColdReference(guest)
        self.most, self.length = tokens, min(tokens, SHORT)
        self._spare: list[Memory] = []

    def draw(self, draw: torch.Generator, n: int) -> list[int]:
        """`n` random tokens, the same on every machine."""
        return random_tokens(self.guest.model, n, draw)

    def take(self) -> Memory:
        """An empty memory with room for every sequence at its longest, and for states to go back to."""
        if self._spare:
            return self._spare.pop()
        cells = {group.name: SEQUENCES * self.length + self.most for group in self.guest.shape.groups}
        memory = self.guest.memory(cells, rows=6 * SEQUENCES)
        noise = Harness(self, seed=-1, memory=memory)
        noise.read(*((seq, noise.draw(self.length)) for seq in range(SEQUENCES)))
        memory.clear()
        return memory

    def give(self, memory: Memory) -> None:
        self._spare.append(memory)


@dataclass(frozen=True, slots=True)
class Seen:
    """Logits [n,V] of some rows of a feed, those at the positions `at` of `text`, which ends with the feed.

    `derived`: the K/V before them are not what the text alone would give, so the reference does not apply to them.
    """

    text: tuple[int, ...]
    at: tuple[int, ...]
    logits: Tensor
    derived: bool

    def rows(self) -> dict[tuple[int, ...], Tensor]:
        """[V] by the text up to and with the row's token."""
        return {self.text[: pos + 1]: row for pos, row in zip(self.at, self.logits, strict=True)}


class Harness:
    """One memory, for one check."""

    def __init__(self, setup: Setup, seed: int, memory: Memory | None = None) -> None:
        self.guest, self.most, self.length = setup.guest, setup.most, setup.length
        self.texts: dict[int, list[int]] = {}
        self.derived: set[int] = set()  # sequences of which some K/V were not read
        self._setup, self._seed, self._memory = setup, seed, memory
        self._draw = torch.Generator().manual_seed(seed % 2**63)
        self._seen: list[Seen] = []
        self._gaps: list[Tensor] = []  # of rows that were compared with other rows of ours
        self._twins: list[Harness] = []

    @property
    def memory(self) -> Memory:
        """Allocated at first use: some checks find that they do not apply before."""
        if self._memory is None:
            self._memory = self._setup.take()
        return self._memory

    def draw(self, n: int) -> list[int]:
        return self._setup.draw(self._draw, n)

    # -- what can be done ---------------------------------------------------------------------------------------

    def read(self, *pieces: Piece, keep_state: bool = False) -> None:
        """Sequences read more tokens and keep them: in one step, or one by one where the guest runs solo."""
        for part in self.parts(pieces):
            self.step(part, keep_state=keep_state)
            self.keep(part)

    def parts(self, pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
        """What can be in one step."""
        return [pieces] if self.guest.mode == "flat" else [[piece] for piece in pieces]

    def begin(self, pieces: Sequence[Piece], *, keep_state: bool = False, revertible: bool = False) -> Plan:
        feeds: list[Feed] = []
        for seq, ids in pieces:
            end = len(self.texts.get(seq, ()))
            feeds.append(Feed(seq, Span(end, end + len(ids)), keep_state=keep_state, revertible=revertible))
        trim(self.memory.rows, most=3 * SEQUENCES, spare=6 * SEQUENCES)
        return self.memory.begin(Batch(tuple(feeds)))

    def step(self, pieces: Sequence[Piece], *, keep_state: bool = False, revertible: bool = False) -> None:
        """A forward over more tokens of some sequences. The step stays open."""
        plan = self.begin(pieces, keep_state=keep_state, revertible=revertible)
        rows = [_some(len(ids)) for _, ids in pieces]
        want: list[int] = []
        start = 0
        for (_, ids), some in zip(pieces, rows, strict=True):
            want += [start + row for row in some]
            start += len(ids)
        logits = self.guest.forward(
            self.memory, plan, self._tensor([t for _, ids in pieces for t in ids]), self._tensor(want)
        )
        for (seq, ids), some, part in zip(pieces, rows, logits.float().split([*map(len, rows)]), strict=True):
            before = self.texts.get(seq, [])
            at = tuple(len(before) + row for row in some)
            self._seen.append(Seen((*before, *ids), at, part, seq in self.derived))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.guest.device)

    def keep(self, pieces: Sequence[Piece], counts: Sequence[int] | None = None) -> None:
        """Keep the open step, or of each of its sequences the first `counts` tokens."""
        counts = [len(ids) for _, ids in pieces] if counts is None else counts
        self.memory.commit({seq: count for (seq, _), count in zip(pieces, counts, strict=True)})
        for (seq, ids), count in zip(pieces, counts, strict=True):
            self.texts[seq] = [*self.texts.get(seq, ()), *ids[:count]]

    def fork(self, src: int, dst: int, upto: int) -> int:
        """`dst` begins as `src` does; returns how many tokens it need not read again."""
        could = self.memory.can_cut(src, upto)
        kept = self.memory.fork(src, dst, upto)
        if kept != could or kept > upto:
            raise CheckFailed(f"can_cut says that {could} of {upto} tokens can be kept; a fork kept {kept}")
        self.texts[dst] = self.texts[src][:kept]
        return kept

    def remove_end(self, seq: int, start: int) -> int:
        """Remove all from `start` on, or from what the memory offers instead; returns how many are kept."""
        length, kept = len(self.texts[seq]), self.memory.can_cut(seq, start)
        if (left := self.memory.remove(seq, Span(kept, length))) != kept:
            raise CheckFailed(f"can_cut says that {kept} of {length} tokens can be kept; a removal kept {left}")
        self.texts[seq] = self.texts[seq][:kept]
        return kept

    def clear(self) -> None:
        """Begin again; what was seen stays."""
        self.memory.clear()
        self.texts.clear()
        self.derived.clear()

    def twin(self) -> "Harness":
        """Another harness, to do the same there in another way."""
        self._twins.append(Harness(self._setup, self._seed))
        return self._twins[-1]

    # -- what came of it ----------------------------------------------------------------------------------------

    def compare(self, other: "Harness") -> None:
        """Every row that this harness and `other` have both seen is the same in both."""
        theirs: dict[tuple[int, ...], Tensor] = {}
        for seen in other._seen:
            theirs |= seen.rows()
        gaps: list[Tensor] = []
        for seen in self._seen:
            pairs = [(row, theirs[text]) for text, row in seen.rows().items() if text in theirs]
            if pairs:
                ours, expected = (torch.stack(rows) for rows in zip(*pairs, strict=True))
                gaps.append(gap_of(ours, expected))
        if not gaps:
            raise CheckFailed("two ways of reading the same texts have no row in common")
        self._gaps += gaps

    def gaps(self, bound: float) -> tuple[list[Tensor], int]:
        """Gaps [n] of the rows of every feed, and in how many rows another token is the most likely one."""
        gaps, other = list(self._gaps), 0
        everything = [seen for harness in (self, *self._twins) for seen in harness._seen if not seen.derived]
        for seen in sorted(everything, key=lambda seen: seen.text, reverse=True):  # a text, then its beginnings
            expected = self._setup.reference.logits(seen.text)[list(seen.at)]
            gaps.append(gap_of(seen.logits, expected))
            other += other_text(seen.logits, expected, bound)
        if not gaps:
            raise CheckFailed("no row was compared")
        return gaps, other

    def close(self) -> None:
        """All sequences go. Raises `CheckFailed` if something of them stays."""
        for twin in self._twins:
            twin.close()
        memory = self.memory
        memory.check()
        lengths = {seq: memory.length(seq) for seq in memory.sequences}
        if lengths != (read := {seq: len(text) for seq, text in self.texts.items()}):
            raise CheckFailed(f"sequences have {lengths} tokens in memory, and read {read}")
        memory.clear()
        if (memory.storage.free(), memory.rows.free) != (memory.storage.capacity(), memory.rows.capacity):
            raise CheckFailed(
                f"without sequences only {memory.storage.free()} cells and {memory.rows.free} rows are free"
            )
        self._setup.give(memory)


def _some(n: int) -> list[int]:
    """Of the rows of a feed: all if they are few; else the first, the last, and some between."""
    if n <= LOOKED_AT:
        return list(range(n))
    side = LOOKED_AT // 3
    between = range(side, n - side)
    return [*range(side), *between[:: -(-len(between) // side)], *range(n - side, n)]


def gap_of(ours: Tensor, theirs: Tensor) -> Tensor:
    """[n,V] twice -> [n]: the largest difference of each row, as a part of the largest logit (of 1, if less)."""
    return ((ours - theirs).abs().amax(-1) / theirs.abs().max().clamp(min=1.0)).cpu()


def other_text(ours: Tensor, theirs: Tensor, bound: float) -> int:
    """Of n rows [n,V], how many would go on with another token although there is no doubt which."""
    first, second = theirs.topk(2).values.unbind(-1)
    clear = first - second > bound * theirs.abs().max().clamp(min=1.0)
    return int((clear & (ours.argmax(-1) != theirs.argmax(-1))).sum())
