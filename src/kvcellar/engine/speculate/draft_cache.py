"""draft_cache: what a drafter with a memory of its own needs of that memory: sequences of completions, and what is kept
of their texts.

    seq, = cache.open([text])                  # begins with what is kept of the text
    plan = memory.begin(Batch(cache.feeds([(text.key, n)])))
    ...                                        # the drafter's forward
    cache.keep(text, memory.commit().get(seq)) # other completions find it from now on
    cache.close(text.key, keep=True)           # the completion is over
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvcellar.engine.speculate.chain import Key
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Feed
from kvcellar.memory.retention import RetentionOptions


class Text(Protocol):
    """The text of a completion, the prompt and the tokens so far, and how what is computed of it is to be kept."""

    @property
    def key(self) -> Key: ...

    @property
    def namespace(self) -> str: ...

    @property
    def text(self) -> Sequence[int]: ...

    @property
    def retention(self) -> RetentionOptions: ...


class DraftCache(Protocol):
    """A memory whose sequences belong to completions. Between two calls of a drafter each of them holds a prefix of the
    text of its completion (unless it is apart), and there are no others."""

    memory: Memory

    def open(self, texts: Sequence[Text]) -> list[int | None]:
        """The sequence of each of these texts. That of a new completion begins with what is kept of its text; at least
        one token is left to compute.

        None where it is not to be computed yet: what is stored of it is being read, or another of these texts has to
        be computed first, because it begins alike.
        """
        ...

    def begin_apart(self, text: Text) -> int:
        """Give a completion another sequence, which is empty, and return it. Its entries begin at a position that the
        drafter chooses, so it is not shared, nor kept when the completion is over."""
        ...

    def make_free(self, cells: int, rows: int, used: Iterable[Key]) -> bool:
        """Evict until so many cells of every group and so many state rows are free: first what no completion uses, then
        what completions other than the `used` ones have. False if that does not suffice."""
        ...

    def end(self, key: Key, most: int) -> int:
        """The position, `most` at the furthest, up to which the next step may compute a text."""
        ...

    def feeds(self, wanted: Sequence[tuple[Key, int]]) -> tuple[Feed, ...]:
        """The feeds of a step that computes so many new tokens of each of these completions."""
        ...

    def keep(self, text: Text, claim: int | None) -> None:
        """A step has computed more of a text, and left `claim` of it."""
        ...

    def spare(self) -> int:
        """The number of a new sequence, for drafts, which the drafter drops before its call ends."""
        ...

    def fork(self, key: Key, other: Key) -> None:
        """The completion `other` begins with the text of `key`."""
        ...

    def close(self, key: Key, *, keep: bool) -> None:
        """A completion is over, or its text was changed: free its sequence. What was computed is kept for others if
        `keep` is true. Not an error if there is none."""
        ...

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what is kept of a namespace, or of all, of texts that begin with these tokens, and that no completion
        uses. It may drop more of the same namespace."""
        ...

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of the drafter has computed so many tokens of texts in so many seconds."""
        ...

    def check(self) -> None:
        """Assert what is always true between two calls of the drafter."""
        ...
