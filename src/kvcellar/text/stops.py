"""stops: where an answer has to stop, found in its text as it comes, in whatever pieces.

The stop string that is complete first is the one that is met; of those complete at the same character, the longest.
That does not depend on how the text is cut into pieces, and generation never has to go on to find out.

The tables of stop strings are made once (`Stops`) and are shared by all texts that they are looked for in.

Always true:
  * what was let out, and what is held back, is the text so far, cut where the stop string that was met begins;
  * what is held back is the longest end of the text that a stop string begins with;
  * a character costs O(stop strings), whatever came before it.
"""

from array import array
from collections.abc import Sequence

from kvcellar.errors import WrongStage


class Stops:
    """Stop strings, none of them empty, ready to be looked for. Costs O(characters) to make; never changes."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.tables = tuple(_Table(text) for text in dict.fromkeys(texts))
        self.firsts = frozenset(text[0] for text in texts)


class StopFinder:
    """Finds the first of `stops` in one text. With no stops it holds nothing back."""

    def __init__(self, stops: Stops) -> None:
        self._needles = [_Needle(table) for table in stops.tables]
        self._firsts = stops.firsts
        self._held = ""
        self._over = False

    def push(self, text: str) -> tuple[str, str | None]:
        """`text` has come: what may be let out, and the stop string that was met, if any; nothing comes after that."""
        if self._over:
            raise WrongStage("push() after a stop string was met or the text was flushed; nothing may follow")
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # all needles stand at their beginning, and stay there
        whole = self._held + text
        for end in range(len(self._held), len(whole)):
            if met := self._advance(whole[end]):
                self._held, self._over = "", True
                return whole[: end + 1 - len(met)], met
        keep = max(needle.matched for needle in self._needles)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def _advance(self, char: str) -> str:
        """Move every needle; the longest stop string complete at this character, or ""."""
        met = ""
        for needle in self._needles:
            if needle.advance(char) and len(needle.text) > len(met):
                met = needle.text
        return met

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        self._over = True
        held, self._held = self._held, ""
        return held

    def check(self) -> None:
        """Assert what is always true."""
        if not self._over:
            assert len(self._held) == max((needle.matched for needle in self._needles), default=0)
            assert all(self._held.endswith(needle.text[: needle.matched]) for needle in self._needles)


class _Needle:
    """One stop string and how much of its beginning the text ends with."""

    def __init__(self, table: "_Table") -> None:
        self._table = table
        self.text = table.text
        self.matched = 0

    def advance(self, char: str) -> bool:
        """Is the whole string complete with this character? If it is, the needle is spent."""
        self.matched = self._table.longer(self.matched, char)
        return self.matched == len(self.text)


class _Table:
    """Where to go on in one stop string when a character does not fit (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = array("I", (0,))  # [n]: the next shorter beginning that the first n + 1 characters end with
        for char in text[1:]:
            self._shorter.append(self.longer(self._shorter[-1], char))

    def longer(self, matched: int, char: str) -> int:
        """How much the text ends with, once `char` has come behind `matched` characters."""
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.text[matched] == char else 0
