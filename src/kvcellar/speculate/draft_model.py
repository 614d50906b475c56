"""draft_model: drafts by a smaller model, with a memory of its own.

Always true between two calls:
  * the sequence of a completion holds a prefix of its text, never a draft: drafts are decoded on forks, which are
    dropped before `propose` returns or raises;
  * no step is open.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.spans import Span
from kvcellar.speculate.chain import Chain, Key, extend
from kvcellar.speculate.drafter import Committed

Forward = Callable[[Memory, Plan, list[int], list[int]], Tensor]  # ids [T], wanted rows [R] -> logits [R,V]


class ModelDrafter:
    """Drafts that `forward` on `memory` draws. `context` is the most tokens of a text that the model can read.

    A text that is new or was not drafted for is computed first, up to `step_tokens` of all texts in a call; those that
    are not complete then have no drafts in this round. Where the memory is full, sequences that are not in use now are
    dropped, the least recently used first; without enough of them, there are no drafts. Unless it is `batched`, a
    forward has one sequence.
    """

    catches_up = True
    reads_hidden = False

    def __init__(
        self,
        name: str,
        forward: Forward,
        memory: Memory,
        *,
        context: int,
        deepest: int = 8,
        step_tokens: int = 512,
        batched: bool = True,
    ) -> None:
        self.name, self.deepest = name, deepest
        self._forward, self._memory, self._context = forward, memory, context
        self._step_tokens, self._batched = step_tokens, batched
        self._seqs: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._numbers = count(1)

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self._seqs[chain.key] = self._seqs.pop(chain.key, None) or next(self._numbers)
        ready = self._caught_up([chain for chain in chains if len(chain.text) + chain.left <= self._context])
        forks: dict[Key, int] = {}
        try:
            while going := [chain for chain in ready if chain.left > 0]:
                if not self._make_free(len(going), chains):
                    break
                for chain in going:
                    if chain.key not in forks:
                        seq = self._seqs[chain.key]
                        fork = forks[chain.key] = next(self._numbers)
                        self._memory.fork(seq, fork, self._memory.length(seq))
                logits = self._step([(forks[chain.key], chain.tokens[-1:]) for chain in going])
                extend(going, logits)
        finally:
            for fork in filter(self._memory.has, forks.values()):
                self._memory.drop(fork)

    def committed(self, news: Sequence[Committed]) -> None:
        """Nothing depends on hidden states."""

    def close(self, key: Key) -> None:
        seq = self._seqs.pop(key, None)
        if seq is not None and self._memory.has(seq):
            self._memory.drop(seq)

    def _caught_up(self, chains: Sequence[Chain]) -> list[Chain]:
        """Compute what is missing of the texts, and add the first draft of those that are complete, which are
        returned."""
        left, feeds, complete = self._step_tokens, list[tuple[int, Sequence[int]]](), list[Chain]()
        for chain in chains:
            seq = self._seqs[chain.key]
            at = self._memory.length(seq)
            if tokens := chain.text[at : at + left]:
                feeds.append((seq, tokens))
                left -= len(tokens)
                complete += [chain] if at + len(tokens) == len(chain.text) else []
        if not feeds or not self._make_free(sum(len(tokens) for _, tokens in feeds), chains):
            return []
        logits = self._step(feeds)
        rows = {seq: row for row, (seq, _) in enumerate(feeds)}
        if complete:
            extend(complete, logits[[rows[self._seqs[chain.key]] for chain in complete]])
        return complete

    def _step(self, feeds: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Compute these tokens of some sequences. -> [len(feeds),V]: logits after the last token of each"""
        if not self._batched and len(feeds) > 1:
            return torch.cat([self._step([feed]) for feed in feeds])
        length = self._memory.length
        batch = Batch(tuple(Feed(seq, Span(length(seq), length(seq) + len(tokens))) for seq, tokens in feeds))
        ids = [token for _, tokens in feeds for token in tokens]
        ends = [sum(len(tokens) for _, tokens in feeds[: i + 1]) - 1 for i in range(len(feeds))]
        plan = self._memory.begin(batch)
        try:
            logits = self._forward(self._memory, plan, ids, ends)
            self._memory.commit()
        except BaseException:
            if self._memory.step is not None:
                self._memory.abandon()
            raise
        return logits

    def _make_free(self, cells: int, chains: Sequence[Chain]) -> bool:
        """Drop sequences of completions without a chain in this call until so many cells of every group are free.
        False if they do not suffice."""
        used = {chain.key for chain in chains}
        idle = [key for key in self._seqs if key not in used]
        while min(self._memory.free().values(), default=cells) < cells:
            if not idle:
                return False
            self.close(idle.pop(0))
        return True

    def check(self) -> None:
        """Assert what is always true between two calls."""
        assert self._memory.step is None
        assert set(self._memory.sequences) <= set(self._seqs.values())
        self._memory.check()
