"""head: drafts by a model's multi-token prediction (MTP) layers, which read its hidden states.

An entry of the head's memory for position p is computed from the target's last hidden state at p and the tokens that
follow: layer i reads the token at p + 1 + i, and what layer i - 1 made of p (the target's hidden state, if i is 0). Its
output predicts the token at p + 2 + i. So where the target has computed n tokens and one more is known, a head of L
layers can make entries of n + 1 - L positions, and its rows of the last L positions give the first L drafts. With a
single layer, later drafts come from that layer too, which then reads its own output in place of hidden states.

A prefix of n tokens that the target restores ends L entries before n for the head, since the last L read tokens that
follow; and the target's states there are not computed again. So few entries are made with states of zeros: drafts that
read them may be a little worse, and are verified like others. Behind a longer gap the head begins anew, apart, and
drafts once it has read some of the text: few drafts from less would be accepted.

Always true between two calls, for each line:
  * its sequence holds entries of the true text only, at consecutive positions from `first` up to `base`;
  * `hidden` are the target's states from `base` up to `end`, which is where the target is;
  * `first` is 0, or the head began behind a prefix that the target had restored and the head had not: then the sequence
    is apart, and nothing of it is shared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvcellar.engine.speculate.chain import Chain, Key, extend
from kvcellar.engine.speculate.draft_memory import DraftMemory, Text
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.spans import Span

HISTORY = 48  # tokens behind a gap from which on drafts of the embedded model's head are about as good as without one
FLUSH = 256  # hidden states of a text that wait before they are computed without a draft


class Head(Protocol):
    """The MTP layers of a model, on a memory of their own."""

    layers: int

    def forward(
        self, memory: Memory, plan: Plan, layer: int, ids: Sequence[int], hidden: Tensor, positions: Sequence[int]
    ) -> Tensor:
        """Run one layer over the rows of the open step: tokens `ids` [T] at `positions`, hidden [T,H] -> [T,H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of a layer [R,H] -> [R,V]."""
        ...


@dataclass(slots=True, eq=False)
class _Line:
    """A completion, as a text of the cache. `apart` is its sequence, if that is not shared."""

    key: Key
    namespace: str
    text: Sequence[int]  # at least the tokens up to `end`; it may grow between two calls
    retention: RetentionOptions
    hidden: Tensor  # [end-base,H]
    base: int
    end: int
    first: int = 0
    apart: int | None = None

    def tokens(self, start: int, stop: int, drafts: Sequence[int]) -> list[int]:
        """Tokens [start,stop) of the text and the drafts behind it; where there are none, a chain was closed, and any
        token will do."""
        own, known = list(self.text[start:stop]), len(self.text)
        own += drafts[max(0, start - known) : max(0, stop - known)]
        return own + [0] * (stop - start - len(own))

    def advance(self, count: int) -> None:
        """The first `count` of the states are not needed any more."""
        self.hidden, self.base = self.hidden[count:], self.base + count


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step for positions [line.base,stop), of which the first `kept` are kept."""

    line: _Line
    seq: int
    stop: int
    kept: int

    def __len__(self) -> int:
        return self.stop - self.line.base


class HeadDrafter:
    """Drafts that `head` draws. `context` is the most tokens of a text that it can read, `history` the fewest behind a
    gap.

    Entries are computed when it drafts, when `FLUSH` hidden states of a text wait, and when a completion ends: up to
    `step_tokens` of all texts in a step. Texts for which more wait have no drafts in that round. Where memory is full
    of what the completions of a call use, there are no drafts.
    """

    catches_up = True
    reads_hidden = True

    def __init__(
        self,
        name: str,
        head: Head,
        cache: DraftMemory,
        *,
        context: int,
        history: int = 0,
        deepest: int = 8,
        step_tokens: int = 512,
    ) -> None:
        self.name, self.cache = name, cache
        self.deepest = deepest if head.layers == 1 else min(deepest, head.layers)
        self._head, self._memory, self._context, self._step_tokens = head, cache.memory, context, step_tokens
        self._history = history
        self._lines: dict[Key, _Line] = {}
        self._lost: set[Key] = set()  # completions whose texts do not fit memory: they have no drafts any more

    # -- what the target has computed ---------------------------------------------------------------------------

    def committed(self, news: Sequence[Committed]) -> None:
        news = [new for new in news if new.key not in self._lost]
        for new in news:
            line = self._lines.get(new.key)
            if line is not None and line.end != new.start:
                self.close(new.key, keep=True)
                line = None
            if line is None:
                none, at = new.hidden[:0], new.start
                line = self._lines[new.key] = _Line(new.key, new.namespace, new.text, new.retention, none, at, at)
            line.text, line.end = new.text, new.start + len(new.tokens)
            line.hidden = torch.cat([line.hidden, new.hidden[max(0, line.base - new.start) :]])
        due = [line for new in news if len((line := self._lines[new.key]).hidden) >= FLUSH]
        self._catch_up_all(due)
        for line in due:
            if len(line.hidden) >= FLUSH and self.cache.open([line])[0] is not None:  # None: its entries are being read
                self._lose(line)

    def _lose(self, line: _Line) -> None:
        """Memory has no room for more of a text beside what others use: free what it has."""
        del self._lines[line.key]
        self._lost.add(line.key)
        self.cache.close(line.key, keep=True)

    def fork(self, key: Key, other: Key) -> None:
        line = self._lines.get(key)
        if line is not None and line.apart is None:
            self._catch_up_all([line])
            self.cache.fork(key, other)
            self._lines[other] = replace(line, key=other, text=list(line.text[: line.end]))

    def close(self, key: Key, *, keep: bool) -> None:
        line = self._lines.pop(key, None)
        self._lost.discard(key)
        try:
            if line is not None and keep and line.apart is None:
                self._catch_up_all([line])
        finally:
            self.cache.close(key, keep=keep)

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        self.cache.forget(namespace, tokens)

    # -- drafts -------------------------------------------------------------------------------------------------

    def propose(self, chains: Sequence[Chain]) -> None:
        asked: dict[_Line, Chain] = {}
        for chain in chains:
            line = self._lines.get(chain.key)
            if line is not None and line.end + 1 == len(chain.text) <= self._context - chain.left:
                line.text = chain.text
                asked[line] = chain
        layers = self._head.layers
        seqs = [(line, seq) for line, seq in self._opened([*asked]) if self._knows(line)]
        rows = [_Rows(line, seq, line.end, max(0, len(line.text) - layers - line.base)) for line, seq in seqs]
        if not (within := self._within(rows)):
            self._catch_up([line for line, _ in seqs])
        elif self._make_free(within, chains):
            drafting = [asked[one.line] for one in within]
            began, tokens = time.perf_counter(), sum(map(len, within))
            last = self._round(within, drafting)
            self.cache.stepped(tokens, time.perf_counter() - began)
            if layers == 1:
                self._deepen(within, drafting, last)

    def _knows(self, line: _Line) -> bool:
        """Whether it has read enough of a text to draft for it."""
        return not line.first or line.end - line.first >= self._history

    def _round(self, rows: Sequence[_Rows], chains: Sequence[Chain] = ()) -> Tensor:
        """Compute rows, and keep entries of them. With `chains`, each layer adds a draft to those that want one, which
        the next layer reads. -> [len(rows),H]: the last layer's output at the last row of each."""
        feeds = self.cache.feeds([(one.line.key, len(one)) for one in rows])
        out = torch.cat([one.line.hidden[: len(one)] for one in rows])  # [T,H]
        places = [pos for one in rows for pos in range(one.line.base, one.stop)]
        ends = torch.tensor([len(one) for one in rows], device=out.device).cumsum(0) - 1
        with self._memory.stepping(Batch(feeds)) as plan:
            for layer in range(self._head.layers):
                ids = self._ids(rows, 1 + layer, [chain.tokens for chain in chains])
                out = self._head.forward(self._memory, plan, layer, ids, out, [pos + 1 + layer for pos in places])
                if going := [row for row, chain in enumerate(chains) if chain.left > 0]:
                    extend([chains[row] for row in going], self._head.logits(out[ends[going]]))
            claims = self._memory.commit({one.seq: one.kept for one in rows})
        for one in rows:
            one.line.advance(one.kept)
            if one.line.apart is None:
                self.cache.keep(one.line, claims.get(one.seq))
        return out[ends]

    def _ids(self, rows: Sequence[_Rows], ahead: int, drafts: Sequence[Sequence[int]]) -> list[int]:
        """[T]: of each row, the token that is `ahead` of its position."""
        own = drafts or [()] * len(rows)
        parts = (
            one.line.tokens(one.line.base + ahead, one.stop + ahead, of) for one, of in zip(rows, own, strict=True)
        )
        return [token for part in parts for token in part]

    def _deepen(self, rows: Sequence[_Rows], chains: Sequence[Chain], hidden: Tensor) -> None:
        """More drafts of the only layer, from its own output [len(rows),H] at the last row of each, on forks."""
        with self.cache.forks() as fork:
            while going := [row for row, chain in enumerate(chains) if chain.left > 0]:
                if not self.cache.make_free(len(going), len(going), [chain.key for chain in chains]):
                    break
                forks, drafting = [fork(rows[row].seq) for row in going], [chains[row] for row in going]
                out = self._drafted(forks, drafting, hidden[going])
                extend(drafting, self._head.logits(out))
                hidden = hidden.index_copy(0, torch.tensor(going, device=hidden.device), out)

    def _drafted(self, seqs: Sequence[int], chains: Sequence[Chain], hidden: Tensor) -> Tensor:
        """Compute an entry of the last draft of each chain. -> [len(chains),H]"""
        feeds = [Feed(seq, Span(at := self._memory.length(seq), at + 1)) for seq in seqs]
        ids = [chain.tokens[-1] for chain in chains]
        places = [len(chain.text) + len(chain.drafts) - 1 for chain in chains]
        with self._memory.stepping(Batch(tuple(feeds))) as plan:
            out = self._head.forward(self._memory, plan, 0, ids, hidden, places)
            self._memory.commit()
        return out

    # -- entries ------------------------------------------------------------------------------------------------

    def _catch_up_all(self, lines: Sequence[_Line]) -> None:
        while self._catch_up(lines):
            pass

    def _catch_up(self, lines: Sequence[_Line]) -> bool:
        """Compute entries of texts whose tokens are known, in one step, but not the last row of a text, which the next
        draft needs. False if there is nothing more that can be computed."""
        ahead = self._head.layers
        rows = [_Rows(line, seq, min(line.end - 1, len(line.text) - ahead), 0) for line, seq in self._opened(lines)]
        left, chosen = self._step_tokens, list[_Rows]()
        for one in rows:
            if (count := min(left, len(one))) > 0:
                chosen.append(replace(one, stop=one.line.base + count, kept=count))
                left -= count
        if not chosen or not self._make_free(chosen, [*self._lines.values(), *lines]):
            return False
        self._round(chosen)
        return True

    def _opened(self, lines: Sequence[_Line]) -> list[tuple[_Line, int]]:
        """Those of the lines whose sequences hold the entries before their states, and these sequences."""
        found: list[tuple[_Line, int]] = []
        for line, seq in zip(lines, self.cache.open(lines), strict=True):
            if seq is None:
                continue
            if seq != line.apart:
                line.first, line.apart = 0, None
            held = line.first + self._memory.length(seq)
            if 0 < line.base - held <= self._head.layers:
                line.hidden = torch.cat([line.hidden.new_zeros(line.base - held, line.hidden.shape[1]), line.hidden])
                line.base = held
            elif held < line.base:
                line.first, held = line.base, line.base
                seq = line.apart = self.cache.begin_apart(line)
            line.advance(held - line.base)
            if line.base < line.end:
                found.append((line, seq))
        return found

    def _within(self, rows: Sequence[_Rows]) -> list[_Rows]:
        """The first of the rows that fit a step."""
        left, found = self._step_tokens, list[_Rows]()
        for one in rows:
            if len(one) <= left:
                found.append(one)
                left -= len(one)
        return found

    def _make_free(self, rows: Sequence[_Rows], used: Sequence[Text | Chain]) -> bool:
        return self.cache.make_free(sum(map(len, rows)), len(rows), [text.key for text in used])

    def check(self) -> None:
        """Assert what is always true between two calls."""
        assert not self._lost & self._lines.keys()
        for line in self._lines.values():
            assert line.base > line.end or len(line.hidden) == line.end - line.base
            assert not line.first or line.apart is not None
        self.cache.check()
