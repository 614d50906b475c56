"""oracle: a drafter that knows the text to come, and is wrong at a set rate. It costs nothing, so that what is measured
is what verification costs."""

import random
from collections.abc import Sequence

from kvcellar.speculate.chain import Chain, Key
from kvcellar.speculate.drafter import Committed

DEEPEST = 7


class Oracle:
    """Drafts for texts that repeat their last token. Each draft is wrong with probability `error`; up to `most` for
    each completion."""

    name = "oracle"
    deepest = DEEPEST
    catches_up = False
    reads_hidden = False

    def __init__(self, *, error: float = 0.0, most: int = DEEPEST) -> None:
        self.error, self.most = error, most
        self._random = random.Random(0)

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            token = chain.text[-1]
            for _ in range(min(self.most, chain.left)):
                chain.add(token if self._random.random() >= self.error else token + 1)

    def committed(self, news: Sequence[Committed]) -> None:
        """Nothing depends on hidden states."""

    def fork(self, key: Key, other: Key) -> None:
        """Nothing is kept."""

    def close(self, key: Key, *, keep: bool) -> None:
        """Nothing is kept."""

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Nothing is kept."""
