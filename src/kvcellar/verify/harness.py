"""harness: a memory for one check, the texts in it, and the logits that were computed with it.

The memory was filled with other text and cleared before, so that reading a cell or row that was not written gives wrong
logits. A harness keeps the logits of some rows of every feed, with the text up to each row; a `ColdReference` computes
the expected logits.

Always true: `texts` are the tokens that each sequence has in memory, if the memory works correctly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import random_tokens
from kvcellar.engine.models.registered import our_attention, own_attention
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.spans import Span

SHORT = 96  # default length of a text in tokens: more than the block size of most recurrent layers
SEQUENCES = 6
COMPARED = 16  # the most rows of a feed whose logits are kept

Piece = tuple[int, Sequence[int]]  # a sequence and its next tokens


class CheckFailed(Exception):
    """A check failed for a reason other than different logits; the message has the reason."""


class ColdReference:
    """The model's own eager forward over a whole text, without a cache."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._text: tuple[int, ...] = ()
        self._logits = torch.empty(0, device=guest.device)

    def logits(self, text: tuple[int, ...]) -> Tensor:
        """[L,V] in float32. A prefix of the last text is not computed again."""
        if self._text[: len(text)] != text:
            own_attention(self._guest.model)
            try:
                with torch.inference_mode():
                    ids = torch.tensor([text], device=self._guest.device)
                    self._logits = self._guest.model(input_ids=ids, use_cache=False).logits[0].float()
            finally:
                if self._guest.mode == "flat":
                    our_attention(self._guest.model)
            self._text = text
        return self._logits[: len(text)]


class Setup:
    """Shared by all checks of one guest: the reference, the lengths of texts, and memories to reuse."""

    def __init__(self, guest: Guest, tokens: int) -> None:
        self.guest, self.reference = guest, ColdReference(guest)
        self.most, self.length = tokens, min(tokens, SHORT)
        self._spare: list[Memory] = []

    def draw(self, draw: torch.Generator, n: int) -> list[int]:
        """`n` random tokens, the same on every machine."""
        return random_tokens(self.guest.model, n, draw)

    def take(self) -> Memory:
        """An empty memory with enough cells for every sequence at its maximum length, and rows for checkpoints."""
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
    """Logits [n,V] of the rows of a feed at the positions `at` of `text`, which ends with the feed.

    `derived`: the K/V before them differ from those of the text alone, so they are not compared with the reference.
    """

    text: tuple[int, ...]
    at: tuple[int, ...]
    logits: Tensor
    derived: bool

    def rows(self) -> dict[tuple[int, ...], Tensor]:
        """Maps the text up to and including a row's token to the row's logits [V]."""
        return {self.text[: pos + 1]: row for pos, row in zip(self.at, self.logits, strict=True)}


class Harness:
    """One memory, for one check."""

    def __init__(self, setup: Setup, seed: int, memory: Memory | None = None) -> None:
        self.guest, self.most, self.length = setup.guest, setup.most, setup.length
        self.texts: dict[int, list[int]] = {}
        self.derived: set[int] = set()  # sequences with derived K/V
        self._setup, self._seed, self._memory = setup, seed, memory
        self._draw = torch.Generator().manual_seed(seed % 2**63)
        self._seen: list[Seen] = []
        self._gaps: list[Tensor] = []  # of rows that were compared with those of another harness
        self._twins: list[Harness] = []

    @property
    def memory(self) -> Memory:
        """Allocated at first use, because some checks raise `NotApplicable` before they need it."""
        if self._memory is None:
            self._memory = self._setup.take()
        return self._memory

    def draw(self, n: int) -> list[int]:
        return self._setup.draw(self._draw, n)

    # -- operations ---------------------------------------------------------------------------------------------

    def read(self, *pieces: Piece, keep_state: bool = False) -> None:
        """Compute and commit more tokens of some sequences, in one step, or one per sequence if the guest is solo."""
        for part in self.parts(pieces):
            self.step(part, keep_state=keep_state)
            self.keep(part)

    def parts(self, pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
        """The pieces of each step: all in one step, or one per step if the guest runs solo."""
        return [pieces] if self.guest.mode == "flat" else [[piece] for piece in pieces]

    def begin(self, pieces: Sequence[Piece], *, keep_state: bool = False, revertible: bool = False) -> Plan:
        feeds: list[Feed] = []
        for seq, ids in pieces:
            end = len(self.texts.get(seq, ()))
            feeds.append(Feed(seq, Span(end, end + len(ids)), keep_state=keep_state, revertible=revertible))
        self.memory.rows.trim(most=3 * SEQUENCES, spare=6 * SEQUENCES)
        return self.memory.begin(Batch(tuple(feeds)))

    def step(self, pieces: Sequence[Piece], *, keep_state: bool = False, revertible: bool = False) -> None:
        """A forward over more tokens of some sequences. Does not commit the step."""
        plan = self.begin(pieces, keep_state=keep_state, revertible=revertible)
        rows = [_some(len(ids)) for _, ids in pieces]
        want: list[int] = []
        start = 0
        for (_, ids), some in zip(pieces, rows, strict=True):
            want += [start + row for row in some]
            start += len(ids)
        logits = self.guest.forward(self.memory, plan, [token for _, ids in pieces for token in ids], want)
        for (seq, ids), some, part in zip(pieces, rows, logits.float().split([*map(len, rows)]), strict=True):
            before = self.texts.get(seq, [])
            at = tuple(len(before) + row for row in some)
            self._seen.append(Seen((*before, *ids), at, part, seq in self.derived))

    def keep(self, pieces: Sequence[Piece], counts: Sequence[int] | None = None) -> None:
        """Commit the open step: all of its tokens, or the first `counts[i]` of piece `i`."""
        counts = [len(ids) for _, ids in pieces] if counts is None else counts
        self.memory.commit({seq: count for (seq, _), count in zip(pieces, counts, strict=True)})
        for (seq, ids), count in zip(pieces, counts, strict=True):
            self.texts[seq] = [*self.texts.get(seq, ()), *ids[:count]]

    def fork(self, src: int, dst: int, upto: int) -> int:
        """Fork `dst` from the first `upto` tokens of `src`. Returns how many of them memory could share."""
        could = self.memory.can_cut(src, upto)
        kept = self.memory.fork(src, dst, upto)
        if kept != could or kept > upto:
            raise CheckFailed(f"can_cut returned {could} for {upto} tokens; a fork kept {kept}")
        self.texts[dst] = self.texts[src][:kept]
        return kept

    def remove_end(self, seq: int, start: int) -> int:
        """Remove all tokens from `start` on, or from the nearest earlier position that memory supports. Returns it."""
        length, kept = len(self.texts[seq]), self.memory.can_cut(seq, start)
        if (left := self.memory.remove(seq, Span(kept, length))) != kept:
            raise CheckFailed(f"can_cut returned {kept} for {length} tokens; a removal kept {left}")
        self.texts[seq] = self.texts[seq][:kept]
        return kept

    def clear(self) -> None:
        """Clear the memory. The logits seen so far are kept."""
        self.memory.clear()
        self.texts.clear()
        self.derived.clear()

    def twin(self) -> "Harness":
        """A second harness, in which the check computes the same texts by other operations."""
        self._twins.append(Harness(self._setup, self._seed))
        return self._twins[-1]

    # -- results ------------------------------------------------------------------------------------------------

    def compare(self, other: "Harness") -> None:
        """Record the gaps of all rows that this harness and `other` have in common."""
        expected: dict[tuple[int, ...], Tensor] = {}
        for seen in other._seen:
            expected |= seen.rows()
        gaps: list[Tensor] = []
        for seen in self._seen:
            pairs = [(row, expected[text]) for text, row in seen.rows().items() if text in expected]
            if pairs:
                gaps.append(gap_of(*(torch.stack(rows) for rows in zip(*pairs, strict=True))))
        if not gaps:
            raise CheckFailed("two ways of computing the same texts have no row in common")
        self._gaps += gaps

    def gaps(self, bound: float) -> tuple[list[Tensor], int]:
        """Gaps [n] of the rows of every feed, and the number of rows with another most likely token (`other_text`)."""
        gaps, other = list(self._gaps), 0
        everything = [seen for harness in (self, *self._twins) for seen in harness._seen if not seen.derived]
        for seen in sorted(everything, key=lambda seen: seen.text, reverse=True):  # a text before its prefixes
            expected = self._setup.reference.logits(seen.text)[list(seen.at)]
            gaps.append(gap_of(seen.logits, expected))
            other += other_text(seen.logits, expected, bound)
        if not gaps:
            raise CheckFailed("no row was compared")
        return gaps, other

    def close(self) -> None:
        """Free all sequences. Raises `CheckFailed` if cells or rows stay allocated, or lengths are wrong."""
        for twin in self._twins:
            twin.close()
        memory = self.memory
        memory.check()
        lengths = {seq: memory.length(seq) for seq in memory.sequences}
        if lengths != (read := {seq: len(text) for seq, text in self.texts.items()}):
            raise CheckFailed(f"sequences have {lengths} tokens in memory, not {read}")
        memory.clear()
        if (memory.free(), memory.rows.free) != (memory.storage.capacity(), memory.rows.capacity):
            raise CheckFailed(f"without sequences only {memory.free()} cells and {memory.rows.free} rows are free")
        self._setup.give(memory)


def _some(n: int) -> list[int]:
    """Indices of the rows of a feed to compare: all if they are few; else the first, the last, and some between."""
    if n <= COMPARED:
        return list(range(n))
    side = COMPARED // 3
    between = range(side, n - side)
    return [*range(side), *between[:: -(-len(between) // side)], *range(n - side, n)]


def gap_of(logits: Tensor, expected: Tensor) -> Tensor:
    """[n,V] twice -> [n]: the largest difference in each row, divided by max(1, largest absolute logit)."""
    return ((logits - expected).abs().amax(-1) / expected.abs().max().clamp(min=1.0)).cpu()


def other_text(logits: Tensor, expected: Tensor, bound: float) -> int:
    """Number of rows of [n,V] with another most likely token, where the two best expected logits differ by more than
    the bound."""
    first, second = expected.topk(2).values.unbind(-1)
    clear = first - second > bound * expected.abs().max().clamp(min=1.0)
    return int((clear & (logits.argmax(-1) != expected.argmax(-1))).sum())
