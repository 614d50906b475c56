"""stops: where an answer has to stop, found in its text as it comes, in whatever pieces.

The stop string that is complete first is the one that is met; of those complete at the same character, the longest.
That does not depend on how the text is cut into pieces, and generation never has to go on to find out.

Always true:
  * what was let out, and what is held back, is the text so far, cut where the stop string that was met begins;
  * what is held back is the longest end of the text that a stop string begins with;
  * a character costs O(stop strings), whatever came before it.
"""

from array import array
from collections.abc import Sequence

from kvcellar.errors import WrongStage


class StopFinder:
    """Finds the first of `stops` (none of them empty) in one text. With no stops it holds nothing back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._needles = [_Needle(stop) for stop in dict.fromkeys(stops)]
        self._firsts = frozenset(stop[0] for stop in stops)
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
    """One stop string and how much of its beginning the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = array("I", (0,))  # [n]: the next shorter beginning that the first n + 1 characters end with
        for char in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], char))

    def advance(self, char: str) -> bool:
        """Is the whole string complete with this character? If it is, the needle is spent."""
        self.matched = self._longer(self.matched, char)
        return self.matched == len(self.text)

    def _longer(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.text[matched] == char else 0
