"""assistant: drafts by a network that keeps nothing of a text: it attends to what the target has stored.

The first draft is made from the newest token and the target's last hidden state, each further one from the draft before
it and the network's own hidden state, all at the position of the newest token. The target's memory is read in a step
whose rows store nothing, which is abandoned.

Always true between two calls: no step is open, and `_states` has the target's last hidden state of each completion with
the position behind it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvcellar.engine.speculate.chain import Chain, Key, extend
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.spans import Span


class Assistant(Protocol):
    """A network of queries only."""

    def forward(
        self, memory: Memory, plan: Plan, ids: Sequence[int], hidden: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """ids [T] at `positions`, hidden [T,H] -> logits [T,V], hidden [T,H]"""
        ...


class _State(NamedTuple):
    end: int  # tokens of the text that the target has computed
    hidden: Tensor  # [1,H], of the last of them


class AssistantDrafter:
    """Drafts that `head` draws from the target's `memory`, where `sequence` returns that of a completion. Positions end
    before `context`."""

    catches_up = False
    reads_hidden = True

    def __init__(
        self,
        name: str,
        head: Assistant,
        memory: Memory,
        sequence: Callable[[Key], int | None],
        *,
        context: int,
        deepest: int = 8,
    ) -> None:
        self.name, self.deepest = name, deepest
        self._head, self._memory, self._sequence, self._context = head, memory, sequence, context
        self._states: dict[Key, _State] = {}

    def committed(self, news: Sequence[Committed]) -> None:
        for new in news:
            self._states[new.key] = _State(new.start + len(new.tokens), new.hidden[-1:].clone())

    def propose(self, chains: Sequence[Chain]) -> None:
        level = [chain for chain in chains if self._is_level(chain)]
        hidden = {chain.key: self._states[chain.key].hidden for chain in level}
        while going := [chain for chain in level if chain.left > 0]:
            logits, states = self._step(going, torch.cat([hidden[chain.key] for chain in going]))
            extend(going, logits)
            hidden = {chain.key: state for chain, state in zip(going, states.split(1), strict=True)}

    def _is_level(self, chain: Chain) -> bool:
        """Whether the target has computed all of a text but its newest token, and the state is of that position."""
        state, seq = self._states.get(chain.key), self._sequence(chain.key)
        if state is None or seq is None or state.end != len(chain.text) - 1:
            return False
        return _end(chain) == self._memory.length(seq) < self._context

    def _step(self, chains: Sequence[Chain], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One draft for each chain: logits [C,V], and hidden states [C,H] for the next."""
        ends = [*map(_end, chains)]
        seqs = [self._sequence(chain.key) for chain in chains]
        feeds = [
            Feed(seq, Span(end - 1, end), stores=False) for seq, end in zip(seqs, ends, strict=True) if seq is not None
        ]
        ids = [(chain.tokens or chain.text)[-1] for chain in chains]
        with self._memory.stepping(Batch(tuple(feeds))) as plan:
            return self._head.forward(self._memory, plan, ids, hidden, ends)

    def fork(self, key: Key, other: Key) -> None:
        if (state := self._states.get(key)) is not None:
            self._states[other] = state

    def close(self, key: Key, *, keep: bool) -> None:
        self._states.pop(key, None)

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Nothing is kept of texts."""

    def check(self) -> None:
        """Assert what is always true between two calls."""
        assert self._memory.step is None
        assert all(len(state.hidden) == 1 for state in self._states.values())


def _end(chain: Chain) -> int:
    """What the target has computed of a text: all but its newest token."""
    return len(chain.text) - 1 + chain.rows_of_images
