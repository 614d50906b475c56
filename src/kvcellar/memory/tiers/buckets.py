"""buckets: names by which a store that others share is looked into for what a text begins with. Nothing is listed.

A bucket has the snapshots that continue the same one, or begin a sequence, with the same tokens: the first `BLOCK`, or,
of shorter snapshots, the first one. All names are made like keys, so with a secret they tell nothing about tokens:

    bucket    the key that a snapshot of these first tokens would have
    member    the key of the snapshot; the number of its tokens, 8 digits; and for each `BLOCK` tokens, up to 16 times,
              a mark: the first digits of the key that a snapshot up to there would have

So it is known from a member how much of a text it has, to a block, and whether it has no others, without reading it.
Members are data of others: what is not of this form is no member, and a key counts only if it is that of the tokens.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from kvcellar.memory.snapshot import KEY, SEGMENT, key_after

TOKEN = 8  # bytes
BLOCK = 32  # tokens
MARK = 4  # digits
MOST_MARKS = 16
LONGEST = 2 * KEY + 8 + MARK * MOST_MARKS  # characters of a member
_MEMBER = re.compile(f"([0-9a-f]{{{2 * KEY}}})([0-9a-f]{{8}})((?:[0-9a-f]{{{MARK}}}){{0,{MOST_MARKS}}})")


class Member(NamedTuple):
    """A snapshot as its bucket has it."""

    bucket: str
    text: str
    key: bytes
    tokens: int
    marks: str


def member_of(bucket: str, text: str) -> Member | None:
    """None for what is no member."""
    found = _MEMBER.fullmatch(text)
    return None if found is None else Member(bucket, text, bytes.fromhex(found[1]), int(found[2], 16), found[3])


@dataclass(frozen=True)
class Rest:
    """The tokens of a text after the snapshot `parent`, which ends at `at`, or from its beginning on."""

    identity: bytes
    secret: bytes
    namespace: str
    parent: bytes | None
    text: bytes
    at: int = 0

    def key(self, n: int) -> bytes:
        """Of a snapshot of the first `n` tokens."""
        tokens = self.text[self.at * TOKEN : (self.at + n) * TOKEN]
        return key_after(
            self.parent, identity=self.identity, namespace=self.namespace, tokens=tokens, secret=self.secret
        )

    @property
    def left(self) -> int:
        """Tokens."""
        return len(self.text) // TOKEN - self.at

    @property
    def buckets(self) -> list[str]:
        """Those of all snapshots that begin like this; of one that has just these tokens, the first."""
        return [self.key(n).hex() for n in (BLOCK, 1) if n <= self.left]

    @cached_property
    def marks(self) -> str:
        return "".join(self.key(n * BLOCK).hex()[:MARK] for n in range(1, min(self.left // BLOCK, MOST_MARKS) + 1))

    def first(self) -> "Rest":
        """As many tokens as most snapshots have."""
        return replace(self, text=self.text[: (self.at + SEGMENT) * TOKEN])

    def next(self) -> "Rest":
        """The tokens after a snapshot of as many tokens as most have."""
        return replace(self, parent=self.key(SEGMENT), at=self.at + SEGMENT)

    def common(self, member: Member) -> int:
        """Tokens that a member has in common, at least: those of whole blocks."""
        alike = 0
        while member.marks[alike : alike + MARK] == self.marks[alike : alike + MARK] != "":
            alike += MARK
        return alike // MARK * BLOCK

    def has(self, member: Member) -> bool:
        """Whether a member is a snapshot of the first tokens of this, and of no others."""
        likely = 0 < member.tokens <= min(self.left, SEGMENT) and self.marks.startswith(member.marks)
        return likely and self.key(member.tokens) == member.key

    def named(self, key: bytes) -> Member:
        """The snapshot of just these tokens, as it is in its bucket."""
        text = f"{key.hex()}{self.left:08x}{self.marks}"
        return Member(self.buckets[0], text, key, self.left, self.marks)
