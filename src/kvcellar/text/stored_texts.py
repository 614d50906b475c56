"""stored_texts: the token sequences that a store had when its engine was made, found by their text.

So the replies of a chat keep their tokens across a restart. What the store removes meanwhile only costs that its tokens
are used without their K/V. Never changes; safe to use from several threads.
"""

from collections.abc import Callable, Iterable
from itertools import chain

from kvcellar.snapshot import Snapshot, requested

MOST_COMPARED = 2**17  # tokens that one text is compared with: some 50 ms
Spell = Callable[[int], bytes]  # the bytes of a token


def first_of(snapshots: Iterable[Snapshot], most_bytes: int) -> tuple[Snapshot, ...]:
    """As many as have `most_bytes` of tokens."""
    found: list[Snapshot] = []
    for snapshot in snapshots:
        most_bytes -= len(snapshot.tokens)
        if most_bytes < 0:
            break
        found.append(snapshot)
    return tuple(found)


class StoredTexts:
    """Of snapshots, each of which comes after the one that it continues."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._after: dict[tuple[str, bytes | None], list[Snapshot]] = {}
        for snapshot in snapshots:
            self._after.setdefault((requested(snapshot.namespace), snapshot.parent), []).append(snapshot)

    def longest(self, namespace: str, text: bytes, spell: Spell) -> list[int]:
        """The tokens of the longest chain of snapshots with whose text the text begins."""
        best: tuple[Snapshot, ...] = ()
        rest: list[tuple[int, tuple[Snapshot, ...]]] = [(0, ())]
        left = MOST_COMPARED
        while rest and left > 0:
            at, before = rest.pop()
            if at and (not best or before[-1].span.end > best[-1].span.end):
                best = before
            for snapshot in reversed(self._after.get((namespace, before[-1].key if before else None), ())):
                end, compared = _spelled(snapshot, text, at, spell)
                left -= compared
                if end is not None:
                    rest.append((end, (*before, snapshot)))
                if left <= 0:
                    break
        return list(chain.from_iterable(map(_tokens, best)))


def _spelled(snapshot: Snapshot, text: bytes, at: int, spell: Spell) -> tuple[int | None, int]:
    """Where the text of a snapshot ends in a text that has it at `at`, None if it has another one there; and how many
    tokens were compared."""
    compared = 0
    for compared, token in enumerate(_tokens(snapshot), start=1):
        try:
            piece = spell(token)
        except OverflowError:  # ids of a tokenizer have 32 bits
            return None, compared
        if not piece or not text.startswith(piece, at):  # an id that the tokenizer does not have has no bytes
            return None, compared
        at += len(piece)
    return at, compared


def _tokens(snapshot: Snapshot) -> memoryview:
    return memoryview(snapshot.tokens).cast("q")
