"""draft_model: drafts by a smaller model, with a memory of its own.

Always true between two calls:
  * the sequence of a completion holds a prefix of its text, never a draft: drafts are decoded on forks, which are
    dropped before `propose` returns or raises;
  * no step is open.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kvcellar.engine.speculate.chain import Chain, Key, extend
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.spans import Span

T = TypeVar("T")
Forward = Callable[[Memory, Plan, list[int], list[int]], Tensor]  # ids [T], wanted rows [R] -> logits [R,V]


class ModelDrafter:
    """Drafts that `forward` draws on the memory of `cache`. `context` is the most tokens of a text that the model can
    read.

    A text that is new or was not drafted for is computed first, from where the cache has it, up to `step_tokens` of all
    texts in a call; those that are not complete then have no drafts in this round. Where memory is full of what the
    completions of a call use, there are no drafts. Unless it is `batched`, a forward has one sequence.
    """

    catches_up = True
    reads_hidden = False

    def __init__(
        self,
        name: str,
        forward: Forward,
        cache: DraftMemory,
        *,
        context: int,
        deepest: int = 8,
        step_tokens: int = 512,
        batched: bool = True,
    ) -> None:
        self.name, self.deepest, self.cache = name, deepest, cache
        self._forward, self._memory, self._context = forward, cache.memory, context
        self._step_tokens, self._batched = step_tokens, batched

    def propose(self, chains: Sequence[Chain]) -> None:
        keys = [chain.key for chain in chains]
        ready = self._caught_up([chain for chain in chains if len(chain.text) + chain.left <= self._context], keys)
        with self.cache.forks() as fork:
            while going := [(chain, seq) for chain, seq in ready if chain.left > 0]:
                if not self.cache.make_free(len(going), len(going), keys):
                    break
                drafting = [(chain, fork(seq)) for chain, seq in going]
                logits = [self._drafted(part) for part in self._parts(drafting)]
                extend([chain for chain, _ in going], torch.cat(logits))

    def committed(self, news: Sequence[Committed]) -> None:
        """Nothing depends on hidden states."""

    def fork(self, key: Key, other: Key) -> None:
        self.cache.fork(key, other)

    def close(self, key: Key, *, keep: bool) -> None:
        self.cache.close(key, keep=keep)

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        self.cache.forget(namespace, tokens)

    def _caught_up(self, chains: Sequence[Chain], keys: Sequence[Key]) -> list[tuple[Chain, int]]:
        """Compute what is missing of the texts, and add the first draft of those that are complete, which are
        returned with their sequences."""
        left, missing = self._step_tokens, list[tuple[Chain, int, Span]]()
        opened = [(one, seq) for one, seq in zip(chains, self.cache.open(chains), strict=True) if seq is not None]
        # Those that lack the least are first, so that a long text does not keep drafts from others.
        for chain, seq in sorted(opened, key=lambda one: len(one[0].text) - self._memory.length(one[1])):
            if left > 0 and (at := self._memory.length(seq)) < len(chain.text):
                missing.append((chain, seq, Span(at, self.cache.end(chain.key, min(len(chain.text), at + left)))))
                left -= len(missing[-1][2])
        while missing and not self.cache.make_free(self._step_tokens - left, len(missing), keys):
            left += len(missing.pop()[2])
        if not missing:
            return []
        began = time.perf_counter()
        logits = torch.cat([self._computed(part) for part in self._parts(missing)])
        rows = [row for row, (chain, _, span) in enumerate(missing) if span.end == len(chain.text)]
        complete = [missing[row][:2] for row in rows]
        if complete:
            extend([chain for chain, _ in complete], logits[rows])
            self.cache.stepped(self._step_tokens - left, time.perf_counter() - began)
        return complete

    def _computed(self, missing: Sequence[tuple[Chain, int, Span]]) -> Tensor:
        """Compute these tokens of texts. -> [len(missing),V]: logits after the last token of each"""
        feeds = self.cache.feeds([(chain.key, len(span)) for chain, _, span in missing])
        logits, claims = self._step(feeds, [chain.text[span.start : span.end] for chain, _, span in missing])
        for chain, seq, _ in missing:
            self.cache.keep(chain, claims.get(seq))
        return logits

    def _drafted(self, drafting: Sequence[tuple[Chain, int]]) -> Tensor:
        """Compute the last draft of each chain on its fork. -> [len(drafting),V]: logits after it"""
        feeds = [Feed(seq, Span(at := self._memory.length(seq), at + 1)) for _, seq in drafting]
        return self._step(feeds, [chain.tokens[-1:] for chain, _ in drafting])[0]

    def _parts(self, things: Sequence[T]) -> list[Sequence[T]]:
        """What is computed in one forward, each."""
        return [things] if self._batched else [[thing] for thing in things]

    def _step(self, feeds: Sequence[Feed], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, dict[int, int]]:
        """Compute the tokens of these feeds. -> [len(feeds),V]: logits after the last token of each, and the claims of
        the commit"""
        ids = [token for own in tokens for token in own]
        ends = [sum(map(len, tokens[: i + 1])) - 1 for i in range(len(tokens))]
        with self._memory.stepping(Batch(tuple(feeds))) as plan:
            logits = self._forward(self._memory, plan, ids, ends)
            return logits, self._memory.commit()

    def check(self) -> None:
        """Assert what is always true between two calls."""
        self.cache.check()
