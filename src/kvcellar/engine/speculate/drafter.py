"""drafter: the protocol of what proposes drafts.

A drafter serves all completions of an engine, on the engine's thread, between two steps. It may keep state for each
completion, by its key; it never changes the memory of the target. What it proposes cannot change the distribution of a
text, only its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens of a completion that have entered the target's memory: the prompt in chunks, then each round's. Rows of
    images are not among them."""

    key: Key
    namespace: str
    text: Sequence[int]  # of the completion, from its beginning; drafts of this round are appended to it after the call
    start: int  # place of the first in `text`
    tokens: Sequence[int]
    hidden: Tensor  # [len(tokens),H]: the target's last hidden states at these tokens
    retention: RetentionOptions = NO_OPTIONS  # how what is computed of the text is kept


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts. An error that `propose`, `committed` or `fork` raises makes the round plain decoding; afterwards
    `close` is called for the completions of the call, without `keep`.

    State of a completion is made when it is first seen, with whatever text it has by then, and dropped by `close`.
    """

    name: str
    deepest: int  # the most drafts of a completion in a round
    catches_up: bool  # whether `propose` first computes what it has missed: then a round after a pause takes longer
    reads_hidden: bool  # whether `committed` is called; not while the drafter is parked, so texts may have gaps

    def propose(self, chains: Sequence[Chain]) -> None:
        """Add up to `chain.left` drafts to each chain: `chain.add(token)` for a guess, `extend(chains, logits)` for
        tokens drawn from a model's logits. No draft is fine. A text only grows between two calls."""
        ...

    def committed(self, news: Sequence[Committed]) -> None:
        """The next tokens of some completions are in the target's memory, with their hidden states."""
        ...

    def fork(self, key: Key, other: Key) -> None:
        """The completion `other` begins with the text of `key`."""
        ...

    def close(self, key: Key, *, keep: bool) -> None:
        """Drop the state of a completion: it has ended, was preempted, or its text was changed (a context shift). With
        `keep`, others of its namespace may profit from what was known of its text; without it, the state may be wrong.
        Not an error if there is none."""
        ...

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what is kept of a namespace, or of all, of texts that have ended and that begin with these tokens. It
        may drop more of that namespace."""
        ...
